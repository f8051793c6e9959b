"""Chat templates: rendering, the order of roles, and turns of tools."""

from __future__ import annotations

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from quire.shared.model.files import ModelError, read_json
from quire.shared.text import chat_template
from quire.shared.text.chat_template import ChatTemplate, TemplateFailure, load_chat_template
from quire.shared.text.role_order import RoleOrder
from quire.shared.text.tokenizer import load_tokenizer, read_special_tokens
from quire.shared.text.tool_arguments import arguments_of, arguments_text
from quire.shared.text.tool_turns import ToolTurns, probe_tool_turns
from tests.support.chat_templates import CHATS, STRICT_TEMPLATES, TEMPLATES, TOKENS, TOOL_TEMPLATES, tool_template
from tests.support.tokenizers import byte_fallback, byte_level

# --- chat template ----------------------------------------------------------------------------------------------------
# Chats render to the text, and to the token ids, that Transformers makes of them - for a dozen styles of template.


PARTS = [{"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]}]


@pytest.fixture(autouse=True)
def fixed_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides see the same day, even at midnight."""

    class Fixed(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Fixed:
            return cls(2026, 3, 4, 5, 6, 7)

    from transformers.utils import chat_template_utils

    monkeypatch.setattr(chat_template, "datetime", Fixed)
    monkeypatch.setattr(chat_template_utils, "datetime", Fixed)


@pytest.fixture(scope="module", params=["byte-level", "byte-fallback"])
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Transformers' own tokenizer, and the folder that it was saved to."""
    from transformers import PreTrainedTokenizerFast

    backend = byte_level() if request.param == "byte-level" else byte_fallback()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **TOKENS)
    folder = tmp_path_factory.mktemp(request.param)
    tokenizer.save_pretrained(folder)
    return tokenizer, folder


@pytest.mark.parametrize("add_generation_prompt", [True, False], ids=["prompt", "no prompt"])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("style", TEMPLATES)
def test_text_and_token_ids_are_those_of_transformers(
    reference: tuple[Any, Path], style: str, chat: str, add_generation_prompt: bool
) -> None:
    tokenizer, folder = reference
    source, messages = TEMPLATES[style], CHATS[chat]
    template = ChatTemplate(source, TOKENS)
    options = {"chat_template": source, "add_generation_prompt": add_generation_prompt}
    rendered = template.render(messages, add_generation_prompt)
    if style == "gemma" and messages[0]["role"] == "system":
        with pytest.raises(Exception, match="System role not supported"):
            tokenizer.apply_chat_template(messages, tokenize=False, **options)
        system, first, *rest = messages
        messages = [{**first, "content": f"{system['content']}\n\n{first['content']}"}, *rest]
    assert rendered == tokenizer.apply_chat_template(messages, tokenize=False, **options)
    ids = load_tokenizer(folder, TOKENS).encode(rendered, add_special_tokens=False).ids
    assert ids == tokenizer.apply_chat_template(messages, return_dict=False, **options)


def test_templates_that_know_only_one_form_of_content_get_that_form() -> None:
    assert ChatTemplate(TEMPLATES["vicuna"], TOKENS).render(PARTS) == "USER: one \ntwo ASSISTANT:"
    only_parts = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
    assert ChatTemplate(only_parts, TOKENS).render(CHATS["system"]) == " Be brief. Hi"


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_no_part_is_lost_in_a_template_that_reads_only_the_first(role: str) -> None:
    chat = [{"role": "user", "content": "Hi"}, {"role": role, "content": PARTS[0]["content"]}]
    for reads_first in (role, "nobody"):
        source = (
            "{% for m in messages %}{% if m.content is string %}{{ m.content }}"
            f"{{% elif m.role == '{reads_first}' %}}{{{{ m.content[0].text }}}}"
            "{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}|{% endfor %}"
        )
        assert ChatTemplate(source, TOKENS).render(chat) == ("Hi|one \ntwo|" if reads_first == role else "Hi|one two|")


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ namespace(__html__='x'.upper) | escape }}",
        "{% set n = namespace() %}{% set n.__html__ = 'x'.upper %}{{ n | escape }}",
    ],
)
def test_templates_run_in_a_sandbox(attack: str) -> None:
    with pytest.raises(TemplateFailure, match=r"unsafe\.$"):
        ChatTemplate(attack, TOKENS).render(CHATS["one turn"])


@pytest.mark.parametrize("method", ["update(messages[0], {'content': 'x'})", "pop(messages[0], 'content')"])
def test_templates_cannot_change_a_conversation(method: str) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    with pytest.raises(TemplateFailure):
        ChatTemplate(f"{{{{ dict.{method} }}}}", TOKENS).render(chat)
    assert chat == [{"role": "user", "content": "Hi"}]


def test_templates_may_make_dictionaries_and_namespaces() -> None:
    source = "{% set n = namespace(self=dict(a=1), b=dict.fromkeys('c')) %}{% set n.d = 2 %}{{ [n.self.a, n.b, n.d] }}"
    assert ChatTemplate(source, TOKENS).render(CHATS["one turn"]) == "[1, {'c': None}, 2]"


def load(folder: Path) -> ChatTemplate | None:
    config = read_json(folder / "tokenizer_config.json")
    return load_chat_template(folder, config, read_special_tokens(folder, config))


def test_places_of_a_template_and_what_wins(tmp_path: Path) -> None:
    def rendered() -> str:
        template = load(tmp_path)
        assert template is not None
        return template.render(CHATS["one turn"])

    assert load(tmp_path) is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "third"}))
    assert rendered() == "third"
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "second"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert rendered() == "second"
    (tmp_path / "chat_template.jinja").write_text("first")
    assert rendered() == "first"


@pytest.mark.parametrize("content", [b"{% for %}", b"\xff"], ids=["not a template", "not UTF-8"])
def test_a_broken_template_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(content)
    with pytest.raises(ModelError, match=r"chat_template\.jinja"):
        load(tmp_path)


def test_calls_with_tools_have_the_template_of_that_name(tmp_path: Path) -> None:
    several = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with {{ tools }}"}, "noise"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    template = load(tmp_path)
    assert template is not None
    assert (template.source, template.with_tools.source) == ("plain", "with {{ tools }}")
    # A file of its own has precedence.
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("other {{ tools }}")
    template = load(tmp_path)
    assert template is not None
    assert (template.source, template.with_tools.source) == ("plain", "other {{ tools }}")


def test_a_conversation_with_results_of_tools_keeps_the_template_for_tools() -> None:
    template = ChatTemplate("plain", {})
    template.with_tools = ChatTemplate("{{ tools }}{{ thinking }}", {})
    asked = {"role": "user", "content": "x"}
    assert template.chosen([asked], False) is template
    assert template.chosen([asked], True) is template.with_tools
    assert template.chosen([asked, {"role": "tool", "content": "y"}], False) is template.with_tools
    assert template.chosen([{"role": "assistant", "tool_calls": [{}]}, asked], False) is template.with_tools
    assert template.takes_variable("thinking")
    assert not template.takes_variable("tools")


def test_the_only_template_of_a_list_is_for_all_calls(tmp_path: Path) -> None:
    several = [{"name": "tool_use", "template": "only"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    template = load(tmp_path)
    assert template is not None
    assert template.with_tools is template
    assert template.render(CHATS["one turn"]) == "only"


@pytest.mark.parametrize(
    "source", ["{{ 'a' * 10**9 }}", "{{ [1] * 1000000000 }}", "{{ 1000000000 * 'ab' }}", "{{ 9**99999999 }}"]
)
def test_no_product_of_a_template_fills_the_memory(source: str) -> None:
    template = ChatTemplate(source, {})
    with pytest.raises(TemplateFailure, match="unsafe"):
        template.render(CHATS["one turn"])
    assert ChatTemplate("{{ '-' * 3 }}{{ 2 ** 3 }}", {}).render(CHATS["one turn"]) == "---8"


# --- role order -------------------------------------------------------------------------------------------------------


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


# --- tool turns -------------------------------------------------------------------------------------------------------


FORMS = {
    "any form": ToolTurns(),
    "no null": ToolTurns(empty_content=""),
    "null is written as None": ToolTurns(empty_content=""),
    "nine characters": ToolTurns(short_ids=True),
    "name of the tool": ToolTurns(),
    "arguments as text": ToolTurns(text_arguments=True),
    "arguments as they are": ToolTurns(text_arguments=True),
    "thinking": ToolTurns(reasoning_key="thinking"),
    "tool plan": ToolTurns(reasoning_key="tool_plan"),
    "ids in place of names": ToolTurns(numbered_ids=True),
    "responses after what asks": ToolTurns(has_responses=True),
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
    assert ("WHY" in text) == (rule in ("thinking", "tool plan"))
    assert ("functions.weather:0" in text and "Return of functions.weather:1" in text) == ("ids" in rule)
    assert ("response:weather{value:SUN}" in text) == ("responses" in rule)
    at = [text.index(word) for word in (("Bönn", "SUN", "Rome", "RAIN") if "call" in rule else ("Bönn", "Rome", "SUN"))]
    assert at == sorted(at)
    assert messages[1]["tool_calls"] == asked["tool_calls"], "the conversation itself stays as it was"


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
    assert ChatTemplate(shows_no_calls, {}).tool_turns == ToolTurns(empty_content="", shows_calls=False)
    assert probe_tool_turns(lambda messages, tools: None) == ToolTurns(shows_calls=False)
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
