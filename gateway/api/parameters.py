"""Every parameter of the two calls: its type, its range, its default - and those of the OpenAI API that are refused.

`null` means absent. A parameter that is not honoured is refused with its name, unless its value asks for nothing.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from quire.gateway.api.errors import InvalidRequest
from quire.shared.keys import DEFAULT_CLASS, PRIORITY_CLASSES
from quire.shared.logprobs import MAX_TOP_LOGPROBS
from quire.shared.messages import (
    MAX_BIAS,
    MAX_BIASES,
    MAX_CHOICES,
    MAX_LENGTH_PENALTY,
    MAX_OUTPUT_TOKENS,
    MAX_SALT_LENGTH,
    MAX_SCHEMA_LENGTH,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
)
from quire.shared.text import json_schema

Check = Callable[[str, Any], Any]

# What the completions API generates when it is not told how much (OpenAI API reference, `max_tokens`).
COMPLETION_DEFAULT_TOKENS = 16


def shown(value: Any) -> str:
    """A value as an error message quotes it: short, on one line, and without what cannot be encoded."""
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "an array"
    text = json.dumps(value) if value is None or type(value) is bool else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def invalid(name: str, value: Any, expected: str) -> InvalidRequest:
    return InvalidRequest(f"{name} must be {expected}, not {shown(value)}.", param=name, code="invalid_value")


def integer(low: int, high: int) -> Check:
    def check(name: str, value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise invalid(name, value, f"an integer from {low} to {high}")
        return value

    return check


def number(low: float, high: float) -> Check:
    def check(name: str, value: Any) -> float:
        if type(value) not in (int, float) or not low <= value <= high:
            raise invalid(name, value, f"a number from {low:g} to {high:g}")
        return float(value)

    return check


def flag(name: str, value: Any) -> bool:
    if type(value) is not bool:
        raise invalid(name, value, "true or false")
    return value


def text(name: str, value: Any) -> str:
    if type(value) is not str:
        raise invalid(name, value, "a string")
    return value


def anything(name: str, value: Any) -> Any:
    """For what a reader of its own checks: messages and prompt."""
    return value


def top_k(name: str, value: Any) -> int:
    checked: int = integer(-1, 2**31 - 1)(name, value)
    return max(checked, 0)  # -1 is another way to say that it is off


def seed(name: str, value: Any) -> int:
    checked: int = integer(-(2**63), 2**64 - 1)(name, value)
    return checked % 2**64


def stop(name: str, value: Any) -> tuple[str, ...]:
    strings = [value] if type(value) is str else value
    if type(strings) is not list:
        raise invalid(name, value, "a string or an array of strings")
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequest(
            f"{name} must have at most {MAX_STOP_STRINGS} strings, not {len(strings)}.",
            param=name,
            code="invalid_value",
        )
    for string in strings:
        if type(string) is not str:
            raise invalid(name, string, "a string or an array of strings")
        if not 1 <= len(string) <= MAX_STOP_LENGTH:
            raise InvalidRequest(
                f"{name} must have strings of 1 to {MAX_STOP_LENGTH} characters, not of {len(string)}.",
                param=name,
                code="invalid_value",
            )
    return tuple(strings)


def stop_token_ids(name: str, value: Any) -> tuple[int, ...]:
    if type(value) is not list:
        raise invalid(name, value, "an array of token ids")
    if len(value) > MAX_STOP_TOKENS:
        raise InvalidRequest(
            f"{name} must have at most {MAX_STOP_TOKENS} token ids, not {len(value)}.", param=name, code="invalid_value"
        )
    if wrong := [one for one in value if type(one) is not int or one < 0]:
        raise invalid(name, wrong[0], "an array of token ids")
    return tuple(value)


def early_stopping(name: str, value: Any) -> str:
    """Hugging Face's three values, as the messages spell them."""
    if type(value) is bool:
        return "true" if value else "false"
    if value != "never":
        raise invalid(name, value, "true, false or 'never'")
    return "never"


def priority(name: str, value: Any) -> str:
    if type(value) is not str or value not in PRIORITY_CLASSES:
        raise invalid(name, value, f"one of {', '.join(PRIORITY_CLASSES)}")
    return value


def cache_salt(name: str, value: Any) -> str:
    salt = text(name, value)
    if not 1 <= len(salt) <= MAX_SALT_LENGTH:
        raise InvalidRequest(
            f"{name} must be a string of 1 to {MAX_SALT_LENGTH} characters, not of {len(salt)}.",
            param=name,
            code="invalid_value",
        )
    return salt


def logit_bias(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    """Pairs of a token id and its bias."""
    if type(value) is not dict:
        raise invalid(name, value, "an object")
    if len(value) > MAX_BIASES:
        raise InvalidRequest(
            f"{name} must have at most {MAX_BIASES} tokens, not {len(value)}.", param=name, code="invalid_value"
        )
    for token_id in value:
        if not re.fullmatch(r"0|[1-9][0-9]{0,9}", token_id, re.ASCII):
            raise InvalidRequest(
                f"{name} must have token ids as its keys, and {shown(token_id)} is none.",
                param=name,
                code="invalid_value",
            )
    check = number(-MAX_BIAS, MAX_BIAS)
    return tuple((int(token_id), check(f"{name}.{token_id}", bias)) for token_id, bias in value.items())


def response_format(name: str, value: Any) -> str:
    """The JSON schema that the answer must follow, as text; empty for none."""
    if type(value) is not dict:
        raise invalid(name, value, "an object")
    kind = value.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise invalid(f"{name}.type", kind, "text, json_object or json_schema")
    _only(name, value, ("type", "json_schema") if kind == "json_schema" else ("type",))
    if kind != "json_schema":
        return json_schema.ANY_OBJECT if kind == "json_object" else ""
    name, wrapped = f"{name}.json_schema", value.get("json_schema")
    if type(wrapped) is not dict:
        raise invalid(name, wrapped, "an object")
    _only(name, wrapped, ("name", "description", "schema", "strict"))
    if not re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", text(f"{name}.name", wrapped.get("name"))):
        raise invalid(f"{name}.name", wrapped["name"], "1 to 64 of the characters a-z, A-Z, 0-9, _ and -")
    for key, check in (("description", text), ("strict", flag)):
        if wrapped.get(key) is not None:
            check(f"{name}.{key}", wrapped[key])
    schema = wrapped.get("schema")
    if type(schema) is not dict:
        raise invalid(f"{name}.schema", schema, "an object")
    try:
        written = json_schema.canonical(schema)
    except RecursionError:
        raise invalid(f"{name}.schema", schema, "an object that is not nested so deeply") from None
    if len(written) > MAX_SCHEMA_LENGTH:
        raise InvalidRequest(
            f"{name}.schema has {len(written)} characters; at most {MAX_SCHEMA_LENGTH} are allowed.",
            param=f"{name}.schema",
            code="invalid_value",
        )
    return written


def _only(name: str, value: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for key in value:
        if key not in known:
            raise InvalidRequest(
                f"{name}.{key[:80]} is not supported; {name} has {', '.join(known)} only.",
                param=f"{name}.{key[:80]}",
                code="unsupported_parameter",
            )


def stream_options(name: str, value: Any) -> bool:
    """Whether usage is asked for."""
    if type(value) is not dict:
        raise invalid(name, value, "an object")
    for key, option in value.items():
        if key == "include_obfuscation" and option in (None, False):
            continue
        if key != "include_usage":
            raise InvalidRequest(
                f"{name}.{key[:80]} is not supported; {name} has include_usage only.",
                param=f"{name}.{key[:80]}",
                code="unsupported_parameter",
            )
    include_usage = value.get("include_usage")
    return include_usage is not None and flag(f"{name}.include_usage", include_usage)


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter that is honoured. `default` stands for absent and for null."""

    check: Check
    default: Any = None
    required: bool = False


_TOKENS = integer(1, MAX_OUTPUT_TOKENS)

COMMON: dict[str, Parameter] = {
    "model": Parameter(text, required=True),
    "stream": Parameter(flag, False),
    "stream_options": Parameter(stream_options),
    "n": Parameter(integer(1, MAX_CHOICES), 1),
    "best_of": Parameter(integer(1, MAX_CHOICES)),
    "use_beam_search": Parameter(flag, False),
    "beam_width": Parameter(integer(2, MAX_CHOICES)),
    "length_penalty": Parameter(number(-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)),
    "early_stopping": Parameter(early_stopping),
    "cache_salt": Parameter(cache_salt, ""),
    "background": Parameter(flag, False),
    "priority": Parameter(priority, DEFAULT_CLASS),
    "timeout": Parameter(number(0, sys.float_info.max)),
    "stop": Parameter(stop, ()),
    "stop_token_ids": Parameter(stop_token_ids, ()),
    "response_format": Parameter(response_format, ""),
    "max_tokens": Parameter(_TOKENS),
    "max_completion_tokens": Parameter(_TOKENS),
    "min_tokens": Parameter(integer(0, MAX_OUTPUT_TOKENS), 0),
    "ignore_eos": Parameter(flag, False),
    "temperature": Parameter(number(0, 2)),
    "top_p": Parameter(number(0, 1)),
    "top_k": Parameter(top_k),
    "min_p": Parameter(number(0, 1)),
    "seed": Parameter(seed),
    "presence_penalty": Parameter(number(-2, 2), 0.0),
    "frequency_penalty": Parameter(number(-2, 2), 0.0),
    "repetition_penalty": Parameter(number(0.01, 100)),
    "logit_bias": Parameter(logit_bias, ()),
}
_TOP_LOGPROBS = integer(0, MAX_TOP_LOGPROBS)
CHAT = {
    "messages": Parameter(anything, required=True),
    "logprobs": Parameter(flag, False),
    "top_logprobs": Parameter(_TOP_LOGPROBS),
    **COMMON,
}
COMPLETIONS = {"prompt": Parameter(anything, required=True), "logprobs": Parameter(_TOP_LOGPROBS), **COMMON}

# Parameters of the OpenAI API that are not honoured, each with the values that ask for nothing beside null.
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
    """The value of every parameter of `table`. Raises InvalidRequest for the first that cannot be honoured."""
    for name, value in body.items():
        if name in table or value is None:
            if name not in table and name not in UNSUPPORTED:
                raise _unknown(name)
            continue
        if name not in UNSUPPORTED:
            raise _unknown(name)
        if not any(type(value) is type(neutral) and value == neutral for neutral in UNSUPPORTED[name]):
            raise InvalidRequest(
                f"{name} is not supported by this server yet; leave it out.", param=name, code="unsupported_parameter"
            )
    values = {}
    for name, parameter in table.items():
        value = body.get(name)
        if value is not None:
            values[name] = parameter.check(name, value)
        elif parameter.required:
            raise InvalidRequest(f"{name} is required.", param=name, code="missing_required_parameter")
        else:
            values[name] = parameter.default
    return values


def _unknown(name: str) -> InvalidRequest:
    short = name[:80]
    return InvalidRequest(f"{short!r} is not a parameter of this call.", param=short, code="unknown_parameter")
