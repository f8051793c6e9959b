"""The common part of the chat dialects: a conversation with tools becomes a call.

`read_call` chooses how the model is told about the tools, the grammar that tool calls follow, and how the output is
read. Chat completions, Responses and Messages differ only in the form of their bodies and answers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from quire.gateway.api.call import Call
from quire.gateway.api.chat_messages import read_messages
from quire.gateway.api.request_limits import RequestLimits
from quire.gateway.api.tool_messages import as_plain_messages
from quire.gateway.api.tools import check_choice
from quire.gateway.errors.api_errors import refused
from quire.gateway.model.conversation import Conversation
from quire.gateway.model.renderer import RenderedChat, Renderer
from quire.gateway.model.schema_fault import find_fault
from quire.gateway.output.formats import FORMATS, REASONING_FORMATS
from quire.gateway.output.output_spec import OutputSpec
from quire.gateway.output.tool_grammar import grammar_after_reasoning
from quire.gateway.output.tools import Besides, Tool, ToolChoice, ToolMode
from quire.shared.text.chat_template import ChatTemplate
from quire.shared.text.grammar import framed
from quire.shared.text.grammar_error import GrammarError

# The places and lines of a grammar in an error: clients see neither the grammar of tool calls nor its lines.
_GRAMMAR_TEXT = re.compile(r"^at \d+\(\d+\): | \d+ \| .*", re.DOTALL)


def read_conversation(given: Mapping[str, Any]) -> Conversation:
    """The conversation in the parameters of a chat that were read. Raises InvalidRequest."""
    tools, choice = given.get("tools", ()), given.get("tool_choice", ToolChoice())
    check_choice(tools, choice)
    messages = read_messages(given["messages"])
    continues = given.get("continue_final_message", False)
    if continues and given.get("add_generation_prompt", False):
        raise refused(
            "continue_final_message",
            "continue_final_message and add_generation_prompt cannot both be true: a chat ends either within its last "
            "message or with the beginning of a new one.",
        )
    return Conversation(
        messages=messages,
        tools=tools,
        tool_choice=choice._replace(parallel=given.get("parallel_tool_calls", True)),
        template_variables=template_variables(given),
        add_generation_prompt=given.get("add_generation_prompt", not continues),
        continue_final_message=continues,
        add_special_tokens=given.get("add_special_tokens", False),
    )


async def render_prompt(conversation: Conversation, limits: RequestLimits, renderer: Renderer) -> RenderedChat:
    """Renders and tokenizes the prompt of a conversation, which may be longer than the context. Raises ApiError."""
    # Control tokens in texts of the client are divided before the gateway writes marks of its own.
    given = (conversation.callable_tools, conversation.template_variables)
    messages, (tools, variables), mark = await renderer.mark_control_tokens(
        conversation.messages, given, limits.max_model_len
    )
    tool_format = FORMATS[renderer.model.tool_format] if renderer.model.tool_format else None
    if tool_format is not None and renderer.describes_tools:
        messages = as_plain_messages(messages, tool_format, tool_format.prompt(tools) if tools else "")
        tools = ()
    marked = replace(conversation, messages=messages, tools=tools, template_variables=variables)
    return await renderer.chat(marked, limits.max_model_len, mark)


async def read_call(
    conversation: Conversation,
    call: Call,
    limits: RequestLimits,
    renderer: Renderer,
    echo: str = "",
    default_max_tokens: int | None = None,
) -> Call:
    """Checks and tokenizes a conversation: the call, which is checked, with its prompt. Raises ApiError.

    echo: JSON that the dialect repeats in its answer. default_max_tokens: for calls without max_tokens, at most the
    rest of the context; None: the rest of the context.
    """
    limits.check_tools(conversation.tools)
    conversation = _with_possible_calls(conversation, renderer)
    model, tools = renderer.model, conversation.callable_tools
    # 1) Render and tokenize the prompt.
    prompt = await render_prompt(conversation, limits, renderer)
    token_ids = call.truncated(prompt.token_ids, limits.max_model_len - (call.max_tokens or 1))
    # 2) Decide how the answer is read.
    tool_format = FORMATS[model.tool_format] if model.tool_format else None
    reasoning = REASONING_FORMATS[model.reasoning_format] if model.reasoning_format else None
    starts_in_reasoning = reasoning is not None and reasoning.begins_in(prompt.text)
    spec = OutputSpec(
        tool_format=model.tool_format if tools or (tool_format and tool_format.has_reasoning) else "",
        tools=tools,
        is_forced=bool(tools),
        besides=_besides(conversation.tool_choice, call),
        reasoning_format=model.reasoning_format,
        starts_in_reasoning=starts_in_reasoning,
    )
    # 3) Choose the grammar of the answer.
    common, about, name = call.common, call.about, call.grammar_parameter
    loosened: tuple[int, ...] = ()
    if tools:
        content = _content_schema(common.grammar, name, spec)
        grammar, loosened = await _tool_grammar(conversation, spec, renderer, content)
        common = replace(common, grammar=grammar)
    elif common.grammar:
        await renderer.check_grammar(common.grammar, name)
        frame = "" if conversation.continue_final_message else _content_frame(spec, prompt.text, renderer)
        if frame:
            common = replace(common, grammar=framed(frame, common.grammar))
            await renderer.check_grammar(common.grammar, name)
    is_plain = not spec.tool_format and not spec.reasoning_format and not conversation.is_typed
    if not is_plain and not spec.markers.isdisjoint(model.special_tokens):
        common, about = replace(common, skip_special_tokens=False), replace(about, skip_special_tokens=False)
    call = replace(call, common=common, about=about, loosened=loosened)
    return call.with_prompts(
        [("messages", token_ids)], limits, default_max_tokens, "" if is_plain else spec.encode(), echo
    )


def _with_possible_calls(conversation: Conversation, renderer: Renderer) -> Conversation:
    """The conversation with at most one call per answer if its template shows the model one call per message only."""
    template = renderer.model.template
    if template is None or template.with_tools.tool_turns.is_parallel or renderer.describes_tools:
        return conversation
    return replace(conversation, tool_choice=conversation.tool_choice._replace(parallel=False))


def _besides(choice: ToolChoice, call: Call) -> Besides:
    """What an answer may have besides calls."""
    if choice.mode != ToolMode.AUTO:
        return Besides.NOTHING
    return Besides.JSON if call.common.grammar else Besides.TEXT


def template_variables(given: Mapping[str, Any]) -> dict[str, Any]:
    """The variables for the chat template that the parameters of a call set; `chat_template_kwargs` has precedence."""
    variables = {name: given[name] for name in ("reasoning_effort", "verbosity") if name in given}
    if variables.get("reasoning_effort") == "none":
        # The name that most templates know (Qwen3, DeepSeek V3.1: `thinking`).
        variables |= {"enable_thinking": False, "thinking": False}
    return {**variables, **given.get("chat_template_kwargs", {})}


def unknown_variables(given: Mapping[str, Any], template: ChatTemplate | None) -> list[str]:
    """The parameters of a call that only set variables which the chat template does not know."""
    if template is None:
        return []
    names = [
        name
        for name in ("reasoning_effort", "verbosity")
        if name in given and not any(map(template.takes_variable, template_variables({name: given[name]})))
    ]
    kwargs = given.get("chat_template_kwargs", {})
    return names + [f"chat_template_kwargs.{name}" for name in kwargs if not template.takes_variable(name)]


def _content_frame(spec: OutputSpec, prompt: str, renderer: Renderer) -> str:
    """The Lark grammar in which `@content` is the content of an answer after its reasoning; empty without reasoning."""
    special_tokens = renderer.model.grammar_tokens
    if spec.tool_format and (frame := FORMATS[spec.tool_format].content_frame(special_tokens)):
        return frame
    if spec.reasoning is None or spec.reasoning.format.is_over_in(prompt):
        return ""
    return grammar_after_reasoning("@content", special_tokens, spec.reasoning)


def _content_schema(grammar: str, name: str, spec: OutputSpec) -> str:
    """The JSON schema of an answer with tools that calls none; empty if any text will do. Raises InvalidRequest.

    grammar: the one of the parameter `name`; empty without it.
    """
    if not grammar:
        return ""
    schema = json.loads(grammar).get("json_schema")
    if schema is None or FORMATS[spec.tool_format].has_reasoning:
        raise refused("tools", f"tools are not supported with this {name}; leave out one of them.")
    return json.dumps(schema, ensure_ascii=False)


async def _tool_grammar(
    conversation: Conversation, spec: OutputSpec, renderer: Renderer, content: str = ""
) -> tuple[str, tuple[int, ...]]:
    """The grammar of an answer with tools, and the indices of the tools whose schemas it does not follow.

    content: the JSON schema of an answer that calls no tool, as text; empty for any text. The arguments of a tool that
    is not strict may be any JSON object if its schema cannot be followed. Raises InvalidRequest that names the strict
    tool whose schema cannot be followed, and the place in the schema.
    """
    choice = conversation.tool_choice
    # Nearly always all schemas can be followed: then this one check suffices.
    grammar, fault = await _checked(spec, spec.tools, choice, renderer, content)
    if not fault:
        return grammar, _loosened(spec, spec.tools, renderer)
    tools: list[Tool] = []
    for index, tool in enumerate(spec.tools):
        _, fault = await _checked(spec, [tool], ToolChoice(ToolMode.NAMED, tool.name), renderer)
        if fault and tool.strict:
            name = f"tools[{index}].function.parameters"
            found = await find_fault(tool.parameters, renderer.try_grammar)
            place, reason = (name + found.path, found.reason) if found is not None else (name, _reason(fault))
            raise refused(name, f"{place}, of the tool {tool.name}, cannot be followed: {reason}.")
        tools.append(tool.with_any_arguments() if fault else tool)
    grammar, fault = await _checked(spec, tools, choice, renderer, content)
    if fault:
        raise refused("tools", f"tools cannot be followed: {_reason(fault)}.")
    unlike = {index for index, tool in enumerate(tools) if tool != spec.tools[index]}
    return grammar, tuple(sorted(unlike | set(_loosened(spec, tools, renderer))))


def _loosened(spec: OutputSpec, tools: Sequence[Tool], renderer: Renderer) -> tuple[int, ...]:
    """The indices of the tools whose schemas the format follows only in part: it could not if they were strict."""

    def follows(some: Sequence[Tool]) -> bool:
        strict = [tool._replace(strict=True) for tool in some]
        try:
            renderer.tool_grammars.text(spec, strict, ToolChoice(ToolMode.REQUIRED))
        except GrammarError:
            return False
        return True

    if all(tool.strict for tool in tools) or follows(tools):
        return ()
    return tuple(index for index, tool in enumerate(tools) if not tool.strict and not follows([tool]))


def _reason(fault: str) -> str:
    """The fault of a grammar without its text."""
    return _GRAMMAR_TEXT.sub("", fault)


async def _checked(
    spec: OutputSpec, tools: Sequence[Tool], choice: ToolChoice, renderer: Renderer, content: str = ""
) -> tuple[str, str]:
    """The grammar of an answer with these tools, and the reason why answers cannot follow it; empty if they can."""
    grammar = ""
    try:
        grammar = renderer.tool_grammars.text(spec, tools, choice, content)
        await renderer.try_grammar(grammar)
    except GrammarError as error:
        return grammar, str(error)
    return grammar, ""
