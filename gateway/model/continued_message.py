"""A chat whose last message is to be continued, rendered as Transformers does it.

A mark at the end of the message shows where its text ends in the rendered chat; the rest is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from quire.shared.text.chat_template import Message, TemplateFailure

# The mark of Transformers. The space shows whether the template strips the ends of messages.
MARK = "CONTINUE_FINAL_MESSAGE_TAG "


def render_continued(render: Callable[[Sequence[Message], bool], str], messages: Sequence[Message]) -> str:
    """Render a chat up to the end of its last message. Raises TemplateFailure.

    render: renders messages, with or without a generation prompt.
    """
    content = messages[-1].get("content")
    text = _last_text(content)
    if text is None:
        raise TemplateFailure("continue_final_message is true, but the last message has no text")
    rendered = render([*messages[:-1], {**messages[-1], "content": _marked(content)}], False)
    if text.strip() not in rendered or MARK.strip() not in rendered:
        raise TemplateFailure(
            "continue_final_message is true, but the template does not show the last message as it is"
        )
    end = rendered.rindex(MARK.strip())
    return rendered[:end] if rendered.startswith(MARK, end) else rendered[:end].rstrip()


def _last_text(content: Any) -> str | None:
    if isinstance(content, str):
        return content
    texts = [part["text"] for part in content or () if "text" in part]
    return texts[-1] if texts else None


def _marked(content: Any) -> Any:
    """Return the content with the mark at the end of its last text."""
    if isinstance(content, str):
        return content + MARK
    last = max(index for index, part in enumerate(content) if "text" in part)
    return [{**part, "text": part["text"] + MARK} if index == last else part for index, part in enumerate(content)]
