"""The parameter `prediction` of a chat: what the caller expects as the answer (OpenAI's predicted outputs)."""

from __future__ import annotations

from typing import Any

from quire.gateway.api.chat_messages import CONTENT_SCHEMA, read_content
from quire.gateway.api.request_limits import RequestLimits
from quire.gateway.errors.api_errors import invalid, only, too_long
from quire.gateway.model.renderer import Renderer
from quire.shared.config.schema_parts import closed
from quire.shared.protocol.sampling_params import Parameter

NAME = "prediction"


def read_prediction(name: str, value: Any) -> str:
    """Return the text of a prediction. Raises InvalidRequest that names the wrong key."""
    if type(value) is not dict:
        raise invalid(name, 'an object like {"type": "content", "content": "..."}', value)
    only(name, value, ("type", "content"))
    if value.get("type") != "content":
        raise invalid(f"{name}.type", "'content'", value.get("type"))
    content = read_content(f"{name}.content", value.get("content"))
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


OF_PREDICTIONS = {
    NAME: Parameter(
        read=read_prediction,
        kind="object with `type` (`content`) and `content`",
        schema=closed({"type": {"const": "content"}, "content": CONTENT_SCHEMA}),
        help="the expected answer, such as a text that the answer changes in a few places: `content` is a string, or "
        'an array of `{"type": "text", "text": ...}`, at most as long as the context. It can make the answer '
        "[faster](../speculation.md#predictions), and changes no token of it",
    )
}


async def prediction_tokens(text: str, limits: RequestLimits, renderer: Renderer) -> tuple[int, ...]:
    """Return the token ids of a prediction, which has no special tokens around it. Raises InvalidRequest."""
    most = limits.max_model_len
    token_ids = await renderer.prompt(NAME, text, most, add_special_tokens=False)
    if (count := len(token_ids)) > most:
        raise too_long(NAME, most, count, f"{NAME} has {count} tokens", f"Please reduce the length of {NAME}.")
    limits.check_vocabulary(NAME, token_ids)
    return tuple(token_ids)
