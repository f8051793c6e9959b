"""The dtypes and shapes that the Triton kernels support. Anything else is refused with one line."""

import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP8 = torch.float8_e4m3fn
BLOCK_SIZES = (8, 16, 32, 64, 128)
WIDE_HEAD_DIM = 256  # larger heads have tiles of their own, and no float32
MAX_HEAD_DIM = 512  # any multiple of 16


class Unsupported(ValueError):
    """The Triton kernels do not support this shape."""


def check_dtypes(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """Raise TypeError unless the kernels compute in `dtype` with a cache of `kv_dtype`."""
    if dtype not in DTYPES:
        raise TypeError(f"the Triton kernels compute in bfloat16, float16 and float32, not in {dtype}")
    if kv_dtype not in (dtype, FP8):
        raise TypeError(f"the cache is asked for as {kv_dtype}: the Triton kernels keep it as {dtype} or {FP8}")


def max_head_dim(dtype: torch.dtype) -> int:
    """Return the largest head dimension of attention that computes in `dtype`.

    Queries of 512 values in float32 would take more registers and shared memory than there are.
    """
    return MAX_HEAD_DIM if dtype.itemsize == 2 else WIDE_HEAD_DIM


def check_cache_shape(block_size: int, head_dim: int, dtype: torch.dtype) -> None:
    """Raise Unsupported unless the kernels support caches of this block size and head dimension.

    dtype: of the activations.
    """
    if block_size not in BLOCK_SIZES:
        raise Unsupported(f"block_size is {block_size}: the Triton kernels support 8, 16, 32, 64 and 128")
    most = max_head_dim(dtype)
    if head_dim % 16 or not 16 <= head_dim <= most:
        raise Unsupported(f"head_dim is {head_dim}: the Triton kernels support multiples of 16 up to {most} in {dtype}")


def check_group(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    """Raise Unsupported if a group has too many query heads for one tile of prefill.

    Shared memory bounds the rows of a tile; in float32 with head_dim over 128, a defect of ptxas does; with head_dim
    over 256, registers do in the batch-invariant mode (`tile_sizes`).
    """
    most = (128 if dtype.itemsize == 2 else 64) // (1 if head_dim <= 128 else 2 if head_dim <= WIDE_HEAD_DIM else 8)
    if heads > most * kv_heads:
        raise Unsupported(
            f"{heads} heads over {kv_heads} key-value heads are {-(-heads // kv_heads)} in a group: the Triton kernels "
            f"support {most} of head_dim {head_dim} in {dtype}"
        )
