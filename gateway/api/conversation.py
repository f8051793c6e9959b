"""The common part of the chat dialects: a conversation with tools becomes a call.

`read_call` chooses how the model is told about the tools, the grammar that tool calls follow, and how the output is
read. Chat completions, Responses and Messages differ only in the form of their bodies and answers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quire.gateway.api.call import Call, Options
from quire.gateway.api.request_limits import RequestLimits
from quire.gateway.errors.api_errors import refused
from quire.gateway.model.prompt_form import PromptForm
from quire.gateway.model.renderer import RenderedChat, Renderer
from quire.gateway.model.served_model import ServedModel
from quire.gateway.output.tools import Besides, Tool, ToolChoice, ToolMode
from quire.gateway.stream.output_spec import OutputSpec
from quire.shared.text.chat_template import ChatTemplate, Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """The messages of a call in the form of chat templates, and the tools that the model may call.

    template_variables: further variables for the chat template, such as `enable_thinking`.
    is_typed: the answer has typed events, so it is read in parts even without tools and reasoning.
    """

    messages: Sequence[Message]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    is_typed: bool = False

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools that the model may call in this answer."""
        return () if self.tool_choice.mode == ToolMode.NONE else self.tools


async def render_prompt(
    conversation: Conversation, limits: RequestLimits, renderer: Renderer, form: PromptForm
) -> RenderedChat:
    """Renders and tokenizes the prompt of a conversation, which may be longer than the context. Raises ApiError."""
    limits.check_tools(conversation.tools)
    messages: Sequence[Message] = conversation.messages
    # Control tokens in texts of the client are divided before the gateway writes marks of its own.
    given = (conversation.callable_tools, conversation.template_variables)
    messages, (tools, variables), mark = await renderer.mark_control_tokens(messages, given, limits.max_model_len)
    tool_format = renderer.model.calls
    if tool_format is not None and renderer.describes_tools:
        messages = tool_format.plain_messages(messages, tools)
        tools = ()
    return await renderer.chat(
        messages,
        limits.max_model_len,
        [_as_json(tool) for tool in tools],
        variables,
        form,
        mark,
    )


async def read_call(
    conversation: Conversation,
    options: Options,
    limits: RequestLimits,
    renderer: Renderer,
    echo: str = "",
    default_max_tokens: int | None = None,
) -> Call:
    """Checks and tokenizes a conversation. Raises ApiError.

    echo: JSON that the dialect repeats in its answer. default_max_tokens: for options without max_tokens, at most the
    rest of the context; None: the rest of the context.
    """
    limits.check_model(options.model)
    limits.check_choices(1, options.counts)
    limits.check_answer(options.sampling.grammar, options.grammar_parameter)
    conversation = _with_possible_calls(conversation, renderer)
    model, tools = renderer.model, conversation.callable_tools
    # 1) Render and tokenize the prompt.
    prompt = await render_prompt(conversation, limits, renderer, options.form)
    token_ids = options.form.truncated(prompt.token_ids, limits.max_model_len - (options.max_tokens or 1))
    # 2) Decide how the answer is read.
    starts_in_reasoning = model.reasoning is not None and model.reasoning.begins_in(prompt.text)
    spec = OutputSpec(
        tool_format=model.tool_format if tools or (model.calls and model.calls.has_reasoning) else "",
        tools=tools,
        is_forced=bool(tools),
        besides=_besides(conversation.tool_choice, options),
        reasoning_format=model.reasoning_format,
        starts_in_reasoning=starts_in_reasoning,
    )
    # 3) Choose the grammar of the answer.
    sampling, answer = options.sampling, options.answer
    loosened: tuple[int, ...] = ()
    if tools:
        content = _content_schema(sampling.grammar, options.grammar_parameter, model)
        grammar, loosened = await renderer.tool_grammars.followed(
            spec, tools, conversation.tool_choice, content, renderer.try_grammar
        )
        sampling = replace(sampling, grammar=grammar)
    elif sampling.grammar:
        await renderer.check_grammar(sampling.grammar, options.grammar_parameter)
        if not options.form.continue_final_message:
            framed = renderer.tool_grammars.framed(spec, prompt.text, sampling.grammar)
            if framed != sampling.grammar:
                sampling = replace(sampling, grammar=framed)
                await renderer.check_grammar(framed, options.grammar_parameter)
    is_plain = not spec.tool_format and not spec.reasoning_format
    output = None if is_plain and not conversation.is_typed else spec
    if output is not None and not spec.markers.isdisjoint(model.special_tokens):
        sampling, answer = replace(sampling, skip_special_tokens=False), answer._replace(skip_special_tokens=False)
    call = Call.of(
        replace(options, sampling=sampling, answer=answer),
        [("messages", token_ids)],
        limits,
        default_max_tokens=default_max_tokens,
        output=output,
        echo=echo,
    )
    return replace(call, loosened=loosened)


def _with_possible_calls(conversation: Conversation, renderer: Renderer) -> Conversation:
    """The conversation with at most one call per answer if its template shows the model one call per message only."""
    template = renderer.model.template
    if template is None or template.with_tools.tool_turns.is_parallel or renderer.describes_tools:
        return conversation
    return replace(conversation, tool_choice=conversation.tool_choice._replace(parallel=False))


def _besides(choice: ToolChoice, options: Options) -> Besides:
    """What an answer may have besides calls."""
    if choice.mode != ToolMode.AUTO:
        return Besides.NOTHING
    return Besides.JSON if options.sampling.grammar else Besides.TEXT


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


def _as_json(tool: Tool) -> dict[str, Any]:
    """The tool in the form of the OpenAI API, which chat templates expect."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def _content_schema(grammar: str, name: str, model: ServedModel) -> str:
    """The JSON schema of an answer with tools that calls none; empty if any text will do. Raises InvalidRequest.

    grammar: the one of the parameter `name`; empty without it.
    """
    if not grammar:
        return ""
    schema = json.loads(grammar).get("json_schema")
    if schema is None or (model.calls is not None and model.calls.has_reasoning):
        raise refused("tools", f"tools are not supported with this {name}; leave out one of them.")
    return json.dumps(schema, ensure_ascii=False)
