"""The harmony format of gpt-oss: an answer is a sequence of messages, each with a channel and perhaps a recipient.

<|channel|>analysis<|message|>The user wants ...<|end|><|start|>assistant<|channel|>commentary
to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>

(without the line break). The channel `analysis` is reasoning; `final` and `commentary` without a recipient are content.
The prompt ends with `<|start|>assistant`. `<|call|>` and `<|return|>` end the answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from quire.gateway.features.tools.call_parser import CallParser
from quire.gateway.features.tools.growing_text import MalformedCall
from quire.gateway.features.tools.reasoning import Reasoning
from quire.gateway.features.tools.tool_format import ToolFormat
from quire.gateway.features.tools.tool_grammar import SpecialTokens, lark_arguments, lark_text
from quire.gateway.output.parts import PartKind
from quire.gateway.output.tools import Tool, ToolChoice, ToolMode

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
_ENDS = (END, CALL, RETURN)
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")
_MAX_HEADER_CHARS = 512


class HarmonyParser(CallParser):
    """Reads the messages of an answer. Messages of one kind are joined with a newline."""

    def read_call(self, trigger: str) -> Generator[None, None, None]:
        """Read the JSON of a call. `trigger`: the name of the tool."""
        yield from self.source.spaces()
        yield from self.read_named_arguments(trigger)
        yield from self.source.spaces()
        yield from self.source.closing(*_ENDS)

    def _read(self) -> Generator[None, None, None]:
        written: set[PartKind] = set()
        while (yield from self.source.peek()):
            self.source.mark()
            header = yield from self._read_header()
            if recipient := _RECIPIENT.search(header):
                yield from self._read_or_give_back(recipient.group(1))
                continue
            channel = _CHANNEL.search(header)
            kind = PartKind.REASONING if channel and channel.group(1) == "analysis" else PartKind.CONTENT
            yield from self._read_body(kind, "\n" if header and kind in written else "")
            written.add(kind)

    def _read_header(self) -> Generator[None, None, str]:
        """Read and return the header of a message; empty if the text has no header here."""
        try:
            begin = yield from self.source.one_of(START, CHANNEL, MESSAGE, " to=")
            return "" if begin == MESSAGE else begin + (yield from self.source.until(MESSAGE, _MAX_HEADER_CHARS))
        except MalformedCall:
            is_header = self.source.taken or self.is_forced
            if self.source.is_complete and len(self.source.unread) <= _MAX_HEADER_CHARS and is_header:
                self.source.take(len(self.source.unread))  # the answer ends inside a header
            return ""

    def _read_body(self, kind: PartKind, separator: str) -> Generator[None, None, None]:
        def emit(text: str) -> None:
            nonlocal separator
            if text:
                self.emit_text(kind, separator + text)
                separator = ""

        try:
            end = yield from self.source.stream_until((*_ENDS, START), emit, str)
        except MalformedCall:
            emit(self.source.take(len(self.source.unread)))
            return
        if end == START:  # of the next message
            self.source.unread = START + self.source.unread


class Harmony(ToolFormat):
    name = "harmony"
    parser_type = HarmonyParser
    has_reasoning = True
    reasoning_markers = (f"{CHANNEL}analysis{MESSAGE}", END, f"{START}assistant{CHANNEL}final{MESSAGE}")
    markers = frozenset({START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN})

    def written(self, name: str, arguments: Mapping[str, Any]) -> str:
        header = f"{CHANNEL}commentary to=functions.{name} {CONSTRAIN}json{MESSAGE}"
        return f"{header}{json.dumps(arguments, ensure_ascii=False)}{CALL}"

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: ToolChoice,
        special_tokens: SpecialTokens,
        reasoning: Reasoning | None = None,
    ) -> str:
        """Return the Lark grammar of the whole answer. A call ends it: `parallel` and `reasoning` have no effect."""

        def text(of: str) -> str:
            return lark_text(of, special_tokens)

        tools = choice.callable_tools(tools)
        is_auto = choice.mode == ToolMode.AUTO
        # The recipient is written after the channel or before it.
        after = [f"{text(tool.name)} content_type {lark_arguments(tool)}" for tool in tools]
        before = [f"{text(tool.name + CHANNEL)} CHANNEL content_type {lark_arguments(tool)}" for tool in tools]
        json_type = f'/ ?/ ({text(CONSTRAIN)})? "json" {text(MESSAGE)}'
        return "\n".join(
            [
                f"start: (thought {text(END + START + 'assistant')})* last",
                "last: call | thought | final" if is_auto else "last: call",
                f"thought: {text(CHANNEL)} CHANNEL {text(MESSAGE)} TEXT",
                f"final: {text(CHANNEL + 'final' + MESSAGE)} TEXT",
                f'call: {text(CHANNEL)} CHANNEL " to=functions." after | " to=functions." before',
                "after: " + " | ".join(after),
                "before: " + " | ".join(before),
                f"content_type: {json_type}",
                "CHANNEL: /analysis|commentary/",
                "TEXT: /(?s:.*)/",
                "",
            ]
        )

    def content_frame(self, special_tokens: SpecialTokens) -> str:
        def text(of: str) -> str:
            return lark_text(of, special_tokens)

        return "\n".join(
            [
                f"start: (thought {text(END + START + 'assistant')})* {text(CHANNEL + 'final' + MESSAGE)} @content",
                f"thought: {text(CHANNEL + 'analysis' + MESSAGE)} TEXT",
                "TEXT: /(?s:.*)/",
                "",
            ]
        )
