"""Which shapes and weights the kernels compute, with which tiles, and what stands in for them."""

import itertools
import sys
from dataclasses import fields

import pytest
import torch

from quire import kernels
from quire.kernels.gpu import start
from quire.kernels.gpu.kernel_table import KernelTable
from quire.kernels.gpu.stack import TritonCaches
from quire.kernels.gpu.supported import Unsupported
from quire.kernels.gpu.tile_sizes import (
    MIN_ROWS,
    AttentionTiles,
    decode_tiles,
    invariant_tiles,
    power_of_2,
    prefill_tiles,
)
from quire.kernels.stack import Caches
from tests.support.kernels.implementations import HAS_TRITON, make_triton_ops
from tests.support.kernels.stacks import HEADS, HIDDEN, INNER, KV_HEADS, make_cache_stack, stack_arguments

# --- unsupported dtypes and shapes are refused with one line that names the value and the supported ones --------------

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
    monkeypatch.setattr(start.sysconfig, "get_path", lambda name: str(tmp_path))

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


# --- the table of tile sizes: every entry is one that the kernels can use ---------------------------------------------

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = [*itertools.product((16, 64, 80, 128, 256), (1, 4, 20, 64), DTYPES)]
SHAPES += [*itertools.product((272, 512), (1, 4, 16), (torch.bfloat16, torch.float16))]


def check(tiles: AttentionTiles) -> None:
    assert tiles.rows >= MIN_ROWS
    assert power_of_2(tiles.rows) == tiles.rows
    assert power_of_2(tiles.keys) == tiles.keys >= 16


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tiles_have_sizes_that_matrix_instructions_take(shape):
    for window, large_shared in itertools.product((0, 100), (False, True)):
        check(decode_tiles(*shape, large_shared))
        check(prefill_tiles(*shape, window, large_shared))
        for tiles in invariant_tiles(*shape, window, large_shared):
            check(tiles)


def shared_bytes(tiles: AttentionTiles, head_dim: int, dtype: torch.dtype) -> int:
    """Return the bytes of queries, and of the tiles of keys and values that are fetched ahead, without Hopper's wgmma.

    Ids of blocks and results of a few rows take up to 3 KB more (`tests/kernels/static/compiled_kernels.tsv`).
    """
    return (tiles.rows + 2 * (tiles.stages - 1) * tiles.keys) * power_of_2(head_dim) * dtype.itemsize


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tiles_fit_a_device_with_less_shared_memory(shape):
    head_dim, _, dtype = shape
    for window in (0, 100):
        for tiles in (
            decode_tiles(*shape, False),
            prefill_tiles(*shape, window, False),
            *invariant_tiles(*shape, window, False),
        ):
            assert shared_bytes(tiles, head_dim, dtype) <= 96 << 10, tiles


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_tile_of_prefill_has_room_for_a_group(shape):
    for large_shared in (False, True):
        assert prefill_tiles(*shape, 0, large_shared).rows >= shape[1]


# --- which kernels can be replaced, and by what -----------------------------------------------------------------------


def test_every_kernel_of_the_table_has_a_replacement(ops):
    from quire.kernels.gpu.kernel_table import ATTENTION, FEW_ROWS, GRAPH, REPLACEMENTS, KernelTable

    names = {field.name for field in fields(KernelTable)}
    assert names | {*ATTENTION, GRAPH, FEW_ROWS} == set(REPLACEMENTS)
    for name in names:
        function = getattr(KernelTable().with_torch(name), name)
        assert function.__module__ in (
            "quire.kernels.gpu.torch_kernels",
            "quire.kernels.reference",
            "quire.kernels.lora",
        )
        assert sum(getattr(KernelTable().with_torch(name), one) != getattr(KernelTable(), one) for one in names) == 1


def test_graphs_are_captured_unless_a_replacement_reads_values_on_the_host(ops):
    assert ops.can_capture
    for kernel in ("rms_norm", "sample", "fresh"):
        ops.replace_kernel(kernel)
    assert ops.can_capture
    assert ops.replaced == {"rms_norm", "sample", "fresh"}
    ops.replace_kernel("prefill")
    assert not ops.can_capture


def test_the_batch_invariant_mode_replaces_nothing(monkeypatch):
    ops = make_triton_ops(torch.float32, monkeypatch, batch_invariant=True)
    assert ops.replacement("rms_norm") == ""
    with pytest.raises(AssertionError, match="nothing can replace the kernel rms_norm"):
        ops.replace_kernel("rms_norm")


# --- argument checks of TritonOps: the use of packed weights, ids on request, and host memory -------------------------


def test_weights_of_another_kind_are_refused(ops):
    x, weight = torch.randn(3, 16), torch.randn(8, 16)
    with pytest.raises(ValueError, match="pack_gate_up"):
        ops.linear(x, ops.pack_gate_up(weight))
    with pytest.raises(ValueError, match="pack_gate_up"):
        ops.linear_silu_mul(x, ops.pack_linear(weight))
    with pytest.raises(ValueError, match="pack_gate_up"):
        ops.linear(x, kernels.ReferenceOps().pack_linear(weight))


def test_ids_are_checked_only_on_request(ops):
    logits, ids = torch.randn(2, 8), torch.tensor([0, 8])
    with pytest.raises(IndexError, match=r"ids\[1\] is 8"):
        ops.logprobs_of(logits, ids)
    ops.check_ids = False
    assert ops.logprobs_of(logits, ids)[1].isnan()


def test_host_blocks_have_the_dtype_of_the_cache(ops):
    stack, caches = make_cache_stack(ops, 2)
    host = ops.alloc_host_blocks(stack, 3)
    assert host.shape == (3, 2, 2, *caches[0][0].shape[1:])
    assert (host.dtype, host.device.type) == (ops.kv_dtype, "cpu")
    with pytest.raises(TypeError, match="host is"):
        ops.swap_out(stack, host.half(), torch.tensor([0], device="cpu"), torch.tensor([0], device="cpu"))


# --- a stack of Triton layers refuses weights and caches that its kernels cannot use ----------------------------------


def test_weights_that_were_packed_for_another_use_are_refused(ops):
    layers, final_norm, caches, cos_sin = stack_arguments(ops, [0])
    layers[0].gate_up = ops.pack_linear(torch.zeros(2 * INNER, HIDDEN))
    with pytest.raises(ValueError, match="gate_up was packed for another use"):
        ops.stack_layers(layers, final_norm, caches, cos_sin, HEADS, KV_HEADS, 1e-5, 0.2)


def test_caches_are_refused_that_no_kernel_reads():
    k, v = torch.zeros(2, 3, 1, 16, 320)
    with pytest.raises(Unsupported, match="head_dim is 320"):
        TritonCaches(Caches([(k, v)]), torch.float32, torch.float32, KernelTable())


def test_a_stack_moves_blocks_of_all_its_caches(ops):
    stack, caches = make_cache_stack(ops, 2)
    assert len(stack.mover.addresses) == 4
    assert stack.block_shape == (2, 2, *caches[0][0].shape[1:])
