"""The grammars of answers of one model: tool calls, and content after reasoning.

Those of tool calls are cached: to make the grammar of 20 tools takes milliseconds.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from quire.gateway.errors.api_errors import refused
from quire.gateway.features.tools.formats import FORMATS
from quire.gateway.features.tools.reasoning import Reasoning
from quire.gateway.features.tools.tool_grammar import (
    GrammarError,
    SpecialTokens,
    between,
    find_fault,
    framed,
    grammar_after_reasoning,
    lark_json,
    with_content,
    write,
)
from quire.gateway.output.tools import Tool, ToolChoice, ToolMode

# Number of cached grammars, and of the characters of their tools.
KEPT = 64
KEPT_CHARACTERS = 4 * 1024 * 1024
# The places and lines of a grammar in an error: clients see neither the grammar of tool calls nor its lines.
_GRAMMAR_TEXT = re.compile(r"^at \d+\(\d+\): | \d+ \| .*", re.DOTALL)

# Raises GrammarError if answers cannot follow a grammar.
Try = Callable[[str], Awaitable[None]]


class OutputForm(Protocol):
    """How an answer is written: the name of the format of its tool calls, and its reasoning."""

    @property
    def tool_format(self) -> str: ...

    @property
    def reasoning(self) -> Reasoning | None: ...


class ToolGrammars:
    """Makes the grammars of answers with tools. special_tokens: those of the model's tokenizer."""

    def __init__(self, special_tokens: SpecialTokens) -> None:
        self._special_tokens = special_tokens
        self._known: OrderedDict[tuple[str, ...], str] = OrderedDict()
        self._characters = 0

    async def followed(
        self, spec: OutputForm, tools: Sequence[Tool], choice: ToolChoice, content: str, attempt: Try
    ) -> tuple[str, tuple[int, ...]]:
        """Return a grammar that answers can follow, and the indices of the tools whose schemas it does not follow.

        content: as of `text`. The arguments of a tool that is not strict may be any JSON object if its schema cannot be
        followed. Raises InvalidRequest that names the strict tool whose schema cannot be followed, and the place in the
        schema.
        """
        # Nearly always all schemas can be followed: then this one check suffices.
        grammar, fault = await self._checked(spec, tools, choice, content, attempt)
        if not fault:
            return grammar, self._loosened(spec, tools)
        possible: list[Tool] = []
        for index, tool in enumerate(tools):
            _, fault = await self._checked(spec, [tool], ToolChoice(ToolMode.NAMED, tool.name), "", attempt)
            if fault and tool.strict:
                name = f"tools[{index}].function.parameters"
                cause = await find_fault(tool.parameters, attempt)
                place, reason = (name + cause.path, cause.reason) if cause is not None else (name, _reason(fault))
                raise refused(name, f"{place}, of the tool {tool.name}, cannot be followed: {reason}.")
            possible.append(tool.with_any_arguments() if fault else tool)
        grammar, fault = await self._checked(spec, possible, choice, content, attempt)
        if fault:
            raise refused("tools", f"tools cannot be followed: {_reason(fault)}.")
        unlike = {index for index, tool in enumerate(possible) if tool != tools[index]}
        return grammar, tuple(sorted(unlike | set(self._loosened(spec, possible))))

    def framed(self, spec: OutputForm, prompt: str, content: str) -> str:
        """Return the grammar of an answer without tools: reasoning, if any, and then the grammar `content`."""
        form, reasoning = FORMATS.get(spec.tool_format), spec.reasoning
        frame = form.content_frame(self._special_tokens) if form else ""
        if not frame:
            if reasoning is not None and reasoning.format.is_over_in(prompt):
                reasoning = None
            answer = between("@content", form.content_marks, self._special_tokens) if form else "@content"
            if answer == "@content" and reasoning is None:
                return content
            frame = grammar_after_reasoning(answer, self._special_tokens, reasoning)
        return framed(frame, content)

    async def _checked(
        self, spec: OutputForm, tools: Sequence[Tool], choice: ToolChoice, content: str, attempt: Try
    ) -> tuple[str, str]:
        """Return the grammar of an answer with these tools, and the reason why answers cannot follow it, or empty."""
        grammar = ""
        try:
            grammar = self.text(spec, tools, choice, content)
            await attempt(grammar)
        except GrammarError as error:
            return grammar, str(error)
        return grammar, ""

    def _loosened(self, spec: OutputForm, tools: Sequence[Tool]) -> tuple[int, ...]:
        """Return the indices of the tools that the format follows only in part: it could not if they were strict."""

        def follows(some: Sequence[Tool]) -> bool:
            strict = [tool._replace(strict=True) for tool in some]
            try:
                self.text(spec, strict, ToolChoice(ToolMode.REQUIRED))
            except GrammarError:
                return False
            return True

        if all(tool.strict for tool in tools) or follows(tools):
            return ()
        return tuple(index for index, tool in enumerate(tools) if not tool.strict and not follows([tool]))

    def text(self, spec: OutputForm, tools: Sequence[Tool], choice: ToolChoice, content: str = "") -> str:
        """Return the text of the grammar of an answer that may call `tools`. Raises GrammarError.

        content: the JSON schema of an answer that calls no tool, as text; empty for any text. An answer that must call
        a tool has no content.
        """
        written = json.dumps(tools, ensure_ascii=False)
        key = (spec.tool_format, repr(spec.reasoning), repr(choice), content, written)
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        if content and choice.mode == ToolMode.AUTO:
            lark = self._with_content(spec, tools, choice, json.loads(content))
        else:
            lark = FORMATS[spec.tool_format].grammar(tools, choice, self._special_tokens, spec.reasoning)
        made = write("lark", lark)
        self._known[key] = made
        self._characters += len(written) + len(content)
        while len(self._known) > KEPT or self._characters > KEPT_CHARACTERS:
            forgotten, _ = self._known.popitem(last=False)
            self._characters -= len(forgotten[-1]) + len(forgotten[-2])
        return made

    def _with_content(self, spec: OutputForm, tools: Sequence[Tool], choice: ToolChoice, schema: dict[str, Any]) -> str:
        """Return the grammar of an answer that is calls, or else JSON that follows a schema. Raises GrammarError."""
        form, special_tokens, reasoning = FORMATS[spec.tool_format], self._special_tokens, spec.reasoning
        if form.json_keys is None:
            required = choice._replace(mode=ToolMode.REQUIRED)
            answer = between(lark_json(schema), form.content_marks, special_tokens)
            return with_content(form.grammar(tools, required, special_tokens, reasoning), answer)
        # Calls and content are JSON objects, so one schema tells them apart.
        objects = [_call_schema(tool, *form.json_keys) for tool in tools]
        if "$ref" in json.dumps([objects, schema]):
            raise GrammarError(f"the format {form.name} has no references next to a schema of the answer")
        return grammar_after_reasoning(lark_json({"anyOf": [*objects, schema]}), special_tokens, reasoning)


def _reason(fault: str) -> str:
    """Return the fault of a grammar without its text."""
    return _GRAMMAR_TEXT.sub("", fault)


def _call_schema(tool: Tool, name_key: str, arguments_key: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {name_key: {"const": tool.name}, arguments_key: dict(tool.parameters)},
        "required": [name_key, arguments_key],
        "additionalProperties": False,
    }
