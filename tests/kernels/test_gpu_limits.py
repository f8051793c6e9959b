"""What the Triton kernels do not support is refused in one line that names the value and what would fit."""

import pytest
import torch

from tests.kernels.conftest import HAS_TRITON, make_triton_ops
from tests.kernels.stacks import stack_arguments

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "message"),
    [
        (torch.float64, None, "compute in bfloat16, float16 and float32, not in torch.float64"),
        (torch.int8, None, "not in torch.int8"),
        (FP8, None, "not in torch.float8_e4m3fn"),
        (torch.float16, torch.bfloat16, "asked for as torch.bfloat16: .* torch.float16 or torch.float8_e4m3fn"),
        (torch.float16, torch.float8_e5m2, "asked for as torch.float8_e5m2"),
    ],
)
def test_types(monkeypatch, dtype, kv_dtype, message):
    with pytest.raises(TypeError, match=message) as refused:
        make_triton_ops(dtype, monkeypatch, kv_dtype=kv_dtype)
    assert "\n" not in str(refused.value)


def test_a_device_without_kernels(monkeypatch):
    from kernels.gpu import TritonOps

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="device is cpu: the Triton kernels need a CUDA device"):
        TritonOps("cpu")


@pytest.mark.parametrize("block_size", [0, 1, 4, 12, 24, 256])
def test_page_sizes(gpu_ops, block_size):
    with pytest.raises(ValueError, match=rf"block_size is {block_size}: .* 8, 16, 32, 64 (and|or) 128"):
        gpu_ops.alloc_kv_cache(2, 1, block_size, 64)


@pytest.mark.parametrize("head_dim", [0, 8, 40, 72, 272, 512])
def test_head_sizes(gpu_ops, head_dim):
    with pytest.raises(ValueError, match=rf"head_dim is {head_dim}: .* multiple"):
        gpu_ops.alloc_kv_cache(2, 1, 16, head_dim)


def test_caches_of_another_maker(gpu_ops):
    """What another implementation may have allocated is refused by the operation itself."""
    wide = torch.zeros(2, 1, 16, 320, dtype=gpu_ops.dtype)
    q, one = torch.zeros(1, 1, 320, dtype=gpu_ops.dtype), torch.tensor([1], dtype=torch.int32)
    where = torch.zeros(1, 1, dtype=torch.int32), one, torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(ValueError, match="head_dim is 320"):
        gpu_ops.paged_attention(q, wide, wide, *where, 0.1)


def test_groups_of_heads(gpu_ops):
    caches = gpu_ops.alloc_kv_cache(2, 1, 16, 256)
    q, one = torch.zeros(1, 65, 256, dtype=gpu_ops.dtype), torch.tensor([1], dtype=torch.int32)
    where = torch.zeros(1, 1, dtype=torch.int32), one, torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"65 heads over 1 key-value heads .* support 64 of head_dim 256"):
        gpu_ops.paged_attention(q, *caches, *where, 0.1)


def test_a_stack_whose_cache_has_another_type(gpu_ops):
    made, final_norm, caches, cos_sin = stack_arguments(gpu_ops, [0])
    other = [tuple(cache.double() for cache in pair) for pair in caches]
    with pytest.raises(TypeError, match=f"a cache is torch.float64, not {gpu_ops.dtype}"):
        gpu_ops.stack_layers(made, final_norm, other, cos_sin, 6, 2, 1e-5, 0.2)
