"""Norms, embedding and rotary embedding."""

import itertools

import pytest
import torch

from tests.support.kernels import oracle
from tests.support.kernels.implementations import few_without_gpu
from tests.support.kernels.oracle import assert_close, slack


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


@pytest.mark.parametrize("width", [1, 7, 16, 40, 576, 1027])
@pytest.mark.parametrize("rows", [1, 3, 70])
def test_rms_norm(ops, width, rows):
    x, weight = random(rows, width, dtype=ops.dtype) * 3, random(width, dtype=ops.dtype)
    assert_close(ops.rms_norm(x, weight, 1e-5), oracle.rms_norm(x, weight, 1e-5), rounds=2)


@pytest.mark.parametrize("width", [7, 576])
def test_add_rms_norm_updates_the_residual(ops, width):
    x, residual = random(5, width, dtype=ops.dtype), random(5, width, dtype=ops.dtype)
    weight, expected = random(width, dtype=ops.dtype), residual + x
    actual = ops.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(residual, expected)
    assert_close(actual, oracle.rms_norm(expected, weight, 1e-6), rounds=2)


def test_a_norm_of_zeros_is_zero(ops):
    x = torch.zeros(2, 32, dtype=ops.dtype)
    assert torch.equal(ops.rms_norm(x, x[0] + 1, 1e-6), x)


@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
def test_embed_takes_rows_of_the_table(ops, integer):
    table = random(50, 37, dtype=ops.dtype)
    ids = torch.tensor([0, 49, 7, 7], dtype=integer)
    assert torch.equal(ops.embed(ids, table), table[ids.long()])


@pytest.mark.parametrize("bad", [-1, 50, 2**31 - 1])
def test_an_id_outside_the_table_is_refused(ops, bad):
    with pytest.raises(IndexError):
        ops.embed(torch.tensor([3, bad], dtype=torch.int32), random(50, 16, dtype=ops.dtype))


@pytest.mark.parametrize(
    ("norms", "heads", "block_size"),
    few_without_gpu(
        itertools.product([False, True], [(4, 4, 32), (6, 2, 48), (9, 3, 64), (8, 1, 256)], [8, 16, 128]), 5
    ),
)
def test_rope_rotates_and_writes_the_cache(ops, block_size, heads, norms):
    heads, kv_heads, d = heads
    tokens, blocks = 21, 24 * 8 // block_size + 1
    qkv = random(tokens, (heads + 2 * kv_heads) * d, dtype=ops.dtype)
    positions = torch.randint(0, 90, (tokens,), dtype=torch.int32)
    angles = torch.rand(90, d // 2, dtype=torch.float64) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1).float()
    q_norm, k_norm = (random(d, dtype=ops.dtype), random(d, dtype=ops.dtype)) if norms else (None, None)
    slots = torch.randperm(blocks * block_size)[:tokens]
    slots[4] = -1
    k_cache, v_cache = ops.alloc_kv_cache(blocks, kv_heads, block_size, d)
    assert k_cache.shape == (blocks, kv_heads, block_size, d)
    assert not k_cache.any()
    cache_before = [c.fill_(float("nan")) for c in (k_cache, v_cache)]
    q = ops.rope_and_cache(qkv, positions, cos_sin, slots, *cache_before, heads, kv_heads, q_norm, k_norm, eps=1e-6)

    exact_q, exact_k, v = qkv.view(tokens, -1, d).split([heads, kv_heads, kv_heads], dim=1)
    if norms:
        exact_q, exact_k = oracle.rms_norm(exact_q, q_norm, 1e-6), oracle.rms_norm(exact_k, k_norm, 1e-6)
    # The tolerance is larger with norms: when two rotated values cancel, the rounding error of the norm remains.
    loose = slack(ops.dtype, 2500) if norms else 1
    assert_close(q, oracle.rotate(exact_q, cos_sin, positions), loose * exact_q.double().abs().amax(), rounds=2)
    exact_k = oracle.rotate(exact_k, cos_sin, positions)
    k_plain, v_plain = ops.plain_kv_cache(k_cache, v_cache)
    written = torch.zeros(blocks, block_size, dtype=torch.bool)
    for t, slot in enumerate(slots.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, block_size)
            written[block, offset] = True
            assert_close(k_plain[block, :, offset], exact_k[t], loose * exact_k.abs().amax(), rounds=2)
            assert torch.equal(v_plain[block, :, offset], v[t])
    untouched = ~written[:, None, :, None].expand_as(k_plain)
    assert k_plain[untouched].isnan().all()
    assert v_plain[untouched].isnan().all()


@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(4, 2, 32), (2, 1, 256)])
def test_rope_normalises_values(ops, heads, kv_heads, d):
    tokens, blocks = 9, 2
    qkv = random(tokens, (heads + 2 * kv_heads) * d, dtype=ops.dtype)
    norm, cos_sin = random(d, dtype=ops.dtype) + 1, torch.rand(40, d)
    where = torch.arange(tokens, dtype=torch.int32), cos_sin, torch.arange(tokens) + 3
    plain, normalised = (ops.alloc_kv_cache(blocks, kv_heads, 16, d) for _ in range(2))
    q = ops.rope_and_cache(qkv, *where, *plain, heads, kv_heads)
    again = ops.rope_and_cache(qkv, *where, *normalised, heads, kv_heads, v_norm=norm)
    assert torch.equal(again, q)
    (k, _), (other_k, found) = ops.plain_kv_cache(*plain), ops.plain_kv_cache(*normalised)
    assert torch.equal(other_k, k)
    v = qkv.view(tokens, -1, d)[:, heads + kv_heads :]
    expected = oracle.rms_norm(v, norm, 1e-6)
    stored = found.transpose(1, 2).reshape(-1, kv_heads, d)
    assert_close(stored[3 : 3 + tokens], expected, slack(ops.dtype, 2500) * expected.abs().amax(), rounds=2)
    assert not stored[:3].any()
    assert not stored[3 + tokens :].any()


def test_rope_rotates_queries_alone(ops):
    heads, d, tokens = 4, 32, 5
    qkv = random(tokens, (heads + 2) * d, dtype=ops.dtype)
    queries = qkv[:, : heads * d].contiguous()
    where = torch.arange(tokens, dtype=torch.int32), torch.rand(40, d), torch.arange(tokens)
    norm = random(d, dtype=ops.dtype)
    expected = ops.rope_and_cache(qkv, *where, *ops.alloc_kv_cache(2, 1, 16, d), heads, 1, norm)
    caches = ops.alloc_kv_cache(2, 1, 16, d)
    assert torch.equal(ops.rope_and_cache(queries, *where, *caches, heads, 0, norm), expected)
    assert not any(bool(cache.any()) for cache in caches)


def test_rope_refuses_positions_and_slots_that_do_not_exist(cpu_ops):
    k_cache, v_cache = cpu_ops.alloc_kv_cache(2, 1, 16, 32)
    qkv, cos_sin = random(2, 96, dtype=cpu_ops.dtype), torch.rand(10, 32)

    def call(positions: list[int], slots: list[int]) -> None:
        where = torch.tensor(positions, dtype=torch.int32), cos_sin, torch.tensor(slots)
        cpu_ops.rope_and_cache(qkv, *where, k_cache, v_cache, 1, 1)

    call([0, 9], [31, -1])
    for positions, slots in ([0, 10], [0, 1]), ([-1, 0], [0, 1]), ([0, 0], [0, 32]), ([0, 0], [-2, 0]):
        with pytest.raises(IndexError, match="does not exist"):
            call(positions, slots)


def test_wrong_arguments_are_refused(ops):
    x, weight = random(3, 32, dtype=ops.dtype), random(32, dtype=ops.dtype)
    with pytest.raises(TypeError, match="weight"):
        ops.rms_norm(x, weight.double(), 1e-6)
    with pytest.raises(ValueError, match="weight has shape"):
        ops.rms_norm(x, weight[:31], 1e-6)
    with pytest.raises(ValueError, match="residual has shape"):
        ops.add_rms_norm(x, x[:2], weight, 1e-6)
    with pytest.raises(TypeError, match="token_ids"):
        ops.embed(torch.zeros(3), x)
    k_cache, v_cache = ops.alloc_kv_cache(2, 1, 16, 32)
    qkv, zeros, cos_sin = random(2, 96, dtype=ops.dtype), torch.zeros(2, dtype=torch.int32), torch.rand(10, 32)
    with pytest.raises(TypeError, match="positions"):
        ops.rope_and_cache(qkv, zeros.long(), cos_sin, zeros, k_cache, v_cache, 1, 1)
    with pytest.raises(ValueError, match="qkv has shape"):
        ops.rope_and_cache(qkv, zeros, cos_sin, zeros, k_cache, v_cache, 2, 1)
    with pytest.raises(ValueError, match="k_cache has shape"):
        ops.rope_and_cache(qkv, zeros, cos_sin, zeros, k_cache, v_cache, 1, 2)
    with pytest.raises(ValueError, match="block_size"):
        ops.alloc_kv_cache(2, 1, 12, 32)
    with pytest.raises(ValueError, match="head_dim"):
        ops.alloc_kv_cache(2, 1, 16, 40)
