"""Input items: their form, their refusals, and the messages that they become."""

from __future__ import annotations

from typing import Any

import pytest

from quire.gateway.api.responses.items import droppable, messages_of, read_items, without_oldest
from quire.gateway.errors.api_errors import InvalidRequest

CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "2"}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def messages(*items: Any, instructions: str = "") -> list[Any]:
    return list(messages_of(instructions, read_items("input", list(items))))


def test_a_string_is_one_message() -> None:
    [item] = read_items("input", "Hello")
    assert item["id"].startswith("msg_")
    assert (item["role"], item["content"]) == ("user", [{"type": "input_text", "text": "Hello"}])
    assert read_items("input", "") == []


def test_items_keep_their_ids_and_get_the_form_of_answers() -> None:
    given: list[dict[str, Any]] = [
        {"type": "message", "id": "msg_1", "role": "assistant", "content": "A", "phase": "commentary"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
        {**CALL, "id": "fc_1", "status": "completed"},
        {**OUTPUT, "output": [{"type": "input_text", "text": "2"}]},
    ]
    message, reasoning, call, output = read_items("input", given)
    part = {"type": "output_text", "text": "A", "annotations": [], "logprobs": []}
    assert message == {**given[0], "status": "completed", "content": [part]}
    assert reasoning == {**given[1], "status": "completed"}
    assert call == given[2]
    assert output["id"].startswith("fco_")
    # Read again, as a client sends back what it listed.
    assert read_items("input", [message, reasoning, call, output]) == [message, reasoning, call, output]


@pytest.mark.parametrize(
    ("item", "param"),
    [
        (5, "input[0]"),
        ({"type": "web_search", "id": "ws_1"}, "input[0].type"),
        ({"type": 5}, "input[0].type"),
        ({}, "input[0].type"),
        ({"role": "tool", "content": "x"}, "input[0].role"),
        ({"role": "user"}, "input[0].content"),
        ({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}, "input[0].content[0].type"),
        ({"role": "user", "content": [{"type": "input_file"}]}, "input[0].content[0].type"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input[0].content[0].text"),
        ({"role": "user", "content": [{"type": "input_text", "text": "x", "extra": 1}]}, "input[0].content[0].extra"),
        ({"role": "user", "content": "x", "extra": 1}, "input[0].extra"),
        ({"role": "user", "content": "x", "status": "new"}, "input[0].status"),
        ({"role": "user", "content": "x", "id": ""}, "input[0].id"),
        ({**CALL, "arguments": {}}, "input[0].arguments"),
        ({**CALL, "call_id": None}, "input[0].call_id"),
        ({**CALL, "name": "a b"}, "input[0].name"),
        ({**CALL, "namespace": "a b"}, "input[0].namespace"),
        ({**CALL, "caller": "direct"}, "input[0].caller"),
        ({**OUTPUT, "output": 5}, "input[0].output"),
        ({"type": "reasoning", "content": "x"}, "input[0].content"),
        ({"type": "reasoning", "summary": [{"type": "other", "text": "x"}]}, "input[0].summary[0]"),
        ({"type": "item_reference"}, "input[0].id"),
        ({"type": "compaction_trigger"}, "input[0].type"),
        ({"type": "additional_tools", "role": "user", "tools": []}, "input[0].role"),
        ({"type": "additional_tools", "role": "developer"}, "input[0].tools"),
        ({"type": "additional_tools", "role": "developer", "tools": [{"type": "function"}]}, "input[0].tools[0].name"),
    ],
)
def test_a_wrong_item_is_refused_with_its_place(item: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_items("input", [item])
    assert caught.value.param == param
    assert param in caught.value.message


@pytest.mark.parametrize(
    "kind",
    [
        "custom_tool_call",
        "custom_tool_call_output",
        "web_search_call",
        "new_call",
        "agent_message",
        "compaction",
        "context_compaction",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "mcp_list_tools",
        "program",
        "program_output",
        "tool_search_call",
        "tool_search_output",
    ],
)
def test_items_that_only_other_servers_have_are_left_out(kind: str) -> None:
    skipped: list[tuple[str, str]] = []
    foreign = {"type": kind, "id": "x", "anything": {"a": 1}}
    [item] = read_items("input", [foreign, user("Hi")], skipped)
    assert item["role"] == "user"
    [(name, reason)] = skipped
    assert name == "input[0]"
    assert kind in reason


def test_too_many_items_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="10000"):
        read_items("input", [user("x")] * 10_001)


def test_the_items_of_one_turn_are_one_message() -> None:
    reasoning = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "why"}]}
    text = {"role": "assistant", "content": "Let me see."}
    found = messages(user("a"), reasoning, text, CALL, {**CALL, "call_id": "d"}, OUTPUT, {**OUTPUT, "call_id": "d"})
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    assert found == [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "why",
            "tool_calls": [call, {**call, "id": "d"}],
        },
        {"role": "tool", "content": "2", "tool_call_id": "c"},
        {"role": "tool", "content": "2", "tool_call_id": "d"},
    ]
    assert messages(reasoning, CALL)[0] == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "why",
        "tool_calls": [call],
    }


def test_reasoning_that_only_another_server_can_read_adds_nothing() -> None:
    hidden = {"type": "reasoning", "summary": [], "encrypted_content": "x"}
    assert messages(user("a"), hidden, CALL)[1]["content"] is None
    assert "reasoning_content" not in messages(user("a"), hidden, CALL)[1]


def test_messages_of_the_system_at_the_beginning_become_one() -> None:
    developer = {"role": "developer", "content": "dev"}
    system = {"role": "system", "content": [{"type": "input_text", "text": "sys"}]}
    assert messages(developer, system, user("a"), developer, instructions="Be.") == [
        {"role": "system", "content": "Be.\n\ndev\n\nsys"},
        {"role": "user", "content": "a"},
        {"role": "system", "content": "dev"},
    ]


@pytest.mark.parametrize("instructions", ["", "Be."])
def test_without_a_message_the_user_says_nothing(instructions: str) -> None:
    assert messages(instructions=instructions)[-1] == {"role": "user", "content": ""}


def test_an_output_without_its_call_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="call_id") as caught:
        messages(user("a"), OUTPUT)
    assert caught.value.param == "input"


@pytest.mark.parametrize("status", ["completed", "incomplete", None])
@pytest.mark.parametrize("arguments", ['{"a": ', "[]", "not json"])
def test_a_function_call_without_whole_arguments_is_kept_with_its_output(status: str | None, arguments: str) -> None:
    """LangChain sends back the call in which an answer ended, without its status."""
    cut = {**CALL, "arguments": arguments, "status": status}
    _, asked, result = messages(user("x"), cut, {**OUTPUT, "output": "not run"})
    assert asked["tool_calls"][0]["function"] == {"name": "f", "arguments": {"INVALID_JSON": arguments}}
    assert result == {"role": "tool", "content": "not run", "tool_call_id": "c"}


def test_the_model_knows_a_function_of_a_namespace_by_a_flat_name() -> None:
    caller = {"type": "program", "caller_id": "c1"}
    call = {**CALL, "namespace": "mcp__w", "caller": caller}
    output = {**OUTPUT, "namespace": "mcp__w", "name": "f", "caller": caller}
    [item, kept] = read_items("input", [call, output])
    assert (item["namespace"], item["name"], kept["namespace"]) == ("mcp__w", "f", "mcp__w")
    assert messages(call)[0]["tool_calls"][0]["function"]["name"] == "mcp__w__f"


def test_additional_tools_are_no_message() -> None:
    tools = {"type": "additional_tools", "role": "developer", "tools": [{"type": "function", "name": "f"}]}
    assert messages(tools, {"role": "developer", "content": "d"}, user("x"), instructions="i") == [
        {"role": "system", "content": "i\n\nd"},
        user("x"),
    ]
    [item] = read_items("input", [tools])
    assert item["id"].startswith("at_")
    assert read_items("input", [item]) == [item]


def test_the_oldest_items_are_dropped_with_the_outputs_of_dropped_calls() -> None:
    items = read_items("input", [{"role": "system", "content": "s"}, user("a"), CALL, OUTPUT, user("b"), user("c")])
    assert droppable(items) == 4
    left = [
        [item.get("call_id", item.get("content")) for item in without_oldest(items, count)][1:] for count in range(5)
    ]
    a, b, c = [items[index]["content"] for index in (1, 4, 5)]
    assert left == [[a, "c", "c", b, c], ["c", "c", b, c], [b, c], [b, c], [c]]
    assert droppable([]) == 0
