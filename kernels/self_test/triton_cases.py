"""Cases of kernels that only the Triton kernels have. Imports Triton."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.gpu.attention import FRESH_KERNEL, HOPPER_KERNEL, PREFILL_KERNEL, AttentionPlan
from quire.kernels.gpu.few_rows.layers import MOST_ROWS
from quire.kernels.gpu.few_rows.products import GELU_MUL, PLAIN, SILU_MUL, product
from quire.kernels.gpu.fold_check import attend_whole_tiles
from quire.kernels.gpu.kernel_table import FEW_ROWS
from quire.kernels.gpu.ops import TritonOps
from quire.kernels.gpu.prefill_plan import MIN_SPLIT_KEYS
from quire.kernels.gpu.tile_sizes import AttentionTiles, prefill_tiles
from quire.kernels.moe import SILU
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
from quire.kernels.self_test.layers import DECODES, layer_case
from quire.kernels.self_test.products import GATED, LINEAR, chosen
from quire.kernels.uses import PLAIN as PLAIN_WEIGHTS
from quire.kernels.uses import AttentionUse, KernelUses, LinearUse

FOLDED_TILES = 5  # of keys
ONE_ROW: Sequences = [(150, 1)]
# Prompts of several tiles of keys. Few programs compute them, each several tiles of queries.
SEVERAL_TILES: Sequences = [(700, 700), (40, 40), (256, 256)]
FEW_PROGRAMS = 3
EPS = 1e-5
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
                yield _of_fresh(name, AttentionInputs(inputs, use, block_size, fitting, name == IMAGES), FRESH_KERNEL)
        ops = inputs.ops
        assert isinstance(ops, TritonOps)
        if ops.launch_options.hopper_prefill:
            step = AttentionInputs(inputs, use, block_size, fit(SEVERAL_TILES, longest))
            yield _of_fresh("new prompts by warps with roles", step, HOPPER_KERNEL)


def _of_fresh(name: str, step: AttentionInputs, kernel: str) -> KernelCase:
    ops, use = step.inputs.ops, step.use
    assert isinstance(ops, TritonOps)

    def attend() -> Tensor:
        out = torch.empty_like(step.q)
        options = ops.launch_options
        if kernel == HOPPER_KERNEL:
            options = replace(options, multiprocessors=FEW_PROGRAMS)
        else:
            options = replace(options, hopper_prefill=False)
        plan = AttentionPlan(options, *step.tables, split=True)
        k, v = (rows[step.tokens] for rows in step.kv)
        plan.attend(step.q, *step.caches, use.scale, use.window, out, (k, v), step.sinks, use.softcap, step.key_ends)
        return out.flatten(1)

    def is_new(length: int, count: int) -> bool:
        return length == count > 1

    return KernelCase(
        name,
        kernel,
        f"{use}, {step.inputs.types}",
        lambda: step.rows(attend(), is_new),
        lambda: step.rows(step.exact, is_new),
        TOLERANCE * step.inputs.unit,
    )


def few_rows_cases(inputs: CaseInputs, uses: KernelUses) -> Iterator[KernelCase]:
    """Yield cases of steps of a few rows: layers, and products with the input features of the model.

    The batch-invariant mode has no such kernels.
    """
    ops = inputs.ops
    assert isinstance(ops, TritonOps)
    if ops.row_invariant:
        return
    for use in uses.attention if uses.is_stack else ():
        for sequences in (ONE_ROW, DECODES):
            yield layer_case(inputs, use, uses, sequences, "layer of few rows", FEW_ROWS)
    plain: Iterable[LinearUse] = (use for use in uses.linears if use.kind == PLAIN_WEIGHTS)
    for linear in chosen(plain, inputs.level):
        for rows in (1, MOST_ROWS):
            yield _of_few_rows(inputs, ops, linear, rows, GELU_MUL if uses.gate != SILU else SILU_MUL)


def _of_few_rows(inputs: CaseInputs, ops: TritonOps, use: LinearUse, rows: int, gate: int) -> KernelCase:
    k = use.in_features
    halves = 2 if use.is_gate_up else 1
    n = max(1, min(use.out_features, inputs.most_elements // k) // halves)
    generator = inputs.generator(k + rows)
    weight, exact = inputs.weight(halves * n, k, PLAIN_WEIGHTS, generator)
    assert isinstance(weight, Tensor)
    bias = inputs.normal(halves * n, generator=generator) if use.has_bias else None
    x, norm = inputs.normal(rows, k, generator=generator), inputs.normal(k, generator=generator) * 0.1 + 1
    added = None if use.is_gate_up else inputs.normal(rows, n, generator=generator)

    def expected() -> Sequence[Tensor]:
        wide = x.float()
        normed = (wide * wide.square().mean(dim=-1, keepdim=True).add(EPS).rsqrt()).to(x.dtype).float() * norm.float()
        total = F.linear(normed.to(x.dtype).float(), exact, None if bias is None else bias.float())
        if added is not None:
            return [total + added.float()]
        gates, ups = total.chunk(2, dim=-1)
        return [(F.gelu(gates, approximate="tanh") if gate == GELU_MUL else F.silu(gates)) * ups]

    def run() -> Sequence[Tensor]:
        if FEW_ROWS in ops.replaced:
            return expected()
        options = ops.launch_options
        kind = gate if use.is_gate_up else PLAIN
        return [product(x, weight, bias, options.multiprocessors, options.dependent_launch, norm, EPS, kind, added)]

    unit = (GATED if use.is_gate_up else 2 * LINEAR) * inputs.unit
    return KernelCase("product of few rows", FEW_ROWS, f"{rows} x {use}, {inputs.types}", run, expected, unit)
