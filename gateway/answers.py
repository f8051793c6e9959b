"""From an accepted call to its answer, in one piece or as a stream of events."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any, Protocol

from aiohttp import web

from gateway import errors, sse
from gateway.assembly import Assembly, Choice, Piece, usage
from gateway.calls import Call
from gateway.model import ServedModel
from gateway.streams import Outputs
from shared.messages import Outcome, StepItem


class Format(Protocol):
    """How a dialect writes what was generated."""

    mark: sse.Mark

    def opening(self) -> str: ...
    def piece(self, index: int, piece: Piece, position: int) -> str: ...
    def usage(self, usage: dict[str, int], position: int) -> str: ...
    def full(self, choices: list[Choice], usage: dict[str, int]) -> dict[str, Any]: ...


class Answer:
    """The text of all prompts of a call as it grows."""

    def __init__(self, call: Call, model: ServedModel, outputs: Outputs) -> None:
        self.call = call
        self.outputs = outputs
        self._n = call.options.n
        # By request id: where the choices of its prompt begin, and its text.
        self._parts = {
            request_id: (index * self._n, Assembly(model, self._n, sampling.stop))
            for index, (request_id, sampling) in enumerate(zip(outputs.cursors, call.sampling, strict=True))
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
        if self.outcome.name == "cancelled":
            return errors.Cancelled(detail or "The request was cancelled.")
        if self.outcome.name == "deadline":
            return errors.DeadlinePassed(detail or "The deadline of the request passed.")
        code = "quarantined" if self.outcome.name == "quarantined" else None
        return errors.GenerationFailed(detail or "The request failed.", code=code)

    @property
    def usage(self) -> dict[str, int]:
        return usage(self.call.prompt_tokens, self.tokens)

    def feed(self, item: StepItem) -> Iterator[tuple[int, Piece, int]]:
        """The pieces of an item: index of the choice, the piece, and the tokens of all prompts up to it."""
        first, assembly = self._parts[item.request_id]
        others = self.tokens - assembly.tokens
        pieces = assembly.feed(item)
        self.tokens = others + assembly.tokens
        if item.outcome is not None:
            self._open -= 1
            if not self._failed:
                self.outcome = item.outcome
                self._failed = item.outcome.name not in ("stop", "length")
        for piece in pieces:
            yield first + piece.choice, piece, others + piece.position


# The answer that a request is about, for the log.
ANSWER = web.RequestKey("answer", Answer)


async def collect(answer: Answer, form: Format) -> web.Response:
    """Wait for everything. Raises ApiError if a request did not end well."""
    texts: list[list[str]] = [[] for _ in range(answer.call.choices)]
    reasons = [""] * answer.call.choices
    scores: list[float | None] = [None] * answer.call.choices
    while not answer.ended:
        for item in await answer.outputs.next():
            for index, piece, _ in answer.feed(item):
                texts[index].append(piece.text)
                if piece.finish_reason is not None:
                    reasons[index], scores[index] = piece.finish_reason, piece.score
    if answer.error is not None:
        raise answer.error
    choices = list(map(Choice, map("".join, texts), reasons, scores))
    return web.Response(text=json.dumps(form.full(choices, answer.usage)), content_type="application/json")


async def stream(request: web.Request, answer: Answer, form: Format, write_timeout_s: float) -> web.StreamResponse:
    """Write events as they come; what waits together is written together. Raises ConnectionError if the client left."""
    response = web.StreamResponse(headers=sse.HEADERS)
    writer = await response.prepare(request)
    assert writer is not None
    writer.send_headers()  # the client learns at once that it was accepted
    transport = request.transport
    if opening := form.opening():
        await response.write(opening.encode("ascii"))
    while not answer.ended:
        items = await answer.outputs.next()
        parts = [form.piece(index, piece, position) for item in items for index, piece, position in answer.feed(item)]
        if answer.ended:
            parts.append(_ending(answer, form))
        data = "".join(parts).encode("ascii")
        if not data:
            if items:
                continue
            data = sse.KEEPALIVE
        if transport is not None and transport.get_write_buffer_size():
            try:
                async with asyncio.timeout(write_timeout_s):
                    await response.write(data)
            except TimeoutError:
                transport.abort()
                raise ConnectionResetError(f"the client has not read for {write_timeout_s:g} s") from None
        else:
            await response.write(data)
    await response.write_eof()
    return response


def _ending(answer: Answer, form: Format) -> str:
    if answer.error is not None:
        # Without [DONE]: a client must not take this for the end of a complete answer.
        return sse.event(form.mark(answer.tokens), errors.body(answer.error))
    text = form.usage(answer.usage, answer.tokens) if answer.call.options.include_usage else ""
    return text + sse.event(form.mark(answer.tokens), "[DONE]")


def created() -> int:
    """Now, in unix seconds, as answers carry it."""
    return int(time.time())
