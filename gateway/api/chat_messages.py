"""The `messages` of a chat: checked, and brought into the form that chat templates expect."""

from __future__ import annotations

from typing import Any

from quire.gateway.api.errors import InvalidRequest
from quire.gateway.api.parameters import invalid, shown

# A template knows `system` for what OpenAI now calls `developer`.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
MAX_MESSAGES = 10_000
MAX_NAME_LENGTH = 256

# Keys that answers of this API carry; clients send them back with the conversation. They must ask for nothing.
_EMPTY = ("refusal", "audio", "annotations", "function_call", "tool_calls")

Message = dict[str, Any]


def read_messages(value: Any) -> list[Message]:
    """The conversation: each message with `role`, `content` (a string, or a list of text parts) and perhaps `name`.

    A key whose value is null counts as absent. Raises InvalidRequest that names the message and the key.
    """
    if type(value) is not list:
        raise invalid("messages", value, "an array of messages")
    if not 1 <= len(value) <= MAX_MESSAGES:
        raise InvalidRequest(
            f"messages must have 1 to {MAX_MESSAGES} messages, not {len(value)}.",
            param="messages",
            code="invalid_value",
        )
    return [_message(f"messages[{index}]", message) for index, message in enumerate(value)]


def _message(name: str, value: Any) -> Message:
    if type(value) is not dict:
        raise invalid(name, value, "an object with role and content")
    for key, item in value.items():
        if key in ("role", "content", "name") or item is None or (key in _EMPTY and item == []):
            continue
        raise InvalidRequest(
            f"{name}.{key[:80]} is not supported by this server yet; leave it out.",
            param=f"{name}.{key[:80]}",
            code="unsupported_parameter" if key in _EMPTY else "unknown_parameter",
        )
    role = value.get("role")
    if type(role) is not str or role not in ROLES:
        known = "system, developer, user or assistant"
        raise InvalidRequest(
            f"{name}.role must be {known}, not {shown(role)}.", param=f"{name}.role", code="invalid_value"
        )
    message = {"role": ROLES[role], "content": _content(f"{name}.content", value.get("content"))}
    if (speaker := value.get("name")) is not None:
        if type(speaker) is not str or not 1 <= len(speaker) <= MAX_NAME_LENGTH:
            raise invalid(f"{name}.name", speaker, f"a string of 1 to {MAX_NAME_LENGTH} characters")
        message["name"] = speaker
    return message


def _content(name: str, value: Any) -> str | list[dict[str, str]]:
    if type(value) is str:
        return value
    if type(value) is not list:
        raise invalid(name, value, "a string or an array of text parts")
    if not value:
        raise InvalidRequest(
            f"{name} is an empty array; send at least one text part, or a string.", param=name, code="invalid_value"
        )
    return [_part(f"{name}[{index}]", part) for index, part in enumerate(value)]


def _part(name: str, value: Any) -> dict[str, str]:
    if type(value) is not dict:
        raise invalid(name, value, 'an object like {"type": "text", "text": "..."}')
    kind = value.get("type")
    if kind != "text":
        raise InvalidRequest(
            f"{name}.type must be 'text', not {shown(kind)}: this server takes no other content.",
            param=f"{name}.type",
            code="invalid_value",
        )
    if unknown := [key for key, item in value.items() if key not in ("type", "text") and item is not None]:
        key = min(unknown)[:80]
        raise InvalidRequest(f"{name}.{key} is not supported.", param=f"{name}.{key}", code="unknown_parameter")
    if type(value.get("text")) is not str:
        raise invalid(f"{name}.text", value.get("text"), "a string")
    return {"type": "text", "text": value["text"]}
