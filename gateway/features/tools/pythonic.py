"""Tool calls as a Python list of calls with named arguments, of Llama 3.2 and Llama 4.

[get_weather(city="Paris", days=3), clock()]
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from quire.gateway.features.tools.call_parser import CallParser
from quire.gateway.features.tools.growing_text import GrowingText, MalformedCall
from quire.gateway.features.tools.literal_arguments import LiteralArguments, Syntax, Value
from quire.gateway.features.tools.tool_format import CallsFormat
from quire.gateway.features.tools.tool_grammar import Beginning, Calls, SpecialTokens, lark_text, pattern, quoted
from quire.gateway.output.tools import Tool

PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"
# Models mix the words of JSON and Python.
_JSON_WORDS = frozenset({"true", "false", "null"})
_IN_STRING = {quote: re.compile(rf"[^{quote}\\\n]*") for quote in "\"'"}
_OUTSIDE_STRING = re.compile(r"[^\"'()\[\]{},]+")


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


def read_literal(source: GrowingText) -> Generator[None, None, str]:
    """Read a Python literal up to the comma or bracket after it; return it as JSON. Raises MalformedCall."""
    position, depth, quote = 0, 0, ""
    while True:
        text = source.unread
        while position < len(text):
            character = text[position]
            if quote:
                match = _IN_STRING[quote].match(text, position)
                assert match is not None
                position = match.end()
                if position == len(text) or text[position : position + 2] == "\\":
                    break
                if text[position] == "\n":
                    raise MalformedCall("a line ends inside a string")
                quote = "" if text[position] == quote else quote
                position += 1 if text[position] != "\\" else 2
            elif match := _OUTSIDE_STRING.match(text, position):
                position = match.end()
            elif character in ",)" and depth == 0:
                return _as_json(source.take(position))
            else:
                depth += (character in "([{") - (character in ")]}")
                if depth < 0:
                    raise MalformedCall("a bracket without its beginning")
                quote = character if character in "\"'" else ""
                position += 1
        yield from source.more()


def _as_json(text: str) -> str:
    """Return a Python literal as JSON. Raises MalformedCall for other text, and for a value that JSON lacks."""
    text = text.strip()
    if text in _JSON_WORDS:
        return text
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of unknown escapes in strings
            return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        raise MalformedCall("no literal") from error


def _written(value: Value) -> str:
    """Return the expression for a value as the models write it, with double quotes."""
    return quoted(json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value))


PYTHON = Syntax(
    assign="=",
    comma=", ",
    types={
        "string": "literal_string",
        "integer": "LITERAL_INTEGER",
        "number": "LITERAL_NUMBER",
        "boolean": '("True" | "False")',
        "null": '"None"',
        "array": "literal_list",
        "object": "literal_dict",
    },
    written=_written,
    any_name="/[A-Za-z_][A-Za-z0-9_]*/",
    rules=(
        "literal_value: literal_string | LITERAL_NUMBER | LITERAL_WORD | literal_list | literal_dict",
        "literal_string: DOUBLE_QUOTED | SINGLE_QUOTED",
        r'DOUBLE_QUOTED: /"([^"\\\x00-\x1f]|\\[\\"\'nrt]|\\u[0-9a-f]{4})*"/',
        r"SINGLE_QUOTED: /'([^'\\\x00-\x1f]|\\[\\\"'nrt]|\\u[0-9a-f]{4})*'/",
        "LITERAL_WORD: /True|False|None/",
        'literal_list: "[" (literal_value (", " literal_value)*)? "]"',
        'literal_dict: "{" (literal_string ": " literal_value (", " literal_string ": " literal_value)*)? "}"',
    ),
)


class Pythonic(CallsFormat):
    name = "pythonic"
    parser_type = PythonicParser
    markers = frozenset({PYTHON_START, PYTHON_END})

    def written(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"[{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})]"

    def calls(self, tools: Sequence[Tool], is_parallel: bool, special_tokens: SpecialTokens) -> Calls:
        arguments = LiteralArguments(PYTHON)
        rules, calls, beginnings = [], [], []
        for index, tool in enumerate(tools):
            rules.append(f'arguments_{index}: {arguments.of(tool)} ")"')
            calls.append(f"{quoted(tool.name + '(')} arguments_{index}")
            beginnings.append(Beginning(pattern=rf"\s*\[{pattern(tool.name)}\(", rest=f"arguments_{index} more"))
        end = f"({lark_text(PYTHON_END, special_tokens)})?"
        beginnings.append(Beginning(text=PYTHON_START, rest=f'"[" call more {end}'))
        rules += [
            "call: " + " | ".join(calls),
            'more: (", " call)* "]" NEWLINES' if is_parallel else 'more: "]" NEWLINES',
            *arguments.rules,
        ]
        return Calls('"[" call more', beginnings, rules)
