from __future__ import annotations

import json
from typing import Any

import pytest

from quire.shared.text.chat_template import ChatTemplate
from quire.shared.text.tool_turns import ToolTurns, arguments_of, arguments_text, probe_tool_turns
from tests.support.tool_templates import TOOL_TEMPLATES, tool_template

FORMS = {
    "any form": ToolTurns(),
    "no null": ToolTurns(empty_content=""),
    "null is written as None": ToolTurns(empty_content=""),
    "nine characters": ToolTurns(short_ids=True),
    "name of the tool": ToolTurns(),
    "arguments as text": ToolTurns(text_arguments=True),
    "arguments as they are": ToolTurns(text_arguments=True),
    "thinking": ToolTurns(reasoning_key="thinking"),
    "one call": ToolTurns(is_parallel=False),
    "only the first call": ToolTurns(is_parallel=False),
    "no null, nine characters, arguments as text": ToolTurns(empty_content="", short_ids=True, text_arguments=True),
}
ID, OTHER_ID = "call_0123456789abcdef01234567", "call_76543210fedcba9876543210"
USER = {"role": "user", "content": "How is the weather?"}


def call(call_id: str, city: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "weather", "arguments": {"city": city}}}


def result(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def test_every_rule_has_a_template() -> None:
    assert FORMS.keys() == TOOL_TEMPLATES.keys()


@pytest.mark.parametrize("rule", TOOL_TEMPLATES)
def test_a_template_gets_tool_calls_in_the_form_that_it_takes(rule: str) -> None:
    template = ChatTemplate(TOOL_TEMPLATES[rule], {})
    assert template.tool_turns == FORMS[rule]
    asked = {"role": "assistant", "content": None, "tool_calls": [call(ID, "Bönn"), call(OTHER_ID, "Rome")]}
    messages = [USER, {**asked, "reasoning_content": "WHY"}, result(ID, "SUN"), result(OTHER_ID, "RAIN")]
    text = template.render(messages, tools=[{"type": "function"}])
    assert '{"city": "Bönn"}' in text
    assert '{"city": "Rome"}' in text
    assert "None" not in text
    assert ("WHY" in text) == (rule == "thinking")
    at = [text.index(word) for word in (("Bönn", "SUN", "Rome", "RAIN") if "call" in rule else ("Bönn", "Rome", "SUN"))]
    assert at == sorted(at)
    assert messages[1]["tool_calls"] == asked["tool_calls"], "the conversation itself stays as it was"


def test_an_empty_text_and_null_are_the_same_for_a_message_with_calls() -> None:
    for empty in (None, "", []):
        message = {"role": "assistant", "content": empty, "tool_calls": [call(ID, "Bonn")]}
        assert ToolTurns().written([message])[0]["content"] is None
        assert ToolTurns(empty_content="").written([message])[0]["content"] == ""
    said = {"role": "assistant", "content": "Let me see.", "tool_calls": [call(ID, "Bonn")]}
    assert ToolTurns().written([said])[0]["content"] == "Let me see."


def test_a_short_id_is_the_same_in_the_call_and_in_its_result() -> None:
    asked = {"role": "assistant", "content": None, "tool_calls": [call(ID, "Bonn"), call("Ab0123456", "Rome")]}
    turn, first, second = ToolTurns(short_ids=True).written([asked, result(ID, "SUN"), result("Ab0123456", "RAIN")])
    ids = [one["id"] for one in turn["tool_calls"]]
    assert ids == [first["tool_call_id"], second["tool_call_id"]]
    assert [len(one) for one in ids] == [9, 9]
    assert ids[1] == "Ab0123456"


def test_a_result_has_the_name_of_its_tool() -> None:
    asked = {"role": "assistant", "content": None, "tool_calls": [call(ID, "Bonn")]}
    named = {**result(ID, "SUN"), "name": "own"}
    found = ToolTurns().written([asked, result(ID, "SUN"), named, result("unknown", "x")])
    assert [one.get("name") for one in found] == [None, "weather", "own", None]


def test_parallel_calls_become_turns_with_the_text_before_the_first() -> None:
    asked = {
        "role": "assistant",
        "content": "Let me see.",
        "reasoning_content": "WHY",
        "tool_calls": [call(ID, "Bonn"), call(OTHER_ID, "Rome")],
    }
    last = {"role": "user", "content": "Thanks"}
    messages = [USER, asked, result(OTHER_ID, "RAIN"), result(ID, "SUN"), result("unknown", "x"), last]
    found = ToolTurns(is_parallel=False).written(messages)
    assert [one["role"] for one in found] == ["user", "assistant", "tool", "assistant", "tool", "tool", "user"]
    assert [one["content"] for one in found] == [USER["content"], "Let me see.", "SUN", None, "RAIN", "x", "Thanks"]
    assert [one["tool_calls"][0]["id"] for one in found if one["role"] == "assistant"] == [ID, OTHER_ID]
    assert [one.get("reasoning_content") for one in found if one["role"] == "assistant"] == ["WHY", None]


def test_a_template_that_shows_no_calls_gets_the_first_form_that_it_takes() -> None:
    shows_no_calls = tool_template(content="'' + m.content").replace("m.tool_calls or []", "[]")
    assert ChatTemplate(shows_no_calls, {}).tool_turns == ToolTurns(empty_content="")
    assert probe_tool_turns(lambda messages, tools: None) == ToolTurns()
    assert ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {}).tool_turns == ToolTurns()


@pytest.mark.parametrize("text", ['{"a": "b', "[1]", "5", "null", "not json", "[" * 100_000])
def test_arguments_that_are_no_object_travel_as_text(text: str) -> None:
    assert arguments_of(text) == {"INVALID_JSON": text}
    assert arguments_text(arguments_of(text)) == text
    turn = {"role": "assistant", "content": None, "tool_calls": [call(ID, "Bonn")]}
    turn["tool_calls"][0]["function"]["arguments"] = arguments_of(text)
    [as_text], [as_object] = ToolTurns(text_arguments=True).written([turn]), ToolTurns().written([turn])
    assert as_text["tool_calls"][0]["function"]["arguments"] == text
    assert as_object["tool_calls"][0]["function"]["arguments"] == {"INVALID_JSON": text}


def test_arguments_that_are_an_object_stay_one() -> None:
    assert arguments_of(" ") == {}
    assert arguments_of('{"a": "ö"}') == {"a": "ö"}
    assert arguments_text({"a": "ö"}) == '{"a": "ö"}'
    for alike in ({"INVALID_JSON": 1}, {"INVALID_JSON": "x", "a": 1}):
        assert json.loads(arguments_text(alike)) == alike
