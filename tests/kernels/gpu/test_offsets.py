"""Pages of a large cache whose offsets do not fit into 32 bits. Most memory of the cache is never accessed."""

import math
import mmap

import pytest
import torch

from tests.support.kernels.implementations import ON_CUDA, TRITON_DTYPES, make_triton_ops

pytestmark = pytest.mark.slow

if not TRITON_DTYPES:
    pytest.skip("Triton is not installed", allow_module_level=True)

BLOCK, KV_HEADS, HEADS, D = 32, 2, 4, 128
NEAR = 10  # blocks of a cache whose pages are the same, but not far behind
FAR = 2**31 // (BLOCK * KV_HEADS * D) + NEAR
LENGTHS, NEW = [70, 40, 20], [1, 10, 20]  # a decode step, a chunk on cached pages, a prompt


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
    for s, length in enumerate(LENGTHS):
        sequences.append(torch.full((length,), s))
        positions.append(torch.arange(length))
    owner, position = torch.cat(sequences), torch.cat(positions)
    slots = tables[owner, position // BLOCK].long() * BLOCK + position % BLOCK
    qkv = torch.randn(len(owner), (HEADS + 2 * KV_HEADS) * D).to(ops.dtype)
    angles = torch.randn(max(LENGTHS), D)
    q = ops.rope_and_cache(qkv, position.int(), angles, slots, *caches, HEADS, KV_HEADS)
    is_new = torch.cat([torch.arange(n) >= n - new for n, new in zip(LENGTHS, NEW, strict=True)])
    starts = torch.tensor([0, *NEW]).cumsum(0).int()
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    mixed = ops.paged_attention(q[is_new].contiguous(), *caches, tables, lengths, starts, D**-0.5)
    ones = torch.arange(4, dtype=torch.int32)
    last = lengths.cumsum(0) - 1
    decoded = ops.paged_attention(q[last].contiguous(), *caches, tables, lengths, ones, D**-0.5)
    return torch.cat([mixed, decoded]), torch.stack([cache[num_blocks - NEAR :].clone() for cache in caches])


@pytest.mark.parametrize("invariant", [False, True], ids=["", "batch-invariant"])
def test_pages_may_be_further_behind_than_32_bits_count(monkeypatch, invariant):
    ops = make_triton_ops(torch.float16, monkeypatch, batch_invariant=invariant)
    assert FAR * BLOCK * KV_HEADS * D > 2**31
    (near, near_pages), (far, far_pages) = step(ops, NEAR), step(ops, FAR)
    assert near.isfinite().all()
    assert near_pages.any()
    assert torch.equal(far, near)
    assert torch.equal(far_pages, near_pages)
