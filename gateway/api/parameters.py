"""Every parameter of the two calls: those of sampling, those of the call itself, and those that are refused.

`null` means absent. A parameter that is not honoured is refused with its name, unless its value asks for nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from quire.gateway.api import request_schemas
from quire.gateway.api.labels import LABELS, NO_EFFECT
from quire.gateway.api.prompt_parameters import OF_BOTH, OF_CHATS, OF_COMPLETIONS
from quire.gateway.api.tools import read_tool_choice, read_tools
from quire.gateway.errors.api_errors import invalid, of_check, only, refused
from quire.gateway.features.grammars.given_grammars import (
    read_choice,
    read_grammar,
    read_regex,
    read_schema_or_text,
    response_format,
    structured_outputs,
)
from quire.shared.config.validators import Check, Flag, InvalidValue, Number, OneOf, Text, shown, wrong
from quire.shared.protocol.keys import DEFAULT_CLASS, PRIORITY_CLASSES
from quire.shared.protocol.messages import MAX_SALT_LENGTH
from quire.shared.protocol.sampling_params import GRAMMAR_PARAMETERS, PARAMETERS, Parameter

# The default of `max_tokens` in the completions API (OpenAI API reference).
COMPLETION_DEFAULT_TOKENS = 16
REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
NO_FREE_END = dict.fromkeys(("ignore_eos", "min_tokens"), "the grammar of tool calls says where an answer ends")


def anything(name: str, value: Any) -> Any:
    """Lets every value pass: a reader of its own checks it later."""
    return value


def priority_class(name: str, value: Any) -> str:
    """The name of a class, also for vLLM's integer priorities. Raises InvalidValue."""
    if type(value) is int and abs(value) < 2**63:
        return PRIORITY_CLASSES[1 + (value > 0) - (value < 0)]
    if type(value) is not str or value not in PRIORITY_CLASSES:
        raise wrong(name, f"one of {', '.join(PRIORITY_CLASSES)}, or an integer", value)
    return value


class StreamOptions(NamedTuple):
    """The options of a stream: an event with the usage at the end, and the usage so far in every event."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


def stream_options(name: str, value: Any) -> StreamOptions:
    """The options of a stream. Raises InvalidRequest or InvalidValue."""
    if type(value) is not dict:
        raise invalid(name, "an object", value)
    if value.get("include_obfuscation", False) not in (None, False):
        only(name, value, StreamOptions._fields)
    only(name, value, (*StreamOptions._fields, "include_obfuscation"))
    options = StreamOptions(
        **{one: Flag()(f"{name}.{one}", value[one]) for one in StreamOptions._fields if value.get(one) is not None}
    )
    if options.continuous_usage_stats and not options.include_usage:
        one = f"{name}.continuous_usage_stats"
        raise refused(one, f"{one} is allowed only with include_usage: true; leave it out.")
    return options


def chat_template_kwargs(name: str, value: Any) -> dict[str, Any]:
    """Variables for the chat template. Raises InvalidRequest."""
    most = request_schemas.MAX_TEMPLATE_VARIABLES
    if type(value) is not dict or len(value) > most:
        raise invalid(name, f"an object with at most {most} names", value)
    for key in value:
        if key in request_schemas.RESERVED_VARIABLES or not key.isidentifier() or key.startswith("_"):
            raise refused(f"{name}.{key[:80]}", f"{name}.{key[:80]} cannot be set by a call; leave it out.")
    return value


MESSAGES = Parameter(
    read=anything,
    required=True,
    kind="array of 1 to 10,000 messages",
    schema=request_schemas.MESSAGES,
    help="each has `role` (`system`, `developer`, `user`, `assistant`, `tool`), `content` (a string, or an array of "
    '`{"type": "text", "text": ...}`) and perhaps `name` (1 to 256 characters). Messages of the assistant may have '
    "`reasoning_content` and `tool_calls`, and then no `content`; those of a tool have `tool_call_id`. A key whose "
    "value is `null` counts as absent",
)
PROMPT = Parameter(
    read=anything,
    required=True,
    kind="string, array of token ids, or array of strings and arrays of token ids",
    schema=request_schemas.PROMPT,
    help="at most `--max-prompts` (64) of them. Extension: strings and arrays of token ids may be mixed",
)
ONE_GRAMMAR = "an answer follows one grammar"


def _guided(form: str, read: Check[Any], kind: str, schema: Mapping[str, Any]) -> Parameter:
    """An old name of a field of `structured_outputs`, which excludes the names before it in GRAMMAR_PARAMETERS."""
    before = GRAMMAR_PARAMETERS[: GRAMMAR_PARAMETERS.index(f"guided_{form}")]
    return Parameter(
        read=read,
        default=(),
        kind=kind,
        schema=schema,
        excludes=dict.fromkeys(before, ONE_GRAMMAR),
        help=f"extension, an older name of vLLM: `{form}` of `structured_outputs`",
    )


OF_THE_CALL: dict[str, Parameter] = {
    "model": Parameter(read=Text(), required=True, help="the served name: `GET /v1/models` has it"),
    "stream": Parameter(read=Flag(), default=False, help="server-sent events instead of one object"),
    "stream_options": Parameter(
        read=stream_options,
        requires="stream",
        kind="object with `include_usage` and `continuous_usage_stats`",
        schema=request_schemas.STREAM_OPTIONS,
        help="only with `stream`. `include_usage`: one more event with the usage. `continuous_usage_stats` (extension, "
        "as in vLLM; only with `include_usage`): every event has the usage so far. `include_obfuscation` may be false",
    ),
    "max_completion_tokens": Parameter(read=PARAMETERS["max_tokens"].read, help="another name of `max_tokens`"),
    "response_format": Parameter(
        read=response_format,
        default=(),
        kind="object with `type`: `text`, `json_object`, `json_schema` or `structural_tag`",
        schema=request_schemas.RESPONSE_FORMAT,
        help="[structured output](#structured-output): the answer is JSON that follows a schema. Not with "
        "`use_beam_search`, `ignore_eos` and `min_tokens`",
    ),
    "structured_outputs": Parameter(
        read=structured_outputs,
        default=(),
        kind="object with one of `json`, `regex`, `choice`, `grammar`, `json_object`, `structural_tag`",
        schema=request_schemas.STRUCTURED_OUTPUTS,
        excludes={"response_format": ONE_GRAMMAR},
        help="extension, as in vLLM: [structured output](#structured-output). Not with `response_format`",
    ),
    "guided_json": _guided("json", read_schema_or_text, "object, or the JSON text of one", request_schemas.JSON),
    "guided_regex": _guided("regex", read_regex, "string", request_schemas.REGEX),
    "guided_choice": _guided("choice", read_choice, "array of strings", request_schemas.CHOICE),
    "guided_grammar": _guided("grammar", read_grammar, "string", request_schemas.GRAMMAR),
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
        schema=request_schemas.PRIORITY,
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
        schema=request_schemas.TIMEOUT,
        help="extension: seconds from acceptance to the deadline; by default `--default-timeout-s` (none)",
    ),
}
OF_THE_CHAT: dict[str, Parameter] = {
    "tools": Parameter(
        read=read_tools,
        default=(),
        kind="array of functions, at most `--max-tools` (128)",
        schema=request_schemas.TOOLS,
        help="functions that the model may [call](#tools)",
        excludes={"use_beam_search": "a beam search does not follow the form of tool calls"} | NO_FREE_END,
    ),
    "tool_choice": Parameter(
        read=read_tool_choice,
        kind="`auto`, `required`, `none` or an object that names a function",
        schema=request_schemas.TOOL_CHOICE,
        help="whether the answer may, must or must not call tools; by default `auto` if there are tools. With `none` "
        "the model is not told about the tools",
    ),
    "parallel_tool_calls": Parameter(read=Flag(), default=True, help="whether one answer may have several tool calls"),
    "reasoning_effort": Parameter(
        read=OneOf(REASONING_EFFORTS),
        kind="`none`, `minimal`, `low`, `medium`, `high`, `xhigh` or `max`",
        help="passed to the chat template as `reasoning_effort`; `none` also as `enable_thinking: false`",
    ),
    "verbosity": Parameter(
        read=OneOf(("low", "medium", "high")),
        kind="`low`, `medium` or `high`",
        help="passed to the chat template as `verbosity`",
    ),
    "chat_template_kwargs": Parameter(
        read=chat_template_kwargs,
        default={},
        kind="object with at most 32 names",
        schema=request_schemas.TEMPLATE_KWARGS,
        help="extension, as in vLLM: variables for the chat template, such as `enable_thinking`",
    ),
}
_SAMPLING = {name: one for name, one in PARAMETERS.items() if one.help}
_OF_BOTH = {**OF_THE_CALL, **_SAMPLING, **OF_BOTH, **LABELS, **NO_EFFECT}
CHAT = {"messages": MESSAGES, **_OF_BOTH, **OF_THE_CHAT, **OF_CHATS}
COMPLETIONS = {"prompt": PROMPT, **_OF_BOTH, **OF_COMPLETIONS}
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
    "tool_choice": ("none",),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}


def read(
    body: Mapping[str, Any],
    table: Mapping[str, Parameter],
    unsupported: Mapping[str, tuple[Any, ...]] = UNSUPPORTED,
) -> dict[str, Any]:
    """The parameters of `table` that `body` gives, in their final form.

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
    if value is not None and not any(type(value) is type(one) and value == one for one in unsupported[name]):
        raise refused(name, f"{name} is not supported by this server yet; leave it out.", code="unsupported_parameter")


def _check_together(name: str, table: Mapping[str, Parameter], given: Mapping[str, Any]) -> None:
    """Check a parameter that is given against those that it requires and excludes."""
    parameter, value = table[name], given[name]
    if parameter.requires and not given.get(parameter.requires) and value not in parameter.neutral:
        true = ": true" if isinstance(table[parameter.requires].read, Flag) else ""
        raise refused(name, f"{name} is allowed only with {parameter.requires}{true}; leave it out.")
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
