"""Every parameter of the two calls: those of sampling, those of the call itself, and those that are refused.

`null` means absent. A parameter that is not honoured is refused with its name, unless its value asks for nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from quire.gateway.api.errors import invalid, of_check, refused
from quire.gateway.api.response_format import only, response_format
from quire.shared.keys import DEFAULT_CLASS, PRIORITY_CLASSES
from quire.shared.messages import MAX_SALT_LENGTH
from quire.shared.sampling_params import PARAMETERS, Parameter
from quire.shared.validators import Flag, InvalidValue, Number, OneOf, Text, shown

# The default of `max_tokens` in the completions API (OpenAI API reference).
COMPLETION_DEFAULT_TOKENS = 16


def anything(name: str, value: Any) -> Any:
    """Lets every value pass: a reader of its own checks it later."""
    return value


def stream_options(name: str, value: Any) -> bool:
    """True if the client asks for an event with the usage. Raises InvalidRequest or InvalidValue."""
    if type(value) is not dict:
        raise invalid(name, "an object", value)
    if value.get("include_obfuscation", False) not in (None, False):
        only(name, value, ("include_usage",))
    only(name, value, ("include_usage", "include_obfuscation"))
    include_usage = value.get("include_usage")
    return include_usage is not None and Flag()(f"{name}.include_usage", include_usage)


MESSAGES = Parameter(
    read=anything,
    required=True,
    kind="array of 1 to 10,000 messages",
    help="each has `role` (`system`, `developer`, `user`, `assistant`), `content` (a string, or an array of "
    '`{"type": "text", "text": ...}`) and perhaps `name` (1 to 256 characters). A key whose value is `null` counts as '
    "absent",
)
PROMPT = Parameter(
    read=anything,
    required=True,
    kind="string, array of token ids, or array of strings and arrays of token ids",
    help="at most `--max-prompts` (64) of them. Extension: strings and arrays of token ids may be mixed",
)
OF_THE_CALL: dict[str, Parameter] = {
    "model": Parameter(read=Text(), required=True, help="the served name: `GET /v1/models` has it"),
    "stream": Parameter(read=Flag(), default=False, help="server-sent events instead of one object"),
    "stream_options": Parameter(
        read=stream_options,
        requires="stream",
        kind="object with `include_usage`",
        help="only with `stream`: one more event with the usage. `include_obfuscation` may be false",
    ),
    "max_completion_tokens": Parameter(read=PARAMETERS["max_tokens"].read, help="another name of `max_tokens`"),
    "response_format": Parameter(
        read=response_format,
        default="",
        kind="object with `type`: `text`, `json_object` or `json_schema`",
        help="the answer is [JSON that follows a schema](#json-answers). Not with `use_beam_search`, `ignore_eos` and "
        "`min_tokens`",
    ),
    "use_beam_search": Parameter(
        read=Flag(),
        default=False,
        excludes={
            "stream": "which beams are the best is known at the end only",
            "response_format": "a beam search does not follow a schema",
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
        read=OneOf(PRIORITY_CLASSES),
        default=DEFAULT_CLASS,
        kind="`interactive`, `standard` or `batch`",
        help="extension: the class in which the request waits",
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
        help="extension: seconds from acceptance to the deadline; by default `--default-timeout-s` (none)",
    ),
}
_SAMPLING = {name: one for name, one in PARAMETERS.items() if one.help}
CHAT = {"messages": MESSAGES, **OF_THE_CALL, **_SAMPLING}
COMPLETIONS = {"prompt": PROMPT, **OF_THE_CALL, **_SAMPLING}
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
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "metadata": ({},),
    "modalities": (["text"], []),
    "moderation": (),
    "parallel_tool_calls": (),
    "prediction": (),
    "prompt_cache_key": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "reasoning_effort": (),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": (),
    "tool_choice": ("none",),
    "tools": ([],),
    "user": (),
    "verbosity": (),
    "web_search_options": (),
}


def read(body: Mapping[str, Any], table: Mapping[str, Parameter]) -> dict[str, Any]:
    """The parameters of `table` that `body` gives, in their final form.

    Raises InvalidRequest for the first one that is missing, wrong or not honoured, or does not go with another one.
    """
    for name, value in body.items():
        if name not in table:
            _check_unsupported(name, value)
    given = {}
    for name, parameter in table.items():
        if (value := body.get(name)) is not None:
            given[name] = _read_one(name, parameter, value)
        elif parameter.required:
            raise refused(name, f"{name} is required.", code="missing_required_parameter")
    for name in given:
        _check_together(name, table[name], given)
    return given


def _read_one(name: str, parameter: Parameter, value: Any) -> Any:
    try:
        return parameter.read(name, value)
    except InvalidValue as error:
        raise of_check(error) from None


def _check_unsupported(name: str, value: Any) -> None:
    if name not in UNSUPPORTED:
        short = name[:80]
        raise refused(short, f"{short!r} is not a parameter of this call.", code="unknown_parameter")
    if value is not None and not any(type(value) is type(one) and value == one for one in UNSUPPORTED[name]):
        raise refused(name, f"{name} is not supported by this server yet; leave it out.", code="unsupported_parameter")


def _check_together(name: str, parameter: Parameter, given: Mapping[str, Any]) -> None:
    """Check a parameter that is given against those that it requires and excludes."""
    value = given[name]
    if parameter.requires and not given.get(parameter.requires) and value not in parameter.neutral:
        raise refused(name, f"{name} is allowed only with {parameter.requires}: true; leave it out.")
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
