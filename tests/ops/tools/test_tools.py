"""Tools for developers: tables in documents, pages, chosen tests, and the runner of the JSON Schema Test Suite."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from quire.ops.paths import PROJECT_ROOT
from quire.ops.tools import json_schema_suite, marked_tables
from quire.ops.tools.changed_tests import ELSEWHERE, chosen
from quire.ops.tools.env_example import render
from quire.ops.tools.json_schema_suite import Case, cases, main, run
from quire.ops.tools.marked_tables import update_page, with_tables

# --- marked tables ----------------------------------------------------------------------------------------------------
# Tables between markers are replaced, and the rest of the document stays as it is.


PAGE = """\
Before.

<!-- first -->

| old |

<!-- /first -->
Between.
<!-- second -->
<!-- /second -->
After.
"""


def test_each_table_is_replaced_at_its_place() -> None:
    updated = with_tables(PAGE, {"second": "| two |\n", "first": "| one |\n"})
    assert updated == (
        "Before.\n\n<!-- first -->\n\n| one |\n\n<!-- /first -->\nBetween.\n"
        "<!-- second -->\n\n| two |\n\n<!-- /second -->\nAfter.\n"
    )
    assert with_tables(updated, {"first": "| one |\n", "second": "| two |\n"}) == updated


@pytest.mark.parametrize(
    "page",
    ["No markers.\n", PAGE + PAGE, PAGE.replace("<!-- /first -->\n", ""), PAGE + "<!-- first -->\n"],
    ids=["none", "twice", "no end", "two beginnings"],
)
def test_a_table_without_exactly_one_place_is_an_error(page: str) -> None:
    with pytest.raises(ValueError, match="the table 'first' needs one pair of lines <!-- first -->"):
        with_tables(page, {"first": "| one |\n"})


def test_a_page_is_written_and_the_command_says_whether_it_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(marked_tables, "PROJECT_ROOT", tmp_path)
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    page.write_text(PAGE)
    for _ in range(2):
        update_page("page.md", {"first": "| one |\n"})
    assert "| one |" in page.read_text()
    assert "| old |" not in page.read_text()
    assert capsys.readouterr().out == "docs/page.md: tables brought up to date\ndocs/page.md: unchanged\n"


# --- env example ------------------------------------------------------------------------------------------------------
# `.env.example` is what the program makes.


def test_the_example_file_has_every_setting() -> None:
    assert (PROJECT_ROOT / ".env.example").read_text() == render(), (
        "python -m quire.ops.tools.env_example > .env.example"
    )


# --- changed tests ----------------------------------------------------------------------------------------------------
# The tests of a change, as `make check` chooses them.


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["gateway/stream/router.py", "gateway/stream/cursor.py"], ["tests/gateway/stream"]),
        (["gateway/stream/router.py", "tests/gateway/stream/test_gone.py"], ["tests/gateway/stream"]),
        (["tests/gateway/features/parking/test_parking.py"], ["tests/gateway/features/parking/test_parking.py"]),
        (["gateway/settings.py", "gateway/stream/router.py"], ["tests/gateway"]),
        (["gateway/features/pages/static/run.js"], ["tests/gateway/features/pages"]),
        (["tests/page/conftest.py"], ["tests/page"]),
        (["shared/protocol/scripts/submit.lua"], ["tests/shared/broker"]),
        (["docs/how-to/keys.md", "docker-compose.yml"], ["tests/outside/deploy", "tests/test_docs.py"]),
        (["tests/support/redis_server.py", "tests/conftest.py", "README.md", "LICENSE"], []),
        (["gateway/stream/gone.py", "tests/gateway/stream/test_gone.py"], ["tests/gateway/stream"]),
    ],
)
def test_files_have_the_tests_of_their_rooms(paths: list[str], expected: list[str]) -> None:
    assert chosen(paths) == expected


def test_the_tests_of_places_without_a_room_exist() -> None:
    assert all((PROJECT_ROOT / tests).exists() for tests in ELSEWHERE.values())


# --- json schema suite ------------------------------------------------------------------------------------------------
# The runner of the JSON Schema Test Suite, with a suite of three schemas.


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    integer = [{"data": 1, "valid": True}, {"data": "a", "valid": False}]
    order = [{"data": {"b": 2, "a": 1}, "valid": True}]
    groups = [
        {"description": "a type", "schema": {"type": "integer"}, "tests": integer},
        {"description": "any order", "schema": {"const": {"a": 1, "b": 2}}, "tests": order},
        {"description": "elsewhere", "schema": {"$ref": "https://example.com"}, "tests": []},
    ]
    folder = tmp_path / json_schema_suite.DRAFT
    folder.mkdir(parents=True)
    (folder / "some.json").write_text(json.dumps(groups))
    return tmp_path


def test_refused_schemas_and_missing_values_are_counted(checkout: Path) -> None:
    found = [run(case, 5) for case in cases(checkout)]
    assert [one.case.name for one in found] == ["some: a type", "some: any order", "some: elsewhere"]
    assert [bool(one.refused) for one in found] == [False, False, True]
    assert [one.missing for one in found] == [(), ('{"b": 2, "a": 1}',), ()]
    assert not any(one.wrong for one in found)
    assert found[1].answers == 5


def test_what_a_grammar_accepts_against_its_schema_is_found() -> None:
    assert run(Case("wrong", {"type": "integer"}, [(1, False)]), 0).wrong == ("1",)


def test_the_counts_are_printed(
    checkout: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["json_schema_suite", str(checkout), "--draws", "1", "--refused"])
    main()
    printed = capsys.readouterr().out
    assert "refused  some: elsewhere" in printed
    assert "3 schemas: 1 refused, 0 wrong, 1 valid values missing" in printed
