"""Rotation with the cache write, in the dtype of activations and in fp8."""

import pytest
import torch

from quire.kernels.gpu.rope import rope_and_cache
from tests.support.kernels import oracle
from tests.support.kernels.implementations import make_triton_ops
from tests.support.kernels.oracle import assert_close, slack

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
