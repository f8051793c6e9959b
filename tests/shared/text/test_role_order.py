from __future__ import annotations

import re
from typing import Any

import pytest

from quire.shared.text.chat_template import ChatTemplate
from quire.shared.text.role_order import SPEAKERS, RoleOrder
from tests.support.chat_templates import STRICT_TEMPLATES, TEMPLATES, TOKENS

ALL_STRICT = {**STRICT_TEMPLATES, "llama2": TEMPLATES["llama2"], "gemma": TEMPLATES["gemma"]}
# Each letter is a message of one role. The order in which Codex, Claude Code and opencode send them, among others.
ORDERS = ["suu", "ssu", "su", "uasu", "us", "usau", "uasuasu", "uusaau", "au", "sau", "sauuaasu", "uauas"]
ROLES = {"s": "system", "u": "user", "a": "assistant"}


def conversation(order: str) -> list[dict[str, Any]]:
    return [{"role": ROLES[letter], "content": f"text{at}"} for at, letter in enumerate(order)]


def order_of(source: str) -> RoleOrder:
    return ChatTemplate(source, TOKENS).role_order


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("style", ALL_STRICT)
def test_a_strict_template_shows_every_text_in_order(style: str, order: str) -> None:
    template = ChatTemplate(ALL_STRICT[style], TOKENS)
    for messages in (conversation(order), [{**m, "content": [_part(m)] * 2} for m in conversation(order)]):
        text = template.render(messages)
        places = [text.index(f"text{at}") for at in range(len(order))]
        assert places == sorted(places)


def _part(message: dict[str, Any]) -> dict[str, str]:
    return {"type": "text", "text": message["content"]}


@pytest.mark.parametrize("style", ALL_STRICT)
def test_what_a_strict_template_holds_reaches_it_unchanged(style: str) -> None:
    order = order_of(ALL_STRICT[style])
    assert order != RoleOrder()
    messages = conversation("uaua" if not order.takes_system else "suaua")
    assert list(order.written(messages)) == messages


@pytest.mark.parametrize("style", sorted(TEMPLATES.keys() - {"llama2", "gemma", "mistral"}))
def test_a_template_that_holds_any_order_gets_the_conversation_itself(style: str) -> None:
    assert order_of(TEMPLATES[style]) == RoleOrder()
    messages = conversation("sauuaasu")
    assert RoleOrder().written(messages) is messages


def test_the_order_of_a_template_is_probed() -> None:
    assert order_of(STRICT_TEMPLATES["system at the head"]) == RoleOrder(
        takes_late_system=False, repeated=SPEAKERS - {"system"}
    )
    alternating = RoleOrder(
        takes_late_system=False, repeated=frozenset(), takes_assistant_first=False, takes_system_alone=False
    )
    assert order_of(STRICT_TEMPLATES["alternating"]) == alternating
    assert order_of(STRICT_TEMPLATES["alternating between tools"]).takes_user_after_tool is False
    assert order_of(STRICT_TEMPLATES["no system"]).takes_system is False
    # A template that fails for another reason says nothing about roles.
    assert order_of("{{ raise_exception('x') }}") == RoleOrder()
    # Late messages that a template leaves out are as good as refused.
    ignoring = "{% for m in messages if m.role != 'system' or loop.first %}{{ m.content }}{% endfor %}"
    assert order_of(ignoring).takes_late_system is False


def test_a_late_system_message_becomes_text_of_the_user_at_its_place() -> None:
    late = {"role": "system", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]}
    messages = [{"role": "user", "content": "Hello", "name": "Ann"}, late, *conversation("asu")]
    found = RoleOrder(takes_late_system=False).written(messages)
    assert found == [
        {"role": "user", "name": "Ann", "content": "Hello\n\n<system>\nBe\nbrief.\n</system>"},
        {"role": "assistant", "content": "text0"},
        {"role": "user", "content": "<system>\ntext1\n</system>\n\ntext2"},
    ]
    assert messages[1] is late


def test_neighbours_are_joined_with_calls_and_reasoning() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}
    first = {"role": "assistant", "content": "I look.", "reasoning_content": "Hm."}
    second = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "So."}
    [joined] = RoleOrder(repeated=frozenset()).written([first, second])
    assert joined == {
        "role": "assistant",
        "content": "I look.",
        "tool_calls": [call],
        "reasoning_content": "Hm.\n\nSo.",
    }
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    [joined] = RoleOrder(repeated=frozenset()).written([{"role": "user", "content": parts}, *conversation("u")])
    assert joined["content"] == [*parts, {"type": "text", "text": "\n\ntext0"}]


@pytest.mark.parametrize("rest", ["u", "uau", "su", "asu"])
def test_a_question_right_after_a_result(rest: str) -> None:
    """Mistral's templates do not count tool calls and results, and refuse two questions around them."""
    template = ChatTemplate(STRICT_TEMPLATES["alternating between tools"], {})
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    turn = [
        {"role": "user", "content": "question"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "result"},
    ]
    for head in (turn, turn[:2]):
        text = template.render([*head, *conversation(rest)], tools=[{"type": "function"}])
        roles = re.findall(r"<\|im_start\|>(\w+)", text)
        assert [text.index(f"text{at}") for at in range(len(rest))] == sorted(
            text.index(f"text{at}") for at in range(len(rest))
        )
        after = roles[len(head) :]
        assert after[0] == "assistant", after


def test_a_gap_has_a_text_where_the_template_refuses_a_message_without_one() -> None:
    source = ALL_STRICT["alternating"]
    refusing = (
        "{% for message in messages %}{% if not message.content %}{{ raise_exception('no text') }}{% endif %}"
        "{% endfor %}" + source
    )
    assert order_of(source).filler == ""
    assert order_of(refusing).filler == "..."
    assert "text0" in ChatTemplate(refusing, TOKENS).render(conversation("au"))


@pytest.mark.parametrize("style", ["llama2", "mistral", "alternating"])
def test_a_conversation_of_the_system_alone_is_shown(style: str) -> None:
    template = ChatTemplate({**ALL_STRICT, **TEMPLATES}[style], TOKENS)
    assert "text0" in template.render(conversation("s"))
    assert "text1" in template.render(conversation("ss"))
