"""KV caches of another type than the activations: values, stored bytes, attention over them, moves of blocks."""

import pytest
import torch

from quire import kernels
from quire.kernels import kv_values
from quire.kernels.ops import Ops
from tests.support.kernels import oracle
from tests.support.kernels.implementations import make_ops
from tests.support.kernels.oracle import assert_close, slack
from tests.support.kernels.paged import GARBAGE, Paged

# --- kV caches of another type than the activations: stored bytes, attention over them, and moves of their blocks -----

FP8 = torch.float8_e4m3fn
EDGES = [0.0, 2**-9, 2**-10, 3 * 2**-10, -(2**-6), 0.0155, 447.0, 464.0, -465.0, 1e30, 1e-30, 6.5e-41, 0.996, 1.0]


def write(ops: Ops, values: torch.Tensor, slots: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Write values [T, 2, H_kv, D], keys and values, without a rotation."""
    tokens, _, kv_heads, d = values.shape
    still = torch.cat([torch.ones(1, d // 2), torch.zeros(1, d // 2)], dim=1)
    qkv = torch.cat([torch.zeros(tokens, kv_heads, d), *values.unbind(1)], dim=1).flatten(1).to(ops.dtype)
    ops.rope_and_cache(qkv, torch.zeros(tokens, dtype=torch.int32), still, slots, *caches, kv_heads, kv_heads)


def plain_bytes(ops: Ops, caches: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return what the cache holds, [2, blocks, H_kv, block_size, bytes of a row]."""
    return torch.stack([cache.view(torch.uint8) for cache in ops.plain_kv_cache(*caches)])


@pytest.mark.parametrize(("block_size", "d"), [(8, 16), (16, 48), (64, 64), (8, 256)])
def test_rows_are_stored_as_defined_and_nothing_else_is_written(narrow_ops, block_size, d):
    ops, blocks, kv_heads, tokens = narrow_ops, 128 // block_size, 2, 50
    caches = ops.alloc_kv_cache(blocks, kv_heads, block_size, d)
    assert not any(cache.view(torch.uint8).any() for cache in caches)
    for cache in caches:
        cache.view(torch.uint8).fill_(255)
    values = torch.randn(tokens, 2, kv_heads, d) * torch.logspace(-3, 2, tokens)[:, None, None, None]
    values[3, :, :, : len(EDGES)] = torch.tensor(EDGES)
    values[4], values[5] = 0, torch.arange(d) - d // 2
    values = values.to(ops.dtype)
    slots = torch.randperm(128)[:tokens]
    slots[7] = -1
    write(ops, values, slots, caches)
    expected = torch.full_like(plain_bytes(ops, caches), 255)
    stored = kv_values.encode(values, ops.kv_dtype).view(torch.uint8)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[:, slot // block_size, :, slot % block_size] = stored[token]
    different = (plain_bytes(ops, caches) != expected).nonzero()
    assert not len(different), f"{len(different)} bytes differ, the first at {different[0].tolist()}"


def test_the_stored_bytes_of_a_token_do_not_depend_on_its_step_or_block(narrow_ops):
    values = torch.randn(20, 2, 2, 32).to(narrow_ops.dtype)
    together, apart = (narrow_ops.alloc_kv_cache(4, 2, 8, 32) for _ in range(2))
    write(narrow_ops, values, torch.arange(20), together)
    slots = torch.randperm(32)[:20]
    for token in torch.randperm(20).tolist():
        write(narrow_ops, values[token : token + 1], slots[token : token + 1], apart)
    one, other = (plain_bytes(narrow_ops, caches).transpose(2, 3).flatten(1, 2) for caches in (together, apart))
    assert torch.equal(one[:, :20], other[:, slots])


def check(paged: Paged) -> None:
    for s, rows in enumerate(paged.attend()):
        assert_close(rows, paged.exact(s), slack(paged.ops.dtype, 2000))


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(1, 1, 32), (9, 3, 64), (8, 1, 256)])
def test_attention_over_the_stored_values(narrow_ops, heads, kv_heads, d):
    check(Paged(narrow_ops, [1, 150, 40, 129, 37, 600], [1, 1, 40, 3, 20, 1], heads, kv_heads, d))


@pytest.mark.parametrize(("block_size", "window"), [(8, 0), (8, 130), (16, 13), (32, 130), (128, 13)])
def test_block_sizes_and_windows(narrow_ops, block_size, window):
    check(Paged(narrow_ops, [290, 131, 9, 128, 15], [18, 1, 9, 33, 1], 6, 2, 64, block_size, window))


def test_blocks_before_every_window_may_be_gone(narrow_ops):
    for block_size in (8, 16):
        paged = Paged(narrow_ops, [300, 200], [4, 1], 4, 2, 32, block_size=block_size, window=30)
        expected = paged.attend()
        for s, (length, queries) in enumerate(zip(paged.lengths, paged.queries, strict=True)):
            gone = (length - queries - paged.window + 1) // block_size
            dropped = paged.tables[s, :gone].long()
            for cache in (paged.k_cache, paged.v_cache):
                cache.view(torch.uint8)[dropped] = 255
            paged.tables[s, :gone] = GARBAGE
        for before, after in zip(expected, paged.attend(), strict=True):
            assert torch.equal(before, after)


def test_rows_are_invariant(narrow_ops, threads):
    if not narrow_ops.row_invariant:
        pytest.skip("plain torch is not row-invariant")
    lengths = [300, 131, 17]
    paged = Paged(narrow_ops, list(lengths), lengths, 9, 3, 64)
    whole = paged.attend()
    threads(3)
    for length in [1, 16, 17, 128, 129, 257, 300]:
        for queries in (1, 2, 7, 40):
            for s, full in enumerate(lengths):
                paged.lengths[s] = min(length, full)
            counts = [min(queries, n) for n in paged.lengths]
            for s, rows in zip([2, 0, 1], paged.attend([2, 0, 1], counts), strict=True):
                assert torch.equal(rows, whole[s][paged.lengths[s] - counts[s] : paged.lengths[s]])


def test_attention_has_the_bits_of_a_cache_of_activations_with_the_same_values(narrow_ops, monkeypatch):
    if narrow_ops.kv_dtype is torch.int8 or narrow_ops.name == "reference":
        pytest.skip("the scales of int8 multiply scores and weights, and plain torch has other sums")
    for block_size in (8, 16):
        torch.manual_seed(3)
        narrow = Paged(narrow_ops, [300, 131, 1000], [300, 1, 5], 9, 3, 64, block_size)
        wide_ops = make_ops("cpu", narrow_ops.level.name, narrow_ops.dtype, monkeypatch)
        torch.manual_seed(3)
        wide = Paged(wide_ops, [300, 131, 1000], [300, 1, 5], 9, 3, 64, block_size)
        for s in range(3):
            wide.kv[s] = narrow.stored(s).to(wide_ops.dtype)
            wide.write(s)
        for one, other in zip(narrow.attend(), wide.attend(), strict=True):
            assert torch.equal(one, other)


def test_int8_keys_with_large_and_small_scales(narrow_ops):
    if narrow_ops.kv_dtype is not torch.int8:
        pytest.skip("other types have no scales")
    paged = Paged(narrow_ops, [200, 33], [5, 33], 4, 2, 32)
    for s, kv in enumerate(paged.kv):
        kv *= torch.logspace(-4, 0.5, kv.shape[1])[torch.randperm(kv.shape[1]), None, None].to(kv.dtype)
        paged.write(s)
    check(paged)


def test_blocks_are_copied_and_swapped_whole(narrow_ops):
    ops, blocks = narrow_ops, 9
    caches = [ops.alloc_kv_cache(blocks, 2, 16, 32) for _ in range(3)]
    for pair in caches:
        write(ops, torch.randn(blocks * 16, 2, 2, 32), torch.arange(blocks * 16), pair)
    stack = ops.stack_caches(caches)

    def held() -> torch.Tensor:
        return torch.stack([plain_bytes(ops, pair) for pair in caches])

    before = held()
    ops.copy_blocks(stack, torch.tensor([0, 5]), torch.tensor([3, 8]))
    expected = before.clone()
    expected[:, :, [3, 8]] = before[:, :, [0, 5]]
    assert torch.equal(held(), expected)

    host = ops.alloc_host_blocks(stack, 2)
    assert host.nbytes == 2 * 6 * caches[0][0][0].nbytes
    ops.swap_out(stack, host, torch.tensor([8, 1]), torch.tensor([0, 1]))
    for cache in (cache for pair in caches for cache in pair):
        cache.view(torch.uint8)[[8, 1]] = 255
    ops.swap_in(stack, host, torch.tensor([0, 1]), torch.tensor([1, 8]))
    expected[:, :, [1, 8]] = expected[:, :, [8, 1]]
    assert torch.equal(held(), expected)


def test_narrow_types_are_close_to_the_exact_attention(narrow_ops):
    paged = Paged(narrow_ops, [700], [20], 6, 2, 64)
    exact = oracle.attention(paged.q[0][-20:], *paged.kv[0], paged.scale)
    error = (paged.attend()[0].double() - exact).norm() / exact.norm()
    allowed = {torch.bfloat16: 0.003, torch.int8: 0.012, FP8: 0.01}  # the values of fp8 were rounded before
    assert error < allowed[narrow_ops.kv_dtype] + (0.01 if narrow_ops.dtype is torch.bfloat16 else 0)


def test_other_types_are_refused(monkeypatch):
    with pytest.raises(TypeError, match="float16"):
        kernels.CpuOps(torch.float32, torch.float16)


# --- the stored bytes of a key or a value, and the values that are read back ------------------------------------------

INT8 = torch.int8


def round_trip(rows: torch.Tensor, kv_dtype: torch.dtype) -> torch.Tensor:
    return kv_values.decode(kv_values.encode(rows, kv_dtype), torch.float64)


def test_int8_values_are_off_by_half_a_step_at_most():
    rows = torch.randn(50, 3, 64) * torch.logspace(-20, 20, 50)[:, None, None]
    step = rows.double().abs().amax(-1, keepdim=True) / 127
    assert ((round_trip(rows, INT8) - rows).abs() <= 0.501 * step).all()


def test_the_scale_of_an_int8_row_follows_its_integers():
    stored = kv_values.encode(torch.tensor([[127.0, -63.5, 0.0, 2.5, 3.5]]), INT8)
    assert stored[0, :5].tolist() == [127, -64, 0, 2, 4]  # ties go to even
    assert stored[0, 5:].clone().view(torch.float32).tolist() == [1.0]


def test_int8_rows_without_a_scale_are_zero():
    assert not kv_values.encode(torch.zeros(2, 16), INT8).any()


def test_nan_does_not_hide_the_other_values_of_an_int8_row():
    rows = torch.tensor([[float("nan"), 1.0, -2.0, 0.5]])
    assert round_trip(rows, INT8)[0, 1:].tolist() == pytest.approx([1.0, -2.0, 0.5], abs=0.01)


def test_fp8_saturates():
    rows = torch.tensor([1e9, 449.0, 448.0, 0.3, -1e-9, -float("inf")])
    assert round_trip(rows, FP8).tolist() == [448.0, 448.0, 448.0, 0.3125, -0.0, -448.0]


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16])
def test_other_types_are_rounded(kv_dtype):
    rows = torch.randn(4, 16)
    assert torch.equal(kv_values.decode(kv_values.encode(rows, kv_dtype), torch.float32), rows.to(kv_dtype).float())
