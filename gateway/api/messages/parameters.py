"""Every parameter of the Messages API: those that are honoured, those without effect, and those that are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from quire.gateway.api.labels import JsonObject
from quire.gateway.api.messages.content import (
    CACHE_CONTROL,
    MAX_MESSAGES,
    MESSAGES_SCHEMA,
    SYSTEM_SCHEMA,
    check_cache_control,
    only_known,
    unknown_key,
)
from quire.gateway.api.messages.tools import TOOL_CHOICE_SCHEMA, TOOLS_SCHEMA
from quire.gateway.api.parameters import OF_THE_CALL, Body, anything, read_answer_schema
from quire.gateway.errors.api_errors import invalid, refused
from quire.gateway.output.given_grammar import GivenGrammar
from quire.shared.config.schema_parts import ANY_OBJECT, Schema, any_of, array, closed, with_nulls
from quire.shared.config.validators import Check, Integer, Number, OneOf, Text, Texts
from quire.shared.protocol.sampling_params import (
    MAX_OUTPUT_TOKENS,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    PARAMETERS,
    Converted,
    Parameter,
)

EFFORTS = ("low", "medium", "high", "xhigh", "max")
CLEAR_THINKING = "clear_thinking_20251015"
MAX_USER_LENGTH = 512
# `keep` of CLEAR_THINKING if it is "all".
ALL = MAX_MESSAGES


# The check of `budget_tokens` by the type of `thinking`; None for a type without it.
BUDGETS = {"enabled": Integer(1, MAX_OUTPUT_TOKENS), "adaptive": Integer(0, MAX_OUTPUT_TOKENS), "disabled": None}
DISPLAYS = ("summarized", "omitted")


class Thinking:
    """The parameter `thinking`; the final form is a dict with `enabled`, `budget_tokens` and `is_hidden`."""

    schema = any_of(
        *(
            with_nulls(
                {"type": {"const": kind}}, {"budget_tokens": budget, "display": OneOf(DISPLAYS)} if budget else {}
            )
            for kind, budget in BUDGETS.items()
        )
    )

    def __call__(self, name: str, value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            raise invalid(name, 'an object like {"type": "enabled"}', value)
        kind = value.get("type")
        if type(kind) is not str or kind not in BUDGETS:
            raise invalid(f"{name}.type", "enabled, adaptive or disabled", kind)
        check = BUDGETS[kind]
        only_known(name, value, ("type", "budget_tokens", "display") if check else ("type",))
        budget, display = value.get("budget_tokens"), value.get("display")
        if budget is not None and check is not None:
            check(f"{name}.budget_tokens", budget)
        if display is not None and display not in DISPLAYS:
            raise invalid(f"{name}.display", " or ".join(DISPLAYS), display)
        return {
            "enabled": kind != "disabled",
            "budget_tokens": budget if kind == "enabled" else None,
            "is_hidden": display == "omitted",
        }

    def __str__(self) -> str:
        return "an object with `type`: `enabled`, `adaptive` or `disabled`"


class OutputFormat:
    """A format of answers; the final form is the grammar of its JSON schema."""

    schema = with_nulls({"type": {"const": "json_schema"}, "schema": ANY_OBJECT})

    def __call__(self, name: str, value: Any) -> GivenGrammar:
        if type(value) is not dict:
            raise invalid(name, "an object", value)
        if value.get("type") != "json_schema":
            raise invalid(f"{name}.type", "json_schema", value.get("type"))
        only_known(name, value, self.schema["properties"])
        return read_answer_schema(f"{name}.schema", value.get("schema"))

    def __str__(self) -> str:
        return "an object with `type` `json_schema` and `schema`"


@dataclass(frozen=True, slots=True)
class Options:
    """An object whose keys have these checks, and may be absent; the final form has the keys that are given."""

    checks: Mapping[str, Check[Any]]

    @property
    def schema(self) -> Schema:
        return with_nulls({}, self.checks)

    def __call__(self, name: str, value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            raise invalid(name, "an object", value)
        given = {}
        for key, item in value.items():
            if item is not None:
                if key not in self.checks:
                    raise unknown_key(name, key)
                given[key] = self.checks[key](f"{name}.{key}", item)
        return given

    def __str__(self) -> str:
        return f"an object with {' and '.join(f'`{key}`' for key in self.checks)}"


_TURNS = Integer(1, ALL)
_KEEP = any_of(
    {"const": "all"},
    closed({"type": {"const": "all"}}),
    closed({"type": {"const": "thinking_turns"}, "value": _TURNS}),
)
# What `context_management` accepts.
_EDITS = with_nulls({}, {"edits": array(with_nulls({"type": {"const": CLEAR_THINKING}}, {"keep": _KEEP}))})


def context_management(name: str, value: Any) -> int:
    """Return the number of assistant messages that keep their thinking; ALL if all do. Raises InvalidRequest."""
    if type(value) is not dict:
        raise invalid(name, "an object with edits", value)
    only_known(name, value, ("edits",))
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
        only_known(where, edit, ("type", "keep"))
        kept = min(kept, _kept_turns(f"{where}.keep", edit.get("keep")))
    return kept


def cache_control(name: str, value: Any) -> bool:
    """Return True if a marker for the prompt cache is correct. Raises InvalidRequest."""
    check_cache_control(name, value)
    return True


def _kept_turns(name: str, keep: Any) -> int:
    if keep is None:  # the default of the Messages API
        return 1
    if keep == "all" or keep == {"type": "all"}:
        return ALL
    if type(keep) is not dict or keep.get("type") != "thinking_turns" or keep.keys() - {"type", "value"}:
        raise invalid(name, '"all" or an object like {"type": "thinking_turns", "value": 2}', keep)
    return _TURNS(f"{name}.value", keep.get("value"))


_OF_THE_PROMPT: dict[str, Parameter] = {
    "model": OF_THE_CALL["model"],
    "messages": Parameter(
        read=anything,
        required=True,
        kind=f"array of 1 to {MAX_MESSAGES:,} messages",
        schema=MESSAGES_SCHEMA,
        help="each has `role` (`user`, `assistant`, `system`) and `content`, a string or [blocks](#blocks). If the "
        "last one is of the assistant, the answer continues it",
    ),
    "system": Parameter(
        read=anything,
        kind="string or array of text blocks",
        schema=SYSTEM_SCHEMA,
        help="the system prompt",
    ),
    "tools": Parameter(
        read=anything,
        kind="array of tools",
        schema=TOOLS_SCHEMA,
        help="see [tools of a message](#tools-of-a-message)",
    ),
    "tool_choice": Parameter(
        read=anything,
        kind="object with `type`: `auto`, `any`, `tool` or `none`",
        schema=TOOL_CHOICE_SCHEMA,
        help="`tool` has a `name`. `disable_parallel_tool_use` allows one tool call at most",
    ),
    "thinking": Parameter(
        read=Thinking(),
        help="switches the reasoning on or off, if the chat template can; by default the template decides. "
        "After `budget_tokens` tokens of reasoning the model has to end it and to answer; they reach the template as "
        "`thinking_budget`, too. `display` `omitted` leaves the text out of the answer; `summarized` shows all of it",
    ),
    "output_config": Parameter(
        read=Options({"effort": OneOf(EFFORTS), "format": OutputFormat()}),
        help=f"`effort` ({', '.join(f'`{effort}`' for effort in EFFORTS)}) reaches the chat template as "
        '`reasoning_effort`; the last two count as `high`. `format` is `{"type": "json_schema", "schema": ...}`: the '
        "answer is "
        "[JSON that follows the schema](#structured-output)",
    ),
    "output_format": Parameter(
        read=OutputFormat(),
        default=(),
        help="the earlier name of `output_config.format`",
    ),
    "context_management": Parameter(
        read=context_management,
        kind="object with `edits`",
        schema=_EDITS,
        help=f"`{CLEAR_THINKING}` leaves thinking out of the prompt, except in the last assistant messages that have "
        "any (`keep`). No other edits",
    ),
    "cache_control": Parameter(
        read=cache_control,
        kind='object like `{"type": "ephemeral"}`',
        schema=CACHE_CONTROL,
        help="pins the prompt up to the last block for the `ttl` (`5m` or `1h`), as it does in a block or a tool up to "
        "this one; see [cache breakpoints](#cache-breakpoints)",
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
        read=Converted(Options({"user_id": Text(0, MAX_USER_LENGTH)}), lambda given: given.get("user_id", "")),
        default="",
        help=f"`user_id` has at most {MAX_USER_LENGTH} characters; logs have its hash",
    ),
    "service_tier": Parameter(
        read=OneOf(("auto", "standard_only")),
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
# By the name of the body's schema in /openapi.json.
BODIES = {
    "MessageRequest": Body(CREATE | WITHOUT_EFFECT, REFUSED, WITHOUT_EFFECT.keys()),
    "MessageCountRequest": Body(COUNT_TOKENS | WITHOUT_EFFECT, REFUSED, WITHOUT_EFFECT.keys()),
}
