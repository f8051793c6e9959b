"""Tool calls after `[TOOL_CALLS]`, of Mistral's models, in two forms: a JSON list, and since tokenizer version 11 a
name with JSON for each call.

    [TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]
    [TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from quire.gateway.features.tools.call_parser import CallParser
from quire.gateway.features.tools.reasoning import Reasoning
from quire.gateway.features.tools.tool_format import ToolFormat
from quire.gateway.features.tools.tool_grammar import (
    Beginning,
    SpecialTokens,
    answer_grammar,
    json_names_and_arguments,
    lark_arguments,
    lark_text,
    quoted,
    several,
)
from quire.gateway.output.tools import Tool, ToolChoice

CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_OPEN = '{"name": '


class MistralParser(CallParser):
    """Reads both forms. An id that the model gives to a call is dropped."""

    triggers = (CALLS,)

    def read_call(self, trigger: str) -> Generator[None, None, None]:
        yield from self.source.spaces()
        if (yield from self.source.peek()) == "[":
            yield from self._read_list()
        else:
            yield from self._read_one()

    def _read_list(self) -> Generator[None, None, None]:
        yield from self.source.literal("[")
        while True:
            yield from self.source.spaces()
            yield from self.read_json_call("name", ("arguments",))
            self.end_call()
            yield from self.source.spaces()
            if (yield from self.source.closing(",", "]")) != ",":
                return

    def _read_one(self) -> Generator[None, None, None]:
        name = yield from self.source.word("[{")
        if (yield from self.source.peek()) == "[" and (yield from self.source.one_of(ARGS, CALL_ID)) == CALL_ID:
            yield from self.source.until(ARGS)
        yield from self.source.spaces()
        yield from self.read_named_arguments(name.strip())


class _Mistral(ToolFormat):
    parser_type = MistralParser
    markers = frozenset({CALLS, ARGS, CALL_ID})

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: ToolChoice,
        special_tokens: SpecialTokens,
        reasoning: Reasoning | None = None,
    ) -> str:
        rest, rules = self._calls(choice.callable_tools(tools), choice.parallel, special_tokens)
        forced = f"{lark_text(CALLS, special_tokens)} {rest}"
        beginning = Beginning(text=CALLS, rest=rest)
        return answer_grammar(choice, special_tokens, reasoning, forced, [beginning], rules)

    @abstractmethod
    def _calls(self, tools: Sequence[Tool], is_parallel: bool, special_tokens: SpecialTokens) -> tuple[str, list[str]]:
        """Return the expression for the calls after the first `[TOOL_CALLS]`, and the rules that it uses."""


class MistralList(_Mistral):
    name = "mistral"

    def written(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"{CALLS}[{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}]"

    def _calls(self, tools: Sequence[Tool], is_parallel: bool, special_tokens: SpecialTokens) -> tuple[str, list[str]]:
        rules = [
            f'call: {quoted(_OPEN)} named ID? "}}"',
            f"named: {json_names_and_arguments(tools, 'arguments')}",
            'ID: /, "id": "[a-zA-Z0-9]{9}"/',
        ]
        following = '(", " call)*' if is_parallel else ""
        # Tokenizers of SentencePiece write a space after a special token.
        return f'/ ?\\[/ call {following} "]"', rules


class MistralNames(_Mistral):
    name = "mistral_args"

    def written(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"{CALLS}{name}{ARGS}{json.dumps(arguments, ensure_ascii=False)}"

    def _calls(self, tools: Sequence[Tool], is_parallel: bool, special_tokens: SpecialTokens) -> tuple[str, list[str]]:
        args = lark_text(ARGS, special_tokens)
        if CALL_ID in special_tokens:
            args = f"({lark_text(CALL_ID, special_tokens)} /[a-zA-Z0-9]{{9}}/)? {args}"
        calls = " | ".join(f"{quoted(tool.name)} args {lark_arguments(tool)}" for tool in tools)
        return several("call", lark_text(CALLS, special_tokens), is_parallel), [f"args: {args}", f"call: {calls}"]
