"""Every parameter of the Messages API: those that are honoured, those without effect, and those that are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.gateway.api.labels import JsonObject
from quire.gateway.api.messages import request_schemas
from quire.gateway.api.messages.content import MAX_MESSAGES, check_cache_control, unknown_key
from quire.gateway.api.messages.request_schemas import CLEAR_THINKING, EFFORTS, MAX_USER_LENGTH
from quire.gateway.api.parameters import OF_THE_CALL, anything
from quire.gateway.errors.api_errors import invalid, of_check, refused
from quire.gateway.features.grammars.given_grammars import read_schema
from quire.gateway.output.given_grammar import GivenGrammar
from quire.shared.config.validators import Integer, InvalidValue, Number, OneOf, Text, Texts
from quire.shared.protocol.sampling_params import (
    MAX_OUTPUT_TOKENS,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    PARAMETERS,
    Parameter,
)

# `keep` of `clear_thinking_20251015` if it is "all".
ALL = MAX_MESSAGES


class Thinking:
    """The parameter `thinking`; the final form is a dict with `enabled`, `budget_tokens` and `is_hidden`."""

    def __call__(self, name: str, value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            raise invalid(name, 'an object like {"type": "enabled"}', value)
        kind = value.get("type")
        if kind not in ("enabled", "adaptive", "disabled"):
            raise invalid(f"{name}.type", "enabled, adaptive or disabled", kind)
        known = ("type",) if kind == "disabled" else ("type", "budget_tokens", "display")
        for key, item in value.items():
            if key not in known and item is not None:
                raise unknown_key(name, key)
        budget = value.get("budget_tokens")
        if budget is not None:
            budget = _checked(
                Integer(0 if kind == "adaptive" else 1, MAX_OUTPUT_TOKENS), f"{name}.budget_tokens", budget
            )
        display = value.get("display")
        if display not in (None, "summarized", "omitted"):
            raise invalid(f"{name}.display", "summarized or omitted", display)
        return {
            "enabled": kind != "disabled",
            "budget_tokens": budget if kind == "enabled" else None,
            "is_hidden": display == "omitted",
        }

    def __str__(self) -> str:
        return "an object with `type`: `enabled`, `adaptive` or `disabled`"


def output_format(name: str, value: Any) -> GivenGrammar:
    """The grammar of an answer that follows a JSON schema. Raises InvalidRequest."""
    if type(value) is not dict:
        raise invalid(name, "an object", value)
    if value.get("type") != "json_schema":
        raise invalid(f"{name}.type", "json_schema", value.get("type"))
    for key, item in value.items():
        if key not in ("type", "schema") and item is not None:
            raise unknown_key(name, key)
    return read_schema(f"{name}.schema", value.get("schema"))


def output_config(name: str, value: Any) -> dict[str, Any]:
    """The `effort` and the `format` of an answer; absent if they are not given. Raises InvalidRequest."""
    if type(value) is not dict:
        raise invalid(name, "an object", value)
    found: dict[str, Any] = {}
    for key, item in value.items():
        if item is None:
            continue
        if key == "effort":
            found[key] = _checked(OneOf(EFFORTS), f"{name}.effort", item)
        elif key == "format":
            found[key] = output_format(f"{name}.format", item)
        else:
            raise unknown_key(name, key)
    return found


def metadata(name: str, value: Any) -> str:
    """The user in `metadata`; empty without one. Raises InvalidRequest."""
    if type(value) is not dict:
        raise invalid(name, "an object", value)
    for key, item in value.items():
        if key != "user_id" and item is not None:
            raise unknown_key(name, key)
    user = value.get("user_id")
    found: str = "" if user is None else _checked(Text(0, MAX_USER_LENGTH), f"{name}.user_id", user)
    return found


def context_management(name: str, value: Any) -> int:
    """The number of assistant messages that keep their thinking; ALL if all do. Raises InvalidRequest."""
    if type(value) is not dict:
        raise invalid(name, "an object with edits", value)
    for key, item in value.items():
        if key != "edits" and item is not None:
            raise unknown_key(name, key)
    edits = value.get("edits") or []
    if type(edits) is not list:
        raise invalid(f"{name}.edits", "an array", edits)
    kept = ALL
    for index, edit in enumerate(edits):
        where = f"{name}.edits[{index}]"
        if type(edit) is not dict or edit.get("type") != CLEAR_THINKING:
            raise refused(
                f"{where}.type",
                f"{where}.type must be {CLEAR_THINKING}: this server does no other edits of the context.",
                code="unsupported_parameter",
            )
        for key, item in edit.items():
            if key not in ("type", "keep") and item is not None:
                raise unknown_key(where, key)
        kept = min(kept, _kept_turns(f"{where}.keep", edit.get("keep")))
    return kept


def cache_control(name: str, value: Any) -> bool:
    """True: a marker for the prompt cache is correct. Raises InvalidRequest."""
    check_cache_control(name, value)
    return True


def _kept_turns(name: str, keep: Any) -> int:
    if keep is None:  # the default of the Messages API
        return 1
    if keep == "all" or keep == {"type": "all"}:
        return ALL
    if type(keep) is not dict or keep.get("type") != "thinking_turns" or keep.keys() - {"type", "value"}:
        raise invalid(name, '"all" or an object like {"type": "thinking_turns", "value": 2}', keep)
    turns: int = _checked(Integer(1, ALL), f"{name}.value", keep.get("value"))
    return turns


def _checked(check: Any, name: str, value: Any) -> Any:
    try:
        return check(name, value)
    except InvalidValue as error:
        raise of_check(error) from None


_OF_THE_PROMPT: dict[str, Parameter] = {
    "model": OF_THE_CALL["model"],
    "messages": Parameter(
        read=anything,
        required=True,
        kind=f"array of 1 to {MAX_MESSAGES:,} messages",
        schema=request_schemas.MESSAGES,
        help="each has `role` (`user`, `assistant`, `system`) and `content`, a string or [blocks](#blocks). If the "
        "last one is of the assistant, the answer continues it",
    ),
    "system": Parameter(
        read=anything,
        kind="string or array of text blocks",
        schema=request_schemas.SYSTEM,
        help="the system prompt",
    ),
    "tools": Parameter(
        read=anything,
        kind="array of tools",
        schema=request_schemas.TOOLS,
        help="see [tools of a message](#tools-of-a-message)",
    ),
    "tool_choice": Parameter(
        read=anything,
        kind="object with `type`: `auto`, `any`, `tool` or `none`",
        schema=request_schemas.TOOL_CHOICE,
        help="`tool` has a `name`. `disable_parallel_tool_use` allows one tool call at most",
    ),
    "thinking": Parameter(
        read=Thinking(),
        kind="object with `type`: `enabled`, `adaptive` or `disabled`",
        schema=request_schemas.THINKING,
        help="switches the reasoning on or off, if the chat template can; by default the template decides. "
        "`budget_tokens` reaches the template as `thinking_budget` and is no bound. `display` `omitted` leaves the "
        "text out of the answer; `summarized` shows all of it",
    ),
    "output_config": Parameter(
        read=output_config,
        kind="object with `effort` and `format`",
        schema=request_schemas.OUTPUT_CONFIG,
        help="`effort` (`low`, `medium`, `high`, `xhigh`, `max`) reaches the chat template as `reasoning_effort`; the "
        'last two count as `high`. `format` is `{"type": "json_schema", "schema": ...}`: the answer is '
        "[JSON that follows the schema](#structured-output)",
    ),
    "output_format": Parameter(
        read=output_format,
        default=(),
        kind="object with `type` `json_schema` and `schema`",
        schema=request_schemas.OUTPUT_FORMAT,
        help="the earlier name of `output_config.format`",
    ),
    "context_management": Parameter(
        read=context_management,
        kind="object with `edits`",
        schema=request_schemas.CONTEXT_MANAGEMENT,
        help=f"`{CLEAR_THINKING}` leaves thinking out of the prompt, except in the last assistant messages that have "
        "any (`keep`). No other edits",
    ),
    "cache_control": Parameter(
        read=cache_control,
        kind='object like `{"type": "ephemeral"}`',
        schema=request_schemas.CACHE_CONTROL,
        help="accepted here, and in blocks and tools: full blocks of every prompt are cached, with or without it, "
        "until their memory is needed",
    ),
}
CREATE: dict[str, Parameter] = {
    **_OF_THE_PROMPT,
    "max_tokens": Parameter(
        read=Integer(0, MAX_OUTPUT_TOKENS),
        required=True,
        help="longest answer. If the context ends first, the `stop_reason` is `model_context_window_exceeded`. 0 "
        "computes the prompt into the prefix cache and returns no content",
    ),
    "stream": OF_THE_CALL["stream"],
    "stop_sequences": Parameter(
        read=Texts(MAX_STOP_STRINGS, 1, MAX_STOP_LENGTH),
        default=(),
        help="the answer ends before the first of them; `stop_sequence` in the answer is the one that was found",
    ),
    "temperature": Parameter(
        read=Number(0, 1),
        model_default=True,
        help="0 is greedy. By default [the model's](#sampling-defaults)",
    ),
    "top_p": PARAMETERS["top_p"],
    "top_k": replace(PARAMETERS["top_k"], help=PARAMETERS["top_k"].help.removeprefix("extension: ")),
    "metadata": Parameter(
        read=metadata,
        default="",
        kind="object with `user_id`",
        schema=request_schemas.METADATA,
        help=f"`user_id` has at most {MAX_USER_LENGTH} characters; logs have its hash",
    ),
    "service_tier": Parameter(
        read=OneOf(("auto", "standard_only")),
        kind="`auto` or `standard_only`",
        help="`standard_only` is the [class](#deadlines-and-classes) `standard`; `auto` leaves the class to `priority`",
    ),
    **{name: OF_THE_CALL[name] for name in ("priority", "cache_salt", "background", "timeout")},
    "seed": replace(PARAMETERS["seed"], help=f"extension: {PARAMETERS['seed'].help}"),
}
# `POST /v1/messages/count_tokens`.
COUNT_TOKENS: dict[str, Parameter] = dict(_OF_THE_PROMPT)

# Parameters that are accepted and have no effect here; the answer's header names them.
WITHOUT_EFFECT: dict[str, Parameter] = {
    "diagnostics": Parameter(read=JsonObject(), help="asks why a prompt was not cached"),
    "user_profile_id": Parameter(read=Text(0, 256), help="an account of Anthropic"),
    "workspace_id": Parameter(read=Text(0, 256), help="a workspace of Anthropic"),
}
# Parameters that are refused, each with the values that ask for nothing besides null.
REFUSED: dict[str, tuple[Any, ...]] = {
    "billing_policy": (),
    "compaction": (),
    "container": (),
    "fallback_credit_token": (),
    "fallbacks": ([],),
    "inference_geo": (),
    "mcp_servers": ([],),
    "speed": ("standard",),
    "thread": (),
}
