"""Chats render to the text, and to the token ids, that Transformers makes of them - for a dozen styles of template."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from quire.shared.model.files import ModelError, read_json
from quire.shared.text import chat_template
from quire.shared.text.chat_template import ChatTemplate, TemplateFailure, load_chat_template
from quire.shared.text.tokenizer import load_tokenizer, read_special_tokens
from tests.support.chat_templates import CHATS, TEMPLATES, TOKENS
from tests.support.tokenizers import byte_fallback, byte_level

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


def test_content_in_parts_is_rendered_as_transformers_does_where_the_template_can() -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level(), **TOKENS)
    source = TEMPLATES["parts"]
    expected = tokenizer.apply_chat_template(PARTS, tokenize=False, chat_template=source, add_generation_prompt=True)
    assert ChatTemplate(source, TOKENS).render(PARTS) == expected
    assert "one two" in expected


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


def test_a_template_knows_the_special_tokens_of_its_folder(tmp_path: Path) -> None:
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": "{{ bos_token }}-{{ eos_token }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = load(tmp_path)
    assert template is not None
    assert template.render(CHATS["one turn"]) == "<s>-</s>"


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
