"""Cache breakpoints of a message call: blocks with `cache_control`, and the prompts that tell where these end.

A probe is the same call with a mark after one block. The prompts of both are equal up to the end of this block,
whatever the chat template writes around it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from quire.gateway.errors.api_errors import refused
from quire.gateway.output.tools import ANY_ARGUMENTS
from quire.shared.protocol.messages import MAX_BREAKPOINTS, MAX_TTL_S, SHORT_TTL_S

TTLS_S = {None: SHORT_TTL_S, "5m": SHORT_TTL_S, "1h": MAX_TTL_S}
# Blocks that end a prefix in no chat template, which may leave them out.
_HIDDEN = ("thinking", "redacted_thinking")

# Keys and indices that lead from a body to one of its blocks.
Path = tuple[str | int, ...]


def read_breakpoints(body: Mapping[str, Any]) -> list[tuple[Path, int]]:
    """Return the blocks with `cache_control` in the order of the prompt, each with its time in seconds.

    The markers and blocks of the body have been checked. Raises InvalidRequest for too many, or in a wrong order.
    """
    found = [*_marked(body)]
    if (marker := body.get("cache_control")) is not None:
        last = _last_block(body["messages"])
        if last is not None and last not in [path for path, _ in found]:
            found.append((last, marker))
    if len(found) > MAX_BREAKPOINTS:
        raise refused(
            "cache_control",
            f"At most {MAX_BREAKPOINTS} blocks may have cache_control, not {len(found)}; leave out some.",
        )
    ttls = [TTLS_S[marker.get("ttl")] for _, marker in found]
    for index, ttl_s in enumerate(ttls[1:], 1):
        if ttl_s > ttls[index - 1]:
            name = _name(found[index][0])
            raise refused(
                name,
                f"{name} has the ttl 1h after a block with 5m. In the order tools, system, messages, 1h goes first.",
            )
    return [(path, ttl_s) for (path, _), ttl_s in zip(found, ttls, strict=True)]


def probed(body: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """Return the body with a mark after one block. Both bodies share all other blocks."""
    mark = f"quire{secrets.token_hex(12)}"  # no text of the client has it
    changed: Mapping[str, Any] = _changed(body, path, lambda block: _after(block, path[0] == "tools", mark))
    return changed


def _marked(body: Mapping[str, Any]) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """Yield the blocks with a marker, with their markers, in the order of the prompt."""
    yield from _in_blocks(("tools",), body.get("tools"))
    yield from _in_blocks(("system",), body.get("system"))
    for index, message in enumerate(body["messages"]):
        yield from _in_blocks(("messages", index, "content"), message.get("content"))


def _in_blocks(path: Path, blocks: Any) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    for index, block in enumerate(blocks if type(blocks) is list else ()):
        if block.get("type") == "tool_result":
            yield from _in_blocks((*path, index, "content"), block.get("content"))
        if (marker := block.get("cache_control")) is not None:
            yield (*path, index), marker


def _last_block(messages: Sequence[Mapping[str, Any]]) -> Path | None:
    """Return the last block of the messages that a prompt shows; None without one."""
    for index in range(len(messages) - 1, -1, -1):
        path: Path = ("messages", index, "content")
        content: str | list[dict[str, Any]] = messages[index]["content"]
        if isinstance(content, str):
            return path
        for at in range(len(content) - 1, -1, -1):
            if content[at]["type"] not in _HIDDEN:
                return (*path, at)
    return None


def _changed(value: Any, path: Path, change: Callable[[Any], Sequence[Any]]) -> Any:
    """Return a value in which `change` has replaced the item at a path. Only the containers on the path are copied."""
    key, *rest = path
    new = [_changed(value[key], tuple(rest), change)] if rest else change(value[key])
    if isinstance(key, int):
        return [*value[:key], *new, *value[key + 1 :]]
    [only] = new
    return {**value, key: only}


def _after(block: Any, is_tool: bool, mark: str) -> Sequence[Any]:
    """Return a block with a mark at its end, or the block and one with the mark."""
    if isinstance(block, str):
        return (block + mark,)
    if is_tool:
        return block, {"name": mark, "input_schema": dict(ANY_ARGUMENTS)}
    match block["type"]:
        case "text":
            return ({**block, "text": block["text"] + mark},)
        case "tool_result":
            content = block.get("content") or ""
            if type(content) is list:
                *before, last = content
                content = [*before, *_after(last, False, mark)]
            else:
                content += mark
            return ({**block, "content": content},)
        case "tool_use":
            return block, {"type": "tool_use", "id": mark, "name": mark, "input": {}}
    return block, {"type": "text", "text": mark}


def _name(path: Path) -> str:
    """Return the name of the marker of a block, for errors."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in (*path, "cache_control")).lstrip(".")
