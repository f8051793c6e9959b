"""The tools of Anthropic that a client runs itself: their schemas, which a request leaves out.

Anthropic's models know these tools from their training. Another model needs the schema in its prompt. Tools that
Anthropic's servers run, such as the web search, are not among them: this server skips those.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple


class ClientTool(NamedTuple):
    """A tool that a request names by a dated type, such as `bash_20250124`."""

    name: str
    description: str
    input_schema: dict[str, Any]


def _object(required: list[str], **properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required}


def _text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


def _command(*names: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(names), "description": "What to do."}


_RANGE = {
    "type": "array",
    "items": {"type": "integer"},
    "minItems": 2,
    "maxItems": 2,
    "description": "For view: the first and the last line to show, from 1; -1 is the end of the file.",
}
_LINE = {"type": "integer", "description": "For insert: the line after which the text goes; 0 is the beginning."}


def _editor(name: str, inserted: str, *more: str) -> ClientTool:
    return ClientTool(
        name,
        "Shows, creates and edits text files.",
        _object(
            ["command", "path"],
            command=_command("view", "create", "str_replace", "insert", *more),
            path=_text("Path of the file, or of the folder to list."),
            file_text=_text("For create: the content of the file."),
            old_str=_text("For str_replace: the text to replace; it occurs exactly once in the file."),
            **{"new_str": _text("For str_replace: the new text."), inserted: _text("The new text.")},
            insert_line=_LINE,
            view_range=_RANGE,
        ),
    )


_BASH = ClientTool(
    "bash",
    "Runs a command in a bash session that stays open between calls.",
    _object(
        [],
        command=_text("The command to run."),
        restart={"type": "boolean", "description": "True to start a new session instead."},
    ),
)
_MEMORY = ClientTool(
    "memory",
    "Keeps notes in files below /memories, which later conversations can read.",
    _object(
        ["command"],
        command=_command("view", "create", "str_replace", "insert", "delete", "rename"),
        path=_text("Path of the file or folder, below /memories."),
        file_text=_text("For create: the content of the file."),
        old_str=_text("For str_replace: the text to replace; it occurs exactly once in the file."),
        new_str=_text("For str_replace: the new text."),
        insert_line=_LINE,
        insert_text=_text("For insert: the text to add."),
        old_path=_text("For rename: the present path."),
        new_path=_text("For rename: the new path."),
        view_range=_RANGE,
    ),
)
# By type without its date.
_TOOLS = {"bash": _BASH, "memory": _MEMORY}
# The name of the editor, and of its field for inserted text, changed with its versions.
_EDITORS = {
    "text_editor_20241022": _editor("str_replace_editor", "new_str", "undo_edit"),
    "text_editor_20250124": _editor("str_replace_editor", "new_str", "undo_edit"),
    "text_editor_20250429": _editor("str_replace_based_edit_tool", "new_str"),
    "text_editor_20250728": _editor("str_replace_based_edit_tool", "insert_text"),
}


def client_tool(kind: str) -> ClientTool | None:
    """Return the tool of a type; None for a tool that no client runs, or that needs images."""
    if kind in _EDITORS:
        return _EDITORS[kind]
    dated = re.fullmatch(r"([a-z]+)_20[0-9]{6}", kind, re.ASCII)
    return _TOOLS.get(dated[1]) if dated else None
