"""The schemas of tools that clients run themselves."""

from __future__ import annotations

import jsonschema
import pytest

from quire.gateway.api.messages.client_tools import client_tool

NAMES = {
    "bash_20241022": "bash",
    "bash_20250124": "bash",
    "text_editor_20241022": "str_replace_editor",
    "text_editor_20250124": "str_replace_editor",
    "text_editor_20250429": "str_replace_based_edit_tool",
    "text_editor_20250728": "str_replace_based_edit_tool",
    "memory_20250818": "memory",
}


@pytest.mark.parametrize(("kind", "name"), NAMES.items())
def test_a_client_tool_has_a_name_and_a_correct_schema(kind: str, name: str) -> None:
    tool = client_tool(kind)
    assert tool is not None
    assert tool.name == name
    jsonschema.Draft202012Validator.check_schema(tool.input_schema)
    assert all(field in tool.input_schema["properties"] for field in tool.input_schema["required"])


@pytest.mark.parametrize(
    "kind",
    ["web_search_20250305", "code_execution_20250825", "computer_20250124", "bash", "bash_2025", "x" * 10_000, ""],
)
def test_other_tools_are_none(kind: str) -> None:
    assert client_tool(kind) is None


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("bash_20250124", {"command": "ls"}),
        ("bash_20250124", {"restart": True}),
        ("text_editor_20250124", {"command": "insert", "path": "/a", "insert_line": 0, "new_str": "x"}),
        ("text_editor_20250124", {"command": "undo_edit", "path": "/a"}),
        ("text_editor_20250728", {"command": "insert", "path": "/a", "insert_line": 0, "insert_text": "x"}),
        ("text_editor_20250728", {"command": "view", "path": "/a", "view_range": [1, -1]}),
        ("memory_20250818", {"command": "rename", "old_path": "/memories/a", "new_path": "/memories/b"}),
    ],
)
def test_a_schema_takes_what_the_documentation_shows(kind: str, arguments: dict[str, object]) -> None:
    tool = client_tool(kind)
    assert tool is not None
    jsonschema.validate(arguments, tool.input_schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**arguments, "command": 5}, tool.input_schema)
