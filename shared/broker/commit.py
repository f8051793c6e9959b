"""The commit of an engine's step: what it takes, and what it tells the worker about its requests."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack
from redis.asyncio import Redis

from quire.shared.broker.lane import Lane, pairs, text
from quire.shared.keys import RETENTION_S
from quire.shared.messages import VERSION, StepItem, new_packer

# A notice in a worker's mailbox; every other one is the token of an attempt that is over.
CANCEL = "cancel"
_ATTEMPT = re.compile(r"[\w-]{1,64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class StepReply:
    """What the commit of a step told the worker about its requests."""

    lost: tuple[tuple[str, str], ...]  # request id, and the attempt token that is over
    cancelled: tuple[str, ...]
    expired: tuple[str, ...]
    behind: dict[str, int]
    # Request id and notice: what of the above is in the worker's mailbox until the next commit says it was obeyed.
    notices: tuple[tuple[str, str], ...] = ()


NOTHING_TOLD = StepReply((), (), (), {})


class StepCommit(NamedTuple):
    """One request of a step: the item, and the attempt under which it was computed."""

    attempt: str
    item: StepItem


class PackedStep:
    """The requests of a step as the script takes them: six values each, of which the last is the item in msgpack."""

    __slots__ = ("values",)

    def __init__(self, commits: Iterable[StepCommit]) -> None:
        self.values: list[Any] = []
        extend, pack = self.values.extend, new_packer().pack
        for attempt, item in commits:
            request_id, start, deltas, outcome = item
            end = start + len(deltas[0].token_ids) if len(deltas) == 1 else item.end
            name = "" if outcome is None else outcome.name
            extend((request_id, attempt, start, end, name, pack((VERSION, request_id, start, deltas, outcome))))

    @property
    def items(self) -> list[bytes]:
        """What each request's log gets."""
        return self.values[5::6]


class CommitVerb(Lane):
    """`commit_step`, which a worker calls for every step."""

    def __init__(self, client: Redis, lane: str) -> None:
        super().__init__(client, lane)
        self._commit_step = self.script("commit_step")
        # Without the types for bytes and short strings, which Redis' cmsgpack does not know.
        self._packer = msgpack.Packer(use_bin_type=False)

    async def commit_step(
        self,
        worker_id: str,
        commits: PackedStep | Sequence[StepCommit],
        obeyed: Sequence[tuple[str, str]] = (),
    ) -> StepReply:
        """Log and publish one step's tokens under the fence. Repeat the identical call if it fails.

        obeyed: the `notices` of the reply before this one.
        """
        step = commits if isinstance(commits, PackedStep) else PackedStep(commits)
        # One argument for all: redis-py takes several microseconds for each.
        args: list[Any] = [self.keys.prefix, RETENTION_S, self._packer.pack(step.values)]
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
            elif (request_id, notice) not in obeyed:  # it comes again until a commit has taken it away
                self.note_corrupt("notice", repr(request_id[:64]), f"{notice[:64]!r}")
        return StepReply(
            (*pairs(lost), *overtaken),
            tuple(cancelled),
            tuple(expired),
            {request_id: int(index) for request_id, index in pairs(behind)},
            noticed,
        )
