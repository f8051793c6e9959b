"""Measures which tile sizes of the attention kernels are fastest on this card.

    make gpu-check ARGS="--only tiles"

Serving takes its tile sizes from the table in kernels/gpu/tile_sizes.py. The results tell what to write into that
table; its current entries are among the candidates. A candidate that does not fit into a multiprocessor is reported
with its error.
"""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from quire.kernels.gpu import attention
from quire.kernels.gpu.ops import TritonOps
from quire.kernels.gpu.tile_sizes import AttentionTiles
from quire.ops.benchmarks.kernels.gpu import CASES, AttentionCase, Card, Timer

# Rows, keys, warps, stages, and for decoding the programs of a multiprocessor.
DECODE = (
    AttentionTiles(16, 64, 4, 3, 2),
    AttentionTiles(16, 64, 4, 3, 3),
    AttentionTiles(16, 64, 4, 2, 3),
    AttentionTiles(16, 32, 4, 3, 4),
    AttentionTiles(16, 128, 4, 2, 2),
    AttentionTiles(16, 128, 8, 2, 2),
    AttentionTiles(64, 64, 4, 3, 2),  # as in the batch-invariant mode: Hopper's matrix instructions, and fewer barriers
)
PREFILL = (
    AttentionTiles(128, 128, 8, 2),
    AttentionTiles(128, 128, 8, 3),
    AttentionTiles(128, 64, 8, 3),
    AttentionTiles(128, 64, 4, 2),
    AttentionTiles(64, 64, 4, 3),
    AttentionTiles(64, 128, 4, 2),
)
NAMES = (
    "decode attention, 256 x 1k",
    "decode attention, 1 x 32k + 63 x 1k",
    "prefill attention, 8k, nothing cached",
    "prefill attention, 2k on 8k cached",
)


def cases() -> list[AttentionCase]:
    """Return the cases of the kernel benchmark that are measured."""
    return [case for case in CASES if isinstance(case, AttentionCase) and case.name in NAMES]


def candidates(case: AttentionCase) -> tuple[AttentionTiles, ...]:
    """Return the tile sizes that are measured for a case."""
    return DECODE if case.queries == 1 else PREFILL


def launch(ops: TritonOps, case: AttentionCase, tiles: AttentionTiles) -> Callable[[], object]:
    """Return a function that does the work of the case with these tiles instead of the table's."""
    run = case.make(ops)

    def with_tiles() -> object:
        with mock.patch.multiple(attention, decode_tiles=lambda *_: tiles, prefill_tiles=lambda *_: tiles):
            return run()

    return with_tiles


def measure(
    timer: Timer,
    card: Card,
    save: Callable[[list[dict[str, Any]]], None],
    measured: list[AttentionCase] | None = None,
) -> list[dict[str, Any]]:
    """Return a row for each case and candidate, the fastest of a case first. Calls `save` after each case.

    measured: the cases; those of `cases` if None.
    """
    ops, rows = TritonOps(dtype=torch.bfloat16), []
    for case in cases() if measured is None else measured:
        floor, found = card.floor_s(case, 2), []
        for tiles in candidates(case):
            name = f"{tiles.rows} x {tiles.keys}, {tiles.warps} warps, {tiles.stages} stages"
            row: dict[str, Any] = {"case": case.name, "tiles": f"{name}, {tiles.per_sm} programs"}
            try:
                seconds = timer.seconds(launch(ops, case, tiles))
            except Exception as error:  # such as a candidate that does not fit: measure the others
                row |= {"ms": None, "error": f"{type(error).__name__}: {error}"}
            else:
                row |= {"ms": 1e3 * seconds, "share": floor / seconds}
            found.append(row)
            torch.cuda.empty_cache()
        rows += sorted(found, key=lambda row: (row["ms"] is None, row["ms"] or 0.0))
        save(rows)
    return rows
