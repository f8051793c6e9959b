"""The format in which a model family writes tool calls: its parser and its grammar."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from quire.gateway.features.tools.call_parser import CallParser
from quire.gateway.features.tools.reasoning import Reasoning
from quire.gateway.features.tools.tool_grammar import Beginning, Calls, SpecialTokens, answer_grammar, lark_text
from quire.gateway.features.tools.tool_messages import as_plain_messages
from quire.gateway.output.tools import Besides, Tool, ToolChoice
from quire.shared.text.chat_template import Message


class ToolFormat(ABC):
    """One format of tool calls. The formats have no state; `parser` makes the state of one choice."""

    parser_type: ClassVar[type[CallParser]]
    # The value of the setting, and the key in `formats.FORMATS`.
    name: ClassVar[str]
    # Special or added tokens that the parser looks for: the text of an answer must contain them.
    markers: ClassVar[frozenset[str]] = frozenset()
    # True if the parser also reads the model's reasoning, so that answers without tools need it, too.
    has_reasoning: ClassVar[bool] = False
    # With such reasoning: what begins it, the token that ends it, and what must follow before an answer without calls.
    reasoning_markers: ClassVar[tuple[str, str, str]] = ("", "", "")
    # The texts around the content of an answer, where the model writes any; the parser drops them.
    content_marks: ClassVar[tuple[str, str]] = ("", "")
    # True if no chat template teaches the format, so that the prompt describes the tools also where the template can.
    is_described: ClassVar[bool] = False
    # The keys of name and arguments, if a call is a JSON object without marks around it.
    json_keys: ClassVar[tuple[str, str] | None] = None

    @property
    def reads_every_answer(self) -> bool:
        """True if answers without tools need the parser, too."""
        return self.has_reasoning or any(self.content_marks)

    def parser(self, tools: Sequence[Tool], is_forced: bool = False, besides: Besides = Besides.TEXT) -> CallParser:
        """Return the parser of one choice.

        is_forced: the answer follows the grammar of this format, so that the arguments of a call are passed on as they
        grow. Without a grammar a call is held back until it is complete and valid. besides: what the grammar allows
        besides calls.
        """
        return self.parser_type(tools, is_forced, besides)

    @abstractmethod
    def grammar(
        self,
        tools: Sequence[Tool],
        choice: ToolChoice,
        special_tokens: SpecialTokens,
        reasoning: Reasoning | None = None,
    ) -> str:
        """Return the Lark grammar of the whole answer.

        tools: at least one. choice: any mode but NONE, in which an answer needs no grammar. reasoning: what may come
        before the answer. Raises GrammarError if the format cannot enforce the schema of a strict tool.
        """

    def content_frame(self, special_tokens: SpecialTokens) -> str:
        """Return the Lark grammar of an answer without calls, whose content is `@content`; empty if it is all content.

        Reasoning between marks of its own (`ReasoningFormat`) is not a part of this grammar.
        """
        return ""

    @abstractmethod
    def written(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return a tool call as the model writes it."""

    def manner(self) -> str:
        """Return the sentences that tell a model how to write a call."""
        form = self.written("NAME", {"ARGUMENT": "VALUE"})
        return f"To call a function, write its name and its arguments in this form:\n{form}"

    def prompt(self, tools: Sequence[Tool]) -> str:
        """Return the text for the system message that describes the tools, for models whose chat template cannot."""
        described = (
            {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)} for tool in tools
        )
        lines = [json.dumps(tool, ensure_ascii=False) for tool in described]
        return "\n".join(
            ["You can call functions. Each line describes one:", *lines, self.manner(), "Otherwise answer as usual."]
        )

    def plain_messages(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
        """Return a conversation whose plain messages describe the tools and have calls and results as text."""
        return as_plain_messages(messages, self.written, self.prompt(tools) if tools else "")


class CallsFormat(ToolFormat):
    """A format whose answers are text until calls begin."""

    @abstractmethod
    def calls(self, tools: Sequence[Tool], is_parallel: bool, special_tokens: SpecialTokens) -> Calls:
        """Return the parts of a grammar that hold calls of these tools. Raises GrammarError as `grammar`."""

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: ToolChoice,
        special_tokens: SpecialTokens,
        reasoning: Reasoning | None = None,
    ) -> str:
        calls = self.calls(choice.callable_tools(tools), choice.parallel, special_tokens)
        return answer_grammar(choice, special_tokens, reasoning, *calls, self.content_marks)


class MarkedFormat(CallsFormat):
    """A format whose calls begin at a mark, anywhere in the answer: the first trigger of the parser.

    other_starts: marks that models write in its place, each with the expression for what follows.
    """

    other_starts: ClassVar[Mapping[str, str]] = {}

    @abstractmethod
    def rules(self, tools: Sequence[Tool], is_parallel: bool, special_tokens: SpecialTokens) -> list[str]:
        """Return the rules of a grammar. The rule `calls` is the rest of an answer after the mark.

        Raises GrammarError as `grammar`.
        """

    def calls(self, tools: Sequence[Tool], is_parallel: bool, special_tokens: SpecialTokens) -> Calls:
        start = self.parser_type.triggers[0]
        rests = {start: "calls", **self.other_starts}
        beginnings = [Beginning(text=text, rest=rest) for text, rest in rests.items()]
        rules = self.rules(tools, is_parallel, special_tokens)
        return Calls(f"{lark_text(start, special_tokens)} calls", beginnings, rules)
