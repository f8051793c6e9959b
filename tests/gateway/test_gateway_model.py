"""What a gateway reads from a model folder, and what it says of one that it cannot use."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from quire.gateway.api.errors import InvalidRequest
from quire.gateway.model.renderer import Renderer
from quire.gateway.model.served_model import ModelError, load_model
from quire.shared.model.naming import served_name
from quire.shared.text.chat_template import ChatTemplate
from tests.support.chat_templates import CHATS, TEMPLATES, TOKENS
from tests.support.tokenizers import byte_fallback, byte_level


def write_folder(folder: Path, tokenizer: Tokenizer, template: str | None = None) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text("{}")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.mark.parametrize("backend", [byte_level(), byte_fallback()], ids=["byte-level", "byte-fallback"])
@pytest.mark.parametrize("config", [{}, {"add_bos_token": True}, {"add_bos_token": False}, {"add_eos_token": True}])
def test_plain_prompts_get_the_special_tokens_that_transformers_gives_them(
    tmp_path: Path, backend: Tokenizer, config: dict[str, Any]
) -> None:
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(tokenizer_object=backend, **TOKENS).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "tokenizer_config.json").read_text())
    saved = {key: value for key, value in saved.items() if key not in ("add_bos_token", "add_eos_token")}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**saved, **config}))
    (tmp_path / "config.json").write_text("{}")
    expected = PreTrainedTokenizerFast.from_pretrained(tmp_path)("Hello world").input_ids
    assert load_model(str(tmp_path), "test").tokenizer.encode("Hello world").ids == expected


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("backend", [byte_level(), byte_fallback()], ids=["byte-level", "byte-fallback"])
@pytest.mark.parametrize(
    "extra",
    [
        {"additional_special_tokens": ["the", "<|new|>"]},
        {"additional_special_tokens": [{"__type": "AddedToken", "content": "the", "special": True}]},
        {"extra_special_tokens": ["the"]},
        {"extra_special_tokens": {"image_token": "the"}},
    ],
    ids=["old name", "in full", "new name", "by role"],
)
def test_what_the_configuration_names_as_special_is_no_text(
    tmp_path: Path, backend: Tokenizer, extra: dict[str, Any], file: str
) -> None:
    from transformers import PreTrainedTokenizerFast

    write_folder(tmp_path, backend)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(TOKENS))
    (tmp_path / file).write_text(json.dumps({**TOKENS, **extra}))
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ours = load_model(str(tmp_path), "test").tokenizer
    ids = theirs("on the<|new|> way").input_ids
    assert ours.encode("on the<|new|> way").ids == ids
    assert "the" not in ours.decode(ids)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


async def test_a_template_that_refuses_says_why(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level(), TEMPLATES["gemma"])
    renderer = Renderer(load_model(str(folder), "test"), 1)
    try:
        with pytest.raises(InvalidRequest, match="System role not supported") as refused:
            await renderer.chat(CHATS["system"], 4096)
        assert refused.value.param == "messages"
    finally:
        renderer.close()


@pytest.mark.parametrize(
    ("messages", "is_short"),
    [
        ([{"role": "user", "content": "x" * 100}], True),
        ([{"role": "user", "content": "x" * 1000}], False),
        ([{"role": "user", "content": ""}] * 1000, False),
        ([{"role": "user", "content": "", "name": "x" * 200}] * 5, False),
    ],
    ids=["short", "long", "many", "long names"],
)
async def test_only_a_short_chat_is_rendered_in_the_thread_of_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: list[dict[str, Any]], is_short: bool
) -> None:
    threads = []

    def render(template: ChatTemplate, messages: Any) -> str:
        threads.append(threading.current_thread())
        return "x"

    monkeypatch.setattr(ChatTemplate, "render", render)
    renderer = Renderer(load_model(str(write_folder(tmp_path, byte_level(), TEMPLATES["chatml"])), "test"), 1)
    try:
        await renderer.chat(messages, 4096)
        assert (threads == [threading.current_thread()]) == is_short
    finally:
        renderer.close()


async def test_a_model_without_a_template_has_no_chat(tmp_path: Path) -> None:
    renderer = Renderer(load_model(str(write_folder(tmp_path, byte_level())), "test"), 1)
    try:
        with pytest.raises(InvalidRequest, match="/v1/completions"):
            await renderer.chat(CHATS["one turn"], 4096)
    finally:
        renderer.close()


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("config.json", None, "config.json is missing"),
        ("config.json", "{", "config.json cannot be read"),
        ("config.json", "[]", "not a JSON object"),
        ("config.json", '{"text_config": "x"}', "text_config is not a JSON object"),
        ("tokenizer_config.json", "[" * 100_000, "tokenizer_config.json cannot be read"),
        ("tokenizer.json", None, "tokenizer.json is missing"),
        ("tokenizer.json", "{}", "not a tokenizer"),
        ("chat_template.jinja", "{% for %}", "chat template"),
    ],
)
def test_a_broken_model_folder_is_named(tmp_path: Path, name: str, content: str | None, says: str) -> None:
    write_folder(tmp_path, byte_level())
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


def test_a_folder_may_be_given_by_the_home_it_is_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As an environment file has it, which no shell reads. The worker and `quire serve` take it too.
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "models").mkdir()
    write_folder(tmp_path / "models", byte_level())
    assert load_model("~/models", "test").vocab_size == byte_level().get_vocab_size()
    assert served_name("~/models") == "models"
