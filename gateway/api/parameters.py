"""Every parameter of the two calls: those of sampling, those of the call itself, and those that are refused.

`null` means absent. A parameter that is not honoured is refused with its name, unless its value asks for nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from quire.gateway.api.chat_messages import MAX_MESSAGES, MAX_NAME_LENGTH, MESSAGES_SCHEMA
from quire.gateway.api.labels import LABELS, NO_EFFECT
from quire.gateway.api.prediction import OF_PREDICTIONS
from quire.gateway.api.prompt_parameters import OF_CHATS, OF_COMPLETIONS, OF_PROMPTS
from quire.gateway.api.prompts import PROMPTS_SCHEMA
from quire.gateway.api.tools import TOOL_CHOICE_SCHEMA, TOOLS_SCHEMA, read_tool_choice, read_tools
from quire.gateway.errors.api_errors import invalid, of_check, only, refused
from quire.gateway.features.grammars.given_grammars import GRAMMARS, JSON_SCHEMA, read_json_schema, read_schema
from quire.shared.config.schema_parts import Schema, any_of, options
from quire.shared.config.validators import Flag, Integer, InvalidValue, Number, OneOf, Text, shown, wrong
from quire.shared.protocol.keys import DEFAULT_CLASS, PRIORITY_CLASSES
from quire.shared.protocol.messages import MAX_SALT_LENGTH
from quire.shared.protocol.sampling_params import GRAMMAR_PARAMETERS, PARAMETERS, Parameter

# The default of `max_tokens` in the completions API (OpenAI API reference).
COMPLETION_DEFAULT_TOKENS = 16
REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
NO_FREE_END = dict.fromkeys(("ignore_eos", "min_tokens"), "the grammar of tool calls says where an answer ends")


def anything(name: str, value: Any) -> Any:
    """Let every value pass: a reader of its own checks it later."""
    return value


# The integers that vLLM's priorities may be here.
_PRIORITIES = Integer(-(2**63) + 1, 2**63 - 1)


def priority_class(name: str, value: Any) -> str:
    """Return the name of a class, also for vLLM's integer priorities. Raises InvalidValue."""
    if type(value) is int and _PRIORITIES.low <= value <= _PRIORITIES.high:
        return PRIORITY_CLASSES[1 + (value > 0) - (value < 0)]
    if type(value) is not str or value not in PRIORITY_CLASSES:
        raise wrong(name, f"one of {', '.join(PRIORITY_CLASSES)}, or an integer", value)
    return value


class StreamOptions(NamedTuple):
    """The options of a stream: an event with the usage at the end, and the usage so far in every event."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


_STATISTICS = "continuous_usage_stats"
# What `stream_options` accepts.
_STREAM_OPTIONS: Schema = options(
    dict.fromkeys(StreamOptions._fields, Flag()) | {"include_obfuscation": {"const": False}}
) | {
    "if": {"properties": {_STATISTICS: {"const": True}}, "required": [_STATISTICS]},
    "then": {"properties": {"include_usage": {"const": True}}, "required": ["include_usage"]},
}


def stream_options(name: str, value: Any) -> StreamOptions:
    """Return the options of a stream. Raises InvalidRequest or InvalidValue."""
    if type(value) is not dict:
        raise invalid(name, "an object", value)
    if value.get("include_obfuscation", False) not in (None, False):
        only(name, value, StreamOptions._fields)
    only(name, value, (*StreamOptions._fields, "include_obfuscation"))
    given = [field for field in StreamOptions._fields if value.get(field) is not None]
    wanted = StreamOptions(**{field: Flag()(f"{name}.{field}", value[field]) for field in given})
    if wanted.continuous_usage_stats and not wanted.include_usage:
        param = f"{name}.{_STATISTICS}"
        raise refused(param, f"{param} is allowed only with include_usage: true; leave it out.")
    return wanted


MAX_TEMPLATE_VARIABLES = 32
# Variables of a chat template that the server sets.
RESERVED_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt", "chat_template")
# What `chat_template_kwargs` accepts.
_TEMPLATE_VARIABLES: Schema = {
    "type": "object",
    "maxProperties": MAX_TEMPLATE_VARIABLES,
    "propertyNames": {"pattern": r"^[^\W\d_]\w*$", "not": {"enum": list(RESERVED_VARIABLES)}},
}


def chat_template_kwargs(name: str, value: Any) -> dict[str, Any]:
    """Return variables for the chat template. Raises InvalidRequest."""
    if type(value) is not dict or len(value) > MAX_TEMPLATE_VARIABLES:
        raise invalid(name, f"an object with at most {MAX_TEMPLATE_VARIABLES} names", value)
    for key in value:
        if key in RESERVED_VARIABLES or not key.isidentifier() or key.startswith("_"):
            raise refused(f"{name}.{key[:80]}", f"{name}.{key[:80]} cannot be set by a call; leave it out.")
    return value


MESSAGES = Parameter(
    read=anything,
    required=True,
    kind=f"array of 1 to {MAX_MESSAGES:,} messages",
    schema=MESSAGES_SCHEMA,
    help="each has `role` (`system`, `developer`, `user`, `assistant`, `tool`), `content` (a string, or an array of "
    '`{"type": "text", "text": ...}`) and perhaps '
    f"`name` (1 to {MAX_NAME_LENGTH} characters). Messages of the assistant may have "
    "`reasoning_content` and `tool_calls`, and then no `content`; those of a tool have `tool_call_id`. A key whose "
    "value is `null` counts as absent",
)
PROMPT = Parameter(
    read=anything,
    required=True,
    kind="string, array of token ids, or array of strings and arrays of token ids",
    schema=PROMPTS_SCHEMA,
    help="at most `--max-prompts` (64) of them. Extension: strings and arrays of token ids may be mixed",
)
# The readers of a JSON schema, and of one with a name, with what that has, for formats of the other APIs.
read_answer_schema, read_named_schema, NAMED_SCHEMA = read_schema, read_json_schema, JSON_SCHEMA


OF_THE_CALL: dict[str, Parameter] = {
    "model": Parameter(read=Text(), required=True, help="the served name: `GET /v1/models` has it"),
    "stream": Parameter(read=Flag(), default=False, help="server-sent events instead of one object"),
    "stream_options": Parameter(
        read=stream_options,
        requires="stream",
        kind="object with `include_usage` and `continuous_usage_stats`",
        schema=_STREAM_OPTIONS,
        help="only with `stream`. `include_usage`: one more event with the usage. `continuous_usage_stats` (extension, "
        "as in vLLM; only with `include_usage`): every event has the usage so far. `include_obfuscation` may be false",
    ),
    "max_completion_tokens": Parameter(read=PARAMETERS["max_tokens"].read, help="another name of `max_tokens`"),
    **GRAMMARS,
    "use_beam_search": Parameter(
        read=Flag(),
        default=False,
        excludes={
            "stream": "which beams are the best is known at the end only",
            **dict.fromkeys(GRAMMAR_PARAMETERS, "a beam search does not follow a grammar"),
        },
        help="extension: the `n` best answers of a beam search, each with its `score`. Not with `stream`, `stop` and "
        "parameters that say how tokens are drawn",
    ),
    "cache_salt": Parameter(
        read=Text(1, MAX_SALT_LENGTH),
        default="",
        help="extension: cached beginnings of prompts are shared only under the same salt",
    ),
    "priority": Parameter(
        read=priority_class,
        default=DEFAULT_CLASS,
        kind="`interactive`, `standard`, `batch` or an integer",
        schema=any_of(OneOf(PRIORITY_CLASSES), _PRIORITIES),
        help="extension: the class in which the request waits. Integers are as in vLLM, where lower ones come first: "
        "below 0 is `interactive`, 0 is `standard`, above 0 is `batch`",
    ),
    "background": Parameter(
        read=Flag(),
        default=False,
        requires="stream",
        neutral=(False,),
        help="extension, only with `stream`: the request runs on when its client leaves",
    ),
    "timeout": Parameter(
        read=Number(0, sys.float_info.max),
        kind="number over 0, at most `--max-timeout-s` (3600)",
        schema={"type": "number", "exclusiveMinimum": 0},
        help="extension: seconds from acceptance to the deadline; by default `--default-timeout-s` (none)",
    ),
}
OF_THE_CHAT: dict[str, Parameter] = {
    "tools": Parameter(
        read=read_tools,
        default=(),
        kind="array of functions, at most `--max-tools` (128)",
        schema=TOOLS_SCHEMA,
        help="functions that the model may [call](#tools)",
        excludes={"use_beam_search": "a beam search does not follow the form of tool calls"} | NO_FREE_END,
    ),
    "tool_choice": Parameter(
        read=read_tool_choice,
        kind="`auto`, `required`, `none` or an object that names a function",
        schema=TOOL_CHOICE_SCHEMA,
        help="whether the answer may, must or must not call tools; by default `auto` if there are tools. With `none` "
        "the model is not told about the tools",
    ),
    "parallel_tool_calls": Parameter(read=Flag(), default=True, help="whether one answer may have several tool calls"),
    "reasoning_effort": Parameter(
        read=OneOf(REASONING_EFFORTS),
        help="passed to the chat template as `reasoning_effort`; `none` also as `enable_thinking: false`",
    ),
    "verbosity": Parameter(read=OneOf(("low", "medium", "high")), help="passed to the chat template as `verbosity`"),
    "chat_template_kwargs": Parameter(
        read=chat_template_kwargs,
        default={},
        kind=f"object with at most {MAX_TEMPLATE_VARIABLES} names",
        schema=_TEMPLATE_VARIABLES,
        help="extension, as in vLLM: variables for the chat template, such as `enable_thinking`",
    ),
}
_SAMPLING = {name: parameter for name, parameter in PARAMETERS.items() if parameter.help}
_CHATS_AND_COMPLETIONS = {**OF_THE_CALL, **_SAMPLING, **OF_PROMPTS, **LABELS, **NO_EFFECT}
CHAT = {"messages": MESSAGES, **_CHATS_AND_COMPLETIONS, **OF_THE_CHAT, **OF_CHATS, **OF_PREDICTIONS}
COMPLETIONS = {"prompt": PROMPT, **_CHATS_AND_COMPLETIONS, **OF_COMPLETIONS}
# Completions are not divided into reasoning and content.
del COMPLETIONS["thinking_token_budget"]
# Completions have one parameter for both: it asks for log-probabilities, and its value is the number of alternatives.
del COMPLETIONS["top_logprobs"]
COMPLETIONS["logprobs"] = Parameter(
    read=PARAMETERS["top_logprobs"].read,
    excludes=PARAMETERS["logprobs"].excludes,
    help="each token with its [log-probability](#log-probabilities), and this many of the most probable tokens in its "
    "place. Not with `use_beam_search`",
)

# Parameters of the OpenAI API that are not honoured, each with the values that ask for nothing besides null.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "guided_decoding_backend": ("auto",),
    "guided_whitespace_pattern": (),
    "modalities": (["text"], []),
    "moderation": (),
    "parallel_tool_calls": (),
    "reasoning_effort": (),
    "spaces_between_special_tokens": (True,),
    "suffix": (),
    "thinking_token_budget": (),
    "tool_choice": ("none",),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}


class Body(NamedTuple):
    """The parameters of a request body.

    unsupported: parameters that are not honoured, each with the values that ask for nothing. without_effect: the names
    of those that may be accepted without effect.
    """

    table: Mapping[str, Parameter]
    unsupported: Mapping[str, tuple[Any, ...]] = UNSUPPORTED
    without_effect: Collection[str] = NO_EFFECT.keys()


def read(
    body: Mapping[str, Any],
    table: Mapping[str, Parameter],
    unsupported: Mapping[str, tuple[Any, ...]] = UNSUPPORTED,
) -> dict[str, Any]:
    """Return the parameters of `table` that `body` gives, in their final form.

    unsupported: parameters that are not honoured, each with the values that ask for nothing.
    Raises InvalidRequest for the first one that is missing, wrong or not honoured, or does not go with another one.
    """
    for name, value in body.items():
        if name not in table:
            _check_unsupported(name, value, unsupported)
    given = {}
    for name, parameter in table.items():
        if (value := body.get(name)) is not None:
            given[name] = _read_one(name, parameter, value)
        elif parameter.required:
            raise refused(name, f"{name} is required.", code="missing_required_parameter")
    for name in given:
        _check_together(name, table, given)
    return given


def _read_one(name: str, parameter: Parameter, value: Any) -> Any:
    try:
        return parameter.read(name, value)
    except InvalidValue as error:
        raise of_check(error) from None


def _check_unsupported(name: str, value: Any, unsupported: Mapping[str, tuple[Any, ...]]) -> None:
    if name not in unsupported:
        short = name[:80]
        raise refused(short, f"{short!r} is not a parameter of this call.", code="unknown_parameter")
    if value is not None and not any(type(value) is type(listed) and value == listed for listed in unsupported[name]):
        raise refused(name, f"{name} is not supported by this server yet; leave it out.", code="unsupported_parameter")


def _check_together(name: str, table: Mapping[str, Parameter], given: Mapping[str, Any]) -> None:
    """Check a parameter that is given against those that it requires and excludes."""
    parameter, value = table[name], given[name]
    if parameter.requires and not given.get(parameter.requires) and value not in parameter.neutral:
        true = ": true" if isinstance(table[parameter.requires].read, Flag) else ""
        raise refused(name, f"{name} is allowed only with {parameter.requires}{true}; set both, or leave {name} out.")
    for other, reason in parameter.excludes.items():
        if value != parameter.default and given.get(other):
            why = f": {reason}" if reason else ""
            raise refused(name, f"{name} is not supported with {other}{why}; leave out one of them.")
    if parameter.beam_value is not None and given.get("use_beam_search") and value != parameter.beam_value:
        raise refused(
            name,
            f"{name} is {shown(value)}, but use_beam_search draws no tokens; leave out {name}, or let it be "
            f"{parameter.beam_value}.",
        )
