"""The tables of architectures in docs/models.md are those that a measurement gives."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from quire.ops.paths import PROJECT_ROOT
from tests.support.architectures import ARCHITECTURES
from tests.support.served_models import PAGE, REFUSED, VISION, Served, measure, tables

# Their computation takes as long as that of ten others.
SLOWEST = ("qwen4_exp_text", "qwen4_exp", "kolibri1")


def rows(name: str) -> list[list[str]]:
    """The cells of a table of the page, without its head."""
    text = (PROJECT_ROOT / "docs" / PAGE).read_text()
    table = text.split(f"<!-- {name} -->")[1].split(f"<!-- /{name} -->")[0]
    return [line.strip("| ").split(" | ") for line in table.strip().splitlines()[2:]]


@cache
def on_the_page() -> dict[str, Served]:
    """Each configuration as the page has it."""
    found = {}
    for name, is_served in (("served", True), ("refused", False)):
        for architecture, kinds, last in rows(name):
            for kind in kinds.split(", "):
                by, why = (last, "") if is_served else (REFUSED, last)
                found[kind] = Served(kind, architecture.strip("`"), by, why)
    return found


def kinds() -> list[Any]:
    """All configurations. CI runs the first one of each architecture."""
    seen: set[str] = set()
    found = []
    for kind in (*ARCHITECTURES, *VISION):
        architecture = on_the_page()[kind].architecture
        is_in_ci = architecture not in seen and kind not in SLOWEST
        found.append(pytest.param(kind, marks=pytest.mark.slow if is_in_ci else pytest.mark.soak))
        seen |= {architecture} if is_in_ci else set()
    return found


def test_each_configuration_is_on_the_page_once() -> None:
    assert not set(ARCHITECTURES) & set(VISION)
    assert sorted(on_the_page()) == sorted([*ARCHITECTURES, *VISION])
    assert [kind for name in ("served", "refused") for row in rows(name) for kind in row[1].split(", ")].count(
        "llama"
    ) == 1


def test_the_count_is_that_of_the_tables() -> None:
    text = (PROJECT_ROOT / "docs" / PAGE).read_text()
    assert tables(list(on_the_page().values()))["count"].strip() in text


@pytest.mark.parametrize("kind", kinds())
def test_a_configuration_is_served_as_the_page_says(kind: str, tmp_path: Path) -> None:
    """If this fails for a change that is right: `python -m tests.support.served_models` writes the page."""
    assert measure(kind, tmp_path) == on_the_page()[kind]
