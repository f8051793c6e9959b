"""The commit of an engine step: its arguments, and its reply about the worker's requests."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack
from redis.asyncio import Redis

from quire.shared.protocol.broker.lane import Lane, pairs, text
from quire.shared.protocol.keys import RETENTION_S
from quire.shared.protocol.messages import VERSION, StepItem, new_packer

# A notice in a worker's mailbox; any other notice is the token of an attempt that is over.
CANCEL = "cancel"
_ATTEMPT = re.compile(r"[\w-]{1,64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class StepReply:
    """The reply of a commit: what changed for the worker's requests."""

    lost: tuple[tuple[str, str], ...]  # request id, and the token of the attempt that is over
    cancelled: tuple[str, ...]
    expired: tuple[str, ...]
    behind: dict[str, int]  # request id, and the token at which its log ends: the worker sends the rest again
    # Request id and notice: those of the above that stay in the worker's mailbox until a commit says that it obeyed.
    notices: tuple[tuple[str, str], ...] = ()


NOTHING_TOLD = StepReply((), (), (), {})


class StepCommit(NamedTuple):
    """One request of a step: the item, and the attempt under which it was computed."""

    attempt: str
    item: StepItem


class ComputedTokens(NamedTuple):
    """The tokens that an attempt has computed so far for a request that ranks several sequences.

    Such a request emits nothing before its end, and then only the best sequences. The attempt after it computes the
    same tokens again, so the largest number of all attempts is what the request has used.
    """

    request_id: str
    attempt: str
    tokens: int


class PackedStep:
    """The requests of a step as the script takes them: six values each; the last is the item in msgpack."""

    __slots__ = ("values",)

    def __init__(self, commits: Iterable[StepCommit]) -> None:
        self.values: list[Any] = []
        extend, pack = self.values.extend, new_packer().pack
        for attempt, item in commits:
            request_id, start, deltas, outcome, report = item
            end = start + len(deltas[0].token_ids) if len(deltas) == 1 else item.end
            name = "" if outcome is None else outcome.name
            values = (VERSION, request_id, start, deltas, None if outcome is None else outcome.values)
            extend((request_id, attempt, start, end, name, pack(values if report is None else (*values, report))))

    @property
    def items(self) -> list[bytes]:
        """The packed items, as the output logs store them."""
        return self.values[5::6]


class CommitVerb(Lane):
    """The verb `commit_step`, which a worker calls for every step."""

    def __init__(self, client: Redis, lane: str) -> None:
        super().__init__(client, lane)
        self._commit_step = self.script("commit_step")
        # Redis' cmsgpack knows neither the msgpack type for bytes nor that for short strings.
        self._packer = msgpack.Packer(use_bin_type=False)

    async def commit_step(
        self,
        worker_id: str,
        commits: PackedStep | Sequence[StepCommit],
        obeyed: Sequence[tuple[str, str]] = (),
        computed: Iterable[ComputedTokens] = (),
    ) -> StepReply:
        """Log and publish one step's tokens under the fence. If the call fails, repeat it with the same arguments.

        obeyed: the `notices` of the previous reply. computed: counts that are charged.
        """
        step = commits if isinstance(commits, PackedStep) else PackedStep(commits)
        # One argument for the whole step: redis-py takes several microseconds per argument.
        args: list[Any] = [self.keys.prefix, RETENTION_S, self._packer.pack(step.values)]
        args.append(self._packer.pack([value for counts in computed for value in counts]) if computed else b"")
        args += (part.encode(errors="surrogateescape") for notice in obeyed for part in notice)
        reply: Any = await self._commit_step(keys=[self.keys.mailbox(worker_id)], args=args)
        if not any(reply):
            return NOTHING_TOLD
        lost, cancelled, expired, behind = (list(map(text, part)) for part in reply[:4])
        noticed = pairs([part.decode(errors="surrogateescape") for part in reply[4]])
        overtaken = []
        for request_id, notice in noticed:
            if notice == CANCEL:
                cancelled.append(request_id)
            elif _ATTEMPT.fullmatch(notice):
                overtaken.append((request_id, notice))
            elif (request_id, notice) not in obeyed:  # it is repeated until a commit has removed it
                self.note_corrupt("notice", repr(request_id[:64]), f"{notice[:64]!r}")
        return StepReply(
            (*pairs(lost), *overtaken),
            tuple(cancelled),
            tuple(expired),
            {request_id: int(index) for request_id, index in pairs(behind)},
            noticed,
        )
