"""The layouts of the C++ kernels: cache blocks."""

import torch


def test_a_plain_cache_has_the_keys_in_the_order_of_their_slots(cpu_ops):
    block_size, d = 32, 16
    k_cache, v_cache = cpu_ops.alloc_kv_cache(1, 1, block_size, d)
    k = torch.randn(block_size, d).to(cpu_ops.dtype)
    qkv = torch.cat([torch.zeros_like(k), k, -k], dim=1)
    still = torch.cat([torch.ones(1, d // 2), torch.zeros(1, d // 2)], dim=1)  # the rotation by an angle of zero
    slots = torch.randperm(block_size)
    cpu_ops.rope_and_cache(qkv, torch.zeros(block_size, dtype=torch.int32), still, slots, k_cache, v_cache, 1, 1)
    plain_k, plain_v = cpu_ops.plain_kv_cache(k_cache, v_cache)
    assert torch.equal(plain_k[0, 0, slots], k)
    assert torch.equal(plain_v[0, 0, slots], -k)
    assert not torch.equal(plain_k, k_cache)
