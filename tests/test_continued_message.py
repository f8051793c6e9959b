"""A chat whose last message is continued is rendered to the same text as in Transformers."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from quire.gateway.model.continued_message import render_continued
from quire.shared.text.chat_template import ChatTemplate, TemplateFailure
from tests.support.chat_templates import TEMPLATES, TOKENS

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
