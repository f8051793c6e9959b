"""The parameters of the attention calls of a model that Transformers computes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LatentRow:
    """The parts of a row of a latent cache: the latent vector, and the part of the keys that has positions."""

    rank: int
    positional: int

    @property
    def value_dim(self) -> int:
        """The width of the latent vector in the cache, a multiple of 16."""
        return -(-self.rank // 16) * 16

    @property
    def width(self) -> int:
        return self.value_dim + -(-self.positional // 16) * 16


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Parameters of one attention call. The n-th call of every step has these same parameters."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int  # at most head_dim
    scale: float
    sliding_window: int  # 0: none
    softcap: float = 0.0  # of the scores; 0: none
    # The earlier call that had the same keys and values, and whose cache this call reads (Gemma 4).
    shared_with: int | None = None
    chunk: int = 0  # a token sees the tokens of its chunk of this size only (`attention_chunks.py`); 0: of all
    has_sinks: bool = False
    latent: LatentRow | None = None  # the cache has such rows, and no keys and values (`latent_attention.py`)

    @property
    def cache_dim(self) -> int:
        """The width of a key in the cache: a multiple of 16, as kernels need it, padded with zeros."""
        return -(-self.head_dim // 16) * 16
