"""Cases of kernels that compute each token by itself: embedding, norms, and rotation with the write to the cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels import kv_values
from quire.kernels.ops import Ops
from quire.kernels.reference import ReferenceOps
from quire.kernels.self_test.cases import KernelCase
from quire.kernels.self_test.inputs import CaseInputs
from quire.kernels.uses import AttentionUse

# In units of the type of activations. A key next to the middle of two numbers of a narrow cache may become either.
NORM, ROTATION = 3, 3
CACHE_UNITS = {torch.float8_e4m3fn: 2.0**-3, torch.int8: 2.0**-5}
EPS = 1e-5
TOKENS = 19


def row_cases(
    inputs: CaseInputs, hidden: int, embedding_dtype: torch.dtype | None, has_norms: bool
) -> Iterator[KernelCase]:
    """Yield the cases of embedding and norms.

    embedding_dtype: of the table; None for a model whose table the kernels do not read. has_norms: RMS norms are used.
    """
    ops, generator = inputs.ops, inputs.generator(hidden)
    shape = f"{hidden} features, {inputs.types}"
    if embedding_dtype is not None:
        table = inputs.normal(50, hidden, generator=generator, dtype=embedding_dtype)
        ids = inputs.integers([0, 49, 7, 7, 31])
        yield KernelCase(
            "embedding",
            "embed",
            shape,
            lambda: [ops.embed(ids, table)],
            lambda: [F.embedding(ids, table).float()],
            inputs.unit,
        )
    if not has_norms:
        return
    x, residual = (inputs.normal(TOKENS, hidden, generator=generator) for _ in range(2))
    weight = inputs.normal(hidden, generator=generator)

    def add_and_normalise() -> Sequence[Tensor]:
        total = residual.clone()
        return [ops.rms_norm(x, weight, EPS), ops.add_rms_norm(x, total, weight, EPS), total]

    def exact() -> Sequence[Tensor]:
        total = (residual + x).float()
        return [_rms_norm(x.float(), weight), _rms_norm(total, weight), total]

    yield KernelCase("norm", "rms_norm", shape, add_and_normalise, exact, NORM * inputs.unit)


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight.float()


def rotation_cases(inputs: CaseInputs, uses: Iterable[AttentionUse], block_size: int) -> Iterator[KernelCase]:
    """Yield cases of the rotation and of the write to the cache for each number and width of heads."""
    alike = (replace(use, scale=1.0, window=0, softcap=0.0, has_sinks=False) for use in uses)
    for use in dict.fromkeys(alike):
        yield from _of_rotation(inputs, use, block_size)


def _of_rotation(inputs: CaseInputs, use: AttentionUse, block_size: int) -> Iterator[KernelCase]:
    ops, generator, d = inputs.ops, inputs.generator(use.head_dim), use.head_dim
    heads = use.heads, use.kv_heads
    qkv = inputs.normal(TOKENS, (use.heads + 2 * use.kv_heads) * d, generator=generator)
    has_norms = use.has_norms, use.has_norms, use.has_v_norm
    norms = [inputs.normal(d, generator=generator) if has_norm else None for has_norm in has_norms]
    positions = torch.arange(TOKENS, dtype=torch.int32, device=ops.device) * 5
    cos_sin = inputs.angles(5 * TOKENS, d // 2, generator)
    num_blocks = -(-TOKENS // block_size) + 1
    # Two tokens are not kept.
    slots = inputs.integers([-1, -1, *range(block_size, block_size + TOKENS - 2)], torch.int64)

    reference = ReferenceOps(ops.device, torch.float32)

    def call(backend: Ops) -> list[Tensor]:
        values = qkv.to(backend.dtype)
        q_norm, k_norm, v_norm = (None if norm is None else norm.to(backend.dtype) for norm in norms)
        caches = backend.alloc_kv_cache(num_blocks, use.kv_heads, block_size, d)
        q = backend.rope_and_cache(values, positions, cos_sin, slots, *caches, *heads, q_norm, k_norm, EPS, v_norm)
        return [q, *backend.plain_kv_cache(*caches)]

    def stored_exactly() -> Sequence[Tensor]:
        rounded = (kv_values.encode(cache.to(ops.dtype), ops.kv_dtype) for cache in call(reference)[1:])
        return [kv_values.decode(cache, torch.float32) for cache in rounded]

    shape = f"{use}, blocks of {block_size}, {inputs.types}"
    yield KernelCase(
        "rotation",
        "rope_and_cache",
        shape,
        lambda: call(ops)[:1],
        lambda: call(reference)[:1],
        ROTATION * inputs.unit,
    )
    yield KernelCase(
        "cache write",
        "rope_and_cache",
        shape,
        lambda: [kv_values.decode(cache, torch.float32) for cache in call(ops)[1:]],
        stored_exactly,
        max(ROTATION * inputs.unit, CACHE_UNITS.get(ops.kv_dtype, 0.0)),
    )
