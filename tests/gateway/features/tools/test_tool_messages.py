"""Conversations with tools for a chat template that does not know them."""

from __future__ import annotations

from typing import Any

from quire.gateway.features.tools.formats import FALLBACK
from quire.gateway.features.tools.tool_messages import as_plain_messages


def call(number: int, name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_calls_and_results_become_plain_messages() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "2 + 3, and the time?"},
        {"role": "assistant", "content": None, "tool_calls": [call(1, "add", a=2, b=3), call(2, "time")]},
        {"role": "tool", "tool_call_id": "call_1", "content": "5"},
        {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "noon"}]},
        {"role": "assistant", "content": "5, at noon."},
    ]
    assert as_plain_messages(messages, FALLBACK.written, "You have tools.") == [
        {"role": "system", "content": "You have tools."},
        {"role": "user", "content": "2 + 3, and the time?"},
        {
            "role": "assistant",
            "content": '{"tool": "add", "arguments": {"a": 2, "b": 3}}\n{"tool": "time", "arguments": {}}',
        },
        {"role": "user", "content": "Result of add:\n5\n\nResult of time:\nnoon"},
        {"role": "assistant", "content": "5, at noon."},
    ]


def test_the_result_of_an_unknown_call_is_that_of_a_tool() -> None:
    messages = [{"role": "tool", "tool_call_id": "x", "content": "5"}]
    assert as_plain_messages(messages, FALLBACK.written, "") == [{"role": "user", "content": "Result of the tool:\n5"}]
