"""Every parameter of POST /v1/responses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from quire.gateway.api.labels import LABELS, NO_EFFECT, JsonObject
from quire.gateway.api.parameters import (
    NAMED_SCHEMA,
    OF_THE_CALL,
    OF_THE_CHAT,
    REASONING_EFFORTS,
    Body,
    anything,
    read_named_schema,
)
from quire.gateway.api.responses.compaction import CARRIED
from quire.gateway.api.responses.items import INPUT_SCHEMA, MAX_ITEMS
from quire.gateway.api.responses.tools import (
    MAX_GIVEN_TOOLS,
    TOOL_CHOICE_SCHEMA,
    TOOLS_SCHEMA,
    read_response_tool_choice,
    read_response_tools,
)
from quire.gateway.errors.api_errors import invalid, only, refused
from quire.gateway.output.given_grammar import GivenGrammar
from quire.shared.config.schema_parts import any_of, array, closed, options
from quire.shared.config.validators import Flag, Integer, OneOf, Text
from quire.shared.protocol.sampling_params import MAX_OUTPUT_TOKENS, PARAMETERS, Parameter

MAX_RESPONSE_ID_LENGTH = 64
MAX_CONVERSATION_ID_LENGTH = 64
LOGPROBS = "message.output_text.logprobs"
# For lists of input items: the URLs of their images.
IMAGE_URLS = "message.input_image.image_url"
# Values of `include` besides these; this server has nothing of these names.
NOT_HERE = (
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
)
FORMATS = ("text", "json_object", "json_schema")
_SUMMARY = OneOf(("auto", "concise", "detailed"))
_REASONING = {
    "effort": OneOf(REASONING_EFFORTS),
    "summary": _SUMMARY,
    "generate_summary": _SUMMARY,
    "context": OneOf(("auto", "current_turn", "all_turns")),
}
_TEXT = {
    "format": any_of(
        closed({"type": OneOf(FORMATS[:2])}), closed({"type": {"const": FORMATS[2]}} | NAMED_SCHEMA[0], NAMED_SCHEMA[1])
    ),
    "verbosity": OF_THE_CHAT["verbosity"].read,
}
# Parameters of sampling that a response has, under their names in the chat API.
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "include_stop_str_in_output",
    "stop_token_ids",
    "bad_words",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "repetition_penalty",
    "thinking_token_budget",
    "repetition_detection",
)


class TextOptions(NamedTuple):
    """The parameter `text`. grammar: empty if any text will do. format: as the answer repeats it."""

    grammar: GivenGrammar | tuple[()]
    format: dict[str, Any]
    verbosity: str | None


class ReasoningOptions(NamedTuple):
    """The parameter `reasoning`. skipped: names of its keys that have no effect."""

    effort: str | None
    summary: str | None
    skipped: tuple[str, ...]


def text_options(name: str, value: Any) -> TextOptions:
    """Read the options of the text. Raises InvalidRequest or InvalidValue."""
    if type(value) is not dict:
        raise invalid(name, "an object with format and verbosity", value)
    only(name, value, _TEXT)
    verbosity = value.get("verbosity")
    if verbosity is not None:
        OF_THE_CHAT["verbosity"].read(f"{name}.verbosity", verbosity)
    given = value.get("format")
    if given is None:
        return TextOptions((), {"type": "text"}, verbosity)
    if type(given) is not dict:
        raise invalid(f"{name}.format", "an object", given)
    if given.get("type") not in FORMATS:
        raise invalid(f"{name}.format.type", "text, json_object or json_schema", given.get("type"))
    if given["type"] != "json_schema":
        return TextOptions(
            OF_THE_CALL["response_format"].read(f"{name}.format", given), {"type": given["type"]}, verbosity
        )
    inner = {key: item for key, item in given.items() if key != "type"}
    echo = {key: given.get(key) for key in ("type", "name", "description", "schema", "strict")}
    return TextOptions(read_named_schema(f"{name}.format", inner), echo, verbosity)


def reasoning_options(name: str, value: Any) -> ReasoningOptions:
    """Read the options of the reasoning. Raises InvalidRequest or InvalidValue."""
    if type(value) is not dict:
        raise invalid(name, "an object with effort and summary", value)
    only(name, value, _REASONING)
    for key, check in _REASONING.items():
        if value.get(key) is not None:
            check(f"{name}.{key}", value[key])
    skipped = [key for key in _REASONING if key != "effort" and value.get(key) not in (None, "auto")]
    if value.get("summary") == "auto":
        skipped.append("summary")
    summary = value.get("summary") or value.get("generate_summary")
    return ReasoningOptions(value.get("effort"), summary, tuple(f"{name}.{key}" for key in skipped))


_CONVERSATION_ID = Text(1, MAX_CONVERSATION_ID_LENGTH)


def conversation_id(name: str, value: Any) -> str:
    """Return the id of a conversation, which is a string or an object. Raises InvalidValue or InvalidRequest."""
    if type(value) is dict:
        only(name, value, ("id",))
        return _CONVERSATION_ID(f"{name}.id", value.get("id"))
    if type(value) is not str:
        raise invalid(name, 'the id of a conversation, or an object like {"id": ...}', value)
    return _CONVERSATION_ID(name, value)


_THRESHOLD = Integer(1, MAX_OUTPUT_TOKENS)


def compact_threshold(name: str, value: Any) -> int:
    """Return the tokens of a prompt from which it is compacted; 0 for never. Raises InvalidValue or InvalidRequest."""
    if type(value) is not list or len(value) > 1:
        raise invalid(name, 'an array of one object like {"type": "compaction", "compact_threshold": 10000}', value)
    for entry in value:
        if type(entry) is not dict:
            raise invalid(f"{name}[0]", 'an object like {"type": "compaction", "compact_threshold": 10000}', entry)
        if entry.get("type") != "compaction":
            raise invalid(f"{name}[0].type", "compaction", entry.get("type"))
        only(f"{name}[0]", entry, ("type", "compact_threshold"))
        return _THRESHOLD(f"{name}[0].compact_threshold", entry.get("compact_threshold"))
    return 0


_INCLUDED = OneOf((LOGPROBS, IMAGE_URLS, *NOT_HERE))


def include(name: str, value: Any) -> tuple[str, ...]:
    """Return the further fields that the answer shall have. Raises InvalidRequest."""
    if type(value) is not list:
        raise invalid(name, "an array of names of fields", value)
    return tuple(_INCLUDED(f"{name}[{index}]", included) for index, included in enumerate(value))


def stream_options(name: str, value: Any) -> dict[str, Any]:
    """Read the options of a stream. Raises InvalidRequest."""
    if type(value) is not dict:
        raise invalid(name, "an object", value)
    only(name, value, ("include_obfuscation",))
    if value.get("include_obfuscation") not in (None, False):
        at = f"{name}.include_obfuscation"
        raise refused(at, f"{at} must be false: this server adds no random text.", code="unsupported_parameter")
    return value


_TOOL_CALLS = Integer(0, 2**31 - 1)


def max_tool_calls(name: str, value: Any) -> int:
    """Check a number of tool calls. Raises InvalidValue or InvalidRequest."""
    if type(value) is not int or not _TOOL_CALLS.low <= value <= _TOOL_CALLS.high:
        raise invalid(name, "an integer of at least 0", value)
    return value


RESPONSES: dict[str, Parameter] = {
    "model": OF_THE_CALL["model"],
    "input": Parameter(
        read=anything,
        kind=f"string, or array of at most {MAX_ITEMS:,} items",
        schema=INPUT_SCHEMA,
        help="the [items](#items) to answer. `input` may be absent only with `previous_response_id` or `conversation`. "
        "Without a message to answer, the model answers an empty message of the user",
    ),
    "instructions": Parameter(read=Text(), default="", help="a message of the system before all items"),
    "previous_response_id": Parameter(
        read=Text(1, MAX_RESPONSE_ID_LENGTH),
        default="",
        help="the conversation of that response and its output come before `input`; its `instructions` do not. The "
        "response must be stored, and must have ended",
    ),
    "conversation": Parameter(
        read=conversation_id,
        schema=any_of(_CONVERSATION_ID, closed({"id": _CONVERSATION_ID})),
        default="",
        kind=f"string of 1 to {MAX_CONVERSATION_ID_LENGTH} characters, or object with `id`",
        help="the items of that [conversation](#conversations) come before `input`; at the end of the response, "
        "`input` and output are added to it. Not together with `previous_response_id`",
    ),
    "context_management": Parameter(
        read=compact_threshold,
        schema=array(closed({"type": {"const": "compaction"}, "compact_threshold": _THRESHOLD}), high=1),
        kind="array of at most one object with `type` and `compact_threshold`",
        default=(),
        help='with `{"type": "compaction", "compact_threshold": N}` a prompt of more than N tokens is '
        "[compacted](#compaction) before it is answered",
    ),
    "max_output_tokens": Parameter(
        read=Integer(1, MAX_OUTPUT_TOKENS), help="by default the rest of the context; reasoning counts"
    ),
    "tools": Parameter(
        read=read_response_tools,
        schema=TOOLS_SCHEMA,
        default=(),
        kind=f"array of at most {MAX_GIVEN_TOOLS:,} tools, of which `--max-tools` (128) functions",
        help="functions that the model may [call](#tools), perhaps within a `namespace`. Tools of other types are "
        "skipped and named in `warnings`",
    ),
    "tool_choice": Parameter(
        read=read_response_tool_choice,
        schema=TOOL_CHOICE_SCHEMA,
        kind="`auto`, `required`, `none`, a function or a set of allowed functions",
        help='by default `auto`. A function is `{"type": "function", "name": ...}`, a set is `{"type": '
        '"allowed_tools", "mode": "auto" or "required", "tools": [...]}`',
    ),
    "parallel_tool_calls": OF_THE_CHAT["parallel_tool_calls"],
    "text": Parameter(
        read=text_options,
        schema=options(_TEXT),
        kind="object with `format` and `verbosity`",
        help='`format` is `{"type": "text"}`, `{"type": "json_object"}` or `{"type": "json_schema", "name": ..., '
        '"schema": ...}`: the answer is [JSON that follows a schema](#structured-output). `verbosity` is passed to the '
        "chat template",
    ),
    "reasoning": Parameter(
        read=reasoning_options,
        schema=options(_REASONING),
        kind="object with `effort`",
        help="`effort` is passed to the chat template as `reasoning_effort`; `none` also as `enable_thinking: false`. "
        "`summary`, `generate_summary` and `context` have no effect: the answer has the reasoning itself",
    ),
    "include": Parameter(
        read=include,
        schema=array(_INCLUDED),
        default=(),
        kind="array of names of fields",
        help=f"`{LOGPROBS}` asks for [log-probabilities](#log-probabilities). All other names of the OpenAI API have "
        "no effect: this server has nothing of what they name",
    ),
    "top_logprobs": Parameter(
        read=PARAMETERS["top_logprobs"].read, default=0, help="alternatives per token; above 0 it asks for them as well"
    ),
    "truncation": Parameter(
        read=OneOf(("auto", "disabled")),
        default="disabled",
        help="`auto` drops the oldest items of a conversation that is too long for the context; `disabled` refuses it",
    ),
    "store": Parameter(
        read=Flag(),
        default=True,
        help="the response can be read for `--response-retention-s` after its end. With `false` only its own call "
        "returns it",
    ),
    "background": Parameter(
        read=Flag(),
        default=False,
        help="the call returns at once with the status `queued`, and the response does not need its client. With "
        "`stream` it is streamed as well. Needs `store`",
    ),
    "stream": Parameter(read=Flag(), default=False, help="[typed events](#events-of-a-response) instead of one object"),
    "stream_options": Parameter(
        read=stream_options,
        schema=options({"include_obfuscation": {"const": False}}),
        default={},
        requires="stream",
        kind="object",
        help="only with `stream`; `include_obfuscation` may be false",
    ),
    "max_tool_calls": Parameter(
        read=max_tool_calls,
        schema=_TOOL_CALLS,
        kind="integer of at least 0",
        help="it bounds calls of tools that a server runs, and this server runs none; repeated in the answer",
    ),
    "client_metadata": Parameter(
        read=JsonObject(), help="of coding agents; it has no effect. `metadata` is stored and returned"
    ),
    **LABELS,
    "metadata": replace(LABELS["metadata"], help="stored with the request, and returned in the response"),
    **{
        name: replace(parameter, help=f"no effect: {parameter.help}")
        for name, parameter in NO_EFFECT.items()
        if name not in ("store", "prediction")
    },
    **{name: PARAMETERS[name] for name in SAMPLING},
    "chat_template_kwargs": OF_THE_CHAT["chat_template_kwargs"],
    **{name: OF_THE_CALL[name] for name in ("cache_salt", "priority", "timeout")},
}
# Parameters of the OpenAI API that are refused unless they are null, with what to do instead.
REFUSED = {
    "prompt": "this server stores no prompt templates; send instructions and input",
    "moderation": "this server has no moderation",
    "access_programs": "leave it out",
    "image": "send the image as input_image in input",
}
# Parameters of POST /v1/responses/compact that coding agents send, and a summary has no use for.
UNUSED = ("tools", "tool_choice", "parallel_tool_calls", "text", "include", "client_metadata", "metadata")
# Every parameter of POST /v1/responses/compact.
COMPACT = {name: RESPONSES[name] for name in ("input", "previous_response_id", *CARRIED, *UNUSED)} | {
    name: RESPONSES[name] for name in NO_EFFECT if name in RESPONSES and name != "store"
}
# By the name of the body's schema in /openapi.json.
BODIES = {
    "ResponseRequest": Body(RESPONSES, dict.fromkeys(REFUSED, ())),
    "ResponseCompactionRequest": Body(COMPACT),
}


def check_refused(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body without the parameters of REFUSED, which must be null. Raises InvalidRequest."""
    for name, instead in REFUSED.items():
        if body.get(name) is not None:
            raise refused(name, f"{name} is not supported: {instead}.", code="unsupported_parameter")
    return {name: value for name, value in body.items() if name not in REFUSED}
