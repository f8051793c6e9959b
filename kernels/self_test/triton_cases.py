"""Cases of kernels that only the Triton kernels have. Imports Triton."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from quire.kernels.gpu.attention import FRESH_KERNEL, PREFILL_KERNEL, AttentionPlan
from quire.kernels.gpu.fold_check import attend_whole_tiles
from quire.kernels.gpu.ops import TritonOps
from quire.kernels.gpu.prefill_plan import MIN_SPLIT_KEYS
from quire.kernels.gpu.tile_sizes import AttentionTiles, prefill_tiles
from quire.kernels.self_test.attention import (
    IMAGES,
    MIXED,
    NEW,
    TOLERANCE,
    AttentionInputs,
    Sequences,
    attention_case,
    fit,
)
from quire.kernels.self_test.cases import KernelCase
from quire.kernels.self_test.inputs import CaseInputs
from quire.kernels.uses import AttentionUse

FOLDED_TILES = 5  # of keys
# Two and three chunks of keys, a context that is too short to be cut, and a decode row.
SPLIT_EXTENDING: Sequences = [(2 * MIN_SPLIT_KEYS + 60, 17), (3 * MIN_SPLIT_KEYS + 5, 3), (130, 21), (40, 1)]


def fold_cases(inputs: CaseInputs, uses: Sequence[AttentionUse]) -> Iterator[KernelCase]:
    """Yield cases of the pattern that assemblers before 13.3 may compile wrongly, with the tiles of prefill."""
    ops = inputs.ops
    assert isinstance(ops, TritonOps)
    is_large = ops.launch_options.large_shared_memory
    tiles = {
        (use.head_dim, prefill_tiles(use.head_dim, use.heads // use.kv_heads, ops.dtype, use.window, is_large)): None
        for use in uses
    }
    for d, size in tiles:
        yield _of_fold(inputs, ops, d, size)


def _of_fold(inputs: CaseInputs, ops: TritonOps, d: int, tiles: AttentionTiles) -> KernelCase:
    generator, scale = inputs.generator(d), d**-0.5
    q = inputs.normal(tiles.rows, d, generator=generator)
    k, v = (inputs.normal(FOLDED_TILES * tiles.keys, d, generator=generator) for _ in range(2))

    def exact() -> Sequence[Tensor]:
        return [(q.float() @ k.float().T * scale).softmax(dim=-1) @ v.float()]

    def run() -> Sequence[Tensor]:
        # Once prefill is replaced, no kernel of the model has this pattern.
        return exact() if PREFILL_KERNEL in ops.replaced else [attend_whole_tiles(q, k, v, tiles, scale)]

    shape = f"{tiles.rows} x {tiles.keys} tiles of {d}, {tiles.warps} warps, {inputs.types}"
    return KernelCase("fold", PREFILL_KERNEL, shape, run, exact, TOLERANCE * inputs.unit)


def split_extend_cases(
    inputs: CaseInputs, uses: Sequence[AttentionUse], block_size: int, longest: int
) -> Iterator[KernelCase]:
    """Yield cases of few queries behind contexts whose keys several programs share.

    longest: context of the model, in tokens; without contexts long enough to be cut, there is no case. In the
    batch-invariant mode, and with key-value heads for at least half of the multiprocessors, one program has all keys.
    """
    if max(length for length, _ in SPLIT_EXTENDING) > longest:
        return
    for use in uses:
        step = AttentionInputs(inputs, use, block_size, SPLIT_EXTENDING)
        yield attention_case("split extend", PREFILL_KERNEL, step)


def fresh_cases(
    inputs: CaseInputs, uses: Sequence[AttentionUse], block_size: int, longest: int
) -> Iterator[KernelCase]:
    """Yield cases of prompts that bring their keys along, alone and among other sequences."""
    for use in uses:
        steps = [("new prompts", NEW), ("new prompts in a mixed step", MIXED)]
        for name, sequences in steps + ([(IMAGES, NEW)] if use.has_key_ends else []):
            fitting = fit(sequences, longest)
            if any(count > 1 for _, count in fitting):
                yield _of_fresh(name, AttentionInputs(inputs, use, block_size, fitting, name == IMAGES))


def _of_fresh(name: str, step: AttentionInputs) -> KernelCase:
    ops, use = step.inputs.ops, step.use
    assert isinstance(ops, TritonOps)

    def attend() -> Tensor:
        out = torch.empty_like(step.q)
        plan = AttentionPlan(ops.launch_options, *step.tables, split=True)
        k, v = (rows[step.tokens] for rows in step.kv)
        plan.attend(step.q, *step.caches, use.scale, use.window, out, (k, v), step.sinks, use.softcap, step.key_ends)
        return out.flatten(1)

    def is_new(length: int, count: int) -> bool:
        return length == count > 1

    return KernelCase(
        name,
        FRESH_KERNEL,
        f"{use}, {step.inputs.types}",
        lambda: step.rows(attend(), is_new),
        lambda: step.rows(step.exact, is_new),
        TOLERANCE * step.inputs.unit,
    )
