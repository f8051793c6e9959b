"""Conversations with tools for a chat template that does not know them: calls and results become plain messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.shared.text.chat_template import Message


def as_plain_messages(
    messages: Sequence[Message], written: Callable[[str, Mapping[str, Any]], str], instructions: str
) -> list[Message]:
    """Return the conversation with the roles system, user and assistant only, and without `tool_calls`.

    written: returns a call as the model writes it. instructions: text about the tools for the system message; empty for
    none. Results of tools become messages of the user; results of parallel calls become one message.
    """
    plain: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    previous = ""
    for message in messages:
        role = message["role"]
        if role == "tool":
            name = names.get(message["tool_call_id"], "the tool")
            result = f"Result of {name}:\n{_text(message)}"
            if previous == "tool":
                plain[-1]["content"] += f"\n\n{result}"
            else:
                plain.append({"role": "user", "content": result})
        elif calls := message.get("tool_calls"):
            names |= {call["id"]: call["function"]["name"] for call in calls}
            functions = [call["function"] for call in calls]
            text = "\n".join(written(one["name"], one["arguments"]) for one in functions)
            content = "\n".join(filter(None, (_text(message), text)))
            rest = {key: value for key, value in message.items() if key != "tool_calls"}
            plain.append({**rest, "content": content})
        else:
            plain.append(dict(message))
        previous = role
    if instructions:
        if plain and plain[0]["role"] == "system":
            plain[0]["content"] = f"{_text(plain[0])}\n\n{instructions}"
        else:
            plain.insert(0, {"role": "system", "content": instructions})
    return list[Message](plain)


def _text(message: Message) -> str:
    """The content of a message as one text."""
    content = message["content"] or ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
