"""The layouts of the C++ kernels: packed weights, packed biases and cache blocks."""

import torch


def test_weights_are_packed_in_panels_of_32_columns(cpu_ops):
    n, k, per_word = 40, 6, 4 // cpu_ops.dtype.itemsize
    weight = torch.arange(n * k).view(n, k).to(cpu_ops.dtype)
    packed = cpu_ops.pack_linear(weight, torch.arange(n).to(cpu_ops.dtype))
    panels = packed.weight.view(cpu_ops.dtype).view(2, k // per_word, 32, per_word)
    for row in (0, 31, 32, 39):
        assert torch.equal(panels[row // 32, :, row % 32].flatten(), weight[row])
    assert not panels[1, :, 8:].any()
    assert packed.bias.tolist() == [*range(n), *[0.0] * 24]
    assert packed.nbytes == packed.weight.nbytes + packed.bias.nbytes


def test_gates_and_ups_share_a_panel(cpu_ops):
    inner = 20
    bias = torch.arange(2 * inner).to(cpu_ops.dtype)
    packed = cpu_ops.pack_gate_up(torch.zeros(2 * inner, 4, dtype=cpu_ops.dtype), bias)
    gates, ups = list(range(inner)), list(range(inner, 2 * inner))
    rest = [0] * 12
    assert packed.bias.tolist() == [*gates[:16], *ups[:16], *gates[16:], *rest, *ups[16:], *rest]


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
