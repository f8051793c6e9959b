"""A whole stack of layers in one call is the single operations, one after the other."""

from types import SimpleNamespace

import pytest
import torch

import kernels
from kernels import layers
from kernels.layers import Stack

HIDDEN, INNER, HEADS, KV_HEADS, D, BLOCK = 72, 88, 6, 2, 32, 16
LENGTHS, QUERIES = [40, 17, 150], [1, 5, 30]


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(shape) / shape[-1] ** 0.5).to(dtype)


def make_layers(ops: kernels.Ops, windows: list[int], norms: bool, biases: bool) -> list[SimpleNamespace]:
    def linear(pack, n: int, k: int):
        return pack(random(n, k, dtype=ops.dtype), random(n, dtype=ops.dtype) if biases else None)

    return [
        SimpleNamespace(
            input_norm=random(HIDDEN, dtype=ops.dtype),
            qkv=linear(ops.pack_linear, (HEADS + 2 * KV_HEADS) * D, HIDDEN),
            q_norm=random(D, dtype=ops.dtype) if norms else None,
            k_norm=random(D, dtype=ops.dtype) if norms else None,
            sliding_window=window,
            o=linear(ops.pack_linear, HIDDEN, HEADS * D),
            mlp_norm=random(HIDDEN, dtype=ops.dtype),
            gate_up=linear(ops.pack_gate_up, 2 * INNER, HIDDEN),
            down=linear(ops.pack_linear, HIDDEN, INNER),
        )
        for window in windows
    ]


def make_caches(ops: kernels.Ops, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    caches = [ops.alloc_kv_cache(20, KV_HEADS, BLOCK, D) for _ in range(count)]
    for i, pair in enumerate(caches):
        for cache in pair:
            cache.copy_(torch.randn(cache.shape, generator=torch.Generator().manual_seed(i)).to(ops.dtype))
    return caches


def step() -> dict[str, torch.Tensor]:
    tables = torch.randperm(20)[:18].view(3, 6)
    tables = torch.cat([tables, torch.randperm(20)[:12].view(3, 4)], dim=1)  # blocks may be shared, to read from
    positions = [torch.arange(n - q, n) for n, q in zip(LENGTHS, QUERIES, strict=True)]
    slots = [tables[s, p // BLOCK] * BLOCK + p % BLOCK for s, p in enumerate(positions)]
    return {
        "positions": torch.cat(positions).int(),
        "slot_mapping": torch.cat(slots).int(),
        "block_tables": tables.int(),
        "seq_lens": torch.tensor(LENGTHS, dtype=torch.int32),
        "query_start_loc": torch.tensor([0, *QUERIES]).cumsum(0).int(),
    }


def stack_arguments(ops, windows, norms=False, biases=False):
    final_norm = random(HIDDEN, dtype=ops.dtype)
    return make_layers(ops, windows, norms, biases), final_norm, make_caches(ops, len(windows)), torch.rand(160, D)


@pytest.mark.parametrize(("norms", "biases"), [(False, False), (True, True)])
@pytest.mark.parametrize("windows", [[0], [0, 20, 20, 0]], ids=str)
@pytest.mark.parametrize("rows", [[0, 5, 35], [], [3, 3], list(range(36))], ids=["last", "none", "twice", "all"])
def test_one_call_equals_single_operations(cpu_ops, norms, biases, windows, rows):
    made, final_norm, caches, cos_sin = stack_arguments(cpu_ops, windows, norms, biases)
    arguments = step() | {"rows": torch.tensor(rows, dtype=torch.int64)}
    residual = random(sum(QUERIES), HIDDEN, dtype=cpu_ops.dtype)
    rest = cos_sin, HEADS, KV_HEADS, 1e-5, 0.2
    expected = layers.run(cpu_ops, residual.clone(), Stack(made, final_norm, caches, *rest), **arguments)
    again = make_caches(cpu_ops, len(windows))
    stack = cpu_ops.stack_layers(made, final_norm, again, *rest)
    actual = cpu_ops.decoder_layers(residual.clone(), stack, **arguments)
    assert torch.equal(actual, expected)
    for one, other in zip(caches, again, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])


def test_the_reference_runs_the_same_operations():
    ops = kernels.ReferenceOps()
    made, final_norm, caches, cos_sin = stack_arguments(ops, [0, 20])
    arguments = step() | {"rows": torch.tensor([0, 35])}
    residual = random(sum(QUERIES), HIDDEN, dtype=ops.dtype)
    stack = ops.stack_layers(made, final_norm, caches, cos_sin, HEADS, KV_HEADS, 1e-5, 0.2)
    actual = ops.decoder_layers(residual.clone(), stack, **arguments)
    assert torch.equal(actual, layers.run(ops, residual, stack, **arguments))


def test_no_tokens_give_no_rows(cpu_ops):
    made, final_norm, caches, cos_sin = stack_arguments(cpu_ops, [0])
    stack = cpu_ops.stack_layers(made, final_norm, caches, cos_sin, HEADS, KV_HEADS, 1e-5, 0.2)
    none = torch.zeros(0, dtype=torch.int32)
    empty = torch.zeros(0, HIDDEN, dtype=cpu_ops.dtype)
    start = torch.zeros(1, dtype=torch.int32)
    out = cpu_ops.decoder_layers(
        empty, stack, none, none, torch.zeros(0, 4, dtype=torch.int32), none, start, none.long()
    )
    assert out.shape == (0, HIDDEN)


def test_bad_ids_are_refused(cpu_ops):
    made, final_norm, caches, cos_sin = stack_arguments(cpu_ops, [0, 0])
    stack = cpu_ops.stack_layers(made, final_norm, caches, cos_sin, HEADS, KV_HEADS, 1e-5, 0.2)
    good = step() | {"rows": torch.tensor([35])}
    residual = random(sum(QUERIES), HIDDEN, dtype=cpu_ops.dtype)
    for name, index, value, message in [
        ("positions", 3, 160, "token 3: position 160 of 160"),
        ("slot_mapping", 4, 20 * BLOCK, "token 4"),
        ("block_tables", (1, 1), 20, "sequence 1"),
        ("seq_lens", 2, 29, "sequence 2"),
        ("rows", 0, 36, r"rows\[0\]"),
    ]:
        bad = good | {name: good[name].clone()}
        bad[name][index] = value
        with pytest.raises(IndexError, match=message):
            cpu_ops.decoder_layers(residual.clone(), stack, **bad)
    with pytest.raises(TypeError, match="rows"):
        cpu_ops.decoder_layers(residual.clone(), stack, **good | {"rows": torch.tensor([35]).int()})
    with pytest.raises(ValueError, match="residual has shape"):
        cpu_ops.decoder_layers(residual[:, 1:].contiguous(), stack, **good)


def test_layers_that_do_not_fit_are_refused(ops):
    made, final_norm, caches, cos_sin = stack_arguments(ops, [0, 0])
    rest = HEADS, KV_HEADS, 1e-5, 0.2
    with pytest.raises(ValueError, match="2 layers and 1 caches"):
        ops.stack_layers(made, final_norm, caches[:1], cos_sin, *rest)
    with pytest.raises(ValueError, match="final_norm"):
        ops.stack_layers(made, final_norm[1:], caches, cos_sin, *rest)
    made[1].o, made[1].down = made[1].down, made[1].o
    with pytest.raises(ValueError, match="o of layer 1"):
        ops.stack_layers(made, final_norm, caches, cos_sin, *rest)
