"""Kernels that compute each row alone, moves of blocks, and ids and offsets at the ends of their ranges."""

import math
import mmap

import pytest
import torch

from quire.kernels.gpu import id_checks
from quire.kernels.gpu.rope import rope_and_cache
from tests.support.kernels import oracle
from tests.support.kernels.implementations import HAS_TRITON, ON_CUDA, make_triton_ops
from tests.support.kernels.oracle import assert_close, slack
from tests.support.kernels.stacks import BLOCKS, make_cache_stack, random

# --- norms, the gated activation and the embedding in Triton ----------------------------------------------------------


def test_a_norm_adds_to_the_residual_first(gpu_ops):
    x, residual, weight = (random(*s, dtype=gpu_ops.dtype) for s in [(3, 1100), (3, 1100), (1100,)])
    assert_close(gpu_ops.rms_norm(x, weight, 1e-5), oracle.rms_norm(x, weight, 1e-5), rounds=2)
    expected = residual + x
    actual = gpu_ops.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, expected)
    assert_close(actual, oracle.rms_norm(expected, weight, 1e-5), rounds=2)


def test_the_activation_takes_the_largest_values(gpu_ops):
    values = torch.tensor([-300.0, -100.0, -1.0, 0.0, 2.0, 250.0]).to(gpu_ops.dtype)
    gate, up = values.repeat(200), torch.randn(1200).to(gpu_ops.dtype)
    x = torch.eye(1).to(gpu_ops.dtype)
    out = gpu_ops.linear_silu_mul(x, gpu_ops.pack_gate_up(torch.cat([gate, up])[:, None]))
    exact = torch.nn.functional.silu(gate.double()) * up.double()
    assert_close(out[0], exact, slack(gpu_ops.dtype, 300) * (1 + gate.double().abs()), rounds=2)


def test_an_embedding_of_an_id_that_does_not_exist_is_nan(gpu_ops):
    table, ids = random(9, 1100, dtype=gpu_ops.dtype), torch.tensor([8, 0, 9, -1])
    with pytest.raises(IndexError, match=r"token_ids\[2\] is 9"):
        gpu_ops.embed(ids, table)
    gpu_ops.check_ids = False  # as a server runs
    found = gpu_ops.embed(ids, table)
    assert torch.equal(found[:2], table[[8, 0]])
    assert found[2:].isnan().all()


# --- rotation with the cache write, in the dtype of activations and in fp8 --------------------------------------------

FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "norms"),
    [(3, 1, 64, ""), (2, 2, 80, "qk"), (4, 2, 96, ""), (6, 1, 256, "qk"), (4, 2, 48, "qkv")],
)
@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
def test_rotation_writes_the_given_slots_and_no_others(gpu_ops, monkeypatch, heads, kv_heads, d, norms, fp8):
    if fp8:
        gpu_ops = make_triton_ops(gpu_ops.dtype, monkeypatch, kv_dtype=FP8)
    gpu_ops.check_ids = False
    tokens, blocks, block_size = 5, 3, 16
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * d).to(gpu_ops.dtype)
    if fp8:
        qkv *= 300  # more than the cache holds, for some keys and values
    before, positions = qkv.clone(), torch.tensor([0, 3, 39, 7, 8], dtype=torch.int32)
    angles = torch.rand(40, d // 2, dtype=torch.float64) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1).float()
    q_norm, k_norm = (torch.randn(2, d).to(gpu_ops.dtype)) if norms else (None, None)
    v_norm = torch.randn(d).to(gpu_ops.dtype) if norms == "qkv" else None
    slots = torch.tensor([7, -1, blocks * block_size, 16, 47])  # the third does not exist
    caches = gpu_ops.alloc_kv_cache(blocks, kv_heads, block_size, d)
    for cache in caches:
        cache.view(torch.uint8).fill_(0x7F if fp8 else 0xFF)  # NaN in any type
    rest = q_norm, k_norm, 1e-6, True, v_norm
    q = rope_and_cache(qkv, positions, cos_sin, slots, *caches, heads, kv_heads, *rest)

    exact_q, exact_k, v = before.view(tokens, -1, d).split([heads, kv_heads, kv_heads], dim=1)
    if norms:
        exact_q, exact_k = oracle.rms_norm(exact_q, q_norm, 1e-6), oracle.rms_norm(exact_k, k_norm, 1e-6)
    exact_q, exact_k = (oracle.rotate(x, cos_sin, positions) for x in (exact_q, exact_k))
    loose = slack(gpu_ops.dtype, 2500) if norms else 1
    assert_close(q, exact_q, loose * exact_q.abs().amax(), rounds=2)
    kept_q, kept_k, kept_v = qkv.view(tokens, -1, d).split([heads, kv_heads, kv_heads], dim=1)
    assert torch.equal(kept_q, before.view(tokens, -1, d)[:, :heads])
    if v_norm is None:
        assert torch.equal(kept_v, v)
    else:
        exact_v = oracle.rms_norm(v, v_norm, 1e-6)
        assert_close(kept_v, exact_v, slack(gpu_ops.dtype, 2500) * exact_v.abs().amax(), rounds=2)
    assert_close(kept_k, exact_k, loose * exact_k.abs().amax(), rounds=2)
    expected = [torch.full(cache.shape, float("nan")) for cache in caches]
    for token, slot in enumerate(slots.tolist()):
        if 0 <= slot < blocks * block_size:
            for cache, x in zip(expected, (kept_k, kept_v), strict=True):
                stored = x[token].float().clamp(-448, 448).to(FP8) if fp8 else x[token]
                cache[slot // block_size, :, slot % block_size] = stored.float()
    for cache, wanted in zip(caches, expected, strict=True):
        torch.testing.assert_close(cache.float(), wanted, rtol=0, atol=0, equal_nan=True)


# --- moves of blocks within the caches, to the host and back ----------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
def test_blocks_move_within_the_caches_and_to_the_host_and_back(gpu_ops, monkeypatch, fp8):
    if fp8:
        gpu_ops = make_triton_ops(gpu_ops.dtype, monkeypatch, kv_dtype=FP8)
    stack, caches = make_cache_stack(gpu_ops, 2)

    def everything() -> torch.Tensor:
        return torch.stack([cache.view(torch.uint8).clone() for pair in caches for cache in pair])

    def ids(*values: int) -> torch.Tensor:
        return torch.tensor(values, device="cpu")

    expected = everything()
    gpu_ops.copy_blocks(stack, ids(3, 3, BLOCKS - 1), ids(4, 0, 7))
    expected[:, [4, 0, 7]] = expected[:, [3, 3, BLOCKS - 1]]
    assert torch.equal(everything(), expected)
    host = gpu_ops.alloc_host_blocks(stack, 5)
    host.view(torch.uint8).fill_(0xFF)
    gpu_ops.swap_out(stack, host, ids(2, 9), ids(4, 1))
    gpu_ops.swap_in(stack, host, ids(1, 4, 0), ids(11, 12, 13))
    expected[:, [11, 12]] = expected[:, [9, 2]]
    expected[:, 13] = 0xFF
    assert torch.equal(everything(), expected)
    assert (host[[0, 2, 3]].view(torch.uint8) == 0xFF).all()


# --- ids, slots, positions and blocks out of range raise IndexError and are named -------------------------------------

TABLES, LENGTHS, STARTS = torch.tensor([[0, 1], [2, 9]]), torch.tensor([20, 16]), torch.tensor([0, 1, 3])


def integers(*values: int) -> torch.Tensor:
    return torch.tensor(values)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: id_checks.token_ids(integers(0, 5), torch.zeros(5, 2)), r"token_ids\[1\] is 5, outside 0..4"),
        (lambda: id_checks.slots(integers(0, 9), 9, integers(0, 1), 8), "token 1: position 9 of 9"),
        (lambda: id_checks.slots(integers(0, 0), 9, integers(0, 8), 8), "slot 8 of 8"),
        (lambda: id_checks.slots(integers(0, 0), 9, integers(-2, 0), 8), "token 0"),
        (lambda: id_checks.vocabulary_ids(integers(3, -1), 4), r"ids\[1\] is -1"),
        (lambda: id_checks.rows(integers(0, 3), 3), r"rows\[1\] is 3, not one of 3 tokens"),
        (lambda: id_checks.blocks(TABLES, LENGTHS, STARTS, 3, 8, 9, 0), "sequence 0"),  # 20 keys in two blocks of 8
        (lambda: id_checks.blocks(TABLES, integers(16, 17), STARTS, 3, 16, 9, 0), "sequence 1"),  # block 9 of 9
        (lambda: id_checks.blocks(TABLES, LENGTHS, STARTS, 4, 16, 10, 0), "sequence 0"),  # not all tokens
    ],
)
def test_a_value_out_of_range_is_named(call, message):
    with pytest.raises(IndexError, match=message):
        call()


def test_values_in_range_pass():
    id_checks.token_ids(integers(0, 4), torch.zeros(5, 2))
    id_checks.slots(integers(0, 8), 9, integers(-1, 7), 8)
    id_checks.rows(integers(2, 0, 2), 3)
    id_checks.blocks(TABLES, LENGTHS, STARTS, 3, 16, 9, 0)  # the second sequence has one block only


def test_a_block_before_every_window_may_be_out_of_range():
    tables = torch.tensor([[2**31 - 1, 1]])
    id_checks.blocks(tables, integers(20), integers(0, 1), 1, 16, 9, 4)
    with pytest.raises(IndexError, match="sequence 0"):
        id_checks.blocks(tables, integers(20), integers(0, 1), 1, 16, 9, 5)


# --- pages of a large cache whose offsets do not fit into 32 bits. Most memory of the cache is never accessed ---------

BLOCK, KV_HEADS, HEADS, D = 32, 2, 4, 128
NEAR = 10  # blocks of a cache whose pages are the same, but not far behind
FAR = 2**31 // (BLOCK * KV_HEADS * D) + NEAR
FAR_LENGTHS, NEW = [70, 40, 20], [1, 10, 20]  # a decode step, a chunk on cached pages, a prompt


def make_caches(ops, num_blocks: int) -> list[torch.Tensor]:
    """Zeros; in host memory that is there once it is touched."""
    if ON_CUDA:
        return list(ops.alloc_kv_cache(num_blocks, KV_HEADS, BLOCK, D))
    shape = num_blocks, KV_HEADS, BLOCK, D
    num_bytes = math.prod(shape) * ops.dtype.itemsize
    return [torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=ops.dtype).view(shape) for _ in range(2)]


def step(ops, num_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Write and read the last NEAR blocks of a cache. Returns the attention, and the contents of these blocks."""
    torch.manual_seed(5)
    caches = make_caches(ops, num_blocks)
    tables = torch.arange(num_blocks - 1, num_blocks - NEAR, -1, dtype=torch.int32).view(3, 3)
    sequences, positions = [], []
    for s, length in enumerate(FAR_LENGTHS):
        sequences.append(torch.full((length,), s))
        positions.append(torch.arange(length))
    owner, position = torch.cat(sequences), torch.cat(positions)
    slots = tables[owner, position // BLOCK].long() * BLOCK + position % BLOCK
    qkv = torch.randn(len(owner), (HEADS + 2 * KV_HEADS) * D).to(ops.dtype)
    angles = torch.randn(max(FAR_LENGTHS), D)
    q = ops.rope_and_cache(qkv, position.int(), angles, slots, *caches, HEADS, KV_HEADS)
    is_new = torch.cat([torch.arange(n) >= n - new for n, new in zip(FAR_LENGTHS, NEW, strict=True)])
    starts = torch.tensor([0, *NEW]).cumsum(0).int()
    lengths = torch.tensor(FAR_LENGTHS, dtype=torch.int32)
    mixed = ops.paged_attention(q[is_new].contiguous(), *caches, tables, lengths, starts, D**-0.5)
    ones = torch.arange(4, dtype=torch.int32)
    last = lengths.cumsum(0) - 1
    decoded = ops.paged_attention(q[last].contiguous(), *caches, tables, lengths, ones, D**-0.5)
    return torch.cat([mixed, decoded]), torch.stack([cache[num_blocks - NEAR :].clone() for cache in caches])


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
@pytest.mark.parametrize("invariant", [False, True], ids=["", "batch-invariant"])
def test_pages_may_be_further_behind_than_32_bits_count(monkeypatch, invariant):
    ops = make_triton_ops(torch.float16, monkeypatch, batch_invariant=invariant)
    assert FAR * BLOCK * KV_HEADS * D > 2**31
    (near, near_pages), (far, far_pages) = step(ops, NEAR), step(ops, FAR)
    assert near.isfinite().all()
    assert near_pages.any()
    assert torch.equal(far, near)
    assert torch.equal(far_pages, near_pages)
