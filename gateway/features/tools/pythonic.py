"""Tool calls as a Python list of calls with named arguments, of Llama 3.2 and Llama 4.

[get_weather(city="Paris", days=3), clock()]
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from quire.gateway.features.tools.call_parser import CallParser
from quire.gateway.features.tools.growing_text import MalformedCall
from quire.gateway.features.tools.python_literals import PythonArguments, read_literal
from quire.gateway.features.tools.reasoning import Reasoning
from quire.gateway.features.tools.tool_format import ToolFormat
from quire.gateway.features.tools.tool_grammar import (
    Beginning,
    SpecialTokens,
    answer_grammar,
    lark_text,
    pattern,
    quoted,
)
from quire.gateway.output.tools import Tool, ToolChoice

PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"


class PythonicParser(CallParser):
    triggers = (PYTHON_START,)
    begins_with_call = True

    def read_call(self, trigger: str) -> Generator[None, None, None]:
        source = self.source
        yield from source.spaces()
        yield from source.literal("[")
        while True:
            yield from source.spaces()
            opened = yield from source.one_of(*(f"{name}(" for name in self.tools))
            self.begin_call(opened[:-1])
            yield from self._read_arguments()
            yield from source.spaces()
            end = yield from source.closing(",", "]")
            self.end_call()
            if end != ",":
                break
        if trigger:
            yield from source.closing(PYTHON_END)

    def _read_arguments(self) -> Generator[None, None, None]:
        """Read the arguments of a call and its closing bracket."""
        source, separator = self.source, "{"
        while True:
            yield from source.spaces()
            if (yield from source.peek()) == ")":
                yield from source.literal(")")
                break
            key = (yield from source.until("=")).strip()
            if not key.isidentifier():
                raise MalformedCall("no name of an argument")
            value = yield from read_literal(source)
            self.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: {value}")
            separator = ", "
            if (yield from source.one_of(",", ")")) == ")":
                break
        self.arguments("{}" if separator == "{" else "}")


class Pythonic(ToolFormat):
    name = "pythonic"
    parser_type = PythonicParser
    markers = frozenset({PYTHON_START, PYTHON_END})

    def written(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"[{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})]"

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: ToolChoice,
        special_tokens: SpecialTokens,
        reasoning: Reasoning | None = None,
    ) -> str:
        tools = choice.callable_tools(tools)
        arguments = PythonArguments()
        rules, calls, beginnings = [], [], []
        for index, tool in enumerate(tools):
            rules.append(f'arguments_{index}: {arguments.of(tool)} ")"')
            calls.append(f"{quoted(tool.name + '(')} arguments_{index}")
            beginnings.append(Beginning(pattern=rf"\s*\[{pattern(tool.name)}\(", rest=f"arguments_{index} more"))
        end = f"({lark_text(PYTHON_END, special_tokens)})?"
        beginnings.append(Beginning(text=PYTHON_START, rest=f'"[" call more {end}'))
        rules += [
            "call: " + " | ".join(calls),
            'more: (", " call)* "]" NEWLINES' if choice.parallel else 'more: "]" NEWLINES',
            *arguments.rules,
        ]
        return answer_grammar(choice, special_tokens, reasoning, '"[" call more', beginnings, rules)
