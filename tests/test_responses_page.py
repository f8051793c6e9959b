"""docs/responses.md says what the code does: parameters, events, statuses, items."""

from __future__ import annotations

import re

from quire.gateway.api.responses.body import ResponseStatus
from quire.gateway.api.responses.items import ITEM_TYPES
from quire.gateway.api.responses.output_items import ItemStatus
from quire.ops.paths import PROJECT_ROOT
from quire.ops.tools.marked_tables import with_tables
from quire.ops.tools.responses_table import tables

PAGE = (PROJECT_ROOT / "docs" / "responses.md").read_text()


def section(title: str) -> str:
    return PAGE.split(f"## {title}\n")[1].split("\n## ")[0]


def test_the_tables_of_parameters_are_written_from_the_code() -> None:
    assert with_tables(PAGE, tables()) == PAGE, "run python -m quire.ops.tools.responses_table"


def test_the_items_are_those_of_the_code() -> None:
    assert re.findall(r"^\| `(\w+)` \|", section("Items"), re.MULTILINE) == list(ITEM_TYPES)


def test_the_statuses_are_those_of_the_code() -> None:
    text = section("Stored responses")
    for status in (*ResponseStatus, *ItemStatus):
        assert f"`{status}`" in text


def test_the_events_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| (`[a-z_.`, ]+) \|", section("Events of a response"), re.MULTILINE)
    documented = set(re.findall(r"`([a-z_.]+)`", "".join(rows)))
    source = (PROJECT_ROOT / "gateway" / "api" / "responses" / "events.py").read_text()
    written = {name.removeprefix("response.") for name in re.findall(r'"(response\.[a-z_]+(?:\.[a-z]+)?)"', source)}
    deltas = {f"{name}.{end}" for name in written if "." not in name and "_" in name for end in ("delta", "done")}
    whole = {name for name in written if "." in name} | {"failed"}
    assert documented == whole | deltas | {"created", "queued", "in_progress", "completed", "incomplete"}
