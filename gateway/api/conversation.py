"""The common part of the chat dialects: a conversation with tools becomes a call.

`read_call` chooses how the model is told about the tools, the grammar that tool calls follow, and how the output is
read. Chat completions, Responses and Messages differ only in the form of their bodies and answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from quire.gateway.api.call import Call
from quire.gateway.api.chat_messages import read_messages
from quire.gateway.api.request_limits import RequestLimits
from quire.gateway.api.tools import check_choice
from quire.gateway.errors.api_errors import ApiError, refused
from quire.gateway.features.affinity.beginnings import beginnings_of
from quire.gateway.model.conversation import Conversation
from quire.gateway.model.renderer import RenderedChat, Renderer
from quire.gateway.model.served_model import ServedModel
from quire.gateway.output.tools import Besides, ToolChoice, ToolMode
from quire.gateway.stream.output_spec import OutputSpec
from quire.shared.protocol.messages import CacheBreakpoint
from quire.shared.protocol.sampling_params import SamplingParams
from quire.shared.text.chat_template import ChatTemplate


def read_conversation(given: Mapping[str, Any]) -> Conversation:
    """Return the conversation in the parameters of a chat that were read. Raises InvalidRequest."""
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


async def render_prompt(
    conversation: Conversation, limits: RequestLimits, renderer: Renderer, probes: Iterable[Conversation] = ()
) -> RenderedChat:
    """Render and tokenize the prompt of a conversation, which may be longer than the context. Raises ApiError.

    probes: conversations that differ from this one from some places on, for the places in the prompt.
    """
    messages, images = await renderer.images(conversation.messages)
    written, mark = await _written(replace(conversation, messages=messages), limits, renderer)
    others = []
    for probe in probes:
        try:
            probe = replace(probe, messages=renderer.without_images(probe.messages))
            others.append(await _written(probe, limits, renderer))
        except ApiError:  # the mark made it too long
            others.append((written, mark))
    return await renderer.chat(written, limits.max_model_len, mark, images, others)


async def _written(conversation: Conversation, limits: RequestLimits, renderer: Renderer) -> tuple[Conversation, str]:
    """Return a conversation without files as the chat template gets it, and the mark that divides control tokens."""
    # Control tokens in texts of the client are divided before the gateway writes marks of its own.
    given = (conversation.callable_tools, conversation.template_variables)
    messages, (tools, variables), mark = await renderer.mark_control_tokens(
        conversation.messages, given, limits.max_model_len
    )
    # A template, or the format of tools, may make one text of a content.
    messages = renderer.with_placeholders(messages)
    tool_format = renderer.model.calls
    if tool_format is not None and renderer.describes_tools:
        messages = tool_format.plain_messages(messages, tools)
        tools = ()
    elif tool_format and (template := renderer.model.template) and not template.with_tools.tool_turns.shows_calls:
        messages = tool_format.plain_messages(messages, ())
    return replace(conversation, messages=messages, tools=tools, template_variables=variables), mark


async def read_call(
    conversation: Conversation,
    call: Call,
    limits: RequestLimits,
    renderer: Renderer,
    echo: str = "",
    default_max_tokens: int | None = None,
    probes: Iterable[Conversation] = (),
    ttls_s: Sequence[int] = (),
) -> Call:
    """Check and tokenize a conversation: the call, which is checked, with its prompt. Raises ApiError.

    echo: JSON that the dialect repeats in its answer. default_max_tokens: for calls without max_tokens, at most the
    rest of the context; None: the rest of the context. probes: of `render_prompt`, one for each cache breakpoint, whose
    times are `ttls_s`.
    """
    limits.check_tools(conversation.tools)
    conversation = _with_possible_calls(conversation, renderer)
    model, tools = renderer.model, conversation.callable_tools
    # 1) Render and tokenize the prompt.
    prompt = await render_prompt(conversation, limits, renderer, probes)
    token_ids = call.truncated(prompt.token_ids, limits.max_model_len - (call.max_tokens or 1))
    if prompt.images and len(token_ids) < len(prompt.token_ids):
        raise refused("truncate_prompt_tokens", "truncate_prompt_tokens is not supported for prompts with images.")
    # 2) Decide how the answer is read.
    is_enforced = _is_enforced(conversation, call, limits)
    starts_in_reasoning = model.reasoning is not None and model.reasoning.begins_in(prompt.text)
    spec = OutputSpec(
        tool_format=model.tool_format if tools or (model.calls and model.calls.reads_every_answer) else "",
        tools=tools,
        is_forced=is_enforced,
        besides=_besides(conversation.tool_choice, call),
        reasoning_format=model.reasoning_format,
        starts_in_reasoning=starts_in_reasoning,
    )
    # 3) Choose the grammar of the answer.
    common, about, name = call.common, call.about, call.grammar_parameter
    loosened: tuple[int, ...] = ()
    if is_enforced:
        content = _content_schema(common.grammar, name, model)
        grammar, loosened = await renderer.tool_grammars.followed(
            spec, tools, conversation.tool_choice, content, renderer.try_grammar
        )
        common = replace(common, grammar=grammar)
    elif tools:
        loosened = tuple(range(len(tools)))
    elif common.grammar:
        await renderer.check_grammar(common.grammar, name)
        if not conversation.continue_final_message:
            framed = renderer.tool_grammars.framed(spec, prompt.text, common.grammar)
            if framed != common.grammar:
                common = replace(common, grammar=framed)
                await renderer.check_grammar(framed, name)
    is_free = not tools and not common.grammar
    markers = ((), ()) if conversation.continue_final_message else model.thinking_markers(prompt.text, is_free)
    common = _with_thinking_budget(common, limits.thinking_token_budget, markers, model.name)
    is_plain = not spec.tool_format and not spec.reasoning_format and not conversation.is_typed
    if not is_plain and not spec.markers.isdisjoint(model.special_tokens):
        common, about = replace(common, skip_special_tokens=False), replace(about, skip_special_tokens=False)
    beginnings = beginnings_of(conversation.messages, [tool.name for tool in tools])
    call = replace(call, common=common, about=about, loosened=loosened, beginnings=beginnings)
    breakpoints = [CacheBreakpoint(*pair) for pair in zip(prompt.places, ttls_s, strict=True) if pair[0]]
    call = replace(call, images=prompt.images, files=prompt.files, breakpoints=tuple(breakpoints))
    return call.with_prompts(
        [("messages", token_ids)], limits, default_max_tokens, "" if is_plain else spec.encode(), echo
    )


def _is_enforced(conversation: Conversation, call: Call, limits: RequestLimits) -> bool:
    """Return whether the answer follows a grammar of tool calls."""
    tools = conversation.callable_tools
    if limits.enforces_tools or not tools:
        return bool(tools)
    is_asked = conversation.tool_choice.mode != ToolMode.AUTO or any(tool.strict for tool in tools)
    return is_asked or bool(call.common.grammar)


def _with_thinking_budget(
    common: SamplingParams, most: int, markers: tuple[tuple[int, ...], tuple[int, ...]], name: str
) -> SamplingParams:
    """Return the sampling parameters with the budget of the reasoning, if it has one. Raises InvalidRequest.

    most: of the server; -1 for any. markers: tokens that begin and end the reasoning; none end it if it has no bound.
    name: of the model.
    """
    asked = common.thinking_token_budget
    budgets = [budget for budget in (asked, most) if budget >= 0]
    if not budgets or common.beam_width:
        return common
    start, end = markers
    if end:
        return replace(common, thinking_token_budget=min(budgets), thinking_start=start, thinking_end=end)
    if asked >= 0:
        raise refused(
            "thinking_token_budget",
            f"thinking_token_budget is not supported: {name} marks no reasoning with a token of its own, or not "
            "in a message that is continued, with tools or with a grammar.",
        )
    return common


def _with_possible_calls(conversation: Conversation, renderer: Renderer) -> Conversation:
    """Return the conversation with at most one call per answer if the template shows one call per message only."""
    template = renderer.model.template
    if template is None or template.with_tools.tool_turns.is_parallel or renderer.describes_tools:
        return conversation
    return replace(conversation, tool_choice=conversation.tool_choice._replace(parallel=False))


def _besides(choice: ToolChoice, call: Call) -> Besides:
    """Return what an answer may have besides calls."""
    if choice.mode != ToolMode.AUTO:
        return Besides.NOTHING
    return Besides.JSON if call.common.grammar else Besides.TEXT


def template_variables(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template variables that the parameters of a call set; `chat_template_kwargs` has precedence."""
    variables = {name: given[name] for name in ("reasoning_effort", "verbosity") if name in given}
    if variables.get("reasoning_effort") == "none":
        # The name that most templates know (Qwen3, DeepSeek V3.1: `thinking`).
        variables |= {"enable_thinking": False, "thinking": False}
    return {**variables, **given.get("chat_template_kwargs", {})}


def unknown_variables(given: Mapping[str, Any], template: ChatTemplate | None) -> list[str]:
    """Return the parameters of a call that only set variables which the chat template does not know."""
    if template is None:
        return []
    names = [
        name
        for name in ("reasoning_effort", "verbosity")
        if name in given and not any(map(template.takes_variable, template_variables({name: given[name]})))
    ]
    kwargs = given.get("chat_template_kwargs", {})
    return names + [f"chat_template_kwargs.{name}" for name in kwargs if not template.takes_variable(name)]


def _content_schema(grammar: str, name: str, model: ServedModel) -> str:
    """Return the JSON schema of an answer with tools that calls none; empty if any text will do. Raises InvalidRequest.

    grammar: the one of the parameter `name`; empty without it.
    """
    if not grammar:
        return ""
    schema = json.loads(grammar).get("json_schema")
    if schema is None or (model.calls is not None and model.calls.has_reasoning):
        raise refused("tools", f"tools are not supported with this {name}; leave out one of them.")
    return json.dumps(schema, ensure_ascii=False)
