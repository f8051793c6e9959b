"""Chats render to the text, and to the token ids, that Transformers makes of them - for a dozen styles of template."""

from __future__ import annotations

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from gateway import templates
from gateway.errors import InvalidRequest
from gateway.model import ModelError, load_model
from gateway.rendering import Renderer
from gateway.templates import ChatTemplate, TemplateFailure
from tests.gateway.templates_for_tests import TEMPLATES
from tests.shared.tokenizers_for_tests import byte_fallback, byte_level

CHATS: dict[str, list[dict[str, Any]]] = {
    "one turn": [{"role": "user", "content": "Hello, wörld 😀 <b>&amp;</b>"}],
    "system": [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "Hi"}],
    "several": [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "first\n\nline"},
        {"role": "assistant", "content": "</s> answer "},
        {"role": "user", "content": "  second  "},
    ],
    "user first": [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": "four"},
        {"role": "user", "content": "five"},
    ],
}
PARTS = [{"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]}]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture(autouse=True)
def fixed_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides see the same day, even at midnight."""

    class Fixed(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Fixed:
            return cls(2026, 3, 4, 5, 6, 7)

    from transformers.utils import chat_template_utils

    monkeypatch.setattr(templates, "datetime", Fixed)
    monkeypatch.setattr(chat_template_utils, "datetime", Fixed)


@pytest.fixture(scope="module", params=["byte-level", "byte-fallback"])
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Transformers' own tokenizer, and the folder that it was saved to."""
    from transformers import PreTrainedTokenizerFast

    backend = byte_level() if request.param == "byte-level" else byte_fallback()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **TOKENS)
    folder = tmp_path_factory.mktemp(request.param)
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
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
    try:
        expected = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except Exception as error:
        with pytest.raises(TemplateFailure, match=re.escape(str(error))):
            template.render(messages, add_generation_prompt)
        return
    rendered = template.render(messages, add_generation_prompt)
    assert rendered == expected
    model = load_model(str(folder), "test")
    ids = model.tokenizer.encode(rendered, add_special_tokens=False).ids
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


@pytest.mark.parametrize("config", [{}, {"add_bos_token": True}, {"add_bos_token": False}, {"add_eos_token": True}])
def test_plain_prompts_get_the_special_tokens_that_transformers_gives_them(
    reference: tuple[Any, Path], tmp_path: Path, config: dict[str, Any]
) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer, _ = reference
    tokenizer.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "tokenizer_config.json").read_text())
    saved = {key: value for key, value in saved.items() if key not in ("add_bos_token", "add_eos_token")}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**saved, **config}))
    (tmp_path / "config.json").write_text("{}")
    expected = PreTrainedTokenizerFast.from_pretrained(tmp_path)("Hello world").input_ids
    assert load_model(str(tmp_path), "test").tokenizer.encode("Hello world").ids == expected


async def test_a_template_that_refuses_says_why(reference: tuple[Any, Path], tmp_path: Path) -> None:
    tokenizer, _ = reference
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text(TEMPLATES["gemma"])
    renderer = Renderer(load_model(str(tmp_path), "test"), 1)
    try:
        with pytest.raises(InvalidRequest, match="System role not supported") as refused:
            await renderer.chat(CHATS["system"], 4096)
        assert refused.value.param == "messages"
    finally:
        renderer.close()


async def test_a_model_without_a_template_has_no_chat(reference: tuple[Any, Path]) -> None:
    renderer = Renderer(load_model(str(reference[1]), "test"), 1)
    try:
        with pytest.raises(InvalidRequest, match="/v1/completions"):
            await renderer.chat(CHATS["one turn"], 4096)
    finally:
        renderer.close()


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
    ],
)
def test_templates_run_in_a_sandbox(attack: str) -> None:
    with pytest.raises(TemplateFailure):
        ChatTemplate(attack + "{{ x.y.z }}", TOKENS).render(CHATS["one turn"])


def test_places_of_a_template_and_what_wins(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text("{}")

    def rendered() -> str:
        template = load_model(str(tmp_path), "test").template
        assert template is not None
        return template.render(CHATS["one turn"])

    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "third"}))
    assert rendered() == "third"
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "second"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert rendered() == "second"
    (tmp_path / "chat_template.jinja").write_text("first")
    assert rendered() == "first"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("config.json", None, "config.json is missing"),
        ("config.json", "{", "config.json cannot be read"),
        ("config.json", "[]", "not a JSON object"),
        ("tokenizer.json", None, "tokenizer.json is missing"),
        ("tokenizer.json", "{}", "not a tokenizer"),
        ("chat_template.jinja", "{% for %}", "chat template"),
    ],
)
def test_a_broken_model_folder_is_named(tmp_path: Path, name: str, content: str | None, says: str) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).unlink(missing_ok=True)
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ModelError, match=says):
        load_model(str(tmp_path), "test")


def test_what_is_no_folder_at_all(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no folder"):
        load_model(str(tmp_path / "nothing"), "test")
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="is a file"):
        load_model(str(tmp_path / "file"), "test")
