"""Renders chats: in a thread if they are long; a template may refuse."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from quire.gateway.errors.api_errors import InvalidRequest
from quire.gateway.model.conversation import Conversation
from quire.gateway.model.renderer import Renderer
from quire.gateway.model.served_model import load_model
from quire.shared.text.chat_template import ChatTemplate
from tests.support.chat_templates import CHATS, TEMPLATES
from tests.support.tokenizers import byte_level


def write_folder(folder: Path, tokenizer: Tokenizer, template: str | None = None) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text("{}")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


async def test_a_template_that_refuses_says_why(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level(), "{{ raise_exception('Not today.') }}")
    renderer = Renderer(load_model(str(folder), "test"), 1)
    try:
        with pytest.raises(InvalidRequest, match=r"refuses these messages: Not today\.$") as refused:
            await renderer.chat(Conversation(messages=CHATS["one turn"]), 4096)
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

    def render(template: ChatTemplate, messages: Any, add_generation_prompt: bool, **others: Any) -> str:
        threads.append(threading.current_thread())
        return "x"

    monkeypatch.setattr(ChatTemplate, "render", render)
    renderer = Renderer(load_model(str(write_folder(tmp_path, byte_level(), TEMPLATES["chatml"])), "test"), 1)
    try:
        await renderer.chat(Conversation(messages=messages), 4096)
        assert (threads == [threading.current_thread()]) == is_short
    finally:
        renderer.close()


async def test_a_model_without_a_template_has_no_chat(tmp_path: Path) -> None:
    renderer = Renderer(load_model(str(write_folder(tmp_path, byte_level())), "test"), 1)
    try:
        with pytest.raises(InvalidRequest, match="/v1/completions"):
            await renderer.chat(Conversation(messages=CHATS["one turn"]), 4096)
    finally:
        renderer.close()


async def test_tokens_become_text_with_special_tokens_and_gaps(tmp_path: Path) -> None:
    renderer = Renderer(load_model(str(write_folder(tmp_path, byte_level(), TEMPLATES["chatml"])), "test"), 1)
    try:
        ids = byte_level().encode("<s>x<|im_end|>", add_special_tokens=False).ids
        assert await renderer.text(ids) == "<s>x<|im_end|>"
        assert await renderer.text([*ids, 10**6]) == "<s>x<|im_end|>"
        assert await renderer.token_strings([ids[0], 10**6]) == ["<s>", ""]
        assert await renderer.token_strings(ids * 1000) == await renderer.token_strings(ids) * 1000
        asked = Conversation(messages=[{"role": "user", "content": "x"}])
        opened = (await renderer.chat(asked, 4096)).token_ids
        closed = (await renderer.chat(replace(asked, add_generation_prompt=False), 4096)).token_ids
        assert opened[: len(closed)] == closed != opened
    finally:
        renderer.close()


@pytest.mark.parametrize(("text", "is_short"), [("a b", True), ("word " * 400, False)], ids=["short", "long"])
async def test_several_texts_get_the_tokens_that_each_gets_alone(tmp_path: Path, text: str, is_short: bool) -> None:
    model = load_model(str(write_folder(tmp_path, byte_level())), "test")
    renderer = Renderer(model, 1)
    threads = []

    def encode(*arguments: Any) -> list[list[int]]:
        threads.append(threading.current_thread())
        return encode_all(*arguments)

    encode_all = renderer._encode_all
    renderer._encode_all = encode  # type: ignore[method-assign]
    try:
        found = await renderer.texts([("input[0]", text), ("input[2]", "c")], 4096, True)
        assert found == [await renderer.prompt("input", one, 4096) for one in (text, "c")]
        assert (threads == [threading.current_thread()]) == is_short
        assert await renderer.texts([], 10, True) == []
        with pytest.raises(InvalidRequest, match=r"input\[1\] has 100 characters"):
            await renderer.texts([("input[0]", "a"), ("input[1]", "x" * 100)], 5, True)
        assert len((await renderer.texts([("input", "x" * 100)], None, True))[0]) > 5
    finally:
        renderer.close()
