"""Blocks of the Messages API become messages of a chat template, or are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.gateway.api.messages.content import (
    BILLING_LABEL,
    ERROR_MARK,
    check_cache_control,
    clear_thinking,
    read_messages,
    read_system,
)
from quire.gateway.api.messages.signature import sign
from quire.gateway.errors.api_errors import ApiError

TEXT = {"type": "text", "text": "Hello"}
CACHED = {"type": "ephemeral", "ttl": "1h"}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def tool_use(id_: str = "toolu_1", name: str = "read", **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": id_, "name": name, "input": arguments}


def tool_result(content: Any = "done", id_: str = "toolu_1", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id_, "content": content, **more}


def test_a_string_and_one_text_block_are_the_same() -> None:
    expected = [{"role": "user", "content": "Hello"}]
    assert read_messages([{"role": "user", "content": "Hello"}], []) == expected
    assert read_messages([user({**TEXT, "cache_control": CACHED})], []) == expected


def test_neighbouring_messages_of_one_speaker_are_one_message() -> None:
    messages = [user(TEXT), {"role": "user", "content": "again"}, assistant(TEXT), assistant(tool_use(path="x"))]
    assert read_messages(messages, []) == [
        {"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": "again"}]},
        {
            "role": "assistant",
            "content": "Hello",
            "tool_calls": [
                {"id": "toolu_1", "type": "function", "function": {"name": "read", "arguments": {"path": "x"}}}
            ],
        },
    ]


def test_tool_results_are_messages_of_their_own_in_the_order_of_the_blocks() -> None:
    messages = [
        user(TEXT),
        assistant(tool_use("a", "read"), tool_use("b", "list")),
        user(
            tool_result("one", "a"),
            tool_result([TEXT, {"type": "text", "text": "two"}], "b"),
            {"type": "text", "text": "go on"},
        ),
    ]
    assert read_messages(messages, [])[2:] == [
        {"role": "tool", "tool_call_id": "a", "name": "read", "content": "one"},
        {"role": "tool", "tool_call_id": "b", "name": "list", "content": "Hello\ntwo"},
        {"role": "user", "content": "go on"},
    ]


@pytest.mark.parametrize(
    ("block", "content"),
    [
        (tool_result(None), ""),
        (tool_result([]), ""),
        (tool_result("no such file", is_error=True), ERROR_MARK + "no such file"),
        (tool_result("fine", is_error=False), "fine"),
        (tool_result([{"type": "tool_reference", "tool_name": "list"}]), "list"),
    ],
)
def test_the_content_of_a_tool_result(block: dict[str, Any], content: str) -> None:
    assert read_messages([user(block)], []) == [{"role": "tool", "tool_call_id": "toolu_1", "content": content}]


def test_thinking_is_the_reasoning_of_a_message() -> None:
    no_effect: list[str] = []
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "sha256-0"}
    redacted = {"type": "redacted_thinking", "data": "secret"}
    [message] = read_messages([assistant(thought, {**thought, "thinking": "Yes."}, redacted, TEXT)], no_effect)
    assert message == {"role": "assistant", "content": "Hello", "reasoning_content": "Hm.\nYes."}
    assert no_effect == ["redacted_thinking"]


def test_an_assistant_message_without_anything_is_left_out() -> None:
    assert read_messages([user(TEXT), assistant()], []) == [{"role": "user", "content": "Hello"}]
    assert len(read_messages([user(TEXT), assistant(tool_use())], [])) == 2


def test_old_thinking_is_cleared() -> None:
    thought = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    turns = [assistant(thought, TEXT), user(TEXT), assistant(TEXT), user(TEXT), assistant(thought, TEXT)]
    messages = read_messages(turns, [])
    assert ["reasoning_content" in message for message in clear_thinking(messages, 1)] == [False] * 4 + [True]
    assert clear_thinking(messages, 2) == messages
    assert all("reasoning_content" not in message for message in clear_thinking(messages, 0))


def test_the_system_prompt_has_no_billing_label() -> None:
    no_effect: list[str] = []
    label = {"type": "text", "text": f"{BILLING_LABEL} cc_version=2.1; cch=fa690;"}
    assert read_system([label, TEXT], no_effect) == [{"role": "system", "content": "Hello"}]
    assert no_effect == ["x-anthropic-billing-header"]
    assert read_system([label], []) == []
    assert read_system("Be brief.", []) == [{"role": "system", "content": "Be brief."}]
    assert read_system("", []) == []


def test_a_system_message_inside_the_conversation_stays_in_its_place() -> None:
    messages = read_messages([user(TEXT), {"role": "system", "content": [TEXT]}], [])
    assert messages[1] == {"role": "system", "content": "Hello"}


def test_the_text_of_hidden_thinking_is_in_its_signature() -> None:
    thought = {"type": "thinking", "thinking": "", "signature": sign("Hm.", True)}
    [message] = read_messages([assistant(thought, TEXT)], [])
    assert message["reasoning_content"] == "Hm."


def test_fields_that_the_sdk_sends_back_are_accepted() -> None:
    no_effect: list[str] = []
    blocks = [{**TEXT, "citations": None, "parsed_output": None}, {**tool_use(), "caller": {"type": "direct"}}]
    read_messages([user(TEXT), assistant(*blocks)], no_effect)
    assert no_effect == []
    read_messages([assistant({**TEXT, "citations": [{}]})], no_effect)
    assert no_effect == ["citations"]


REFUSED: dict[str, tuple[Any, str]] = {
    "none": ([], "messages"),
    "not an array": ("Hello", "messages"),
    "a string inside": ([user(TEXT), "Hello"], "messages[1]"),
    "unknown role": ([{"role": "tool", "content": "x"}], "messages[0].role"),
    "no content": ([{"role": "user"}], "messages[0].content"),
    "unknown key": ([{"role": "user", "content": "x", "name": "me"}], "messages[0].name"),
    "a block that is a string": ([user("x")], "messages[0].content[0]"),
    "a block without type": ([user({"text": "x"})], "messages[0].content[0].type"),
    "a block whose type is no string": ([user({"type": ["text"]})], "messages[0].content[0].type"),
    "an image": ([user({"type": "image", "source": {}})], "messages[0].content[0].type"),
    "a document": ([user({"type": "document", "source": {}})], "messages[0].content[0].type"),
    "an image in a result": ([user(tool_result([{"type": "image"}]))], "messages[0].content[0].content[0].type"),
    "a result in a result": ([user(tool_result([tool_result()]))], "messages[0].content[0].content[0].type"),
    "a tool use of the user": ([user(tool_use())], "messages[0].content[0].type"),
    "a result of the assistant": ([assistant(tool_result())], "messages[0].content[0].type"),
    "thinking of the user": ([user({"type": "thinking", "thinking": "x"})], "messages[0].content[0].type"),
    "a tool in the system": ([{"role": "system", "content": [tool_use()]}], "messages[0].content[0].type"),
    "text of another type": ([user({"type": "text", "text": 1})], "messages[0].content[0].text"),
    "unknown key of a block": ([user({**TEXT, "color": "red"})], "messages[0].content[0].color"),
    "unknown cache control": (
        [user({**TEXT, "cache_control": {"type": "forever"}})],
        "messages[0].content[0].cache_control.type",
    ),
    "thinking of another type": ([assistant({"type": "thinking", "thinking": 1})], "messages[0].content[0].thinking"),
    "a signature of another type": (
        [assistant({"type": "thinking", "thinking": "x", "signature": 1})],
        "messages[0].content[0].signature",
    ),
    "a damaged signature": (
        [assistant({"type": "thinking", "thinking": "", "signature": "base64-*"})],
        "messages[0].content[0].signature",
    ),
    "no id": ([assistant({**tool_use(), "id": ""})], "messages[0].content[0].id"),
    "no name": ([assistant({**tool_use(), "name": None})], "messages[0].content[0].name"),
    "an input of another type": ([assistant({**tool_use(), "input": "{}"})], "messages[0].content[0].input"),
    "another caller": ([assistant({**tool_use(), "caller": {"type": "x"}})], "messages[0].content[0].caller"),
    "no id of the result": ([user(tool_result(id_=""))], "messages[0].content[0].tool_use_id"),
    "is_error of another type": ([user(tool_result(is_error=1))], "messages[0].content[0].is_error"),
}


@pytest.mark.parametrize(("messages", "param"), REFUSED.values(), ids=REFUSED)
def test_messages_that_are_refused(messages: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_messages(messages, [])
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ("ephemeral", "cache_control"),
        ({"type": "ephemeral", "ttl": "1d"}, "cache_control.ttl"),
        ({"type": "ephemeral", "scope": 1}, "cache_control.scope"),
        ({"type": "ephemeral", "size": 1}, "cache_control.size"),
    ],
)
def test_cache_markers_that_are_refused(value: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        check_cache_control("cache_control", value)
    assert caught.value.param == param


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["type", "text", "content", "role", "id", "x"]), inner, max_size=4)
    ),
    max_leaves=12,
)
blocks = st.sampled_from([TEXT, tool_use(), tool_result(), {"type": "thinking", "thinking": "x"}, {"type": "image"}])
messages = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system", "x"]),
        "content": st.lists(blocks | values, max_size=4) | values,
    }
)


@given(st.lists(messages | values, max_size=4) | values)
def test_any_messages_are_accepted_or_refused_by_name(value: Any) -> None:
    for read in (read_messages, read_system):
        refusal: ApiError | None = None
        found: list[Any] = []
        try:
            found = read(value, [])
        except ApiError as error:
            refusal = error
        assert refusal is None or refusal.param is not None
        assert all(message["role"] in ("system", "user", "assistant", "tool") for message in found)
