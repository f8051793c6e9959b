"""The events of a streamed message, and the same message as one object.

A message is a list of blocks. Each block of a stream begins with `content_block_start`, grows by
`content_block_delta`, and ends with `content_block_stop`. The events follow from the parts of the answer alone, so a
resumed stream, a stream of another gateway and the whole message agree.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from quire.gateway.api.messages.signature import sign
from quire.gateway.errors.api_errors import ApiError
from quire.gateway.errors.message_errors import error_json
from quire.gateway.output.parts import AnswerPart, PartKind, complete_calls
from quire.gateway.stream import sse

TOOL_ID_PREFIX = "toolu_"

# By kind: the type of the deltas of a block, and their field.
_TEXT_DELTAS = {PartKind.CONTENT: ("text_delta", "text"), PartKind.REASONING: ("thinking_delta", "thinking")}


def event(name: str, data: str) -> str:
    """One event without its id. `data`: JSON on one line."""
    return f"event: {name}\ndata: {data}\n\n"


def error_event(error: ApiError, call_id: str) -> str:
    """Return the event of an error, which no `message_stop` follows."""
    return event("error", error_json(error, call_id))


def tool_use_id(part: AnswerPart) -> str:
    """The id of a tool call, which depends on the request and the position of the call alone."""
    return TOOL_ID_PREFIX + part.id.removeprefix("call_")


class BlockWriter:
    """Divides the parts of a streamed answer into blocks. `hides_thinking`: thinking blocks have no text."""

    def __init__(self, hides_thinking: bool = False) -> None:
        self._hides_thinking = hides_thinking
        # The number of the block that is open or will be next.
        self._index = 0
        self._kind: PartKind | None = None
        self._delta_head = ""
        # The texts of the thinking block that is open.
        self._thoughts: list[str] = []

    def parts(self, parts: Sequence[AnswerPart]) -> list[str]:
        """Returns the events of the next parts."""
        if len(parts) == 1 and parts[0].kind is PartKind.CONTENT is self._kind and parts[0].text:  # nearly always
            return [f"{self._delta_head}{sse.quote(parts[0].text)}}}}}\n\n"]
        events: list[str] = []
        for part in parts:
            if part.kind == PartKind.CALL:
                events += [*self.close(), self._open_call(part)]
            elif not part.text:
                continue
            elif part.kind == PartKind.ARGUMENTS:
                events.append(f"{self._delta_head}{sse.quote(part.text)}}}}}\n\n")
            else:
                if part.kind != self._kind:
                    events += [*self.close(), self._open_text(part.kind)]
                if part.kind == PartKind.REASONING:
                    self._thoughts.append(part.text)
                    if self._hides_thinking:
                        continue
                events.append(f"{self._delta_head}{sse.quote(part.text)}}}}}\n\n")
        return events

    def close(self) -> list[str]:
        """Ends the block that is open, if there is one; returns its last events."""
        if self._kind is None:
            return []
        events = []
        if self._kind == PartKind.REASONING:
            signed = sign("".join(self._thoughts), self._hides_thinking)
            self._thoughts.clear()
            delta = {"type": "signature_delta", "signature": signed}
            data = {"type": "content_block_delta", "index": self._index, "delta": delta}
            events.append(event("content_block_delta", sse.dumps(data)))
        events.append(event("content_block_stop", f'{{"type":"content_block_stop","index":{self._index}}}'))
        self._kind = None
        self._index += 1
        return events

    def _open_text(self, kind: PartKind) -> str:
        delta, field = _TEXT_DELTAS[kind]
        start = _thinking_block("", "") if kind == PartKind.REASONING else _text_block("")
        return self._open(kind, start, delta, field)

    def _open_call(self, part: AnswerPart) -> str:
        return self._open(PartKind.ARGUMENTS, _tool_block(part), "input_json_delta", "partial_json")

    def _open(self, kind: PartKind, start: dict[str, Any], delta: str, field: str) -> str:
        self._kind = kind
        self._delta_head = (
            f'event: content_block_delta\ndata: {{"type":"content_block_delta","index":{self._index},'
            f'"delta":{{"type":"{delta}","{field}":'
        )
        data = {"type": "content_block_start", "index": self._index, "content_block": start}
        return event("content_block_start", sse.dumps(data))


def blocks(parts: Sequence[AnswerPart], hides_thinking: bool = False) -> list[dict[str, Any]]:
    """The blocks of a whole answer, whose neighbouring parts of a kind are merged; without an unfinished tool call."""
    found: list[dict[str, Any]] = []
    for part in complete_calls(parts):
        match part.kind:
            case PartKind.CALL:
                found.append(_tool_block(part))
            case PartKind.ARGUMENTS:
                found[-1]["input"] = json.loads(part.text)
            case PartKind.CONTENT if part.text:
                found.append(_text_block(part.text))
            case PartKind.REASONING if part.text:
                signed = sign(part.text, hides_thinking)
                found.append(_thinking_block("" if hides_thinking else part.text, signed))
    return found


def _text_block(text: str) -> dict[str, Any]:
    # An empty list: the specification requires the field, and `@ai-sdk/anthropic` refuses null.
    return {"type": "text", "text": text, "citations": []}


def _thinking_block(text: str, signed: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": signed}


def _tool_block(part: AnswerPart) -> dict[str, Any]:
    use: dict[str, Any] = {"type": "tool_use", "id": tool_use_id(part), "name": part.text, "input": {}}
    return {**use, "caller": {"type": "direct"}}
