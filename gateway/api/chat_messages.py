"""Reads the `messages` of a chat: checks them, and brings them into the form that chat templates expect."""

from __future__ import annotations

from typing import Any

from quire.gateway.api.errors import invalid, refused
from quire.shared.text.chat_template import Message
from quire.shared.validators import shown

# OpenAI's name `developer` is new; chat templates know it as `system`.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
MAX_MESSAGES = 10_000
MAX_NAME_LENGTH = 256

# Keys of the answers of this API. Clients send these keys back with the conversation; a value must be null or [].
_EMPTY = ("refusal", "audio", "annotations", "function_call", "tool_calls")


def read_messages(value: Any) -> list[Message]:
    """The conversation: each message with `role`, `content` (a string, or a list of text parts) and perhaps `name`.

    A key whose value is null counts as absent. Raises InvalidRequest that names the message and the key.
    """
    if type(value) is not list:
        raise invalid("messages", "an array of messages", value)
    if not 1 <= len(value) <= MAX_MESSAGES:
        raise refused("messages", f"messages must have 1 to {MAX_MESSAGES} messages, not {len(value)}.")
    return [_message(f"messages[{index}]", message) for index, message in enumerate(value)]


def _message(name: str, value: Any) -> Message:
    if type(value) is not dict:
        raise invalid(name, "an object with role and content", value)
    for key, item in value.items():
        if key in ("role", "content", "name") or item is None or (key in _EMPTY and item == []):
            continue
        raise refused(
            f"{name}.{key[:80]}",
            f"{name}.{key[:80]} is not supported by this server yet; leave it out.",
            code="unsupported_parameter" if key in _EMPTY else "unknown_parameter",
        )
    role = value.get("role")
    if type(role) is not str or role not in ROLES:
        raise invalid(f"{name}.role", "system, developer, user or assistant", role)
    message = {"role": ROLES[role], "content": _content(f"{name}.content", value.get("content"))}
    if (speaker := value.get("name")) is not None:
        if type(speaker) is not str or not 1 <= len(speaker) <= MAX_NAME_LENGTH:
            raise invalid(f"{name}.name", f"a string of 1 to {MAX_NAME_LENGTH} characters", speaker)
        message["name"] = speaker
    return message


def _content(name: str, value: Any) -> str | list[dict[str, str]]:
    if type(value) is str:
        return value
    if type(value) is not list:
        raise invalid(name, "a string or an array of text parts", value)
    if not value:
        raise refused(name, f"{name} is an empty array; send at least one text part, or a string.")
    return [_part(f"{name}[{index}]", part) for index, part in enumerate(value)]


def _part(name: str, value: Any) -> dict[str, str]:
    if type(value) is not dict:
        raise invalid(name, 'an object like {"type": "text", "text": "..."}', value)
    kind = value.get("type")
    if kind != "text":
        raise refused(
            f"{name}.type", f"{name}.type must be 'text', not {shown(kind)}: this server takes no other content."
        )
    if unknown := [key for key, item in value.items() if key not in ("type", "text") and item is not None]:
        key = min(unknown)[:80]
        raise refused(f"{name}.{key}", f"{name}.{key} is not supported.", code="unknown_parameter")
    if type(value.get("text")) is not str:
        raise invalid(f"{name}.text", "a string", value.get("text"))
    return {"type": "text", "text": value["text"]}
