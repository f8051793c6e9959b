"""The recording of the tour and its page are what their scripts write."""

from __future__ import annotations

import json

import pytest

from quire.kernels import CpuOps, KernelsUnavailable
from quire.ops.tools import record_tour, tour_page


def test_the_page_is_the_one_that_its_sources_give() -> None:
    assert tour_page.FILE.read_text() == tour_page.build(), "run python -m quire.ops.tools.tour_page"


def test_modules_of_the_page_that_declare_the_same_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tour_page.static_files, "content", lambda name: b"export const a = 1;\nfunction b() {}\n")
    with pytest.raises(ValueError, match="two modules of the tour declare b"):
        tour_page.script('import { a } from "/a.js";\nconst b = a;\n')


def test_an_engine_gives_the_recording_again() -> None:
    try:
        import torch

        CpuOps(torch.float32)
    except KernelsUnavailable as missing:
        pytest.skip(str(missing))
    given, made = json.loads(record_tour.FILE.read_text()), json.loads(record_tour.record())
    for old, new in zip(given["chapters"], made["chapters"], strict=True):
        assert old == new, f"chapter {old['id']}: run python -m quire.ops.tools.record_tour"
