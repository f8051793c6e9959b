"""Workers that `quire serve` starts on one machine do not share a GPU where each can have its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.ops.local.gpus import VARIABLE, of_worker


@pytest.fixture
def four(tmp_path: Path) -> Path:
    """The folder of the driver with four GPUs."""
    for bus in ("0000:17:00.0", "0000:65:00.0", "0000:ca:00.0", "0000:e3:00.0"):
        (tmp_path / bus).mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("workers", "each", "given", "found"),
    [
        (4, 1, {}, ["0", "1", "2", "3"]),
        (3, 1, {}, ["0", "1", "2"]),
        (2, 2, {}, ["0,1", "2,3"]),
        (2, 1, {VARIABLE: "3, GPU-5f2a"}, ["3", "GPU-5f2a"]),
        (1, 4, {}, [None]),  # it finds them itself
        (2, 4, {}, [None, None]),
        (8, 1, {}, [None] * 8),
        (2, 1, {VARIABLE: ""}, [None, None]),  # hidden on purpose
    ],
)
def test_each_worker_has_gpus_of_its_own_where_there_are_enough(
    workers: int, each: int, given: dict[str, str], found: list[str | None], four: Path
) -> None:
    assert [of_worker(index, workers, each, given, four).get(VARIABLE) for index in range(workers)] == found


def test_without_a_driver_nothing_is_said_of_gpus(tmp_path: Path) -> None:
    assert of_worker(0, 2, 1, {}, tmp_path / "none") == {}
