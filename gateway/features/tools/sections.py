"""Tool calls in a section between marks, with marks around the name and the arguments of each: DeepSeek, Kimi K2.

DeepSeek V3 and R1 write the arguments in a block of code, V3.1 does not. Kimi K2 counts the calls of a conversation.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
```json
{"city": "Paris"}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

... <｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜> ...

<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Paris"}
<|tool_call_end|><|tool_calls_section_end|>    (without the line break)
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from quire.gateway.features.tools.call_parser import CallParser
from quire.gateway.features.tools.tool_format import MarkedFormat
from quire.gateway.features.tools.tool_grammar import SpecialTokens, lark_arguments, lark_text
from quire.gateway.output.tools import Tool


class Marks(NamedTuple):
    """The marks of a section, of a call in it, and between a name and arguments."""

    section: str
    section_end: str
    call: str
    call_end: str
    separator: str


DEEPSEEK = Marks(
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
)
KIMI = Marks(
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    "<|tool_call_argument_begin|>",
)
_BLOCK, _BLOCK_END = "```json", "```"
_NUMBERED = re.compile(r"(?:functions\.)?(.+):\d+")


class DeepSeekParser(CallParser):
    """Reads both forms."""

    marks = DEEPSEEK
    triggers = (DEEPSEEK.section,)

    def read_call(self, trigger: str) -> Generator[None, None, None]:
        source, marks = self.source, self.marks
        yield from source.spaces()
        yield from source.literal(marks.call)
        while True:
            name = self.name((yield from source.until(marks.separator)))
            yield from source.spaces()
            has_block = (yield from source.peek()) != "{"
            if has_block:  # `function` is before the separator
                name = yield from source.until("\n")
                yield from source.literal(_BLOCK)
                yield from source.spaces()
            yield from self.read_named_arguments(name.strip())
            yield from source.spaces()
            if has_block:
                yield from source.literal(_BLOCK_END)
                yield from source.spaces()
            yield from source.closing(marks.call_end)
            self.end_call()
            yield from source.spaces()
            if (yield from source.closing(marks.call, marks.section_end)) != marks.call:
                return

    def name(self, text: str) -> str:
        """Return the name of a tool from the text before the separator."""
        return text


class KimiParser(DeepSeekParser):
    marks = KIMI
    triggers = (KIMI.section,)

    def name(self, text: str) -> str:
        match = _NUMBERED.fullmatch(text.strip())
        return match.group(1) if match else text


class DeepSeekV31(MarkedFormat):
    name = "deepseek_v31"
    parser_type: ClassVar[type[DeepSeekParser]] = DeepSeekParser
    markers = frozenset(DEEPSEEK)
    # The text before the name, after it, between it and the arguments, and after the arguments.
    _before, _number, _between, _after = "", "", DEEPSEEK.separator, ""

    def written(self, name: str, arguments: Mapping[str, Any]) -> str:
        text, marks = json.dumps(arguments, ensure_ascii=False), self.parser_type.marks
        call = f"{self._before}{name}{self._number}{self._between}{text}{self._after}"
        return f"{marks.section}{marks.call}{call}{marks.call_end}{marks.section_end}"

    def rules(self, tools: Sequence[Tool], is_parallel: bool, special_tokens: SpecialTokens) -> list[str]:
        def text(of: str) -> str:
            return lark_text(of, special_tokens)

        marks = self.parser_type.marks
        number = "/:[0-9]{1,4}/" if self._number else ""
        named = [f"{text(tool.name)} {number} {text(self._between)} {lark_arguments(tool)}" for tool in tools]
        following = "(NEWLINES call)*" if is_parallel else ""
        return [
            f"calls: call {following} {text(marks.section_end)}",
            f"call: {text(marks.call + self._before)} named {text(self._after + marks.call_end)}",
            "named: " + " | ".join(named),
        ]


class DeepSeekV3(DeepSeekV31):
    name = "deepseek"
    _before, _between, _after = f"function{DEEPSEEK.separator}", f"\n{_BLOCK}\n", f"\n{_BLOCK_END}"


class KimiK2(DeepSeekV31):
    name = "kimi_k2"
    parser_type = KimiParser
    markers = frozenset(KIMI)
    _before, _number, _between = "functions.", ":0", KIMI.separator
