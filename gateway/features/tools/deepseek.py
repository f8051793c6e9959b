"""Tool calls of DeepSeek V3 and R1, with the arguments in a block of code, and of V3.1, without it.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
```json
{"city": "Paris"}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

... <｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜> ...
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from quire.gateway.features.tools.call_parser import CallParser
from quire.gateway.features.tools.reasoning import Reasoning
from quire.gateway.features.tools.tool_format import ToolFormat
from quire.gateway.features.tools.tool_grammar import (
    Beginning,
    SpecialTokens,
    answer_grammar,
    lark_arguments,
    lark_text,
)
from quire.gateway.output.tools import Tool, ToolChoice

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
_BLOCK, _BLOCK_END = "```json", "```"


class DeepSeekParser(CallParser):
    """Reads both forms."""

    triggers = (CALLS_BEGIN,)

    def read_call(self, trigger: str) -> Generator[None, None, None]:
        source = self.source
        yield from source.spaces()
        yield from source.literal(CALL_BEGIN)
        while True:
            name = yield from source.until(SEPARATOR)
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
            yield from source.closing(CALL_END)
            self.end_call()
            yield from source.spaces()
            if (yield from source.closing(CALL_BEGIN, CALLS_END)) != CALL_BEGIN:
                return


class DeepSeekV31(ToolFormat):
    name = "deepseek_v31"
    parser_type = DeepSeekParser
    markers = frozenset({CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR})
    # The text before the name, between name and arguments, and after the arguments.
    _before, _between, _after = "", SEPARATOR, ""

    def written(self, name: str, arguments: Mapping[str, Any]) -> str:
        text = json.dumps(arguments, ensure_ascii=False)
        return f"{CALLS_BEGIN}{CALL_BEGIN}{self._before}{name}{self._between}{text}{self._after}{CALL_END}{CALLS_END}"

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: ToolChoice,
        special_tokens: SpecialTokens,
        reasoning: Reasoning | None = None,
    ) -> str:
        def text(of: str) -> str:
            return lark_text(of, special_tokens)

        named = [f"{text(tool.name + self._between)} {lark_arguments(tool)}" for tool in choice.callable_tools(tools)]
        following = "(NEWLINES call)*" if choice.parallel else ""
        rules = [
            f"call: {text(CALL_BEGIN + self._before)} named {text(self._after + CALL_END)}",
            "named: " + " | ".join(named),
        ]
        rest = f"call {following} {text(CALLS_END)}"
        beginning = Beginning(text=CALLS_BEGIN, rest=rest)
        return answer_grammar(choice, special_tokens, reasoning, f"{text(CALLS_BEGIN)} {rest}", [beginning], rules)


class DeepSeekV3(DeepSeekV31):
    name = "deepseek"
    _before, _between, _after = f"function{SEPARATOR}", f"\n{_BLOCK}\n", f"\n{_BLOCK_END}"
