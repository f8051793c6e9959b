"""The order of roles that a chat template holds: messages that it refuses or leaves out are moved and joined, in order.

Many templates take a system message only at the head, only one of them, or none. Others refuse two messages of one
speaker in a row, or a question right after the result of a tool. A template is probed once, and a conversation that it
holds reaches it unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

Message = Mapping[str, Any]
# Renders messages, with or without the tools that they call; returns None if the template refuses them.
Render = Callable[[Sequence[Message], bool], str | None]

SPEAKERS = frozenset(("system", "user", "assistant"))
# Between the texts of two messages that become one.
SEPARATOR = "\n\n"
# The text that fills a gap in a template that refuses messages without one.
VISIBLE_FILLER = "..."


@dataclass(frozen=True, slots=True)
class RoleOrder:
    """The conversations that one template holds.

    takes_system: with a message of the system at the head. takes_late_system: with such messages at other places.
    repeated: roles whose messages may follow each other. takes_assistant_first: with an assistant that begins.
    takes_user_after_tool: with a message of the user right after a tool call or its result. takes_system_alone: with
    nothing but messages of the system. filler: the text of a message that fills a gap.
    """

    takes_system: bool = True
    takes_late_system: bool = True
    repeated: frozenset[str] = SPEAKERS
    takes_assistant_first: bool = True
    takes_user_after_tool: bool = True
    takes_system_alone: bool = True
    filler: str = ""

    def written(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the conversation in a form that the template holds.

        A system message that cannot stay becomes text of the user at the same place, between `<system>` tags unless it
        is at the head. Neighbours of one role are joined. Messages without a meaning fill the gaps between roles that
        must alternate.
        """
        if self == RoleOrder():
            return messages
        written: list[Message] = []
        was_moved = False
        for message, is_moved in self._placed(messages):
            last = written[-1] if written else None
            role = message["role"]
            if last and last["role"] == role != "tool" and (role not in self.repeated or is_moved or was_moved):
                written[-1] = _joined(last, message)
            else:
                written += self._fill(last, role)
                written.append(message)
            was_moved = is_moved
        if not self.takes_system_alone and all(message["role"] == "system" for message in written):
            written.append({"role": "user", "content": self.filler})
        return written

    def _placed(self, messages: Sequence[Message]) -> Iterator[tuple[Message, bool]]:
        """Yield each message, and whether it was a system message that cannot stay at its place."""
        is_head = True
        for message in messages:
            is_system = message["role"] == "system"
            is_head = is_head and is_system
            if not is_system or (self.takes_system if is_head else self.takes_late_system):
                yield message, False
            else:
                content = message["content"]
                yield (
                    {"role": "user", "content": content if is_head else f"<system>\n{_text(content)}\n</system>"},
                    True,
                )

    def _fill(self, last: Message | None, role: str) -> list[Message]:
        """Return the message that the template needs between a message and the next, which has a role; if any."""
        begins = last is None or last["role"] == "system"
        if begins and role == "assistant" and not self.takes_assistant_first:
            return [{"role": "user", "content": self.filler}]
        after_tool = last is not None and (last["role"] == "tool" or last.get("tool_calls"))
        if after_tool and role == "user" and not self.takes_user_after_tool:
            return [{"role": "assistant", "content": self.filler}]
        return []


def probe_role_order(render: Render, tool_turn: Sequence[Message]) -> RoleOrder:
    """Return the order of roles that a template holds.

    tool_turn: a conversation that ends with the result of a tool; empty if the template takes none.
    """

    def holds(*roles: str) -> bool:
        messages = [{"role": role, "content": f"probed{role}{at}"} for at, role in enumerate(roles)]
        text = render(messages, False)
        return text is not None and all(message["content"] in text for message in messages)

    if not holds("user", "assistant", "user"):
        return RoleOrder()  # the template refuses more than an order of roles
    doubled = {
        "system": ("system", "system", "user"),
        "user": ("user", "user", "assistant", "user"),
        "assistant": ("user", "assistant", "assistant", "user"),
    }
    question = {"role": "user", "content": "probedquestion"}
    takes_system = holds("system", "user")
    takes_tools = bool(tool_turn) and render(tool_turn, True) is not None
    order = RoleOrder(
        takes_system=takes_system,
        takes_late_system=takes_system
        and holds("user", "assistant", "system")
        and holds("user", "system", "assistant", "user"),
        repeated=frozenset(role for role, roles in doubled.items() if holds(*roles)),
        takes_assistant_first=holds("assistant", "user"),
        takes_user_after_tool=not takes_tools or render([*tool_turn, question], True) is not None,
        takes_system_alone=not takes_system or holds("system"),
    )
    # Some templates refuse messages without a text.
    first: list[Message] = [{"role": "assistant", "content": "probed"}, question]
    after_tool: list[Message] = [*tool_turn, question]
    gaps = ((first, False), (after_tool, takes_tools))
    fits = all(render(order.written(gap), has_tools) is not None for gap, has_tools in gaps)
    return order if fits else replace(order, filler=VISIBLE_FILLER)


def _joined(first: Message, second: Message) -> Message:
    """Return two messages of one role as one."""
    joined: dict[str, Any] = {**second, **first, "content": _both(first["content"], second["content"])}
    if calls := [*first.get("tool_calls", ()), *second.get("tool_calls", ())]:
        joined["tool_calls"] = calls
    if reasoning := [message["reasoning_content"] for message in (first, second) if message.get("reasoning_content")]:
        joined["reasoning_content"] = SEPARATOR.join(reasoning)
    return joined


def _both(first: Any, second: Any) -> Any:
    """Return two contents as one: texts as one text; otherwise parts, because the template writes parts in its way."""
    if not first or not second:
        return first or second
    if isinstance(first, str) and isinstance(second, str):
        return first + SEPARATOR + second
    head, *rest = _parts(second)
    return [*_parts(first), {**head, "text": SEPARATOR + head["text"]}, *rest]


def _parts(content: Any) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _text(content: Any) -> str:
    return "\n".join(part["text"] for part in _parts(content or ""))
