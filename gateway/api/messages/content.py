"""Messages and system prompts: blocks of the Messages API become messages in the form that chat templates expect.

A block of a kind that this server does not know is refused with its name. Names of fields without effect are added to
the list `no_effect`, for a header of the answer.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from quire.gateway.api.messages.signature import hidden_text
from quire.gateway.errors.api_errors import invalid, refused
from quire.shared.config.schema_parts import ANY_OBJECT, FLAG, TEXT, Schema, any_of, array, closed, or_null, with_nulls
from quire.shared.config.validators import InvalidValue, OneOf, Text, shown
from quire.shared.text.chat_template import Message

MAX_MESSAGES = 10_000
ID, NAME = Text(1, 256), Text(1, 128)
# A label that a coding agent puts before its system prompt. The value of the label changes with each request: with the
# label in the prompt, the prefix cache could share no block.
BILLING_LABEL = "x-anthropic-billing-header:"
# The beginning of the text of a tool result with `is_error`: chat templates have no field for it.
ERROR_MARK = "Error: "

CACHE_CONTROL = closed(
    {}, {"type": {"const": "ephemeral"}, "ttl": or_null(OneOf(("5m", "1h"))), "scope": or_null(TEXT)}
)

MEDIA_TYPES = OneOf(("image/png", "image/jpeg", "image/webp", "image/gif"))
# The sources of images, each with the keys that it has besides `type`.
_SOURCES: dict[str, Schema] = {
    "base64": {"media_type": MEDIA_TYPES, "data": TEXT},
    "url": {"url": TEXT},
    "file": {"file_id": TEXT},
}


def _block_schema(kind: str, required: Schema, optional: Schema | None = None) -> Schema:
    return with_nulls({"type": {"const": kind}, **required}, {"cache_control": CACHE_CONTROL} | (optional or {}))


# What each kind of block is. The server does not read `citations` and `data`.
_SCHEMAS = {
    "text": _block_schema("text", {"text": TEXT}, {"citations": {}}),
    "thinking": _block_schema("thinking", {"thinking": TEXT}, {"signature": TEXT}),
    "redacted_thinking": _block_schema("redacted_thinking", {}, {"data": {}}),
    "tool_use": _block_schema(
        "tool_use", {"id": ID, "name": NAME, "input": ANY_OBJECT}, {"caller": closed({"type": {"const": "direct"}})}
    ),
    "tool_reference": _block_schema("tool_reference", {"tool_name": NAME}),
    "image": _block_schema(
        "image",
        {"source": any_of(*(closed({"type": {"const": name}, **keys}) for name, keys in _SOURCES.items()))},
    ),
}
_BLOCKS = {
    "system": ("text",),
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "tool result": ("text", "image", "tool_reference"),
}


def _content_schema(of: str) -> Schema:
    return any_of(TEXT, array(any_of(*(_SCHEMAS[kind] for kind in _BLOCKS[of]))))


_SCHEMAS["tool_result"] = _block_schema(
    "tool_result", {"tool_use_id": ID}, {"content": _content_schema("tool result"), "is_error": FLAG}
)
_KEYS = {kind: frozenset(schema["properties"]) for kind, schema in _SCHEMAS.items()}
# What `read_system` and `read_messages` accept.
SYSTEM_SCHEMA = _content_schema("system")
MESSAGES_SCHEMA = array(
    any_of(
        *(
            with_nulls({"role": {"const": role}, "content": _content_schema(role)})
            for role in ("user", "assistant", "system")
        )
    ),
    low=1,
    high=MAX_MESSAGES,
)


def read_system(value: Any, no_effect: list[str]) -> list[Message]:
    """Return the system prompt as messages: none or one. Raises InvalidRequest."""
    parts = [text for text in _texts("system", value, no_effect) if not text.startswith(BILLING_LABEL)]
    if type(value) is list and len(parts) < len(value):
        no_effect.append(BILLING_LABEL.rstrip(":"))
    return [{"role": "system", "content": _content(parts)}] if any(parts) else []


def read_messages(value: Any, no_effect: list[str]) -> list[Message]:
    """Return the conversation. Neighbouring messages of one speaker become one message.

    A tool result becomes a message with the role `tool`, and thinking becomes `reasoning_content`. Raises
    InvalidRequest that names the message and the key.
    """
    if type(value) is not list:
        raise invalid("messages", "an array of messages", value)
    if not 1 <= len(value) <= MAX_MESSAGES:
        raise refused("messages", f"messages must have 1 to {MAX_MESSAGES} messages, not {len(value)}.")
    messages: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for index, message in enumerate(value):
        for turn in _message(f"messages[{index}]", message, names, no_effect):
            if messages and turn["role"] == messages[-1]["role"] != "tool":
                _join(messages[-1], turn)
            else:
                messages.append(turn)
    for turn in messages:
        if "parts" in turn:
            turn["content"] = _content(turn.pop("parts"))
    return [turn for turn in messages if turn["content"] or turn["role"] != "assistant" or len(turn) > 2]


def clear_thinking(messages: Sequence[Message], keep: int) -> list[Message]:
    """Return the messages with the reasoning of the last `keep` assistant messages that have any, and of no others."""
    with_reasoning = [index for index, message in enumerate(messages) if "reasoning_content" in message]
    cleared = set(with_reasoning[: max(len(with_reasoning) - keep, 0)])
    return [
        {key: item for key, item in message.items() if key != "reasoning_content"} if index in cleared else message
        for index, message in enumerate(messages)
    ]


def check_cache_control(name: str, value: Any) -> None:
    """Check a marker, which `breakpoints.py` reads. The `scope` has no effect. Raises InvalidRequest."""
    if type(value) is not dict:
        raise invalid(name, 'an object like {"type": "ephemeral"}', value)
    for key, item in value.items():
        if key == "type" and item != "ephemeral":
            raise invalid(f"{name}.type", "ephemeral", item)
        if key == "ttl" and item not in (None, "5m", "1h"):
            raise invalid(f"{name}.ttl", "5m or 1h", item)
        if key == "scope" and not isinstance(item, str | None):
            raise invalid(f"{name}.scope", "a string", item)
        if key not in ("type", "ttl", "scope"):
            raise unknown_key(name, key)


def only_known(name: str, value: Mapping[str, Any], known: Container[str]) -> None:
    """Refuse a key that this API does not know, unless its value is null. Raises InvalidRequest."""
    for key, item in value.items():
        if key not in known and item is not None:
            raise unknown_key(name, key)


def unknown_key(name: str, key: str) -> Exception:
    """Return the error for a key of an object that this API does not know."""
    return refused(f"{name}.{key[:80]}", f"{name}.{key[:80]} is not supported.", code="unknown_parameter")


def _message(name: str, value: Any, names: dict[str, str], no_effect: list[str]) -> list[dict[str, Any]]:
    """Return one message as messages of a template.

    `names`: of the tools by the id of their use; this message adds its own. The texts are in the
    list `parts`, so that neighbours can be joined.
    """
    if type(value) is not dict:
        raise invalid(name, "an object with role and content", value)
    only_known(name, value, ("role", "content"))
    role = value.get("role")
    if role not in ("user", "assistant", "system"):
        raise invalid(f"{name}.role", "user, assistant or system", role)
    where = f"{name}.content"
    content = value.get("content")
    if role == "system":
        return [{"role": "system", "parts": _texts(where, content, no_effect)}]
    blocks = _blocks(where, content, role, no_effect)
    return _user(blocks, names, no_effect) if role == "user" else [_assistant(blocks, names, no_effect)]


def _user(
    blocks: Iterable[tuple[str, dict[str, Any]]], names: dict[str, str], no_effect: list[str]
) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for name, block in blocks:
        if block["type"] == "tool_result":
            messages.append(_tool_result(name, block, names, no_effect))
            continue
        part = _image(name, block) if block["type"] == "image" else _text(name, block, no_effect)
        if messages and messages[-1]["role"] == "user":
            messages[-1]["parts"].append(part)
        else:
            messages.append({"role": "user", "parts": [part]})
    return messages


def _tool_result(name: str, block: dict[str, Any], names: dict[str, str], no_effect: list[str]) -> dict[str, Any]:
    id_ = _string(f"{name}.tool_use_id", block.get("tool_use_id"), ID)
    where = f"{name}.content"
    content = block.get("content")
    texts: list[str] = []
    images: list[dict[str, str]] = []
    for inner, part in [] if content is None else _blocks(where, content, "tool result", no_effect):
        if part["type"] == "text":
            texts.append(_text(inner, part, no_effect))
        elif part["type"] == "image":
            images.append(_image(inner, part))
        else:  # all tools are in the prompt, so the name is enough
            texts.append(_string(f"{inner}.tool_name", part.get("tool_name"), NAME))
    is_error = block.get("is_error")
    if type(is_error) not in (bool, type(None)):
        raise invalid(f"{name}.is_error", "true or false", is_error)
    text = (ERROR_MARK if is_error else "") + "\n".join(texts)
    shown_first: list[Any] = [text] if text else []
    message = {"role": "tool", "tool_call_id": id_, "content": _content([*shown_first, *images])}
    if id_ in names:
        message["name"] = names[id_]
    return message


def _assistant(
    blocks: Iterable[tuple[str, dict[str, Any]]], names: dict[str, str], no_effect: list[str]
) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "parts": []}
    for name, block in blocks:
        match block["type"]:
            case "text":
                message["parts"].append(_text(name, block, no_effect))
            case "thinking":
                if text := _thinking(name, block):
                    message["reasoning_content"] = _joined(message.get("reasoning_content"), text)
            case "redacted_thinking":  # encrypted for another server
                no_effect.append("redacted_thinking")
            case _:
                call = _tool_use(name, block)
                names[call["id"]] = call["function"]["name"]
                message.setdefault("tool_calls", []).append(call)
    return message


def _image(name: str, block: dict[str, Any]) -> dict[str, str]:
    """Return an image as `take_images` reads it."""
    source = block.get("source")
    if type(source) is not dict or source.get("type") not in _SOURCES:
        example = 'an object like {"type": "base64", "media_type": "image/png", "data": "..."}'
        raise invalid(f"{name}.source", example, source)
    keys = _SOURCES[source["type"]]
    only_known(f"{name}.source", source, ("type", *keys))
    for key in keys:
        if type(source.get(key)) is not str:
            raise invalid(f"{name}.source.{key}", "a string", source.get(key))
    if source["type"] != "base64":
        [key] = keys
        return {"type": "image", key: source[key], "where": f"{name}.source.{key}"}
    kind = _string(f"{name}.source.media_type", source["media_type"], MEDIA_TYPES)
    url = f"data:{kind};base64,{source['data']}"
    return {"type": "image", "url": url, "media_type": kind, "where": f"{name}.source.data"}


def _thinking(name: str, block: dict[str, Any]) -> str:
    """Return the text of a thinking block, or the text that its signature carries."""
    text, signature = block.get("thinking"), block.get("signature")
    if type(text) is not str:
        raise invalid(f"{name}.thinking", "a string", text)
    if not isinstance(signature, str | None):
        raise invalid(f"{name}.signature", "a string", signature)
    try:
        return text or hidden_text(signature or "")
    except ValueError:
        raise invalid(f"{name}.signature", "a signature of this server as it was sent", signature) from None


def _tool_use(name: str, block: dict[str, Any]) -> dict[str, Any]:
    id_ = _string(f"{name}.id", block.get("id"), ID)
    tool = _string(f"{name}.name", block.get("name"), NAME)
    if type(block.get("input")) is not dict:
        raise invalid(f"{name}.input", "an object", block.get("input"))
    caller = block.get("caller")
    if caller is not None and caller != {"type": "direct"}:
        raise invalid(f"{name}.caller", '{"type": "direct"}', caller)
    return {"id": id_, "type": "function", "function": {"name": tool, "arguments": block["input"]}}


def _texts(name: str, value: Any, no_effect: list[str]) -> list[str]:
    return [_text(where, block, no_effect) for where, block in _blocks(name, value, "system", no_effect)]


def _blocks(name: str, value: Any, of: str, no_effect: list[str]) -> list[tuple[str, dict[str, Any]]]:
    """Return the blocks of a content, each with its name for errors and of a kind that `of` may have."""
    if type(value) is str:
        return [(name, {"type": "text", "text": value})]
    if type(value) is not list:
        raise invalid(name, "a string or an array of blocks", value)
    names = [f"{name}[{index}]" for index in range(len(value))]
    return [(where, _block(where, block, of)) for where, block in zip(names, value, strict=True)]


def _block(name: str, value: Any, of: str) -> dict[str, Any]:
    if type(value) is not dict:
        raise invalid(name, 'an object like {"type": "text", "text": "..."}', value)
    kind = value.get("type")
    if type(kind) is not str or kind not in _BLOCKS[of]:
        raise refused(
            f"{name}.type",
            f"{name}.type must be {', '.join(_BLOCKS[of])}, not {shown(kind)}: this server takes no other blocks here.",
        )
    for key, item in value.items():
        if key == "cache_control" and item is not None:
            check_cache_control(f"{name}.cache_control", item)
        elif key not in _KEYS[kind] and item is not None:
            raise unknown_key(name, key)
    return value


def _text(name: str, block: dict[str, Any], no_effect: list[str]) -> str:
    text = block.get("text")
    if type(text) is not str:
        raise invalid(f"{name}.text", "a string", text)
    if block.get("citations"):
        no_effect.append("citations")
    return text


def _string(name: str, value: Any, check: Text | OneOf) -> str:
    try:
        return check(name, value)
    except InvalidValue:
        raise invalid(name, str(check), value) from None


def _join(first: dict[str, Any], second: dict[str, Any]) -> None:
    """Add a message to the message of the same speaker before it."""
    first["parts"] += second["parts"]
    if calls := second.get("tool_calls"):
        first.setdefault("tool_calls", []).extend(calls)
    if reasoning := second.get("reasoning_content"):
        first["reasoning_content"] = _joined(first.get("reasoning_content"), reasoning)


def _joined(first: str | None, second: str) -> str:
    return f"{first}\n{second}" if first else second


def _content(parts: Sequence[Any]) -> str | list[dict[str, str]]:
    """Return the content of a message: a string if it has one text or none, else parts. parts: texts and images."""
    if not parts or (len(parts) == 1 and isinstance(parts[0], str)):
        return parts[0] if parts else ""
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
