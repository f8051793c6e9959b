"""Reads a request that has tokens, with its output log, from Redis. Nothing in Redis changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.shared.config.command_line import CommandError
from quire.shared.protocol.broker import Broker
from quire.shared.protocol.broker.lane import text
from quire.shared.protocol.logprobs import TokenLogprobs, read_records
from quire.shared.protocol.messages import Delta, GenerationRequest, MessageError, WorkerCard


class CannotReplay(CommandError):
    """The request cannot be replayed, so nothing is known about its tokens. why: in one word, for metrics."""

    exit_code = 2

    def __init__(self, message: str, why: str = "failed") -> None:
        super().__init__(message)
        self.why = why


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """A request as Redis has it.

    deltas: those with tokens, by choice. weights: digest of the weights of the worker that ran it last; empty if that
    worker is gone. files: of its images, by digest.
    """

    request: GenerationRequest
    state: str
    deltas: dict[int, list[Delta]]
    weights: str
    files: Mapping[str, bytes]

    def output(self, choice: int) -> tuple[int, ...]:
        """Return the tokens of a choice."""
        return tuple(token for delta in self.deltas[choice] for token in delta.token_ids)

    def logprobs(self, choice: int) -> Sequence[TokenLogprobs]:
        """Return the log-probabilities of the tokens of a choice; none unless the request asked for them."""
        if not self.request.sampling.logprobs:
            return ()
        deltas = self.deltas[choice]
        return [one for delta in deltas for one in read_records(delta.logprobs or b"", len(delta.token_ids))]


async def read_logged(broker: Broker, request_id: str) -> LoggedRequest:
    """Read a request. Raises CannotReplay, RedisError, OSError."""
    try:
        key = broker.keys.request(request_id)
        body: Any
        card: Any
        body, state, owner = await broker.client.hmget(key, "body", "state", "owner")
        items = await broker.read_output(request_id)
        card = await broker.client.hget(broker.keys.worker(text(owner)), "card") if owner else None
    except MessageError as error:
        raise CannotReplay(f"the output log of request {request_id} is corrupt: {error}", "corrupt") from error
    if state is None:
        raise CannotReplay(
            f"the model {broker.keys.lane!r} has no request {request_id}; check the id and --served-model-name. "
            "Requests are kept for ten minutes after their end",
            "gone",
        )
    if body is None:
        raise CannotReplay(
            f"request {request_id} has ended, and its prompt is not kept: it has 64 KiB or more, it is a line of a "
            "batch, or an older version of Quire ended it",
            "not_kept",
        )
    try:
        request = GenerationRequest.decode(body)
        weights = WorkerCard.decode(card).weights_digest if card else ""
        files = await broker.images(request)
    except MessageError as error:
        raise CannotReplay(f"request {request_id} is of another version of Quire: {error}", "corrupt") from error
    if files is None:
        raise CannotReplay(f"request {request_id} is about an image that is not kept any more", "not_kept")
    deltas: dict[int, list[Delta]] = {}
    for delta in (delta for item in items for delta in item.deltas if delta.token_ids):
        deltas.setdefault(delta.choice, []).append(delta)
    if request.pooling or not deltas:
        raise CannotReplay(
            f"request {request_id} has no tokens to compare" + ("" if request.pooling else " yet"), "no_tokens"
        )
    if not request.sampling.is_streamed:
        raise CannotReplay(
            f"request {request_id} ranks its choices (best_of or beam search), and the log has only the best ones; the "
            "choice among all of them cannot be repeated from these",
            "ranked",
        )
    # A repetition pins nothing for the client.
    request = replace(request, breakpoints=())
    return LoggedRequest(request, text(state), dict(sorted(deltas.items())), weights, files)
