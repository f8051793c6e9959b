"""Reads the `messages` of a chat: checks them, and brings them into the form that chat templates expect."""

from __future__ import annotations

from typing import Any

from quire.gateway.api.tools import TOOL_NAME, tool_name
from quire.gateway.errors.api_errors import invalid, of_check, only, refused
from quire.shared.config.schema_parts import TEXT, Schema, any_of, array, closed, with_nulls
from quire.shared.config.validators import InvalidValue, OneOf, Text, shown
from quire.shared.text.chat_template import Message
from quire.shared.text.tool_arguments import arguments_of

# OpenAI's name `developer` is new; chat templates know it as `system`.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
MAX_MESSAGES = 10_000
MAX_NAME_LENGTH = 256

# Keys of the answers of this API. Clients send these keys back with the conversation; a value must be null or [].
_EMPTY = ("refusal", "audio", "annotations", "function_call")
# Keys that belong to the messages of one role, besides role, content and name. vLLM writes `reasoning` for
# `reasoning_content`.
_OF_ROLE = {"assistant": ("tool_calls", "reasoning_content", "reasoning"), "tool": ("tool_call_id",)}
# litellm copies keys of an answer's message that it does not know into this object, and sends the object back.
_COPIES = "provider_specific_fields"
MAX_TOOL_CALLS = 128
CALL_ID = Text(1, 256)

_CALLED = closed({"name": TOOL_NAME, "arguments": TEXT})
# `index` is a key of streamed deltas, which clients send back as they are.
_CALL = closed({"id": CALL_ID, "function": _CALLED}, {"type": {"const": "function"}, "index": {"type": "integer"}})
_CALLS = array(_CALL, high=MAX_TOOL_CALLS)
_TEXT_PART = with_nulls({"type": {"const": "text"}, "text": TEXT})
DETAILS = OneOf(("auto", "low", "high"))
_IMAGE_PART = with_nulls({"type": {"const": "image_url"}, "image_url": with_nulls({"url": TEXT}, {"detail": DETAILS})})
# What `read_content` accepts, without and with images.
CONTENT_SCHEMA = any_of(TEXT, array(_TEXT_PART, low=1))
_SEEN_SCHEMA = any_of(TEXT, array(any_of(_TEXT_PART, _IMAGE_PART), low=1))
# Roles whose messages may have images.
_SEEING = ("user", "tool")
_NOTHING: Schema = {"enum": [None, []]}


def _schema(roles: tuple[str, ...], required: Schema, optional: Schema) -> Schema:
    """Return the schema of a message."""
    message = with_nulls({"role": OneOf(roles), **required}, {"name": Text(1, MAX_NAME_LENGTH)} | optional)
    message["properties"] = dict.fromkeys((*_EMPTY, "tool_calls"), _NOTHING) | message["properties"]
    return message


_REASONING = dict.fromkeys(_OF_ROLE["assistant"][1:], TEXT)
_OF_ASSISTANT: Schema = {"content": CONTENT_SCHEMA, "tool_calls": _CALLS, **_REASONING}
# A message of the assistant has at least one of these.
_ONE_OF_ASSISTANT: Schema = {
    "content": CONTENT_SCHEMA,
    "tool_calls": _CALLS | {"minItems": 1},
    **dict.fromkeys(_REASONING, TEXT | {"minLength": 1}),
}
# What `read_messages` accepts.
MESSAGES_SCHEMA = array(
    any_of(
        _schema(("system", "developer"), {"content": CONTENT_SCHEMA}, {}),
        _schema(("user",), {"content": _SEEN_SCHEMA}, {}),
        _schema(("tool",), {"content": _SEEN_SCHEMA, "tool_call_id": CALL_ID}, {}),
        *(
            _schema(("assistant",), {name: part}, {key: of for key, of in _OF_ASSISTANT.items() if key != name})
            for name, part in _ONE_OF_ASSISTANT.items()
        ),
    ),
    low=1,
    high=MAX_MESSAGES,
)


def read_messages(value: Any) -> list[Message]:
    """Return the conversation: each message with the keys of its role (`chat_template.Message`).

    A key whose value is null counts as absent. Raises InvalidRequest that names the message and the key.
    """
    if type(value) is not list:
        raise invalid("messages", "an array of messages", value)
    if not 1 <= len(value) <= MAX_MESSAGES:
        raise refused("messages", f"messages must have 1 to {MAX_MESSAGES} messages, not {len(value)}.")
    try:
        return [_message(f"messages[{index}]", message) for index, message in enumerate(value)]
    except InvalidValue as error:
        raise of_check(error) from None


def _message(name: str, value: Any) -> Message:
    if type(value) is not dict:
        raise invalid(name, "an object with role and content", value)
    role = value.get("role")
    if type(role) is not str or role not in ROLES:
        raise invalid(f"{name}.role", "system, developer, user, assistant or tool", role)
    known = ("role", "content", "name", *_OF_ROLE.get(role, ()))
    for key, item in value.items():
        if key in known or item is None or (key in (*_EMPTY, "tool_calls") and item == []):
            continue
        if key == _COPIES and role == "assistant" and _has_only_copies(item, value):
            continue
        raise refused(
            f"{name}.{key[:80]}",
            f"{name}.{key[:80]} is not supported in a message of the role {role}; leave it out.",
            code="unsupported_parameter" if key in _EMPTY else "unknown_parameter",
        )
    message: dict[str, Any] = {"role": ROLES[role]}
    calls = value.get("tool_calls")
    if calls is not None and (calls := _tool_calls(f"{name}.tool_calls", calls)):
        message["tool_calls"] = calls
    key = "reasoning" if value.get("reasoning_content") is None else "reasoning_content"
    reasoning = value.get(key)
    if reasoning is not None and (reasoning := Text(0)(f"{name}.{key}", reasoning)):
        message["reasoning_content"] = reasoning
    content = value.get("content")
    if content is None and role == "assistant" and (calls or reasoning):
        message["content"] = None if calls else ""
    else:
        message["content"] = read_content(f"{name}.content", content, role in _SEEING)
    if role == "tool":
        message["tool_call_id"] = CALL_ID(f"{name}.tool_call_id", value.get("tool_call_id"))
    if (speaker := value.get("name")) is not None:
        if type(speaker) is not str or not 1 <= len(speaker) <= MAX_NAME_LENGTH:
            raise invalid(f"{name}.name", f"a string of 1 to {MAX_NAME_LENGTH} characters", speaker)
        message["name"] = speaker
    return message


def _has_only_copies(value: Any, message: dict[str, Any]) -> bool:
    """Return True if each value of an object is null, or the text that the message has under the same key."""
    if type(value) is not dict:
        return False
    return all(item is None or (type(item) is str and item == message.get(key)) for key, item in value.items())


def _tool_calls(name: str, value: Any) -> list[dict[str, Any]]:
    """Return the tool calls of an assistant's message, with arguments as objects: chat templates write them as JSON."""
    if type(value) is not list or len(value) > MAX_TOOL_CALLS:
        raise invalid(name, f"an array of at most {MAX_TOOL_CALLS} tool calls", value)
    calls = []
    for index, call in enumerate(value):
        at = f"{name}[{index}]"
        if type(call) is not dict:
            raise invalid(at, "an object with id and function", call)
        if call.get("type", "function") != "function":
            raise invalid(f"{at}.type", "function", call["type"])
        only(at, call, ("id", "type", "function", "index"))
        function = call.get("function")
        if type(function) is not dict:
            raise invalid(f"{at}.function", "an object with name and arguments", function)
        only(f"{at}.function", function, _CALLED["properties"])
        calls.append(
            {
                "id": CALL_ID(f"{at}.id", call.get("id")),
                "type": "function",
                "function": {
                    "name": tool_name(f"{at}.function.name", function.get("name")),
                    "arguments": call_arguments(f"{at}.function.arguments", function.get("arguments")),
                },
            }
        )
    return calls


def call_arguments(name: str, value: Any) -> dict[str, Any]:
    """Return the arguments of a tool call, given as text. Raises InvalidRequest.

    The text may be no JSON: models write what they want, and an answer that was cut off ends inside of its arguments.
    """
    if type(value) is not str:
        raise invalid(name, "a string: the arguments as JSON", value)
    return arguments_of(value)


def read_content(name: str, value: Any, takes_images: bool = False) -> str | list[dict[str, str]]:
    """Return a text, or its parts (`chat_template.Message`). Raises InvalidRequest that names the wrong part."""
    if type(value) is str:
        return value
    if type(value) is not list:
        raise invalid(name, "a string or an array of text parts", value)
    if not value:
        raise refused(name, f"{name} is an empty array; send at least one text part, or a string.")
    return [_part(f"{name}[{index}]", part, takes_images) for index, part in enumerate(value)]


def _part(name: str, value: Any, takes_images: bool) -> dict[str, str]:
    if type(value) is not dict:
        raise invalid(name, 'an object like {"type": "text", "text": "..."}', value)
    kind = value.get("type")
    if kind == "image_url" and takes_images:
        return _image(name, value)
    if kind != "text":
        known = "'text' or 'image_url'" if takes_images else "'text'"
        raise refused(
            f"{name}.type", f"{name}.type must be {known}, not {shown(kind)}: no other content is taken here."
        )
    if unknown := [key for key, item in value.items() if key not in ("type", "text") and item is not None]:
        key = min(unknown)[:80]
        raise refused(f"{name}.{key}", f"{name}.{key} is not supported.", code="unknown_parameter")
    if type(value.get("text")) is not str:
        raise invalid(f"{name}.text", "a string", value.get("text"))
    return {"type": "text", "text": value["text"]}


def _image(name: str, value: dict[str, Any]) -> dict[str, str]:
    only(name, value, ("type", "image_url"))
    image = value.get("image_url")
    if type(image) is not dict:
        raise invalid(f"{name}.image_url", 'an object like {"url": "data:image/png;base64,..."}', image)
    only(f"{name}.image_url", image, ("url", "detail"))
    detail = DETAILS(f"{name}.image_url.detail", "auto" if image.get("detail") is None else image["detail"])
    if type(image.get("url")) is not str:
        raise invalid(f"{name}.image_url.url", "a string", image.get("url"))
    return {"type": "image", "url": image["url"], "detail": detail, "where": f"{name}.image_url.url"}
