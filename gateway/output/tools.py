"""The tools of a call, and which of them the model may or must use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

# The schema of arguments that may be any JSON object.
ANY_ARGUMENTS: Mapping[str, Any] = {"type": "object"}


class Tool(NamedTuple):
    """A function that the client runs. `parameters`: JSON schema of its arguments. `strict`: the schema is enforced."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = ANY_ARGUMENTS
    strict: bool = False

    def with_any_arguments(self) -> Tool:
        """Return the tool with arguments that may be any JSON object, for a schema that no grammar can follow."""
        return self._replace(parameters=ANY_ARGUMENTS)


class Besides(StrEnum):
    """What an answer may have besides tool calls, where a grammar holds."""

    # Text before the calls, or instead of them.
    TEXT = "text"
    # JSON that follows a schema, instead of calls.
    JSON = "json"
    NOTHING = "nothing"


class ToolMode(StrEnum):
    """Which answers are allowed."""

    NONE = "none"
    # Text, tool calls, or text and then tool calls.
    AUTO = "auto"
    # At least one call of any tool.
    REQUIRED = "required"
    # At least one call of one tool, and no call of another one.
    NAMED = "named"


class ToolChoice(NamedTuple):
    """The `tool_choice` of a call. `name`: the tool of NAMED. `parallel`: an answer may have several tool calls."""

    mode: ToolMode = ToolMode.AUTO
    name: str = ""
    parallel: bool = True

    def callable_tools(self, tools: Sequence[Tool]) -> list[Tool]:
        """Return the tools that the answer may call."""
        if self.mode == ToolMode.NONE:
            return []
        return [tool for tool in tools if self.mode != ToolMode.NAMED or tool.name == self.name]
