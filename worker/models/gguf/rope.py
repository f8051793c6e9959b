"""The divisors of RoPE frequencies that a GGUF file stores as a tensor, as for Llama 3.1."""

from __future__ import annotations

from dataclasses import replace

from quire.shared.errors import CheckpointError
from quire.shared.gguf.config import ROPE_FACTORS, rope_factors
from quire.shared.gguf.errors import AGAIN, GGUFError
from quire.shared.gguf.file import GGUFFile
from quire.worker.models.rope import RopeConfig


def with_divisors(rope: RopeConfig, file: GGUFFile, head_dim: int) -> RopeConfig:
    """Return the parameters with the divisors of a file, if it has some. Raises CheckpointError."""
    try:
        divisors = rope_factors(file)
    except GGUFError as error:
        raise CheckpointError(error.where, error.what, error.remedy) from error
    if divisors and len(divisors) != head_dim // 2:
        what = f"tensor {ROPE_FACTORS} has {len(divisors)} numbers, expected {head_dim // 2}, half of head_dim"
        raise CheckpointError(file.path, what, AGAIN)
    return replace(rope, divisors=divisors)
