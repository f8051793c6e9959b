"""Spills of engines over the mock model, and of engines over checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from quire.worker.engine.engine import Engine
from quire.worker.engine.features.spill.block_file import BlockFile
from quire.worker.engine.features.spill.block_spill import BlockSpill, SpillCosts
from tests.support.mock_model import MockCache

FINGERPRINT = bytes(range(32))
# Reading always pays, and there is time to wait for it.
FREE = SpillCosts(0.0, 10.0)


def _at_once(move: Callable[[], None]) -> None:
    move()


class MockPool:
    """Places for blocks of the mock model. submit: has a device do a move, perhaps later."""

    def __init__(
        self, cache: MockCache, num_places: int, submit: Callable[[Callable[[], None]], object] = _at_once
    ) -> None:
        self.num_places, self._cache, self._submit = num_places, cache, submit
        self._blocks = np.zeros((num_places, *cache.device.shape[1:]), dtype=np.int64)
        self.block_bytes = self._blocks[0].nbytes

    def swap_out(self, blocks: list[int], places: list[int]) -> None:
        assert len(set(places)) == len(places)
        self._submit(partial(self._copy_out, list(blocks), list(places)))

    def swap_in(self, places: list[int], blocks: list[int]) -> None:
        assert len(set(blocks)) == len(blocks)
        self._submit(partial(self._copy_in, list(places), list(blocks)))

    def _copy_out(self, blocks: list[int], places: list[int]) -> None:
        self._blocks[places] = self._cache.device[blocks]

    def _copy_in(self, places: list[int], blocks: list[int]) -> None:
        self._cache.device[blocks] = self._blocks[places]

    def block(self, place: int) -> list[memoryview]:
        return [memoryview(self._blocks[place].reshape(-1).view(np.uint8))]


def attach(
    engine: Engine,
    folder: Path | None,
    num_places: int = 64,
    fingerprint: bytes = FINGERPRINT,
    max_bytes: int = 1 << 20,
    costs: SpillCosts = FREE,
    **others: Any,
) -> BlockSpill:
    """Give an engine over the mock model a spill."""
    cache: Any = engine.runner.kv_cache
    model: Any = engine.runner.model
    pool = MockPool(cache, num_places, model.late.submit if hasattr(model, "late") else _at_once)
    file = BlockFile.open(folder, fingerprint, pool.block_bytes, max_bytes) if folder is not None else None
    spill = BlockSpill(engine.groups, pool, model.ops.device, fingerprint, file, costs, **others)
    engine.scheduler.spill = engine.runner.spill = spill
    return spill


@contextmanager
def spilling(engine: Engine, folder: Path | None, **options: Any) -> Iterator[BlockSpill]:
    """Give an engine over the mock model a spill, which ends with the block."""
    spill = attach(engine, folder, **options)
    try:
        yield spill
    finally:
        spill.close()


def settle(spill: BlockSpill) -> None:
    """Wait until no block is on its way to the file, which the spill has."""
    deadline = time.monotonic() + 20
    while (figures := spill.figures()).kept["disk"] + figures.dropped["error"] < figures.kept["host"]:
        if not figures.blocks["disk"] and figures.dropped["error"]:
            return  # the file is given up
        assert time.monotonic() < deadline, "blocks are not written"
        time.sleep(0.001)


def assert_no_place_lost(spill: BlockSpill) -> None:
    """Check that a spill that has ended has all places of its pool: no read and no error has lost one."""
    places = [*spill._free, *spill._clean.values(), *spill._dirty.values()]
    assert sorted(places) == list(range(spill._pool.num_places))
