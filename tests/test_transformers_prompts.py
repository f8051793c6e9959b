"""Prompts are those of Transformers: the special tokens of texts, and chats whose last message is continued."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from quire.gateway.model.continued_message import render_continued
from quire.gateway.model.served_model import load_model
from quire.shared.text.chat_template import ChatTemplate, TemplateFailure
from tests.support.chat_templates import TEMPLATES, TOKENS
from tests.support.tokenizers import byte_fallback, byte_level

QUESTION = {"role": "user", "content": "A question"}


def by_transformers(source: str, messages: list[dict[str, Any]]) -> str:
    [text], _ = render_jinja_template([messages], chat_template=source, continue_final_message=True, **TOKENS)
    return str(text)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_text_is_that_of_transformers(name: str) -> None:
    render = ChatTemplate(TEMPLATES[name], TOKENS).render
    for answer in ("Once upon", "Once upon ", "  Once\n", "Once CONTINUE_FINAL_MESSAGE_TAG upon", ""):
        messages = [QUESTION, {"role": "assistant", "content": answer}]
        try:
            expected = by_transformers(TEMPLATES[name], messages)
        except Exception:
            with pytest.raises(TemplateFailure):
                render_continued(render, messages)
        else:
            assert render_continued(render, messages) == expected


def test_the_last_text_of_a_message_in_parts_is_continued() -> None:
    source = (
        "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}{{ part.text }}|{% endfor %}{% endif %}</{{ m.role }}>{% endfor %}"
    )
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [QUESTION, {"role": "assistant", "content": parts}]
    assert render_continued(ChatTemplate(source, TOKENS).render, messages) == by_transformers(source, messages)
    assert by_transformers(source, messages).endswith("one|two")
    assert parts[1] == {"type": "text", "text": "two"}


@pytest.mark.parametrize("content", [None, []])
def test_a_message_without_text_cannot_be_continued(content: Any) -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.role }}{% endfor %}", TOKENS)
    with pytest.raises(TemplateFailure, match="no text"):
        render_continued(template.render, [QUESTION, {"role": "assistant", "content": content}])


def test_a_template_that_hides_the_message_is_refused() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.role }}{% endfor %}", TOKENS)
    with pytest.raises(TemplateFailure, match="does not show"):
        render_continued(template.render, [QUESTION, {"role": "assistant", "content": "Once"}])


@pytest.mark.parametrize("backend", [byte_level(), byte_fallback()], ids=["byte-level", "byte-fallback"])
@pytest.mark.parametrize("config", [{}, {"add_bos_token": True}, {"add_bos_token": False}, {"add_eos_token": True}])
def test_plain_prompts_get_the_special_tokens_that_transformers_gives_them(
    tmp_path: Path, backend: Tokenizer, config: dict[str, Any]
) -> None:
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
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(TOKENS))
    (tmp_path / file).write_text(json.dumps({**TOKENS, **extra}))
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ours = load_model(str(tmp_path), "test").tokenizer
    ids = theirs("on the<|new|> way").input_ids
    assert ours.encode("on the<|new|> way").ids == ids
    assert "the" not in ours.decode(ids)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
