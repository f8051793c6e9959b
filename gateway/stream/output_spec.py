"""The formats with which the output of a call is read: of its tool calls and of its reasoning.

A gateway stores this with the call, so that every gateway divides the same tokens into the same parts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from quire.gateway.features.tools.formats import FORMATS, REASONING_FORMATS
from quire.gateway.features.tools.reasoning import Reasoning, ReasoningParser
from quire.gateway.output.parts import OutputParser, PlainText
from quire.gateway.output.tools import Besides, Tool
from quire.shared.config.validators import InvalidValue

# Largest number of characters of an encoded specification: the tools of a call are most of it.
MAX_SPEC_LENGTH = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSpec:
    """The formats with which the text of each choice of a call is divided into parts.

    tool_format: a name of FORMATS; empty if the call has no tools. tools: those that the model may call.
    is_forced: a grammar guarantees the form of every tool call, so arguments may be streamed as they grow.
    besides: what that grammar allows besides calls.
    reasoning_format: a name of REASONING_FORMATS; empty if the model does not mark its reasoning.
    starts_in_reasoning: the prompt ends inside the reasoning.
    """

    tool_format: str = ""
    tools: tuple[Tool, ...] = ()
    is_forced: bool = False
    besides: Besides = Besides.TEXT
    reasoning_format: str = ""
    starts_in_reasoning: bool = False

    @property
    def reasoning(self) -> Reasoning | None:
        """The reasoning that an answer may have; None without a reasoning format."""
        if not self.reasoning_format:
            return None
        return Reasoning(REASONING_FORMATS[self.reasoning_format], self.starts_in_reasoning)

    @property
    def markers(self) -> frozenset[str]:
        """Tokens that the parser looks for; some may be special tokens, which have no text by default."""
        found = FORMATS[self.tool_format].markers if self.tool_format else frozenset()
        return found | {self.reasoning.format.start, self.reasoning.format.end} if self.reasoning else found

    def parser(self) -> OutputParser:
        """Returns a parser at the beginning of a choice."""
        parser: OutputParser = PlainText()
        if self.tool_format:
            parser = FORMATS[self.tool_format].parser(self.tools, self.is_forced, self.besides)
        if self.reasoning is not None:
            parser = ReasoningParser(self.reasoning, parser)
        return parser

    def encode(self) -> str:
        """The specification as JSON."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        written = values | {"tools": [tool._asdict() for tool in self.tools]}
        return json.dumps(written, ensure_ascii=False, separators=(",", ":"))


def read_spec(name: str, value: Any) -> OutputSpec:
    """Reads the JSON of a specification. Raises InvalidValue."""
    try:
        if type(value) is not str or len(value) > MAX_SPEC_LENGTH:
            raise ValueError("it is no text, or too long")
        return _decoded(value)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InvalidValue(name, f"must be the JSON of an output specification: {error}") from error


# The gateway that writes a specification reads it next, and a client repeats its tools in every turn of a conversation.
@lru_cache(maxsize=16)
def _decoded(text: str) -> OutputSpec:
    values = json.loads(text)
    tools, besides = tuple(Tool(**tool) for tool in values["tools"]), Besides(values.get("besides", Besides.TEXT))
    spec = OutputSpec(**{**values, "tools": tools, "besides": besides})
    spec.parser()  # raises KeyError for a format that does not exist
    return spec
