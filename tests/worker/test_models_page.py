"""The tables of architectures in docs/models.md are those that a measurement gives."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from quire.ops.paths import PROJECT_ROOT
from quire.ops.tools.marked_tables import with_tables
from tests.support.architectures import ARCHITECTURES
from tests.support.served_models import (
    OWN_DECODER,
    PAGE,
    REFUSED,
    SEEN,
    TRANSFORMERS,
    VISION,
    Served,
    measure,
    tables,
)

# Their computation takes as long as that of ten others.
SLOWEST = ("qwen4_exp_text", "qwen4_exp", "kolibri1")


def marked(name: str) -> list[str]:
    """The lines between the markers of a table or list of the page."""
    text = (PROJECT_ROOT / "docs" / PAGE).read_text()
    return text.split(f"<!-- {name} -->")[1].split(f"<!-- /{name} -->")[0].strip().splitlines()


def rows() -> list[tuple[str, str, str, str]]:
    """Each row of the page: architecture, its configurations, who computes it, and why it is refused."""
    found = []
    for name, by in (("own-decoder", OWN_DECODER), ("transformers", TRANSFORMERS)):
        found += [(*line.removeprefix("- ").split(": "), by, "") for line in marked(name)]
    for line in marked(REFUSED)[2:]:
        architecture, kinds, why = line.strip("| ").split(" | ")
        found.append((architecture, kinds, REFUSED, why))
    return found


@cache
def on_the_page() -> dict[str, Served]:
    """Each configuration as the page has it."""
    seeing = {kind for line in marked("images") for kind in line.split(": ")[1].split(", ")}
    images = dict.fromkeys(seeing, SEEN)
    for line in marked("text-alone")[2:]:
        _, kind, why = line.strip("| ").split(" | ")
        images[kind] = why
    return {
        kind: Served(kind, architecture.strip("`"), by, why, images.get(kind, ""))
        for architecture, kinds, by, why in rows()
        for kind in kinds.split(", ")
    }


def kinds() -> list[Any]:
    """All configurations. CI runs the first one of each architecture of the own decoder, and of each fourth other."""
    seen: set[str] = set()
    found = []
    for kind in (*ARCHITECTURES, *VISION):
        served = on_the_page()[kind]
        is_first = served.architecture not in seen and kind not in SLOWEST
        seen |= {served.architecture} if is_first else set()
        is_in_ci = is_first and (served.by == OWN_DECODER or len(seen) % 4 == 0)
        found.append(pytest.param(kind, marks=pytest.mark.slow if is_in_ci else pytest.mark.soak))
    return found


def test_each_configuration_is_on_the_page_once() -> None:
    assert not set(ARCHITECTURES) & set(VISION)
    assert sorted(on_the_page()) == sorted([*ARCHITECTURES, *VISION])
    assert [kind for row in rows() for kind in row[1].split(", ")].count("llama") == 1


def test_the_lists_and_the_count_are_written_from_the_same_rows() -> None:
    text = (PROJECT_ROOT / "docs" / PAGE).read_text()
    assert with_tables(text, tables(list(on_the_page().values()))) == text


@pytest.mark.parametrize("kind", kinds())
def test_a_configuration_is_served_as_the_page_says(kind: str, tmp_path: Path) -> None:
    """If this fails for a change that is right: `python -m tests.support.served_models` writes the page."""
    assert measure(kind, tmp_path) == on_the_page()[kind]
