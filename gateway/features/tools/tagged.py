"""Tool calls in tags around their name, keys and values: a string is written as it is, any other value as JSON.

Qwen3-Coder and Qwen3.5:

<tool_call>
<function=get_weather>
<parameter=city>
Paris
</parameter>
</function>
</tool_call>

GLM 4.5 and 4.6, and without newlines GLM 4.7:

<tool_call>get_weather
<arg_key>city</arg_key>
<arg_value>Paris</arg_value>
</tool_call>

MiniMax M2, with all calls between the outer tags:

<minimax:tool_call>
<invoke name="get_weather">
<parameter name="city">Paris</parameter>
</invoke>
</minimax:tool_call>
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from quire.gateway.features.tools.argument_types import properties_of, required_of, resolved, types_of
from quire.gateway.features.tools.call_parser import CallParser
from quire.gateway.features.tools.growing_text import MalformedCall, parse_json
from quire.gateway.features.tools.tool_format import MarkedFormat
from quire.gateway.features.tools.tool_grammar import (
    SpecialTokens,
    StrictToolError,
    lark_json,
    lark_text,
    quoted,
    several,
    text_and_end,
)
from quire.gateway.output.tools import Tool

NEWLINE = "\n"
# Python's words, which models write instead of JSON.
_WORDS = {"None": "null", "True": "true", "False": "false"}
_ANNOTATIONS = frozenset({"$comment", "default", "deprecated", "description", "examples", "format", "title"})
# The keywords of a schema of arguments whose meaning is in the sequence of its properties.
_OBJECT = frozenset({"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema"})
_NOT_IN_KEYS = frozenset('<>"\n')


class Tags(NamedTuple):
    """The texts around the parts of a call.

    start, end: around calls. name, key, value: around these. call_end: after the arguments. padding: the text before
    and after a value. shares: all calls of an answer are between one `start` and `end`. may_join: the newlines between
    tags may be left out.
    """

    start: str
    end: str
    name: tuple[str, str]
    key: tuple[str, str]
    value: tuple[str, str]
    call_end: str = ""
    padding: str = ""
    shares: bool = False
    may_join: bool = False

    @property
    def lead(self) -> str:
        """The text between `start` and the name."""
        return NEWLINE if self.name[0] else ""

    @property
    def gap(self) -> str:
        """The text between a key and its value."""
        return NEWLINE if self.value[0] else ""

    @property
    def tail(self) -> str:
        """The text after `call_end`."""
        return NEWLINE if self.call_end else ""


class TaggedParser(CallParser):
    tags: ClassVar[Tags]

    def read_call(self, trigger: str) -> Generator[None, None, None]:
        source, tags = self.source, self.tags
        if trigger == tags.start:
            yield from source.spaces()
            yield from source.literal(tags.name[0])
        while True:
            yield from self._read_one()
            if trigger != tags.start or not tags.call_end:
                return
            self.end_call()
            yield from source.spaces()
            if (yield from source.closing(tags.end, tags.name[0])) != tags.name[0]:
                return

    def _read_one(self) -> Generator[None, None, None]:
        """Read a call from its name to the end of its arguments."""
        source, tags = self.source, self.tags
        name = yield from (source.until(tags.name[1]) if tags.name[1] else source.word("\n<"))
        self.begin_call(name.strip())
        schema = self.tools[name.strip()].parameters
        separator = "{"
        while True:
            yield from source.spaces()
            if (yield from source.one_of(tags.key[0], tags.call_end or tags.end)) != tags.key[0]:
                break
            key = yield from source.until(tags.key[1])
            if tags.value[0]:
                yield from source.spaces()
                yield from source.literal(tags.value[0])
            self.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            separator = ", "
            yield from self._read_value(types_of(properties_of(schema).get(key), schema))
        self.arguments("{}" if separator == "{" else "}")

    def _read_value(self, types: frozenset[str]) -> Generator[None, None, None]:
        """Read a value and its end tag. A value that names no type is a string."""
        padding, end = self.tags.padding, self.tags.value[1]
        if padding and (yield from self.source.peek()) == padding:
            self.source.take(1)
        if types <= {"string"}:
            self.arguments('"')
            yield from self.source.stream_until((end,), self._string, self._without_padding)
            self.arguments('"')
            return
        pieces: list[str] = []
        yield from self.source.stream_until((end,), pieces.append, self._without_padding)
        self.arguments(_as_json("".join(pieces), types))

    def _string(self, text: str) -> None:
        if text:
            self.arguments(json.dumps(text, ensure_ascii=False)[1:-1])

    def _without_padding(self, text: str) -> str:
        return text.removesuffix(self.tags.padding)


def _as_json(text: str, types: frozenset[str]) -> str:
    """Return the JSON of a value that may have several types, or one that is not a string."""
    value = _WORDS.get(text.strip(), text.strip())
    if "string" in types and not ("null" in types and value == "null"):
        return json.dumps(text, ensure_ascii=False)
    try:
        parse_json(value)
    except MalformedCall:
        return json.dumps(text, ensure_ascii=False)
    return value


class TaggedFormat(MarkedFormat):
    parser_type: ClassVar[type[TaggedParser]]

    def written(self, name: str, arguments: Mapping[str, Any]) -> str:
        tags = self.parser_type.tags
        lines = ""
        for key, value in arguments.items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            lines += f"{key.join(tags.key)}{tags.gap}{f'{tags.padding}{text}{tags.padding}'.join(tags.value)}\n"
        return f"{tags.start}{tags.lead}{name.join(tags.name)}\n{lines}{tags.call_end}{tags.tail}{tags.end}"

    def rules(self, tools: Sequence[Tool], is_parallel: bool, special_tokens: SpecialTokens) -> list[str]:
        tags = self.parser_type.tags
        arguments = _Arguments(tags, special_tokens)
        functions = [f"{arguments.text(tool.name + tags.name[1] + NEWLINE)} {arguments.of(tool)}" for tool in tools]
        item, start = f"{arguments.text(tags.name[0])} function", arguments.text(tags.start)
        lead, tail = arguments.text(tags.lead), arguments.text(tags.tail)
        items = f"{item} ({tail} {item})*" if tags.shares and is_parallel else item
        return [
            *arguments.rules,
            f"calls: {several('call', start, is_parallel and not tags.shares)}",
            f"call: {lead} {items} {tail} {arguments.text(tags.end)}",
            f"function: ({' | '.join(functions)}) {arguments.text(tags.call_end)}",
        ]


class _Arguments:
    """Makes the expressions for the arguments of tools. `rules`: the rules that they use."""

    def __init__(self, tags: Tags, special_tokens: SpecialTokens) -> None:
        self._tags, self._special_tokens = tags, special_tokens
        self.rules = [
            # A string ends at the first end tag.
            *text_and_end("raw_text", tags.value[1], special_tokens),
            "any_argument: " + self._argument(r'/[^<>"\n]+/', "raw_text"),
        ]

    def text(self, of: str) -> str:
        """Return the expression for a text with tags and newlines."""
        if not self._tags.may_join:
            return lark_text(of, self._special_tokens)
        lines = (lark_text(line, self._special_tokens) for line in of.split(NEWLINE))
        return ' ("\\n")? '.join(lines)

    def of(self, tool: Tool) -> str:
        """Return the expression for the arguments of a tool, in the order of its schema.

        Raises StrictToolError if the tool is strict and tags cannot be made to follow its schema.
        """
        schema = tool.parameters
        properties = properties_of(schema)
        is_plain = schema.keys() <= _OBJECT | _ANNOTATIONS and not any(set(key) & _NOT_IN_KEYS for key in properties)
        closed = properties or schema.get("additionalProperties") is False
        if not is_plain or not closed:
            if tool.strict:
                raise StrictToolError("strict tools name their arguments in `properties`")
            return "any_argument*"
        required = required_of(schema)
        arguments = []
        for key, value in properties.items():
            argument = self._argument(quoted(key), self._value(key, value, schema, tool.strict))
            arguments.append(argument if key in required else f"({argument})?")
        return " ".join(arguments)

    def _argument(self, key: str, value: str) -> str:
        """Return the expression for an argument. value: the one for a value and its end tag."""
        tags = self._tags
        before = self.text(tags.key[1] + tags.gap + tags.value[0] + tags.padding)
        return f"{self.text(tags.key[0])} {key} {before} {value} {self.text(NEWLINE)}"

    def _value(self, key: str, schema: Any, root: Mapping[str, Any], is_strict: bool) -> str:
        """Return the expression for a value and its end tag."""
        types, definition = types_of(schema, root), resolved(schema, root)
        end = lark_text(self._tags.padding + self._tags.value[1], self._special_tokens)
        values = [definition["const"]] if "const" in definition else definition.get("enum")
        if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
            return "(" + " | ".join(quoted(value) for value in values) + f") {end}"
        if types and "string" not in types:
            definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
            return f"{lark_json({**definition, **definitions})} {end}"
        if is_strict and not (types == {"string"} and definition.keys() <= {"type"} | _ANNOTATIONS - {"format"}):
            raise StrictToolError(f"the argument {key!r} of a strict tool has type string only")
        return "raw_text"


QWEN = Tags(
    start="<tool_call>",
    end="</tool_call>",
    name=("<function=", ">"),
    key=("<parameter=", ">"),
    value=("", "</parameter>"),
    call_end="</function>",
    padding=NEWLINE,
)
GLM = Tags(
    start="<tool_call>",
    end="</tool_call>",
    name=("", ""),
    key=("<arg_key>", "</arg_key>"),
    value=("<arg_value>", "</arg_value>"),
    may_join=True,
)
MINIMAX = Tags(
    start="<minimax:tool_call>",
    end="</minimax:tool_call>",
    name=('<invoke name="', '">'),
    key=('<parameter name="', '">'),
    value=("", "</parameter>"),
    call_end="</invoke>",
    shares=True,
)


class QwenCoderParser(TaggedParser):
    tags = QWEN
    # The models sometimes leave the outer tag out.
    triggers = (QWEN.start, QWEN.name[0])


class GlmParser(TaggedParser):
    tags = GLM
    triggers = (GLM.start,)


class MiniMaxParser(TaggedParser):
    tags = MINIMAX
    triggers = (MINIMAX.start,)


class QwenCoder(TaggedFormat):
    name = "qwen3_coder"
    parser_type = QwenCoderParser
    other_starts: ClassVar[Mapping[str, str]] = {QWEN.name[0]: "function NEWLINES"}
    markers = frozenset({QWEN.start, QWEN.end})


class Glm(TaggedFormat):
    name = "glm"
    parser_type = GlmParser
    markers = frozenset({GLM.start, GLM.end, *GLM.key, *GLM.value})


class MiniMax(TaggedFormat):
    name = "minimax_m2"
    parser_type = MiniMaxParser
    markers = frozenset({MINIMAX.start, MINIMAX.end})
