"""Norms, activation, embedding, rotation with the write into the cache, moves of blocks: each Triton kernel once."""

import pytest
import torch

from quire import kernels
from quire.kernels.gpu import matmul, tiles
from tests.kernels import oracle
from tests.kernels.conftest import ON_CUDA, TRITON_DTYPES, make_triton_ops
from tests.kernels.interpreter import make_dot_row_invariant
from tests.kernels.oracle import assert_close, slack
from tests.kernels.stacks import (
    BLOCK,
    BLOCKS,
    HEADS,
    HIDDEN,
    KV_HEADS,
    alone_and_added_up,
    make_stack,
    random,
    stack_arguments,
)

FP8 = torch.float8_e4m3fn


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


@pytest.mark.parametrize("dtype", TRITON_DTYPES, ids=str)
def test_a_product_has_the_same_bits_for_a_row_alone_and_among_others_in_batch_invariant_mode(monkeypatch, dtype):
    if not ON_CUDA:
        make_dot_row_invariant(monkeypatch)
    ops = make_triton_ops(dtype, monkeypatch, batch_invariant=True)
    assert ops.row_invariant
    n, k = (12800, 2000) if ON_CUDA else (70, 200)  # on a device as many as for the largest tiles
    weight, bias, x = (random(*s, dtype=dtype) for s in [(n, k), (n,), (130, k)])
    exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    for method, pack, expected in (
        ("linear", ops.pack_linear(weight, bias), exact),
        ("linear_logits", ops.pack_linear(weight, bias), exact),
    ):
        product = getattr(ops, method)
        together = product(x, pack)
        assert_close(together, expected, 20 * slack(dtype, 300))
        for first, end in ((0, 1), (129, 130), (30, 67)):
            assert torch.equal(product(x[first:end], pack), together[first:end])
    sizes = [tiles.ProductTiles(*size) for size in ((64, 64, 64, 4, 6), (128, 128, 64, 8, 4))]
    for size in sizes:  # those of more columns, too
        monkeypatch.setattr(matmul, "product_tiles", lambda *_, size=size: size)
        assert torch.equal(ops.linear_logits(x, pack), together)


def test_an_embedding_of_an_id_that_does_not_exist_is_nan(gpu_ops):
    table, ids = random(9, 1100, dtype=gpu_ops.dtype), torch.tensor([8, 0, 9, -1])
    with pytest.raises(IndexError, match=r"token_ids\[2\] is 9"):
        gpu_ops.embed(ids, table)
    gpu_ops.check_ids = False  # as a server runs
    found = gpu_ops.embed(ids, table)
    assert torch.equal(found[:2], table[[8, 0]])
    assert found[2:].isnan().all()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "norms"), [(3, 1, 64, False), (2, 2, 80, True), (4, 2, 96, False), (6, 1, 256, True)]
)
@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
def test_rotation_writes_the_given_slots_and_no_others(gpu_ops, monkeypatch, heads, kv_heads, d, norms, fp8):
    scales = (2.0**-8, 2.0) if fp8 else (1.0, 1.0)  # some keys are more than the cache holds
    if fp8:
        gpu_ops = make_triton_ops(gpu_ops.dtype, monkeypatch, kv_dtype=FP8, k_scale=scales[0], v_scale=scales[1])
    gpu_ops.check_ids = False
    tokens, blocks, block_size = 5, 3, 16
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * d).to(gpu_ops.dtype)
    before, positions = qkv.clone(), torch.tensor([0, 3, 39, 7, 8], dtype=torch.int32)
    angles = torch.rand(40, d // 2, dtype=torch.float64) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1).float()
    q_norm, k_norm = (torch.randn(2, d).to(gpu_ops.dtype)) if norms else (None, None)
    slots = torch.tensor([7, -1, blocks * block_size, 16, 47])  # the third does not exist
    caches = gpu_ops.alloc_kv_cache(blocks, kv_heads, block_size, d)
    for cache in caches:
        cache.view(torch.uint8).fill_(0x7F if fp8 else 0xFF)  # NaN in any type
    q = gpu_ops.rope_and_cache_kernel(
        qkv, positions, cos_sin, slots, *caches, heads, kv_heads, q_norm, k_norm, 1e-6, keep_k=True
    )

    exact_q, exact_k, v = before.view(tokens, -1, d).split([heads, kv_heads, kv_heads], dim=1)
    if norms:
        exact_q, exact_k = oracle.rms_norm(exact_q, q_norm, 1e-6), oracle.rms_norm(exact_k, k_norm, 1e-6)
    exact_q, exact_k = (oracle.rotate(x, cos_sin, positions) for x in (exact_q, exact_k))
    loose = slack(gpu_ops.dtype, 2500) if norms else 1
    assert_close(q, exact_q, loose * exact_q.abs().amax(), rounds=2)
    kept_q, kept_k, kept_v = qkv.view(tokens, -1, d).split([heads, kv_heads, kv_heads], dim=1)
    assert torch.equal(kept_q, before.view(tokens, -1, d)[:, :heads])
    assert torch.equal(kept_v, v)
    assert_close(kept_k, exact_k, loose * exact_k.abs().amax(), rounds=2)
    expected = [torch.full(cache.shape, float("nan")) for cache in caches]
    for token, slot in enumerate(slots.tolist()):
        if 0 <= slot < blocks * block_size:
            for cache, x, scale in zip(expected, (kept_k, v), scales, strict=True):
                stored = (x[token].float() / scale).clamp(-448, 448).to(FP8) if fp8 else x[token]
                cache[slot // block_size, :, slot % block_size] = stored.float()
    for cache, wanted in zip(caches, expected, strict=True):
        torch.testing.assert_close(cache.float(), wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
def test_blocks_move_within_the_caches_and_to_the_host_and_back(gpu_ops, monkeypatch, fp8):
    if fp8:
        gpu_ops = make_triton_ops(gpu_ops.dtype, monkeypatch, kv_dtype=FP8)
    stack, caches = make_stack(gpu_ops, [0, 0])

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


@pytest.mark.parametrize("windows", [[0, 20]], ids=str)
def test_all_layers_of_a_mixed_step_are_those_of_the_reference(monkeypatch, windows):
    """A decode row, a chunk on cached pages and a prompt of its own, with norms and biases."""
    if torch.float32 not in TRITON_DTYPES:
        pytest.skip("Triton is not installed")
    ops = make_triton_ops(torch.float32, monkeypatch)
    reference = kernels.ReferenceOps(ops.device)
    lengths, queries, rows = [40, 6, 70], [1, 6, 9], torch.tensor([0, 6, 15])
    positions = [torch.arange(n - q, n) for n, q in zip(lengths, queries, strict=True)]
    tables = torch.randperm(BLOCKS)[:15].view(3, 5)
    slots = [tables[s, at // BLOCK] * BLOCK + at % BLOCK for s, at in enumerate(positions)]
    step = (
        torch.cat(positions).int(),
        torch.cat(slots),
        tables.int(),
        torch.tensor(lengths).int(),
        torch.tensor([0, *queries]).cumsum(0).int(),
        rows,
    )
    residual = random(sum(queries), HIDDEN, dtype=torch.float32)
    results = []
    for one in (ops, reference):
        torch.manual_seed(3)
        made, final_norm, caches, cos_sin = stack_arguments(one, windows, norms=True, biases=True)
        stack = one.stack_layers(made, final_norm, caches, cos_sin, HEADS, KV_HEADS, 1e-5, 0.2)
        results.append((one.decoder_layers(residual.clone(), stack, *step), caches))
    (actual, caches), (expected, wanted) = results
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    for one, other in zip(caches, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_all_layers_add_up_over_ranks_in_both_products(gpu_ops):
    alone, added_up = alone_and_added_up(gpu_ops)
    assert torch.equal(added_up, alone)
