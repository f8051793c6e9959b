"""Reads the body of POST /v1/responses."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.gateway.api.call import Call
from quire.gateway.api.conversation import template_variables, unknown_variables
from quire.gateway.api.labels import LABELS, NO_EFFECT
from quire.gateway.api.parameters import read
from quire.gateway.api.request_limits import RequestLimits
from quire.gateway.api.responses.body import joined_echo, split_echo
from quire.gateway.api.responses.items import ADDITIONAL_TOOLS, Item, messages_of, read_items, without_trigger
from quire.gateway.api.responses.parameters import (
    LOGPROBS,
    NOT_HERE,
    RESPONSES,
    SAMPLING,
    ReasoningOptions,
    TextOptions,
    check_refused,
)
from quire.gateway.api.responses.tools import (
    FunctionName,
    GivenChoice,
    GivenFunction,
    GivenTools,
    read_response_tools,
)
from quire.gateway.api.tools import check_choice
from quire.gateway.errors.api_errors import InvalidRequest, refused
from quire.gateway.model.conversation import Conversation
from quire.gateway.output.tools import Tool, ToolChoice, ToolMode
from quire.gateway.stream.call_metadata import MAX_ECHO_LENGTH
from quire.shared.text.chat_template import ChatTemplate

# The name of a tool's schema in errors of a chat.
_SCHEMA_NAME = re.compile(r"tools\[(\d+)\]\.function\.parameters")
# The tier of a response whose call does not name one; the field of the answer must not be null.
DEFAULT_TIER = "default"
# Parameters that reach `Call.of` under the same name.
_SAME = ("model", "stream", "background", "cache_salt", "priority", "timeout", *LABELS, *SAMPLING)


@dataclass(frozen=True, slots=True)
class ResponseRequest:
    """A body that was read. items: those of `input` only. skipped: parameters without an effect, with the reason.
    compacts: the answer is a compaction of the items.
    """

    given: dict[str, Any]
    items: list[Item]
    tools: GivenTools
    choice: ToolChoice
    call: Call
    skipped: tuple[tuple[str, str], ...]
    compacts: bool = False

    @property
    def previous(self) -> str:
        return str(self.given.get("previous_response_id", ""))

    @property
    def conversation_id(self) -> str:
        """The conversation that the call continues; empty for none."""
        return str(self.given.get("conversation", ""))

    @property
    def compact_threshold(self) -> int:
        """Tokens of a prompt from which it is compacted; 0 for never."""
        return int(self.given.get("context_management") or 0)

    @property
    def is_stored(self) -> bool:
        return bool(self.given.get("store", True))

    @property
    def is_truncated(self) -> bool:
        """True if the oldest items are dropped if not all fit into the context."""
        return self.given.get("truncation") == "auto"

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The functions that `tool_choice` allows."""
        return tuple(function.tool for function in self._callable)

    @property
    def _callable(self) -> list[GivenFunction]:
        choice = _choice(self.given)
        return [function for function in self.tools.functions if choice.allows(function.name)]

    def following(self, before: Sequence[Item]) -> ResponseRequest:
        """Return the call with the tools of the conversation that it continues. Raises InvalidRequest."""
        earlier = [
            read_response_tools("previous_response_id.tools", item["tools"])
            for item in before
            if item["type"] == ADDITIONAL_TOOLS
        ]
        request = replace(self, tools=GivenTools.merged([*earlier, self.tools]))
        check_choice(request.tools.tools, request.choice)
        _check_allowed(request.tools, _choice(self.given))
        return request

    def for_summary(self) -> ResponseRequest:
        """Return the call without what its answer, a summary, has no use for: tools, and a grammar."""
        call = replace(self.call, common=replace(self.call.common, grammar=""), grammar_parameter="")
        return replace(self, tools=GivenTools(), choice=ToolChoice(), call=call)

    def for_warm_up(self) -> ResponseRequest:
        """Return the call with one token, the least that computes a prompt. Raises InvalidRequest."""
        if self.compacts:
            raise refused("generate", "generate cannot be false with compaction_trigger: its answer is the compaction.")
        return replace(self, call=replace(self.call, max_tokens=1))

    def conversation(self, items: Sequence[Item]) -> Conversation:
        """Return the conversation of these items. Raises InvalidRequest."""
        return Conversation(
            messages=messages_of(self.given.get("instructions", ""), items),
            tools=self.callable_tools,
            tool_choice=self.choice,
            template_variables=_template_variables(self.given),
            is_typed=True,
        )

    def _schema_name(self, index: int) -> str:
        """Return the name of the schema of a callable tool, as the call gave it."""
        return f"{self._callable[index].place}.parameters"

    def renamed(self, error: InvalidRequest) -> InvalidRequest:
        """Return the error with the place of a tool in this call: a chat has no tools of other types."""
        match = _SCHEMA_NAME.match(error.param or "")
        if match is None or int(match[1]) >= len(self._callable):
            return error
        name = self._schema_name(int(match[1]))
        return refused(name, _SCHEMA_NAME.sub(name, error.message), code=error.code)

    def with_loosened(self, call: Call) -> Call:
        """Return the call with a warning for each tool whose schema no grammar can follow."""
        names = [self._schema_name(index) for index in call.loosened]
        if not names:
            return call
        fields, compaction = split_echo(call.about.echo)
        echo = json.loads(fields)
        reason = "the grammar follows this schema only in part, because the function is not strict"
        warnings = [{"param": name, "message": f"{name}: {reason}."} for name in names]
        echo["warnings"] = [*echo.get("warnings", []), *warnings]
        about = replace(call.about, echo=joined_echo(json.dumps(echo, separators=(",", ":")), compaction))
        return replace(call.without_effect(names), about=about)

    def echo(self) -> str:
        """Return the fields of the answer that repeat the call, as JSON. Raises InvalidRequest if they are too long."""
        given, call, sampling = self.given, self.call, self.call.common
        text, reasoning = _text(given), _reasoning(given)
        fields = {
            "background": call.about.is_background,
            "conversation": {"id": self.conversation_id} if self.conversation_id else None,
            "frequency_penalty": sampling.frequency_penalty,
            "instructions": given.get("instructions"),
            "max_output_tokens": given.get("max_output_tokens"),
            "max_tool_calls": given.get("max_tool_calls"),
            "metadata": dict(call.about.metadata),
            "parallel_tool_calls": self.choice.parallel,
            "presence_penalty": sampling.presence_penalty,
            "previous_response_id": self.previous or None,
            "prompt_cache_key": given.get("prompt_cache_key"),
            "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
            "safety_identifier": given.get("safety_identifier"),
            "service_tier": call.about.service_tier or DEFAULT_TIER,
            "store": self.is_stored,
            "temperature": sampling.temperature,
            "text": {"format": text.format} | ({"verbosity": text.verbosity} if text.verbosity else {}),
            "tool_choice": _choice(given).echo,
            "tools": self.tools.echo(),
            "top_logprobs": sampling.top_logprobs,
            "top_p": sampling.top_p,
            "truncation": given.get("truncation", "disabled"),
            "user": given.get("user"),
        }
        if self.skipped:
            fields["warnings"] = [{"param": name, "message": f"{name}: {reason}."} for name, reason in self.skipped]
        written = json.dumps(fields, separators=(",", ":"))
        if len(written) > MAX_ECHO_LENGTH:
            raise refused(
                "tools",
                f"tools, instructions and text together have {len(written)} characters of JSON; at most "
                f"{MAX_ECHO_LENGTH} are allowed.",
            )
        return written


def read_request(body: dict[str, Any], limits: RequestLimits, template: ChatTemplate | None = None) -> ResponseRequest:
    """Read a body. Raises InvalidRequest.

    template: of the model. A call that continues a response is not checked for its tools.
    """
    given = read(check_refused(body), RESPONSES)
    follows = [name for name in ("previous_response_id", "conversation") if given.get(name)]
    if len(follows) == 2:
        raise refused(
            "conversation",
            "conversation and previous_response_id are both given; leave out one of them: a conversation has the items "
            "of all its responses.",
        )
    if body.get("input") is None and not follows:
        raise refused("input", "input is required.", code="missing_required_parameter")
    if given.get("background") and not given.get("store", True):
        raise refused("store", "store must be true with background: true, because the answer is read later.")
    left_out: list[tuple[str, str]] = []
    value, compacts = without_trigger(body.get("input") or [])
    items = read_items("input", value, left_out)
    places = [
        read_response_tools(f"input[{index}].tools", item["tools"])
        for index, item in enumerate(value if type(value) is list else ())
        if item.get("type") == ADDITIONAL_TOOLS
    ]
    tools = GivenTools.merged([given.get("tools") or GivenTools(), *places])
    tool_choice = _choice(given).choice._replace(parallel=given.get("parallel_tool_calls", True))
    skipped = (*left_out, *_skipped(given, tools), *_unknown_variables(given, template))
    request = ResponseRequest(
        given=given,
        items=items,
        tools=tools,
        choice=tool_choice,
        call=replace(_call(given, limits), no_effect=tuple(name for name, _ in skipped)),
        skipped=skipped,
        compacts=compacts,
    )
    # The conversation before the call may have more tools.
    return request if follows else request.following(())


def _choice(given: dict[str, Any]) -> GivenChoice:
    choice: GivenChoice = given.get("tool_choice") or GivenChoice(ToolChoice(), "auto")
    return choice


def _text(given: dict[str, Any]) -> TextOptions:
    options: TextOptions = given.get("text") or TextOptions((), {"type": "text"}, None)
    return options


def _reasoning(given: dict[str, Any]) -> ReasoningOptions:
    options: ReasoningOptions = given.get("reasoning") or ReasoningOptions(None, None, ())
    return options


def _check_allowed(tools: GivenTools, choice: GivenChoice) -> None:
    names = {function.name for function in tools.functions} | {FunctionName(name, "") for name in tools.namespaces}
    if unknown := [name for name in choice.allowed or () if name not in names]:
        raise refused(
            "tool_choice.tools",
            f"tool_choice.tools names the function {unknown[0].flat!r}, which is not among the tools of the call.",
        )
    if choice.allowed == () and choice.choice.mode == ToolMode.REQUIRED:
        raise refused("tool_choice.tools", "tool_choice.tools has no function, but its mode is 'required'.")


def _call(given: dict[str, Any], limits: RequestLimits) -> Call:
    """Return the call without its prompt, from the names that they have in a chat."""
    chat = {name: given[name] for name in _SAME if name in given}
    if "max_output_tokens" in given:
        chat["max_tokens"] = given["max_output_tokens"]
    if grammar := _text(given).grammar:
        chat["response_format"] = grammar
    top_logprobs = given.get("top_logprobs", 0)
    if top_logprobs or LOGPROBS in given.get("include", ()):
        chat |= {"logprobs": True, "top_logprobs": top_logprobs}
    return Call.of(chat, limits.sampling_defaults)


def _template_variables(given: dict[str, Any]) -> dict[str, Any]:
    """Return the variables for the chat template, from the names that the parameters have in a chat."""
    named = {"reasoning_effort": _reasoning(given).effort, "verbosity": _text(given).verbosity}
    chat = {name: value for name, value in named.items() if value is not None}
    return template_variables(chat | {"chat_template_kwargs": given.get("chat_template_kwargs", {})})


def _unknown_variables(given: dict[str, Any], template: ChatTemplate | None) -> list[tuple[str, str]]:
    """Return the parameters that only set variables which the chat template does not know, with the reason."""
    named = {"reasoning_effort": _reasoning(given).effort, "verbosity": _text(given).verbosity}
    chat = {name: value for name, value in named.items() if value is not None}
    names = unknown_variables(chat | {"chat_template_kwargs": given.get("chat_template_kwargs", {})}, template)
    here = {"reasoning_effort": "reasoning.effort", "verbosity": "text.verbosity"}
    return [(here.get(name, name), "the chat template of this model does not know it") for name in names]


def _skipped(given: dict[str, Any], tools: GivenTools) -> list[tuple[str, str]]:
    """Return the parameters of a call that have no effect, with the reason."""
    skipped = list(tools.skipped)
    for index, name in enumerate(given.get("include", ())):
        if name in NOT_HERE:
            skipped.append((f"include[{index}]", f"this server has no {name}"))
    skipped += [(name, "it has no effect on this server") for name in _reasoning(given).skipped]
    if "client_metadata" in given:
        skipped.append(("client_metadata", "it has no effect on this server; metadata is stored and returned"))
    if "max_tool_calls" in given:
        skipped.append(("max_tool_calls", "this server runs no tools"))
    for name, parameter in NO_EFFECT.items():
        if name in RESPONSES and name != "store" and name in given and given[name] not in parameter.neutral:
            skipped.append((name, parameter.help.split(":")[0].split(".")[0]))
    return skipped
