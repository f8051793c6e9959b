"""The page of the runbook is what the program makes, without dead links or Markdown."""

from __future__ import annotations

import re

from quire.ops.paths import PROJECT_ROOT
from quire.ops.tools.runbook_page import PAGE
from quire.ops.tools.runbook_page import render as render_runbook

RUNBOOK = (PROJECT_ROOT / "docs" / "runbook.md").read_text()


def test_the_page_of_the_runbook_is_what_the_program_makes() -> None:
    page = PAGE.read_text()
    assert page == render_runbook(RUNBOOK), "run python -m quire.ops.tools.runbook_page"
    # Each link leads to a place of this page, and no Markdown is left over.
    assert set(re.findall(r'href="#([^"]+)"', page)) <= set(re.findall(r'id="([^"]+)"', page))
    assert "href" not in re.sub(r'href="#', "", page)
    text = re.sub(r"<code>.*?</code>", "", page.partition("</style>")[2])
    assert not re.search(r"\*|`|\]\(|^#|^- ", text, re.MULTILINE)
