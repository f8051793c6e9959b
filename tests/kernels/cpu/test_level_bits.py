"""Levels with float activations give the same bits, so that a request may move between machines of different kinds."""

from collections.abc import Callable

import pytest
import torch

from quire import kernels
from quire.kernels.cpu.levels import LEVELS
from quire.kernels.ops import Ops
from quire.kernels.quantization import quantize
from tests.support.kernels.implementations import make_ops
from tests.support.kernels.paged import Paged
from tests.support.kernels.stacks import HEADS, HIDDEN, KV_HEADS, QUERIES, add_extras, stack_arguments, step

NAN, INF = float("nan"), float("inf")
# Values at the ends of exponent and exponential, and such that are not numbers.
EDGES = torch.tensor([0.0, -0.0, 1e-44, -1e-38, 3e38, -87.2, -87.4, 88.2, 88.4, -103.0, -126.3, 1e-5, NAN, INF, -INF])


def linear(ops: Ops) -> list[torch.Tensor]:
    results = []
    for rows, k, n in [(1, 77, 33), (5, 576, 48), (29, 130, 257), (40, 2000, 20)]:
        x, weight, bias = torch.randn(rows, k), torch.randn(2 * n, k) * 0.3, torch.randn(2 * n)
        packed = ops.pack_linear(weight, bias)
        results += [ops.linear(x, packed), ops.linear_logits(x, packed)]
        results.append(ops.linear_silu_mul(x, ops.pack_gate_up(weight, bias)))
    # Gates at the edges of the exponential function.
    one = torch.ones(2, 1)
    return [*results, ops.linear_silu_mul(EDGES[:, None].contiguous(), ops.pack_gate_up(one))]


def quantized(ops: Ops) -> list[torch.Tensor]:
    results = []
    for bits in (8, 4):
        for rows, k, n in [(1, 77, 33), (7, 576, 48), (40, 2000, 20)]:
            x, weight = torch.randn(rows, k), quantize(torch.randn(2 * n, k), bits)
            results += [ops.linear(x, ops.pack_linear(weight)), ops.linear_silu_mul(x, ops.pack_gate_up(weight))]
    return results


def norms(ops: Ops) -> list[torch.Tensor]:
    results = []
    for width in (1, 7, 16, 48, 300, 2051):
        x, residual, weight = torch.randn(9, width), torch.randn(9, width), torch.randn(width)
        results += [ops.rms_norm(x, weight, 1e-6), ops.add_rms_norm(x, residual, weight, 1e-6), residual]
    return [*results, ops.rms_norm(EDGES[None].contiguous(), torch.ones(len(EDGES)), 1e-6)]


def rope(ops: Ops) -> list[torch.Tensor]:
    heads, kv_heads, d, tokens = 6, 2, 48, 11
    caches = ops.alloc_kv_cache(4, kv_heads, 16, d)
    qkv, norm = torch.randn(tokens, (heads + 2 * kv_heads) * d), torch.randn(d)
    slots = torch.randperm(64)[:tokens]
    q = ops.rope_and_cache(
        qkv, torch.arange(tokens).int(), torch.randn(20, d), slots, *caches, heads, kv_heads, norm, norm
    )
    return [q, *ops.plain_kv_cache(*caches)]


def attention(ops: Ops) -> list[torch.Tensor]:
    results = []
    for d, block_size, window, sharpness in [
        (64, 16, 0, 1.0),
        (48, 8, 50, 30.0),
        (16, 32, 0, 300.0),
        (128, 16, 9, 1.0),
    ]:
        paged = Paged(ops, [300, 131, 1000, 1], [7, 131, 1, 1], 6, 2, d, block_size, window)
        paged.scale *= sharpness  # differences of scores beyond the range of the exponential function
        results += paged.attend()
        paged.sinks, paged.softcap = torch.tensor([-9.0, 0.0, 0.3, 5.0, 90.0, -1e30]), 3.0
        results += paged.attend()
    return results


def logits(ops: Ops) -> list[torch.Tensor]:
    rows, vocabulary = 12, 5003
    x = torch.randn(rows, vocabulary) * 4
    x[0, 17:32], x[1], x[2, 5:] = EDGES, NAN, -INF
    temperature, uniform = torch.rand(rows) + 0.1, torch.rand(rows, dtype=torch.float64)
    top_k = torch.tensor([0, 0, 0, 1, 40, 5000] * 2, dtype=torch.int32)
    top_p, min_p = torch.rand(rows), torch.rand(rows) * 0.01
    drawn = [
        ops.sample(x, temperature, top_k, p, m, uniform)
        for p in (torch.ones(rows), top_p)
        for m in (torch.zeros(rows), min_p)
    ]
    return [*drawn, ops.argmax(x), *ops.top_logprobs(x, 20), ops.logprobs_of(x, torch.arange(rows))]


def decoder_layers(ops: Ops) -> list[torch.Tensor]:
    results = []
    for windows, extras, softcap in [([0, 20, 0], False, 0.0), ([0, 0], True, 0.0), ([0, 20], True, 3.0)]:
        made, final_norm, caches, cos_sin = stack_arguments(ops, windows, norms=extras, biases=extras)
        if softcap:
            add_extras(ops, made)
        stack = ops.stack_layers(made, final_norm, caches, cos_sin, HEADS, KV_HEADS, 1e-5, 0.2, None, softcap)
        residual = torch.randn(sum(QUERIES), HIDDEN)
        results.append(ops.decoder_layers(residual, stack, **step(), rows=torch.tensor([0, 5, 35])))
    return results


OPERATIONS = [linear, quantized, norms, rope, attention, logits, decoder_layers]


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[values.itemsize])


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
@pytest.mark.parametrize("level", [level.name for level in LEVELS[torch.float32] if level.name != "avx2"])
def test_a_level_gives_the_bits_of_avx2(
    level: str, operation: Callable[[kernels.Ops], list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(level, operation, None, monkeypatch)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("operation", [rope, attention, decoder_layers], ids=lambda operation: operation.__name__)
@pytest.mark.parametrize("level", [level.name for level in LEVELS[torch.float32] if level.name != "avx2"])
def test_a_level_gives_the_bits_of_avx2_with_every_cache(
    level: str,
    operation: Callable[[kernels.Ops], list[torch.Tensor]],
    kv_dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compare(level, operation, kv_dtype, monkeypatch)


def compare(
    level: str,
    operation: Callable[[kernels.Ops], list[torch.Tensor]],
    kv_dtype: torch.dtype | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    results = []
    for name in ("avx2", level):
        ops = make_ops("cpu", name, torch.float32, monkeypatch, kv_dtype)
        torch.manual_seed(11)
        results.append(operation(ops))
    for index, (lowest, highest) in enumerate(zip(*results, strict=True)):
        different = (bits(lowest) != bits(highest)).sum().item()
        assert not different, f"{different} of {lowest.numel()} values of result {index} differ"
