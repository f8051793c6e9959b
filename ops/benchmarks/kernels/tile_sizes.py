"""Which tiles of the attention kernels are fastest on this card: candidates timed side by side.

    make gpu-check ARGS="--only tiles"

Serving takes its tiles from the table in kernels/gpu/tiles.py; this is what to write that table from, and what it holds
now is among the candidates. A candidate that does not fit into a multiprocessor is named with its error.
"""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from quire.kernels.gpu import TritonOps, attention
from quire.kernels.gpu.tiles import Tiles
from quire.ops.benchmarks.kernels.gpu import CASES, AttentionCase, Card, Timer

# rows, keys, warps, stages, and for decoding programs of a multiprocessor.
DECODE = (
    Tiles(16, 64, 4, 3, 2),
    Tiles(16, 64, 4, 3, 3),
    Tiles(16, 64, 4, 2, 3),
    Tiles(16, 32, 4, 3, 4),
    Tiles(16, 128, 4, 2, 2),
    Tiles(16, 128, 8, 2, 2),
    Tiles(64, 64, 4, 3, 2),  # as the batch-invariant mode: Hopper's own matrix instructions, and fewer barriers
)
PREFILL = (
    Tiles(128, 128, 8, 2),
    Tiles(128, 128, 8, 3),
    Tiles(128, 64, 8, 3),
    Tiles(128, 64, 4, 2),
    Tiles(64, 64, 4, 3),
    Tiles(64, 128, 4, 2),
)
NAMES = (
    "decode attention, 256 x 1k",
    "decode attention, 1 x 32k + 63 x 1k",
    "prefill attention, 8k, nothing cached",
    "prefill attention, 2k on 8k cached",
)


def cases() -> list[AttentionCase]:
    return [case for case in CASES if isinstance(case, AttentionCase) and case.name in NAMES]


def candidates(case: AttentionCase) -> tuple[Tiles, ...]:
    return DECODE if case.queries == 1 else PREFILL


def launch(ops: TritonOps, case: AttentionCase, tiles: Tiles) -> Callable[[], object]:
    """A function that does the work of the case with these tiles, whatever the table says."""
    run = case.make(ops)

    def with_tiles() -> object:
        with mock.patch.multiple(attention, decode_tiles=lambda *_: tiles, prefill_tiles=lambda *_: tiles):
            return run()

    return with_tiles


def measure(timer: Timer, card: Card, save: Callable[[list[dict[str, Any]]], None]) -> list[dict[str, Any]]:
    """A row for each case and candidate, the fastest of a case first; `save` is told after each case."""
    ops, rows = TritonOps(dtype=torch.bfloat16), []
    for case in cases():
        floor, found = card.floor_s(case, 2), []
        for tiles in candidates(case):
            name = f"{tiles.rows} x {tiles.keys}, {tiles.warps} warps, {tiles.stages} stages"
            row: dict[str, Any] = {"case": case.name, "tiles": f"{name}, {tiles.per_sm} programs"}
            try:
                seconds = timer.seconds(launch(ops, case, tiles))
            except Exception as error:  # one that does not fit, say: the others may
                row |= {"ms": None, "error": f"{type(error).__name__}: {error}"}
            else:
                row |= {"ms": 1e3 * seconds, "share": floor / seconds}
            found.append(row)
            torch.cuda.empty_cache()
        rows += sorted(found, key=lambda row: (row["ms"] is None, row["ms"] or 0.0))
        save(rows)
    return rows
