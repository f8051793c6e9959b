"""Unsupported dtypes and shapes are refused with one line that names the value and the supported ones."""

import sys

import pytest
import torch

from quire import kernels
from quire.kernels import select
from tests.support.kernels.implementations import HAS_TRITON, make_triton_ops
from tests.support.kernels.stacks import stack_arguments

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
    from quire.kernels.gpu.ops import TritonOps

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="device is cpu: the Triton kernels need a CUDA device"):
        TritonOps("cpu")


@pytest.mark.parametrize(
    ("environ", "headers", "message"),
    [
        (
            {"PATH": ""},
            True,
            "Triton needs a C compiler and finds neither gcc nor clang: install gcc, or set CC to a C compiler",
        ),
        (
            {"CC": "no-such-cc"},
            True,
            "Triton needs a C compiler and CC=no-such-cc does not exist: install gcc, or set CC",
        ),
        ({"CC": sys.executable}, False, "Triton needs Python's C headers and finds no Python.h: install them"),
        ({"CC": sys.executable}, True, r"Triton cannot launch a kernel here \(the driver is too old\)"),
    ],
    ids=["no compiler", "another", "no headers", "anything else"],
)
def test_what_keeps_triton_from_compiling_is_found_before_the_first_step(
    monkeypatch, tmp_path, environ, headers, message
):
    device = make_triton_ops(torch.float32, monkeypatch).device
    assert kernels.triton_ops(device, torch.float32).name == "triton"
    monkeypatch.delenv("CC", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    if headers:
        (tmp_path / "Python.h").touch()
    monkeypatch.setattr(select.sysconfig, "get_path", lambda name: str(tmp_path))

    def fail(*_):
        raise RuntimeError("a traceback\nthe driver is too old")

    monkeypatch.setattr(kernels.gpu.ops.TritonOps, "argmax", fail)
    with pytest.raises(kernels.KernelsUnavailable, match=message) as refused:
        kernels.triton_ops(device, torch.float32)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("block_size", [0, 1, 4, 12, 24, 256])
def test_page_sizes(gpu_ops, block_size):
    with pytest.raises(ValueError, match=rf"block_size is {block_size}: .* 8, 16, 32, 64 (and|or) 128"):
        gpu_ops.alloc_kv_cache(2, 1, block_size, 64)


@pytest.mark.parametrize("head_dim", [0, 8, 40, 72, 528, 1024])
def test_head_sizes(gpu_ops, head_dim):
    with pytest.raises(ValueError, match=rf"head_dim is {head_dim}: .* multiple"):
        gpu_ops.alloc_kv_cache(2, 1, 16, head_dim)


def test_large_heads_in_16_bits_alone(gpu_ops):
    for head_dim in (272, 512):
        if gpu_ops.dtype.itemsize == 2:
            assert gpu_ops.alloc_kv_cache(2, 1, 16, head_dim)[0].shape == (2, 1, 16, head_dim)
            continue
        with pytest.raises(ValueError, match=rf"head_dim is {head_dim}: .* multiples of 16 up to 256 in torch.float32"):
            gpu_ops.alloc_kv_cache(2, 1, 16, head_dim)


def test_caches_of_another_maker(gpu_ops):
    """The operation refuses caches of an unsupported shape, which another implementation may have allocated."""
    wide = torch.zeros(2, 1, 16, 640, dtype=gpu_ops.dtype)
    q, one = torch.zeros(1, 1, 640, dtype=gpu_ops.dtype), torch.tensor([1], dtype=torch.int32)
    where = torch.zeros(1, 1, dtype=torch.int32), one, torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(ValueError, match="head_dim is 640"):
        gpu_ops.paged_attention(q, wide, wide, *where, 0.1)


@pytest.mark.parametrize(("head_dim", "most"), [(256, 64), (512, 16)])
def test_groups_of_heads(gpu_ops, head_dim, most):
    if gpu_ops.dtype.itemsize == 4:
        head_dim, most = 256, 32
    caches = gpu_ops.alloc_kv_cache(2, 1, 16, head_dim)
    q, one = torch.zeros(1, most + 1, head_dim, dtype=gpu_ops.dtype), torch.tensor([1], dtype=torch.int32)
    where = torch.zeros(1, 1, dtype=torch.int32), one, torch.tensor([0, 1], dtype=torch.int32)
    message = rf"{most + 1} heads over 1 key-value heads .* support {most} of head_dim {head_dim}"
    with pytest.raises(ValueError, match=message):
        gpu_ops.paged_attention(q, *caches, *where, 0.1)


def test_a_stack_whose_cache_has_another_type(gpu_ops):
    made, final_norm, caches, cos_sin = stack_arguments(gpu_ops, [0])
    other = [tuple(cache.double() for cache in pair) for pair in caches]
    with pytest.raises(TypeError, match=f"k_cache is torch.float64, not {gpu_ops.dtype}"):
        gpu_ops.stack_layers(made, final_norm, other, cos_sin, 6, 2, 1e-5, 0.2)
