"""Reads the body of a message call: it becomes a conversation and the options of a call."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from quire.gateway.api.call import Call
from quire.gateway.api.messages.breakpoints import Path, probed, read_breakpoints
from quire.gateway.api.messages.content import clear_thinking, read_messages, read_system
from quire.gateway.api.messages.parameters import ALL, REFUSED, WITHOUT_EFFECT
from quire.gateway.api.messages.tools import read_tool_choice, read_tools
from quire.gateway.api.parameters import read
from quire.gateway.errors.api_errors import ApiError, ContextExceeded, refused
from quire.gateway.model.conversation import Conversation
from quire.gateway.model.served_model import ServedModel
from quire.gateway.output.given_grammar import GivenGrammar
from quire.gateway.output.tools import Tool, ToolChoice, ToolMode
from quire.shared.protocol.keys import DEFAULT_CLASS
from quire.shared.protocol.sampling_params import Parameter
from quire.shared.text.chat_template import Message

NO_THREADS = "thread is not supported: this server keeps no messages between calls; send all messages in each call."
# Names that chat templates have for the switch of the reasoning: Qwen3's and DeepSeek V3.1's.
SWITCHES = ("enable_thinking", "thinking")
# Chat templates know three levels of effort.
_EFFORTS = {"xhigh": "high", "max": "high"}
_SCHEMA_NAME = re.compile(r"tools\[([0-9]+)\]\.function\.parameters")


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageRequest:
    """A body that was read.

    given: the parameters in their final form. no_effect: names of fields without effect. tool_places: the place in
    `tools` of each tool of the conversation. breakpoints: see `read_breakpoints`.
    """

    given: Mapping[str, Any]
    conversation: Conversation
    no_effect: tuple[str, ...]
    tool_places: tuple[int, ...]
    breakpoints: tuple[tuple[Path, int], ...] = ()

    def probes(self, body: Mapping[str, Any]) -> Iterator[Conversation]:
        """Yield the conversation for each breakpoint, with a mark after its block. body: that was read."""
        for path, _ in self.breakpoints:
            messages, tools = _read_prompt(probed(body, path), self.given, [])
            yield replace(self.conversation, messages=messages, tools=tuple(tools.values()))

    def call(self, defaults: Mapping[str, float]) -> Call:
        """Return the call without its prompt and without `max_tokens`, which is only an upper bound here.

        Raises InvalidRequest. defaults: the model's sampling defaults.
        """
        given = dict(self.given)
        priority = given.get("priority", DEFAULT_CLASS)
        if given.pop("service_tier", "auto") == "standard_only" and priority != DEFAULT_CLASS:
            raise refused(
                "service_tier", f"service_tier is 'standard_only', but priority is {priority!r}; leave out one of them."
            )
        given["stop"] = given.pop("stop_sequences", ())
        given["user"] = given.pop("metadata", "")
        for name in ("max_tokens", "tools", "tool_choice"):
            given.pop(name, None)
        given["continue_final_message"] = self.conversation.continue_final_message
        if grammar := self.grammar:
            given["response_format"] = grammar
        return replace(Call.of(given, defaults), no_effect=self.no_effect)

    @property
    def grammar(self) -> GivenGrammar | None:
        """The grammar that the answer follows; None without one. Raises InvalidRequest."""
        new: GivenGrammar | None = self.given.get("output_config", {}).get("format")
        old: GivenGrammar | None = self.given.get("output_format")
        if new and old and new.text != old.text:
            raise refused("output_format", "output_format and output_config.format differ; give one of them.")
        return new or old

    def renamed(self, error: ApiError) -> ApiError:
        """Return the error in the words of this API, which clients look for: a chat has a schema elsewhere."""
        if isinstance(error, ContextExceeded):
            # One token of the context is left for the answer.
            words = f"prompt is too long: {error.prompt_tokens} tokens > {error.context - 1} maximum"
            return refused(error.param, f"{words}. {error.message}", code=error.code)
        match = _SCHEMA_NAME.match(error.param or "")
        if match is None or int(match[1]) >= len(self.tool_places):
            return error
        name = f"tools[{self.tool_places[int(match[1])]}].input_schema"
        return refused(name, _SCHEMA_NAME.sub(name, error.message), code=error.code)


def read_request(body: Mapping[str, Any], table: Mapping[str, Parameter], model: ServedModel) -> MessageRequest:
    """Read a body whose parameters are in `table`. Raises InvalidRequest."""
    if body.get("thread") is not None:
        # With this code, the runner of tools of the `anthropic` SDK goes on without a thread.
        raise refused("thread", NO_THREADS, code="thread_unsupported_request")
    given = read(body, {**table, **WITHOUT_EFFECT}, REFUSED)
    no_effect = [name for name in WITHOUT_EFFECT if name in given]
    messages, tools = _read_prompt(body, given, no_effect)
    choice = ToolChoice()
    if "tool_choice" in given:
        choice = read_tool_choice(given["tool_choice"], tuple(tools.values()))
    # The answer continues the last message.
    continues = messages[-1]["role"] == "assistant"
    request = MessageRequest(
        given=given,
        conversation=Conversation(
            messages=messages,
            tools=tuple(tools.values()),
            tool_choice=choice,
            template_variables=_template_variables(given, model, no_effect, continues),
            add_generation_prompt=not continues,
            continue_final_message=continues,
            is_typed=True,
        ),
        no_effect=tuple(dict.fromkeys(no_effect)),
        tool_places=tuple(tools),
        breakpoints=tuple(read_breakpoints(body)),
    )
    _check_continuation(request)
    return request


def _read_prompt(
    body: Mapping[str, Any], given: Mapping[str, Any], no_effect: list[str]
) -> tuple[list[Message], dict[int, Tool]]:
    """Return the messages, and the tools by place. Raises InvalidRequest."""
    messages = read_messages(body["messages"], no_effect)
    if not messages:
        raise refused("messages", "messages has no content; give it at least one message of the user.")
    if given.get("context_management", ALL) < ALL:
        messages = clear_thinking(messages, given["context_management"])
    if "system" in given:
        messages = _with_system(read_system(body["system"], no_effect), messages)
    return messages, read_tools(body["tools"], no_effect) if "tools" in given else {}


def _with_system(system: list[Message], messages: list[Message]) -> list[Message]:
    """Return the messages after the system prompt. A system message at their beginning is a part of it."""
    if not system or messages[0]["role"] != "system":
        return [*system, *messages]
    texts = [message["content"] for message in (system[0], messages[0])]
    parts = [part for text in texts for part in ([{"type": "text", "text": text}] if isinstance(text, str) else text)]
    return [{"role": "system", "content": parts}, *messages[1:]]


def _template_variables(
    given: dict[str, Any], model: ServedModel, no_effect: list[str], continues: bool
) -> dict[str, Any]:
    """Return the variables for the chat template; those that the template does not know have no effect.

    A budget of the reasoning becomes the parameter `thinking_token_budget` as well, unless the answer continues a
    message.
    """
    known: Collection[str] = model.template.variables if model.template is not None else ()
    variables: dict[str, Any] = {}
    if thinking := given.get("thinking"):
        variables = dict.fromkeys(SWITCHES, thinking["enabled"])
        always_thinks = model.reasoning_format and thinking["enabled"]
        if not always_thinks and not any(name in known for name in SWITCHES):
            no_effect.append("thinking")
        if (budget := thinking["budget_tokens"]) is not None:
            variables["thinking_budget"] = budget
            has_format = given.get("output_format") or given.get("output_config", {}).get("format")
            if not continues and model.thinking_markers("", not (given.get("tools") or has_format))[1]:
                given["thinking_token_budget"] = budget
            elif "thinking_budget" not in known:
                no_effect.append("thinking.budget_tokens")
    if effort := given.get("output_config", {}).get("effort"):
        variables["reasoning_effort"] = _EFFORTS.get(effort, effort)
        if "reasoning_effort" not in known:
            no_effect.append("output_config.effort")
    return variables


def _check_continuation(request: MessageRequest) -> None:
    """Check that the answer can continue the last message, if that is of the assistant. Raises InvalidRequest."""
    conversation = request.conversation
    if not conversation.continue_final_message:
        return
    if conversation.messages[-1].get("tool_calls"):
        raise refused(
            "messages", "The last message has a tool_use; give its tool_result in a message of the user after it."
        )
    other = "output_config.format" if request.grammar else ""
    if conversation.tool_choice.mode in (ToolMode.REQUIRED, ToolMode.NAMED):
        other = "tool_choice"
    if other:
        raise refused(
            other,
            f"{other} is not supported if the last message is of the assistant: the answer continues its text. Leave "
            "out one of them.",
        )
