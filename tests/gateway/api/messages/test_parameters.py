"""The parameters of the Messages API, one by one."""

from __future__ import annotations

from typing import Any

import pytest

from quire.gateway.api.messages.parameters import ALL, COUNT_TOKENS, CREATE, REFUSED, WITHOUT_EFFECT
from quire.gateway.errors.api_errors import ApiError
from quire.shared.validators import InvalidValue


def read(name: str, value: Any) -> Any:
    return CREATE[name].read(name, value)


ACCEPTED: dict[str, tuple[str, Any, Any]] = {
    "thinking on": (
        "thinking",
        {"type": "enabled", "budget_tokens": 1024},
        {"enabled": True, "budget_tokens": 1024, "is_hidden": False},
    ),
    "thinking on without a budget": (
        "thinking",
        {"type": "enabled", "display": "omitted"},
        {"enabled": True, "budget_tokens": None, "is_hidden": True},
    ),
    "adaptive thinking with the budget that an agent sends": (
        "thinking",
        {"type": "adaptive", "budget_tokens": 0, "display": "summarized"},
        {"enabled": True, "budget_tokens": None, "is_hidden": False},
    ),
    "thinking off": ("thinking", {"type": "disabled"}, {"enabled": False, "budget_tokens": None, "is_hidden": False}),
    "effort": ("output_config", {"effort": "low", "format": None}, {"effort": "low"}),
    "user": ("metadata", {"user_id": "user_1"}, "user_1"),
    "no user": ("metadata", {"user_id": None}, ""),
    "no edits": ("context_management", {"edits": []}, ALL),
    "clear no thinking": ("context_management", {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}, ALL),
    "clear thinking": ("context_management", {"edits": [{"type": "clear_thinking_20251015"}]}, 1),
    "clear thinking but two": (
        "context_management",
        {"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 2}}]},
        2,
    ),
    "no tokens": ("max_tokens", 0, 0),
    "cache control": ("cache_control", {"type": "ephemeral"}, True),
}


@pytest.mark.parametrize(("name", "value", "expected"), ACCEPTED.values(), ids=ACCEPTED)
def test_what_is_accepted(name: str, value: Any, expected: Any) -> None:
    assert read(name, value) == expected


REFUSALS: dict[str, tuple[str, Any, str]] = {
    "thinking of another type": ("thinking", True, "thinking"),
    "unknown thinking": ("thinking", {"type": "between_tools"}, "thinking.type"),
    "a budget of 0": ("thinking", {"type": "enabled", "budget_tokens": 0}, "thinking.budget_tokens"),
    "a budget without thinking": ("thinking", {"type": "disabled", "budget_tokens": 5}, "thinking.budget_tokens"),
    "unknown display": ("thinking", {"type": "enabled", "display": "all"}, "thinking.display"),
    "unknown key of thinking": ("thinking", {"type": "enabled", "depth": 1}, "thinking.depth"),
    "unknown effort": ("output_config", {"effort": "extreme"}, "output_config.effort"),
    "unknown key of output": ("output_config", {"style": "x"}, "output_config.style"),
    "unknown format": ("output_config", {"format": {"type": "xml"}}, "output_config.format.type"),
    "no schema": ("output_config", {"format": {"type": "json_schema"}}, "output_config.format.schema"),
    "no schema of the old name": ("output_format", {"type": "json_schema"}, "output_format.schema"),
    "unknown metadata": ("metadata", {"tag": "x"}, "metadata.tag"),
    "a user that is too long": ("metadata", {"user_id": "x" * 513}, "metadata.user_id"),
    "another edit": (
        "context_management",
        {"edits": [{"type": "clear_tool_uses_20250919"}]},
        "context_management.edits[0].type",
    ),
    "keep nothing": (
        "context_management",
        {"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 0}}]},
        "context_management.edits[0].keep.value",
    ),
    "keep something else": (
        "context_management",
        {"edits": [{"type": "clear_thinking_20251015", "keep": "some"}]},
        "context_management.edits[0].keep",
    ),
    "negative tokens": ("max_tokens", -1, "max_tokens"),
    "a temperature over 1": ("temperature", 1.5, "temperature"),
    "a stop sequence that is a string": ("stop_sequences", "x", "stop_sequences"),
    "an empty stop sequence": ("stop_sequences", [""], "stop_sequences"),
    "a tier of OpenAI": ("service_tier", "flex", "service_tier"),
}


@pytest.mark.parametrize(("name", "value", "param"), REFUSALS.values(), ids=REFUSALS)
def test_what_is_refused(name: str, value: Any, param: str) -> None:
    with pytest.raises((ApiError, InvalidValue)) as caught:
        read(name, value)
    refusal = caught.value
    assert (refusal.name if isinstance(refusal, InvalidValue) else refusal.param) == param  # type: ignore[attr-defined]


def test_a_parameter_is_in_one_list() -> None:
    lists = [set(CREATE), set(WITHOUT_EFFECT), set(REFUSED)]
    assert sum(map(len, lists)) == len(set.union(*lists))
    assert set(COUNT_TOKENS) < set(CREATE)
