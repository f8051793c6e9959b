"""Renders chats: in a thread if they are long; a template may refuse."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from quire.gateway.api.errors import InvalidRequest
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
