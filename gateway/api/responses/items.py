"""The input items of a response: checked, brought into one form, and turned into messages for the chat template.

The form is that of the API's answers, so that stored items can be listed and be sent back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.gateway.api.chat_messages import CALL_ID, DETAILS, ROLES
from quire.gateway.api.responses.compaction import (
    COMPACTION,
    SUMMARY,
    TRIGGER,
    Compaction,
    broken_compaction,
    is_foreign,
)
from quire.gateway.api.responses.tools import FunctionName, read_response_tools
from quire.gateway.api.tools import tool_name
from quire.gateway.errors.api_errors import invalid, of_check, only, refused
from quire.shared.config.schema_parts import ANY_OBJECT, TEXT, any_of, array
from quire.shared.config.validators import InvalidValue, OneOf, Text, shown
from quire.shared.protocol.broker import new_id
from quire.shared.text.chat_template import Message
from quire.shared.text.tool_arguments import arguments_of

Item = dict[str, Any]

MAX_ITEMS = 10_000
# Of `input`; `read_items` checks each item.
INPUT_SCHEMA = any_of(TEXT, array(ANY_OBJECT, high=MAX_ITEMS))
MAX_ITEM_ID_LENGTH = 256
ADDITIONAL_TOOLS = "additional_tools"
# Types of the items that a compaction may keep.
KEPT_TYPES = ("message", "function_call", "function_call_output", "reasoning")
ITEM_TYPES = (
    "message",
    "function_call",
    "function_call_output",
    "reasoning",
    COMPACTION,
    ADDITIONAL_TOOLS,
    "item_reference",
)
# Ends of the types of calls, and of their outputs, of tools that only other servers have, such as `web_search_call`.
_FOREIGN_ENDS = ("_call", "_call_output")
# Other items that threads have which began at another server.
_FOREIGN = (
    "agent_message",
    "context_compaction",
    "mcp_approval_request",
    "mcp_approval_response",
    "mcp_list_tools",
    "program",
    "program_output",
    "tool_search_output",
)
# Notes that Codex writes into items for a provider with the name OpenAI; they are left out.
_OF_CODEX = "internal_chat_message_metadata_passthrough"
_STATUS = OneOf(("in_progress", "completed", "incomplete"))
# Keys of each type besides `type`, `id` and `status`. The keys of the second group are kept with the item, and the
# model does not see them.
_KEYS = {
    "message": (("role", "content"), ("phase",)),
    "function_call": (("call_id", "namespace", "name", "arguments", "caller"), ("created_by",)),
    "function_call_output": (("call_id", "output", "caller"), ("created_by", "namespace", "name")),
    "reasoning": (("content", "summary"), ("encrypted_content", "created_by")),
    COMPACTION: (("encrypted_content",), ("created_by",)),
    ADDITIONAL_TOOLS: (("role", "tools"), ()),
    "item_reference": ((), ()),
}
# The type of a text part by role; `text` is the name of the chat API.
_PART_TYPES = {"user": "input_text", "system": "input_text", "developer": "input_text", "assistant": "output_text"}
# Keys of an image that only this process knows: its name for errors, and the image once it is read.
WHERE, IMAGE = "where", "image"
_PART_KEYS = ("type", "text", "annotations", "logprobs", "prompt_cache_breakpoint")


def read_items(name: str, value: Any, skipped: list[tuple[str, str]] | None = None) -> list[Item]:
    """Return the items of an input: a string is one message of the user. Raises InvalidRequest that names the item.

    Items without an id get a random one. Those that only other servers have, such as calls of their tools, are left
    out: their names are added to `skipped`, each with the reason.
    """
    if type(value) is str:
        return [user_message(value)] if value else []
    if type(value) is not list:
        raise invalid(name, "a string or an array of items", value)
    if len(value) > MAX_ITEMS:
        raise refused(name, f"{name} must have at most {MAX_ITEMS} items, not {len(value)}.")
    try:
        items = []
        for index, item in enumerate(value):
            at = f"{name}[{index}]"
            kind = item.get("type") if type(item) is dict else None
            if kind == COMPACTION and skipped is not None and is_foreign(item.get("encrypted_content")):
                skipped.append((at, "another server has made this compaction; the model does not see it"))
            elif type(kind) is not str or kind in ITEM_TYPES or not (kind in _FOREIGN or kind.endswith(_FOREIGN_ENDS)):
                items.append(_item(at, item))
            elif skipped is not None:
                skipped.append((at, f"this server has no items of the type {shown(kind)}; the model does not see it"))
        return items
    except InvalidValue as error:
        raise of_check(error) from None


def user_message(text: str) -> Item:
    content = [{"type": "input_text", "text": text}]
    return {"type": "message", "id": f"msg_{new_id()}", "status": "completed", "role": "user", "content": content}


def without_trigger(value: Any) -> tuple[Any, bool]:
    """Return an input without the item at its end that asks for a compaction, and whether it has one."""
    last = value[-1] if type(value) is list and value else None
    if type(last) is not dict or last.get("type") != TRIGGER:
        return value, False
    only(f"input[{len(value) - 1}]", last, ("type", "id"))
    return value[:-1], True


def _item(name: str, value: Any) -> Item:
    if type(value) is not dict:
        raise invalid(name, "an object", value)
    kind = value.get("type", "message" if "role" in value else "item_reference" if "id" in value else None)
    if kind == TRIGGER:
        raise refused(f"{name}.type", f"{name}.type is {TRIGGER}, which only the last item of the input may have.")
    if type(kind) is not str or kind not in ITEM_TYPES:
        raise refused(
            f"{name}.type",
            f"{name}.type must be {', '.join(ITEM_TYPES[:-1])} or {ITEM_TYPES[-1]}, not {shown(kind)}: this server has "
            "no other items.",
            code="unsupported_parameter",
        )
    seen, kept = _KEYS[kind]
    for key, entry in value.items():
        if key not in ("type", "id", "status", _OF_CODEX, *seen, *kept) and entry is not None:
            raise refused(
                f"{name}.{key[:80]}",
                f"{name}.{key[:80]} is not supported in an item of the type {kind}; leave it out.",
                code="unknown_parameter",
            )
    item: Item = {"type": kind}
    if (item_id := value.get("id")) is not None:
        item["id"] = Text(1, MAX_ITEM_ID_LENGTH)(f"{name}.id", item_id)
    elif kind == "item_reference":
        raise refused(f"{name}.id", f"{name}.id is required.", code="missing_required_parameter")
    else:
        item["id"] = f"{_PREFIXES[kind]}{new_id()}"
    if kind == "item_reference":
        return item
    if kind != COMPACTION:
        item["status"] = _STATUS(f"{name}.status", value["status"]) if value.get("status") is not None else "completed"
    _READERS[kind](name, value, item)
    for key in kept:
        if value.get(key) is not None:
            item[key] = Text()(f"{name}.{key}", value[key])
    return item


def _read_message(name: str, value: Mapping[str, Any], item: Item) -> None:
    role = value.get("role")
    if type(role) is not str or role not in _PART_TYPES:
        raise invalid(f"{name}.role", "user, assistant, system or developer", role)
    item["role"] = role
    item["content"] = _parts(f"{name}.content", value.get("content"), _PART_TYPES[role], role == "user")


def _parts(name: str, value: Any, part_type: str, takes_images: bool = False) -> list[dict[str, Any]]:
    """Return the parts of a message; a string is one part."""
    if type(value) is str:
        value = [{"type": part_type, "text": value}]
    if type(value) is not list:
        raise invalid(name, "a string or an array of text parts", value)
    return [_part(f"{name}[{index}]", part, part_type, takes_images) for index, part in enumerate(value)]


def _image(name: str, value: Mapping[str, Any]) -> dict[str, Any]:
    only(name, value, ("type", "image_url", "file_id", "detail", "prompt_cache_breakpoint"))
    detail = DETAILS(f"{name}.detail", "auto" if value.get("detail") is None else value["detail"])
    key = "image_url" if value.get("file_id") is None else "file_id"
    if key == "file_id" and value.get("image_url") is not None:
        raise refused(f"{name}.file_id", f"{name}.file_id and {name}.image_url are both given; leave out one of them.")
    text = Text()(f"{name}.{key}", value.get(key))
    part = {"type": "input_image", "image_url": None, "file_id": None, key: text, "detail": detail}
    return part | {WHERE: f"{name}.{key}"}


def _part(name: str, value: Any, part_type: str, takes_images: bool) -> dict[str, Any]:
    if type(value) is not dict:
        raise invalid(name, f'an object like {{"type": "{part_type}", "text": "..."}}', value)
    kind, key = value.get("type"), "text"
    if kind == "input_image" and takes_images:
        return _image(name, value)
    if kind == "refusal" and part_type == "output_text":
        key = "refusal"
    elif kind not in ("input_text", "output_text", "text"):
        raise refused(
            f"{name}.type",
            f"{name}.type must be '{part_type}', not {shown(kind)}: this server takes no other content.",
            code="unsupported_parameter",
        )
    for other, entry in value.items():
        if other not in (*_PART_KEYS, key) and entry is not None:
            raise refused(f"{name}.{other[:80]}", f"{name}.{other[:80]} is not supported.", code="unknown_parameter")
    text = Text()(f"{name}.{key}", value.get(key))
    if part_type == "input_text":
        return {"type": "input_text", "text": text}
    # A refusal of another model is what the assistant said.
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _read_function_call(name: str, value: Mapping[str, Any], item: Item) -> None:
    item["call_id"] = CALL_ID(f"{name}.call_id", value.get("call_id"))
    if value.get("namespace") is not None:
        item["namespace"] = tool_name(f"{name}.namespace", value["namespace"])
    item["name"] = tool_name(f"{name}.name", value.get("name"))
    _check_caller(f"{name}.caller", value.get("caller"))
    item["arguments"] = Text()(f"{name}.arguments", value.get("arguments"))


def _read_function_call_output(name: str, value: Mapping[str, Any], item: Item) -> None:
    item["call_id"] = CALL_ID(f"{name}.call_id", value.get("call_id"))
    output = value.get("output")
    if type(output) is not str and type(output) is not list:
        raise invalid(f"{name}.output", "a string or an array of text parts", output)
    _check_caller(f"{name}.caller", value.get("caller"))
    item["output"] = output if type(output) is str else _parts(f"{name}.output", output, "input_text", True)


def _check_caller(name: str, value: Any) -> None:
    """Check what made a call, such as a program of another server: the model does not see it."""
    if value is not None and type(value) is not dict:
        raise invalid(name, 'an object like {"type": "direct"}', value)


def _read_additional_tools(name: str, value: Mapping[str, Any], item: Item) -> None:
    if value.get("role") != "developer":
        raise invalid(f"{name}.role", "developer", value.get("role"))
    read_response_tools(f"{name}.tools", value.get("tools"))
    item |= {"role": "developer", "tools": value["tools"]}


def _read_reasoning(name: str, value: Mapping[str, Any], item: Item) -> None:
    for key, part_type in (("summary", "summary_text"), ("content", "reasoning_text")):
        parts = value.get(key) or []
        if type(parts) is not list:
            raise invalid(f"{name}.{key}", "an array", parts)
        texts = []
        for index, part in enumerate(parts):
            at = f"{name}.{key}[{index}]"
            if type(part) is not dict or part.get("type") not in (part_type, "text"):
                raise invalid(at, f'an object like {{"type": "{part_type}", "text": "..."}}', part)
            texts.append({"type": part_type, "text": Text()(f"{at}.text", part.get("text"))})
        item[key] = texts


def _read_compaction(name: str, value: Mapping[str, Any], item: Item) -> None:
    """Check a compaction of this server, which any client may have written: it is as much theirs as a message."""
    at = f"{name}.encrypted_content"
    item["encrypted_content"] = Text()(at, value.get("encrypted_content"))
    compaction = Compaction.read(at, item["encrypted_content"])
    if compaction.kept is not None:
        if any(type(kept) is not dict or kept.get("type") not in KEPT_TYPES for kept in compaction.kept):
            raise broken_compaction(at)
        kept = kept_by_compaction(read_items(at, compaction.kept))
        item["encrypted_content"] = Compaction(compaction.summary, kept).encode()


_READERS: dict[str, Callable[[str, Mapping[str, Any], Item], None]] = {
    "message": _read_message,
    "function_call": _read_function_call,
    "function_call_output": _read_function_call_output,
    "reasoning": _read_reasoning,
    COMPACTION: _read_compaction,
    ADDITIONAL_TOOLS: _read_additional_tools,
}
_PREFIXES = {
    "message": "msg_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "reasoning": "rs_",
    COMPACTION: "cmp_",
    ADDITIONAL_TOOLS: "at_",
}


def shown_to_model(items: Sequence[Item]) -> list[Item]:
    """Return the items with the summary in place of each compaction, and without what a compaction replaces.

    A compaction that keeps items replaces all items before it but the messages of the system at the beginning.
    """
    found: list[Item] = []
    head = head_of(items)  # also of what was found: a summary is a message of the user
    for item in items:
        if item["type"] != COMPACTION:
            found.append(item)
            continue
        compaction = Compaction.read("input", item["encrypted_content"])
        if compaction.kept is not None:
            del found[head:]
        found += [summary_message(compaction.summary), *(compaction.kept or ())]
    return found


def summary_message(summary: str) -> Item:
    """Return the message that tells the model a summary."""
    return user_message(SUMMARY + summary)


def with_own_ids(items: Sequence[Item]) -> list[Item]:
    """Return the items; one with the id of an item before it, such as a repeated one, gets another id."""
    seen: set[str] = set()
    found = []
    for item in items:
        if item["id"] in seen:
            item = item | {"id": f"{_PREFIXES[item['type']]}{new_id()}"}
        seen.add(item["id"])
        found.append(item)
    return found


def divided(items: Sequence[Item]) -> tuple[list[Item], list[Item], list[Item]]:
    """Return the messages of the system at the beginning, the items that a summary may replace, and the last step.

    The last step is what the model answers: the last messages of the user, or the last outputs with their calls.
    """
    head, at = head_of(items), len(items)
    while at > head and items[at - 1]["type"] == "function_call_output":
        at -= 1
    if at < len(items):
        while at > head and items[at - 1]["type"] in ("function_call", "reasoning"):
            at -= 1
    else:
        while at > head and items[at - 1].get("role") in ("user", "system", "developer"):
            at -= 1
    return list(items[:head]), list(items[head:at]), list(items[at:])


def kept_by_compaction(items: Sequence[Item]) -> list[Item]:
    """Return items as a compaction keeps them: a text stands for each image."""

    def text_of(part: dict[str, Any]) -> dict[str, Any]:
        return {"type": "input_text", "text": "[image]"} if part["type"] == "input_image" else part

    kept = []
    for item in items:
        if item["type"] in KEPT_TYPES:
            lists = {key: item[key] for key in ("content", "output") if type(item.get(key)) is list}
            kept.append(item | {key: [text_of(part) for part in parts] for key, parts in lists.items()})
    return kept


def messages_of(instructions: str, items: Sequence[Item]) -> list[Message]:
    """Return the messages for the chat template. Raises InvalidRequest for an output without its function call.

    Reasoning, text and function calls that follow each other are one message of the assistant. Messages of the system
    at the beginning become one, after the instructions: many templates take only one. Without any message of another
    role, the user says an empty text: templates need a message to answer.
    """
    head = [instructions] if instructions else []
    messages: list[dict[str, Any]] = []
    calls: set[str] = set()
    reasoning = ""
    for index, item in enumerate(shown_to_model(items)):
        kind = item["type"]
        if kind == ADDITIONAL_TOOLS:
            continue
        if kind == "reasoning":
            reasoning += "".join(part["text"] for part in item["content"])
        elif kind == "function_call_output":
            if item["call_id"] not in calls:
                raise refused(
                    "input",
                    f"input has an output for the call {item['call_id']!r}, but no function_call with this call_id "
                    f"before it (item {index} of the conversation).",
                )
            messages.append({"role": "tool", "content": _content(item["output"]), "tool_call_id": item["call_id"]})
        elif kind == "function_call":
            calls.add(item["call_id"])
            _assistant(messages, reasoning)["tool_calls"].append(_call(item))
            reasoning = ""
        elif item["role"] == "assistant":
            message = {"role": "assistant", "content": "".join(part["text"] for part in item["content"])}
            messages.append(message | ({"reasoning_content": reasoning} if reasoning else {}))
            reasoning = ""
        elif ROLES[item["role"]] == "system" and not messages:
            head.append("\n".join(part["text"] for part in item["content"]))
        else:
            messages.append({"role": ROLES[item["role"]], "content": _content(item["content"])})
    if head:
        messages.insert(0, {"role": "system", "content": "\n\n".join(head)})
    if len(messages) == bool(head):
        messages.append({"role": "user", "content": ""})
    return list[Message](messages)


def _assistant(messages: list[dict[str, Any]], reasoning: str) -> dict[str, Any]:
    """Return the message of the assistant that a function call belongs to."""
    if reasoning or not messages or messages[-1]["role"] != "assistant":
        messages.append(
            {"role": "assistant", "content": None} | ({"reasoning_content": reasoning} if reasoning else {})
        )
    messages[-1].setdefault("tool_calls", [])
    return messages[-1]


def _call(item: Item) -> dict[str, Any]:
    name = FunctionName(item.get("namespace", ""), item["name"]).flat
    function = {"name": name, "arguments": arguments_of(item["arguments"])}
    return {"id": item["call_id"], "type": "function", "function": function}


def _content(value: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return the content of a message: one text, or several parts in the form of the chat API."""
    if isinstance(value, str):
        return value
    if len(value) == 1 and "text" in value[0]:
        text: str = value[0]["text"]
        return text
    return [{"type": "text", "text": part["text"]} if "text" in part else _image_part(part) for part in value]


def _image_part(part: dict[str, Any]) -> dict[str, Any]:
    """Return an image as `take_images` reads it."""
    given = {"file_id": part["file_id"]} if part.get("file_id") else {"url": part["image_url"]}
    return {"type": "image", "where": part.get(WHERE, "input"), IMAGE: part.get(IMAGE), **given}


def without_oldest(items: Sequence[Item], count: int) -> list[Item]:
    """Return the items without the `count` oldest ones; messages of the system at the beginning stay.

    An output whose function call is dropped is dropped as well.
    """
    head = head_of(items)
    rest = items[head + count :]
    calls = {item["call_id"] for item in rest if item["type"] == "function_call"}
    kept = [item for item in rest if item["type"] != "function_call_output" or item["call_id"] in calls]
    return [*items[:head], *kept]


def droppable(items: Sequence[Item]) -> int:
    """Return the largest `count` for `without_oldest`: the last item stays."""
    return max(0, len(items) - head_of(items) - 1)


def head_of(items: Sequence[Item]) -> int:
    """Return the number of messages of the system at the beginning."""
    head = 0
    while head < len(items) and items[head].get("role") in ("system", "developer"):
        head += 1
    return head
