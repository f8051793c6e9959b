"""From what an accepted call emits to its answer, and the choices of an answer that is complete."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Protocol

from aiohttp import web

from quire.gateway.api import errors
from quire.gateway.api.call_metadata import CallMetadata
from quire.gateway.api.logprobs import ScoredTokens
from quire.gateway.model.served_model import ServedModel
from quire.gateway.stream.assembly import Assembly, Choice, TextDelta, usage
from quire.gateway.stream.buffer import OutputBuffer
from quire.shared.messages import Outcome, StepItem
from quire.shared.states import OutcomeName


class Dialect(Protocol):
    """How a dialect writes what was generated. Events are complete, but for their ids."""

    def opening(self) -> list[str]: ...
    def text(self, index: int, text: str, logprobs: ScoredTokens | None = None) -> str: ...
    def finish(self, index: int, reason: str) -> str: ...
    def usage(self, usage: dict[str, int]) -> str: ...
    def full(self, choices: list[Choice], usage: dict[str, int]) -> Iterator[str]: ...


class Transcript:
    """The text of all prompts of a call as it grows."""

    def __init__(self, about: CallMetadata, model: ServedModel, outputs: OutputBuffer, is_joined: bool = False) -> None:
        self.about = about
        self.outputs = outputs
        self.model_name = model.name
        # Whether another HTTP request made the call.
        self.is_joined = is_joined
        # By request id: the text of its prompt.
        is_message = about.dialect == "chat"
        self._parts = {
            request_id: Assembly(model, about.n, about.stop, is_message, first_choice=index * about.n)
            for index, request_id in enumerate(outputs.cursors)
        }
        self._open = len(self._parts)
        self.tokens = 0
        self.outcome: Outcome | None = None
        self._failed = False

    @property
    def ended(self) -> bool:
        return self._open == 0 or self._failed

    @property
    def error(self) -> errors.ApiError | None:
        """What the client must be told if a request did not end well."""
        if self.outcome is None or not self._failed:
            return None
        detail = self.outcome.detail
        if self.outcome.name == OutcomeName.CANCELLED:
            return errors.Cancelled(detail or "The request was cancelled.")
        if self.outcome.name == OutcomeName.DEADLINE:
            return errors.DeadlinePassed(detail or "The deadline of the request passed.")
        code = "quarantined" if self.outcome.name == OutcomeName.QUARANTINED else None
        return errors.GenerationFailed(detail or "The request failed.", code=code)

    @property
    def usage(self) -> dict[str, int]:
        return usage(self.about.prompt_tokens, self.tokens)

    @property
    def finish_reasons(self) -> list[str]:
        """Why the choices ended that did, in order."""
        return [reason for assembly in self._parts.values() for reason in assembly.finish_reasons]

    def feed(self, item: StepItem) -> list[TextDelta]:
        """The pieces of an item; choices and tokens are counted over all prompts."""
        assembly = self._parts[item.request_id]
        others = self.tokens - assembly.tokens
        pieces = assembly.feed(item, others)
        self.tokens = others + assembly.tokens
        if item.outcome is not None:
            self._open -= 1
            if not self._failed:
                self.outcome = item.outcome
                self._failed = item.outcome.name not in ("stop", "length")
        return pieces


# The answer that a request is about, for the log.
ANSWER = web.RequestKey("answer", Transcript)


async def collect(answer: Transcript) -> list[Choice]:
    """Wait for everything. Raises ApiError if a request did not end well."""
    texts: list[list[str]] = [[] for _ in range(answer.about.choices)]
    scored: list[list[ScoredTokens]] = [[] for _ in range(answer.about.choices)]
    reasons = [""] * answer.about.choices
    scores: list[float | None] = [None] * answer.about.choices
    while not answer.ended:
        for item in await answer.outputs.next():
            for piece in answer.feed(item):
                texts[piece.choice] += (piece.text, piece.rest)
                if piece.logprobs is not None:
                    scored[piece.choice].append(piece.logprobs)
                if piece.finish_reason is not None:
                    reasons[piece.choice], scores[piece.choice] = piece.finish_reason, piece.score
    if answer.error is not None:
        raise answer.error
    logprobs = [ScoredTokens.join(parts) if parts else None for parts in scored]
    return list(map(Choice, map("".join, texts), reasons, scores, logprobs))


def created() -> int:
    """Now, in unix seconds, as answers carry it."""
    return int(time.time())
