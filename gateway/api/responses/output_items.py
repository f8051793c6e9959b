"""The output items of a response, from the parts of the answer.

Reasoning, text and function calls become items in the order in which they appear. The items depend on the tokens
alone, so every gateway makes the same items and the same ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from quire.gateway.api.logprobs import token_entries
from quire.gateway.api.responses.compaction import COMPACTION, KEEPS, REPLACES, Compaction
from quire.gateway.api.responses.tools import FunctionName
from quire.gateway.model.token_texts import TokenTexts
from quire.gateway.output.parts import AnswerPart, PartKind, is_complete
from quire.gateway.stream import sse
from quire.gateway.stream.choice_text import ScoredTokens
from quire.gateway.stream.transcript import TextDelta
from quire.shared.protocol.states import OutcomeName


class ItemType(StrEnum):
    """Types of output items."""

    MESSAGE = "message"
    REASONING = "reasoning"
    FUNCTION_CALL = "function_call"
    # What was compacted before the answer.
    COMPACTION = COMPACTION


class ItemStatus(StrEnum):
    """The status of an output item."""

    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    # The answer ended inside of the item.
    INCOMPLETE = "incomplete"


_TYPES = {
    PartKind.CONTENT: ItemType.MESSAGE,
    PartKind.REASONING: ItemType.REASONING,
    PartKind.CALL: ItemType.FUNCTION_CALL,
    PartKind.ARGUMENTS: ItemType.FUNCTION_CALL,
}
# What `joined_echo` has for a response that only computes its prompt.
WARM_UP = "warm-up"
NO_NAMES: Mapping[str, FunctionName] = {}
# Reasons for which an answer ends too early.
CUT = (OutcomeName.LENGTH, OutcomeName.REPETITION)
_PREFIXES = {
    ItemType.MESSAGE: "msg_",
    ItemType.REASONING: "rs_",
    ItemType.FUNCTION_CALL: "fc_",
    ItemType.COMPACTION: "cmp_",
}


@dataclass(slots=True)
class OutputItem:
    """One item as it grows.

    namespace, name, tool_call_id: of a function call. logprobs: JSON objects, one per token.
    """

    index: int
    type: ItemType
    id: str
    namespace: str = ""
    name: str = ""
    tool_call_id: str = ""
    # The fields that place an event in the response.
    place: str = field(init=False)
    status: ItemStatus = ItemStatus.IN_PROGRESS
    texts: list[str] = field(default_factory=list)
    logprobs: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.place = f'"item_id":{sse.quote(self.id)},"output_index":{self.index}'

    @property
    def text(self) -> str:
        if len(self.texts) > 1:
            self.texts = ["".join(self.texts)]
        return self.texts[0] if self.texts else ""

    def json(self) -> str:
        """Return the item in the form of the API."""
        if self.type == ItemType.COMPACTION:
            content = "" if self.status == ItemStatus.IN_PROGRESS else self.text
            return f'{{"id":{sse.quote(self.id)},"type":"compaction","encrypted_content":{sse.quote(content)}}}'
        head = f'{{"id":{sse.quote(self.id)},"type":"{self.type}","status":"{self.status}"'
        if self.type == ItemType.FUNCTION_CALL:
            space = f'"namespace":{sse.quote(self.namespace)},' if self.namespace else ""
            names = f'"call_id":{sse.quote(self.tool_call_id)},{space}"name":{sse.quote(self.name)}'
            return f'{head},{names},"arguments":{sse.quote(self.text)}}}'
        # An item that has just begun has no content yet.
        content = self.part_json() if self.texts else ""
        if self.type == ItemType.REASONING:
            return f'{head},"summary":[],"content":[{content}]}}'
        return f'{head},"role":"assistant","content":[{content}]}}'

    def part_json(self) -> str:
        """Return the one content part of a message or of reasoning."""
        if self.type == ItemType.REASONING:
            return f'{{"type":"reasoning_text","text":{sse.quote(self.text)}}}'
        logprobs = ",".join(self.logprobs)
        return f'{{"type":"output_text","text":{sse.quote(self.text)},"annotations":[],"logprobs":[{logprobs}]}}'


class ItemChange(NamedTuple):
    """A change of an item: it began (without delta and end), it grew by `delta`, or it ended."""

    item: OutputItem
    delta: str | None = None
    logprobs: Sequence[str] = ()
    is_end: bool = False


class OutputItems:
    """The items of one response."""

    def __init__(
        self, call_id: str, texts: TokenTexts, names: Mapping[str, FunctionName] = NO_NAMES, compaction: str = ""
    ) -> None:
        """names: of functions within namespaces, by the name that the model knows. compaction: content of
        the first item; KEEPS or REPLACES if the answer is a summary; WARM_UP if there is no output; empty for none.
        """
        self._call_id = call_id
        self._texts = texts
        self._names = names
        # Log-probabilities of tokens without a part yet, each with the number of bytes of its token.
        self._held: list[tuple[str, int]] = []
        self.items: list[OutputItem] = []
        # The last item, while it may grow.
        self.open: OutputItem | None = None
        # The finish reason of the answer; empty while it runs.
        self.finish_reason = ""
        # The type of the item that a part of each kind belongs to; other parts are left out.
        self._types = _TYPES
        self.is_warm_up = compaction == WARM_UP
        self._summary = Compaction("", [] if compaction == REPLACES else None)
        if compaction in (KEEPS, REPLACES):
            self._types = {PartKind.CONTENT: ItemType.COMPACTION}
        elif self.is_warm_up:
            self._types = {}
        elif compaction:
            item_id = f"{_PREFIXES[ItemType.COMPACTION]}{call_id}_0"
            first = OutputItem(0, ItemType.COMPACTION, item_id, status=ItemStatus.COMPLETED)
            first.texts.append(compaction)
            self.items.append(first)

    def push(self, parts: Sequence[AnswerPart], scored: ScoredTokens | None = None) -> Iterator[ItemChange]:
        """Add the parts that one token made certain; yield the changes, which must be consumed."""
        if scored is not None:
            sizes = [_size(self._texts[token_id].bytes) for token_id in scored.token_ids]
            self._held += zip(token_entries(scored, self._texts), sizes, strict=True)
        for part in parts:
            if not part.text and part.kind != PartKind.CALL:
                continue
            if (kind := self._types.get(part.kind)) is None:
                continue
            begins = part.kind == PartKind.CALL or self.open is None or self.open.type != kind
            if begins:
                yield from self._end(ItemStatus.COMPLETED)
                item = self._begin(kind)
                if part.kind == PartKind.CALL:
                    item.namespace, item.name = self._names.get(part.text, ("", part.text))
                    item.tool_call_id = part.id
                yield ItemChange(item)
                if part.kind == PartKind.CALL:
                    continue
            assert self.open is not None
            logprobs: Sequence[str] = ()
            if kind == ItemType.MESSAGE and self._held:
                logprobs = self._take_held(part.text if begins else None)
                self.open.logprobs += logprobs
            self.open.texts.append(part.text)
            yield ItemChange(self.open, part.text, logprobs)
        if parts:
            # Tokens of reasoning and of function calls have no log-probabilities in the API.
            self._held = []

    def add(self, delta: TextDelta) -> None:
        """Add what the transcript made of one token, without making events."""
        changes = [*self.push(delta.parts or (), delta.logprobs), *self.push(delta.rest_parts)]
        if delta.finish_reason is not None:
            changes += self.finish(delta.finish_reason)

    def grow_message(self, text: str) -> OutputItem | None:
        """Add text to the open message: the usual case, without log-probabilities. None if no message is open."""
        item = self.open
        if item is None or item.type is not ItemType.MESSAGE or self._held:
            return None
        item.texts.append(text)
        return item

    def finish(self, reason: str) -> Iterator[ItemChange]:
        """End the answer; yield the changes, which must be consumed."""
        self.finish_reason = reason
        is_cut = reason in CUT
        if self.open is not None and self.open.type == ItemType.FUNCTION_CALL:
            is_cut = not is_complete(self.open.text)  # by the token limit, a stop string or a stop token
        yield from self._end(ItemStatus.INCOMPLETE if is_cut else ItemStatus.COMPLETED)

    @property
    def is_cut(self) -> bool:
        """True if the answer reached its token limit, repeated itself, ended inside of a function call, or is a summary
        without text."""
        if self.is_warm_up:
            return False
        if self._types is not _TYPES and not self.items:
            return True
        return self.finish_reason in CUT or any(item.status == ItemStatus.INCOMPLETE for item in self.items)

    def fail(self) -> None:
        """End an answer that failed or was cancelled."""
        for _ in self._end(ItemStatus.INCOMPLETE):
            pass

    def json(self) -> str:
        """Return the items as a JSON array."""
        return f"[{','.join([item.json() for item in self.items])}]"

    def _take_held(self, first_text: str | None) -> list[str]:
        """Return the log-probabilities of the tokens of a message's text.

        first_text: the first text of a message; the tokens before it are a marker, such as the end of the reasoning.
        """
        held, self._held = self._held, []
        first = 0
        if first_text is not None:
            missing, first = len(first_text.encode()), len(held)
            while first > 0 and missing > 0:
                first -= 1
                missing -= held[first][1]
        return [entry for entry, _ in held[first:]]

    def _begin(self, kind: ItemType) -> OutputItem:
        index = len(self.items)
        self.open = OutputItem(index, kind, f"{_PREFIXES[kind]}{self._call_id}_{index}")
        self.items.append(self.open)
        return self.open

    def _end(self, status: ItemStatus) -> Iterator[ItemChange]:
        if self.open is not None:
            item, self.open = self.open, None
            if item.type == ItemType.COMPACTION:
                item.texts = [replace(self._summary, summary=item.text.strip()).encode()]
            item.status = status
            yield ItemChange(item, is_end=True)


def _size(values: str) -> int:
    """Return the number of bytes of a token, from their JSON array; 0 for null."""
    return values.count(",") + 1 if len(values) > 2 and values[0] == "[" else 0
