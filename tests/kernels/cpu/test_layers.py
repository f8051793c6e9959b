"""Layers in C++: stacks, products, experts, latent attention and adapters."""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from quire import kernels
from quire.kernels.cpu.levels import LEVELS
from quire.kernels.cpu.ranks import CpuRanks, GivenUp, shared_file
from quire.kernels.lora import NO_ADAPTER, AdapterBatch
from quire.kernels.moe import CLAMPED, ExpertWeights, Routing
from quire.kernels.quantization import quantize
from tests.support.kernels.implementations import make_ops
from tests.support.kernels.latent import LatentSequences
from tests.support.kernels.stacks import (
    BLOCK,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    QUERIES,
    make_caches,
    make_factors,
    make_stack,
    prompts,
    random,
    stack_arguments,
    step,
)

# --- all layers in one call of the C++ library: ranks, and invalid ids ------------------------------------------------


def test_a_sum_that_is_given_up_gives_no_output(cpu_ops):
    """The last all-reduce of a step, after which no other one could fail."""
    file = shared_file(2)
    ranks = [CpuRanks(rank, 2, file) for rank in range(2)]
    os.close(file)
    made, final_norm, caches, cos_sin = stack_arguments(cpu_ops, [0])
    stack = cpu_ops.stack_layers(made, final_norm, caches, cos_sin, HEADS, KV_HEADS, 1e-5, 0.2, ranks[0])
    residual = random(sum(QUERIES), HIDDEN, dtype=cpu_ops.dtype)
    arguments = step() | {"rows": torch.tensor([35])}
    with ThreadPoolExecutor(1) as pool:
        output = pool.submit(cpu_ops.decoder_layers, residual, stack, **arguments)
        ranks[1].all_reduce(torch.zeros(1, HIDDEN, dtype=cpu_ops.dtype))
        ranks[1].give_up()
        with pytest.raises(GivenUp):
            output.result(30)


def test_the_last_token_of_a_cached_prompt_can_be_computed_alone(cpu_ops):
    stack, caches = make_stack(cpu_ops, [0, 20])
    count, table = 45, torch.tensor([[7, 2, 11]], dtype=torch.int32)
    at = torch.arange(count)
    residual = random(count, HIDDEN, dtype=cpu_ops.dtype)

    def compute(tokens: slice, slots: torch.Tensor) -> torch.Tensor:
        queries = len(at[tokens])
        return cpu_ops.decoder_layers(
            residual[tokens].clone(),
            stack,
            at[tokens].int(),
            slots[tokens].contiguous(),
            table,
            torch.tensor([count], dtype=torch.int32),
            torch.tensor([0, queries], dtype=torch.int32),
            torch.tensor([queries - 1]),
        )

    slots = table[0, at // BLOCK] * BLOCK + at % BLOCK
    expected = compute(slice(None), slots)
    kept = [cache.clone() for pair in caches for cache in pair]
    assert torch.equal(compute(slice(-1, None), torch.full_like(slots, -1)), expected)
    assert all(torch.equal(cache, old) for cache, old in zip((c for pair in caches for c in pair), kept, strict=True))


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


# --- packed weights of linear layers: layouts, and weights of 16 bits with float activations --------------------------

HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture(params=[level.name for level in LEVELS[torch.float32]])
def float_ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> kernels.Ops:
    return make_ops("cpu", request.param, torch.float32, monkeypatch)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("k", "n"), [(1, 1), (2, 33), (77, 40), (576, 200), (1531, 64)])
def test_weights_of_16_bits_have_the_products_of_the_same_floats(float_ops, dtype, k, n):
    weight, bias = torch.randn(2 * n, k).to(dtype), torch.randn(2 * n).to(dtype)
    short, long = (float_ops.pack_linear(w, b) for w, b in ((weight, bias), (weight.float(), bias.float())))
    gates = [float_ops.pack_gate_up(w, b) for w, b in ((weight, bias), (weight.float(), bias.float()))]
    assert short.weight.nbytes * k == long.weight.nbytes * ((k + 1) // 2)
    for rows in (1, 2, 3, 4, 7, 12, 13, 25, 70):
        x = torch.randn(rows, k)
        assert torch.equal(float_ops.linear(x, short), float_ops.linear(x, long))
        assert torch.equal(float_ops.linear_logits(x, short), float_ops.linear_logits(x, long))
        assert torch.equal(float_ops.linear_silu_mul(x, gates[0]), float_ops.linear_silu_mul(x, gates[1]))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("width", [1, 16, 47, 64])
def test_an_embedding_table_stays_in_16_bits(float_ops, dtype, width):
    table, ids = torch.randn(50, width).to(dtype), torch.tensor([3, 49, 0, 3])
    assert torch.equal(float_ops.embed(ids, table), table[ids].float())
    with pytest.raises(IndexError, match=r"token_ids\[1\]"):
        float_ops.embed(torch.tensor([1, 50]), table)


def test_extreme_values_of_16_bits_are_kept(float_ops):
    for dtype in HALVES:
        info = torch.finfo(dtype)
        values = torch.tensor([info.max, -info.max, info.tiny, info.smallest_normal / 2, -0.0, 1 + info.eps]).to(dtype)
        packed = float_ops.pack_linear(values[:, None].contiguous())
        assert torch.equal(float_ops.linear(torch.ones(1, 1), packed)[0], values.float())


# --- the table of experts for the C++ kernels -------------------------------------------------------------------------

EXPERT_HIDDEN, EXPERT_INNER = 40, 24


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape) / shape[-1] ** 0.5


def test_experts_of_several_formats_are_refused(cpu_ops):
    if not cpu_ops.quantized_bits:
        pytest.skip("quantised weights are for float32")
    router = cpu_ops.pack_linear(randn(2, EXPERT_HIDDEN))
    experts = [
        ExpertWeights(randn(2 * EXPERT_INNER, EXPERT_HIDDEN), quantize(randn(EXPERT_HIDDEN, EXPERT_INNER), bits))
        for bits in (8, 4)
    ]
    with pytest.raises(ValueError, match="several formats in down: int4, int8"):
        cpu_ops.pack_moe(Routing(2, 1, True), router, experts)


def test_biases_of_experts_are_those_of_linear_layers(cpu_ops):
    """One expert with all rows is a gated MLP of gpt-oss."""
    dtype = cpu_ops.dtype
    gate_up, down = randn(2 * EXPERT_INNER, EXPERT_HIDDEN).to(dtype), randn(EXPERT_HIDDEN, EXPERT_INNER).to(dtype)
    biases = torch.randn(2 * EXPERT_INNER).to(dtype), torch.randn(EXPERT_HIDDEN).to(dtype)
    routing, router = Routing(1, 1, True, CLAMPED), cpu_ops.pack_linear(randn(1, EXPERT_HIDDEN).to(dtype))
    packed = cpu_ops.pack_moe(routing, router, [ExpertWeights(gate_up, down, *biases)])
    x = torch.randn(5, EXPERT_HIDDEN).to(dtype)
    wide = torch.nn.functional.linear(x.float(), gate_up.float(), biases[0].float())
    gate, up = wide.chunk(2, dim=-1)
    inner = (up.clamp(-7, 7) + 1) * gate.clamp(max=7) * torch.sigmoid(1.702 * gate.clamp(max=7))
    expected = torch.nn.functional.linear(inner, down.float(), biases[1].float())
    tolerance = 1e-5 if dtype is torch.float32 else 0.1
    torch.testing.assert_close(cpu_ops.moe(x, packed).float(), expected, rtol=tolerance, atol=tolerance)


# --- the C++ operations of a latent cache: a row's result is the same bit for bit in any batch, chunk and thread count


@pytest.mark.parametrize(("heads", "width", "value_dim"), [(4, 48, 32), (60, 80, 64)])
@pytest.mark.parametrize("window", [0, 50])
def test_attention_rows_in_any_chunking(cpu_ops, threads, heads, width, value_dim, window):
    lengths = [300, 131, 17]
    given = LatentSequences(cpu_ops, list(lengths), lengths, heads, width, value_dim, window=window)
    whole = given.attend()
    threads(3)
    for queries in ([1, 1, 1], [130, 7, 2]):
        given.queries = queries
        for rows, all_rows, count in zip(given.attend(), whole, queries, strict=True):
            assert torch.equal(rows, all_rows[-count:])


def test_products_of_groups_are_those_of_each_layer_alone(cpu_ops):
    latent, weights = kernels.latent_ops(cpu_ops), torch.randn(3, 40, 24).to(cpu_ops.dtype)
    x = torch.randn(3, 70, 24).to(cpu_ops.dtype)
    together = latent.linear_groups(x, latent.pack_groups(weights))
    for group in range(3):
        alone = cpu_ops.linear(x[group], cpu_ops.pack_linear(weights[group]))
        assert torch.equal(together[group], alone)
        one = latent.linear_groups(x[:, 5:6].contiguous(), latent.pack_groups(weights))
        assert torch.equal(one[group], alone[5:6])


# --- low-rank adapters in C++: rows do not affect each other, and rows without an adapter keep their bits -------------


@pytest.fixture
def compute(cpu_ops):
    """Compute a step with an adapter index per token, or None for no adapters at all."""
    torch.manual_seed(4)
    layers, norm, _, cos_sin = stack_arguments(cpu_ops, [0, 20], norms=True, biases=True)
    residual, arguments = random(sum(QUERIES), HIDDEN, dtype=cpu_ops.dtype), prompts()
    adapters = [cpu_ops.pack_adapter(make_factors(2, rank, dtype), INNER)
                for rank, dtype in ((8, torch.float32), (5, torch.bfloat16), (64, torch.float32))]  # fmt: skip

    def run(index, rows=None):
        wanted = torch.arange(36) if rows is None else torch.tensor(rows)
        stack = cpu_ops.stack_layers(layers, norm, make_caches(cpu_ops, 2), cos_sin, HEADS, KV_HEADS, 1e-5, 0.2)
        batch = None
        if index is not None:
            index = np.array(index, dtype=np.int32)
            batch = AdapterBatch(adapters, index, index[wanted.numpy()])
        return cpu_ops.decoder_layers(residual.clone(), stack, **arguments, rows=wanted, adapters=batch)

    return run


def test_a_row_does_not_depend_on_the_adapters_of_other_sequences(compute):
    plain = compute(None)
    mixed = compute([2] + [NO_ADAPTER] * 5 + [1] * 30)
    other = compute([0] + [1] * 5 + [1] * 30)
    assert torch.equal(plain[1:6], mixed[1:6])
    assert torch.equal(other[6:], mixed[6:])
    assert not torch.equal(plain[0], mixed[0])
    assert not torch.equal(plain[6:], mixed[6:])


def test_the_wanted_rows_alone_have_the_same_bits(compute):
    index = [2] + [0] * 5 + [1] * 30
    assert torch.equal(compute(index, [35, 0, 3]), compute(index)[[35, 0, 3]])
