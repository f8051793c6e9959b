"""Tables between markers are replaced, and the rest of the document stays as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.ops.tools import marked_tables
from quire.ops.tools.marked_tables import update_page, with_tables

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
