"""Measures which tile sizes of the attention kernels are fastest on this card.

    make gpu-check ARGS="--only tiles"

Serving takes its tile sizes from the table in kernels/gpu/tile_sizes.py. The last lines of the results tell what to
write into that table; its current entries are among the candidates. Before a candidate is timed, its results are
compared with torch in float32, with the tolerance of the self-test. A candidate that is wrong, or that does not fit
into a multiprocessor, is reported and not timed.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple
from functools import partial
from typing import Any
from unittest import mock

import torch

from quire.kernels.gpu import attention
from quire.kernels.gpu.ops import TritonOps
from quire.kernels.gpu.tile_sizes import AttentionTiles, decode_tiles, prefill_tiles
from quire.kernels.self_test.attention import TOLERANCE
from quire.kernels.self_test.cases import UNITS, deviation
from quire.ops.benchmarks.kernels.gpu import CASES, AttentionCase, AttentionStep, Card, Timer

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
    AttentionTiles(128, 64, 4, 2),
    AttentionTiles(128, 64, 8, 3),
    AttentionTiles(64, 128, 4, 2),
    AttentionTiles(64, 64, 4, 3, 2),
    AttentionTiles(64, 64, 4, 2, 2),
)
NAMES = (
    "decode attention, 256 x 1k",
    "decode attention, 1 x 32k + 63 x 1k",
    "prefill attention, 8k, nothing cached",
    "prefill attention, 2k on 8k cached",
    "extend attention, 64 on 32k cached",
)
TABLE_OF = {DECODE: "decode_tiles", PREFILL: "prefill_tiles"}  # the functions of kernels/gpu/tile_sizes.py
WORTHWHILE = 0.98  # other tiles are suggested if they take at most this share of the time of the table's


def cases() -> list[AttentionCase]:
    """Return the cases of the kernel benchmark that are measured."""
    return [case for case in CASES if isinstance(case, AttentionCase) and case.name in NAMES]


def candidates(case: AttentionCase) -> tuple[AttentionTiles, ...]:
    """Return the tile sizes that are measured for a case."""
    return DECODE if case.queries == 1 else PREFILL


def attend(step: AttentionStep, tiles: AttentionTiles) -> torch.Tensor:
    """Compute a step with these tiles instead of the table's."""
    with mock.patch.multiple(attention, decode_tiles=lambda *_: tiles, prefill_tiles=lambda *_: tiles):
        return step.attend()


def check(step: AttentionStep, tiles: AttentionTiles, exact: torch.Tensor) -> None:
    """Raise ValueError if a step with these tiles deviates from the exact result by more than the self-test allows."""
    step.out.fill_(math.nan)
    worst = deviation(attend(step, tiles).flatten(1), exact.flatten(1))
    if not worst <= (most := TOLERANCE * UNITS[step.q.dtype]):
        raise ValueError(f"wrong results: they deviate by {worst:.2g} from float32, and at most {most:.2g} is right")


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
        floor, step, found = card.floor_s(case, 2), case.step(ops), []
        exact = step.exact()
        for tiles in candidates(case):
            name = f"{tiles.rows} x {tiles.keys}, {tiles.warps} warps, {tiles.stages} stages"
            row: dict[str, Any] = {"case": case.name, "tiles": f"{name}, {tiles.per_sm} programs"}
            row |= {"table": TABLE_OF[candidates(case)], "arguments": astuple(tiles), "serves": serves(case, tiles)}
            try:
                check(step, tiles, exact)
                seconds = timer.seconds(partial(attend, step, tiles))
            except Exception as error:  # such as a candidate that does not fit: measure the others
                row |= {"ms": None, "error": f"{type(error).__name__}: {error}"}
            else:
                row |= {"ms": 1e3 * seconds, "share": floor / seconds}
            found.append(row)
            torch.cuda.empty_cache()
        rows += sorted(found, key=lambda row: (row["ms"] is None, row["ms"] or 0.0))
        save(rows)
    return rows


def serves(case: AttentionCase, tiles: AttentionTiles) -> bool:
    """Return whether the table has these tiles for the case."""
    heads = case.heads
    chosen = decode_tiles if case.queries == 1 else prefill_tiles
    return chosen(heads.d, heads.heads // heads.kv_heads, torch.bfloat16) == tiles


def suggestions(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return what to write into the table, a line for each of its functions.

    The best candidate has right results in all cases of a function, is slower in none, and takes the least time: the
    geometric mean over the cases of its time divided by that of the table's tiles.
    """
    lines = []
    for function in dict.fromkeys(row["table"] for row in rows):
        mine = [row for row in rows if row["table"] == function]
        now = {row["case"]: row["ms"] for row in mine if row["serves"]}
        if None in now.values() or now.keys() != {row["case"] for row in mine}:
            lines.append(
                f"{function}: nothing to compare with; the table's tiles failed, or are not among the candidates"
            )
            continue
        best, share = None, WORTHWHILE
        for arguments in dict.fromkeys(tuple(row["arguments"]) for row in mine):
            times = {row["case"]: row["ms"] for row in mine if tuple(row["arguments"]) == arguments}
            if None in times.values() or any(times[case] > 1.01 * now[case] for case in now):
                continue
            mean = math.prod(times[case] / now[case] for case in now) ** (1 / len(now))
            if mean <= share:
                best, share = AttentionTiles(*arguments), mean
        if best is None:
            lines.append(f"{function}: keep the table's tiles; none is {1 - WORTHWHILE:.0%} faster and slower nowhere")
        else:
            lines.append(f"{function}, heads of 128 in 16 bits: write {best}, which takes {share:.0%} of the time")
    return lines
