"""A conversation as chat templates take it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.gateway.output.tools import Tool, ToolChoice, ToolMode
from quire.shared.text.chat_template import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """The messages of a call in the form of chat templates, and the tools that the model may call.

    template_variables: further variables for the chat template, such as `enable_thinking`.
    add_generation_prompt: the prompt ends with the beginning of an answer. continue_final_message: it ends within the
    last message instead. add_special_tokens: the tokenizer adds its special tokens, which most templates write.
    is_typed: the answer has typed events, so it is read in parts even without tools and reasoning.
    """

    messages: Sequence[Message]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    is_typed: bool = False

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools that the model may call in this answer."""
        return () if self.tool_choice.mode == ToolMode.NONE else self.tools
