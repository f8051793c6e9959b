"""Candidates for the table of tiles run, and are those that the table may hold."""

from dataclasses import replace

import pytest
import torch

from quire.ops.benchmarks.kernels import gpu
from tests.support.kernels.implementations import HAS_TRITON, make_triton_ops

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")


def test_what_serves_now_is_a_candidate():
    from quire.kernels.gpu.tile_sizes import decode_tiles, prefill_tiles
    from quire.ops.benchmarks.kernels import tile_sizes

    heads = gpu.Heads()
    for case in tile_sizes.cases():
        chosen = decode_tiles if case.queries == 1 else prefill_tiles
        assert chosen(heads.d, heads.heads // heads.kv_heads, torch.bfloat16) in tile_sizes.candidates(case)
    assert {case.name for case in tile_sizes.cases()} == set(tile_sizes.NAMES)


def test_the_tiles_of_a_launch_are_those_of_the_candidate(monkeypatch):
    from quire.kernels.gpu import attention
    from quire.kernels.gpu.tile_sizes import AttentionTiles
    from quire.ops.benchmarks.kernels import tile_sizes

    ops, seen = make_triton_ops(torch.float16, monkeypatch), []
    for name in ("decode", "prefill"):
        kernel = getattr(attention, name)

        def watched(*args, kernel=kernel, **kwargs):
            seen.append(next(one for one in args if isinstance(one, AttentionTiles)))
            return kernel(*args, **kwargs)

        monkeypatch.setattr(attention, name, watched)
    for case in tile_sizes.cases():
        queries = None if case.queries is None else min(case.queries, 7)
        small = replace(case, lengths=(40, 9), queries=queries, heads=gpu.Heads(4, 2, 32, 16))
        for tiles in tile_sizes.candidates(case)[1:3]:
            seen.clear()
            step = small.step(ops)
            tile_sizes.check(step, tiles, step.exact())
            assert seen
            assert set(seen) == {tiles}


CARD = gpu.Card("a card", copy_bytes_per_s=4e12, flops_per_s=800e12, bus_bytes_per_s=50e9)


class FakeTimer:
    """Runs nothing, and takes as many seconds as a tile has keys."""

    def __init__(self):
        self.timed = []

    def seconds(self, run):
        tiles = run.args[1]
        self.timed.append(tiles)
        return tiles.keys


def test_a_candidate_with_wrong_results_is_not_timed(monkeypatch):
    """With tiles of 64 keys, each query leaves out the last key that it sees."""
    from quire.kernels.gpu import attention
    from quire.kernels.gpu.tile_sizes import AttentionTiles
    from quire.ops.benchmarks.kernels import tile_sizes

    ops = make_triton_ops(torch.bfloat16, monkeypatch)
    ops.check_ids = False
    monkeypatch.setattr(tile_sizes, "TritonOps", lambda dtype: ops)
    right, wrong = AttentionTiles(64, 32, 4, 2), AttentionTiles(64, 64, 4, 2)
    monkeypatch.setattr(tile_sizes, "PREFILL", (wrong, right))
    monkeypatch.setattr(tile_sizes, "TABLE_OF", {(wrong, right): "prefill_tiles"})
    kernel = attention.prefill

    def short_of_a_key(q, k, v, tables, lengths, *rest, **options):
        kernel(q, k, v, tables, lengths - int(wrong in rest), *rest, **options)

    monkeypatch.setattr(attention, "prefill", short_of_a_key)
    timer, saved = FakeTimer(), []
    case = gpu.AttentionCase("prefill", (70, 40), 9, gpu.Heads(4, 2, 32, 16))
    rows = tile_sizes.measure(timer, CARD, saved.append, [case])
    assert timer.timed == [right]
    assert saved == [rows]
    assert [row["ms"] for row in rows] == [32e3, None]
    assert rows[1]["error"].startswith("ValueError: wrong results: they deviate by ")


def test_the_exact_result_is_that_of_the_kernels_within_rounding(monkeypatch):
    from quire.kernels.self_test.cases import deviation

    ops = make_triton_ops(torch.float32, monkeypatch)
    for queries in (None, 1, 5):
        step = gpu.AttentionCase("", (33, 20), queries, gpu.Heads(4, 2, 32, 16)).step(ops)
        assert deviation(step.attend(), step.exact()) < 1e-4


def row(case: str, arguments: tuple[int, ...], ms: float | None, serves: bool = False) -> dict:
    return {"case": case, "table": "prefill_tiles", "arguments": arguments, "ms": ms, "serves": serves}


NOW, OTHER, THIRD = (128, 128, 8, 2, 1), (128, 128, 8, 3, 1), (64, 64, 4, 3, 2)


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        (
            [row("a", NOW, 1.0, True), row("b", NOW, 2.0, True), row("a", OTHER, 0.9), row("b", OTHER, 1.9)],
            "write AttentionTiles(rows=128, keys=128, warps=8, stages=3, per_sm=1), which takes 92% of the time",
        ),
        # wrong in one case
        ([row("a", NOW, 1.0, True), row("b", NOW, 2.0, True), row("a", OTHER, 0.5), row("b", OTHER, None)], "keep"),
        # slower in one case
        ([row("a", NOW, 1.0, True), row("b", NOW, 2.0, True), row("a", OTHER, 0.5), row("b", OTHER, 2.1)], "keep"),
        ([row("a", NOW, 1.0, True), row("a", OTHER, 0.99)], "keep"),
        (
            [row("a", NOW, 1.0, True), row("a", OTHER, 0.95), row("a", THIRD, 0.9)],
            "rows=64, keys=64, warps=4, stages=3",
        ),
        ([row("a", NOW, None, True), row("a", OTHER, 0.95)], "nothing to compare with"),
    ],
    ids=["faster", "wrong", "slower", "alike", "fastest", "unknown"],
)
def test_the_suggestion_is_right_and_faster_in_all_cases(rows, line):
    from quire.ops.benchmarks.kernels.tile_sizes import suggestions

    (found,) = suggestions(rows)
    assert found.startswith("prefill_tiles")
    assert line in found
