"""The typed events of a streamed response.

Each event has a `sequence_number`, from 0 without gaps. Rendering begins at token 0 also for a resumed stream, and the
events depend on the tokens alone, so every gateway gives the same event the same number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from quire.gateway.api.responses.body import ResponseBody, ResponseStatus, end_status, split_echo
from quire.gateway.api.responses.output_items import ItemChange, ItemStatus, ItemType, OutputItem, OutputItems
from quire.gateway.api.responses.tools import function_names
from quire.gateway.errors.api_errors import ApiError, Cancelled, DeadlinePassed, GenerationFailed
from quire.gateway.model.served_model import ServedModel
from quire.gateway.output.parts import AnswerPart, PartKind
from quire.gateway.stream import sse
from quire.gateway.stream.buffer import OutputBuffer
from quire.gateway.stream.call_metadata import CallMetadata
from quire.gateway.stream.choice_text import ScoredTokens
from quire.gateway.stream.prompt_text import PromptText
from quire.gateway.stream.transcript import Transcript
from quire.gateway.stream.writer import deltas

# The place before the first event.
START = -1
# Errors that end the response itself, and not only this stream of it.
_ENDS = (Cancelled, DeadlinePassed, GenerationFailed)


class ResponseEvents:
    """Renders the events of one response, and drops those up to `after`, which the client has."""

    opens_late = False

    def __init__(self, call_id: str, model: ServedModel, metadata: CallMetadata, after: int = START) -> None:
        self.body = ResponseBody(call_id, model, metadata)
        fields, compaction = split_echo(metadata.echo)
        self.output = OutputItems(call_id, model.token_texts, function_names(fields), compaction)
        self._is_background = metadata.is_background
        self._after = after
        # The number of the next event.
        self.next_number = 0

    def opening(self, usage: dict[str, Any]) -> list[str]:
        first = ResponseStatus.QUEUED if self._is_background else ResponseStatus.IN_PROGRESS
        statuses = [("created", first), ("in_progress", ResponseStatus.IN_PROGRESS)]
        if self._is_background:
            statuses.insert(1, ("queued", first))
        events = [(f"response.{name}", f'"response":{self.body.running(status)}') for name, status in statuses]
        for item in self.output.items:  # a compaction
            place = f'"output_index":{item.index},"item":{item.json()}'
            events += [("response.output_item.added", place), ("response.output_item.done", place)]
        return self._all(events)

    def text(self, index: int, text: str, logprobs: ScoredTokens | None = None) -> str:
        return "".join(self.parts(index, (AnswerPart(PartKind.CONTENT, text),), logprobs))

    def parts(self, index: int, parts: Sequence[AnswerPart], logprobs: ScoredTokens | None = None) -> list[str]:
        # This runs for every token.
        if len(parts) == 1 and logprobs is None and parts[0].kind is PartKind.CONTENT:
            text = parts[0].text
            if text and (item := self.output.grow_message(text)) is not None:
                return self._text_delta(item, text)
        events: list[str] = []
        for change in self.output.push(parts, logprobs):
            events += self._all(_events_of(change))
        return events

    def prompt(self, first_choice: int, prompt: PromptText) -> Iterator[str]:
        """Return nothing: no parameter of this API asks for the prompt."""
        return iter(())

    def finish(self, index: int, reason: str, stop_reason: str | int | None = None) -> list[str]:
        events: list[str] = []
        for change in self.output.finish(reason):
            events += self._all(_events_of(change))
        return events

    def mark(self) -> None:
        self.body.mark()

    def ending(self, usage: dict[str, Any]) -> list[str]:
        name = f"response.{end_status(self.output)}"
        return [*self._all([(name, f'"response":{self.body.ended(self.output, usage)}')]), sse.event(sse.DONE)]

    def failure(self, error: ApiError) -> list[str]:
        """Return a response that failed; or, if only this stream of it ended, an event `error`.

        That event has the number of the event before it, after which a client resumes.
        """
        if isinstance(error, _ENDS):
            self.output.fail()
            return self._all([("response.failed", f'"response":{self.body.failed(self.output, error)}')])
        fields = {"code": error.code, "message": error.message, "param": error.param}
        number = max(0, self.next_number - 1)
        return [f'event: error\ndata: {{"type":"error","sequence_number":{number},{sse.dumps(fields)[1:-1]}}}\n\n']

    async def whole(self, buffer: OutputBuffer, transcript: Transcript) -> Iterator[str]:
        async for delta in deltas(buffer, transcript):
            self.output.add(delta)
        if not transcript.is_exact:
            self.body.mark()
        return iter([self.body.ended(self.output, transcript.usage)])

    def _text_delta(self, item: OutputItem, text: str) -> list[str]:
        """Return the event of `_events_of` for text of a message."""
        number = self.next_number
        self.next_number = number + 1
        if number <= self._after:
            return []
        return [
            f'id: {number}\nevent: response.output_text.delta\ndata: {{"type":"response.output_text.delta",'
            f'"sequence_number":{number},{item.place},"content_index":0,"delta":{sse.quote(text)},"logprobs":[]}}\n\n'
        ]

    def _all(self, events: Iterable[tuple[str, str]]) -> list[str]:
        """Number events (a type, and the JSON of the other fields) and return those after `after`."""
        texts = []
        for kind, fields in events:
            number = self.next_number
            self.next_number = number + 1
            if number > self._after:
                texts.append(
                    f'id: {number}\nevent: {kind}\ndata: {{"type":"{kind}","sequence_number":{number},{fields}}}\n\n'
                )
        return texts


def _events_of(change: ItemChange) -> list[tuple[str, str]]:
    """Return the events of one change, each as its type and its fields."""
    item = change.item
    place = item.place
    if item.type == ItemType.COMPACTION and change.delta is not None:
        return [("response.compaction.compacting", place)]
    kind, part = _NAMES[item.type]
    if item.type != ItemType.FUNCTION_CALL:
        place += ',"content_index":0'
    if change.delta is not None:
        logprobs = f',"logprobs":[{",".join(change.logprobs)}]' if item.type == ItemType.MESSAGE else ""
        return [(f"{kind}.delta", f'{place},"delta":{sse.quote(change.delta)}{logprobs}')]
    whole = f'"output_index":{item.index},"item":{item.json()}'
    if item.type == ItemType.COMPACTION:
        return [("response.output_item.done" if change.is_end else "response.output_item.added", whole)]
    if not change.is_end:
        events = [("response.output_item.added", whole)]
        if part:
            events.append(("response.content_part.added", f'{place},"part":{item.part_json()}'))
        return events
    if item.type == ItemType.FUNCTION_CALL and item.status == ItemStatus.INCOMPLETE:
        return [("response.output_item.done", whole)]  # clients take `arguments.done` for a call that they can run
    if item.type == ItemType.FUNCTION_CALL:
        done = f'{place},"name":{sse.quote(item.name)},"arguments":{sse.quote(item.text)}'
    else:
        logprobs = f',"logprobs":[{",".join(item.logprobs)}]' if item.type == ItemType.MESSAGE else ""
        done = f'{place},"text":{sse.quote(item.text)}{logprobs}'
    events = [(f"{kind}.done", done)]
    if part:
        events.append(("response.content_part.done", f'{place},"part":{item.part_json()}'))
    return [*events, ("response.output_item.done", whole)]


# The name of the events of each type of item, and whether such an item has a content part.
_NAMES = {
    ItemType.MESSAGE: ("response.output_text", True),
    ItemType.REASONING: ("response.reasoning_text", True),
    ItemType.FUNCTION_CALL: ("response.function_call_arguments", False),
    ItemType.COMPACTION: ("response.compaction", False),
}
