"""The part of a model that each rank of a tensor-parallel worker holds (Megatron-LM; PagedAttention, section 4.6).

Attention is split by heads, the MLP by inner features. A rank computes q, k, v, gate and up of its part from the whole
hidden state; the results of `o` and `down` are all-reduced, twice per layer. Every expert is split as an MLP is, and
all ranks choose the same experts. Each rank holds the keys and values of its heads. The head of the model is split by
tokens of the vocabulary. Norms, routers and embeddings are replicated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.worker.models.native.config import ModelConfig

ALL = slice(None)
# Projections that are split by rows of the weight, and by columns; results of the latter are all-reduced.
BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "w1", "w3")
BY_COLUMNS = ("o_proj", "down_proj", "w2")


class NotDivisible(ValueError):
    """The model cannot be split over this number of ranks. The message says why, and which numbers are possible."""


def can_share(config: ModelConfig, size: int) -> bool:
    """Return whether a model can be split into `size` equal parts, each with a part of the vocabulary."""
    return (
        config.num_heads % size == 0
        and all(heads % size == 0 or size % heads == 0 for heads in _kv_heads(config))
        and all(inner % size == 0 for inner in _inner_features(config))
        and (size - 1) * -(-config.vocab_size // size) < config.vocab_size
    )


def _kv_heads(config: ModelConfig) -> list[int]:
    """Return the key-value heads of the model's layers: one number for each kind of layers."""
    return sorted({config.kv_heads_of(layer) for layer in range(config.num_layers)})


def _inner_features(config: ModelConfig) -> list[int]:
    """Return the inner features of an MLP and of an expert, of those that the model has."""
    mlp = [config.intermediate_size] if config.has_mlps else []
    return mlp + ([config.experts.intermediate_size] if config.experts else [])


@dataclass(frozen=True)
class Shard:
    """Part `rank` of `size` of a model. Raises NotDivisible."""

    config: ModelConfig  # of the whole model
    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        config = self.config
        if not can_share(config, self.size):
            possible = [str(size) for size in range(1, config.num_heads + 1) if can_share(config, size)]
            inner = " and ".join(map(str, _inner_features(config)))
            kv_heads = " and ".join(map(str, _kv_heads(config)))
            raise NotDivisible(
                f"{self.size} ranks cannot share {config.num_heads} heads, {kv_heads} key-value heads, "
                f"{inner} inner features and {config.vocab_size} tokens; {', '.join(possible)} can"
            )

    @property
    def local(self) -> ModelConfig:
        """The configuration of this part. If there are more ranks than key-value heads, several ranks share a head."""
        config, size = self.config, self.size
        return replace(
            config,
            num_heads=config.num_heads // size,
            num_kv_heads=max(1, config.num_kv_heads // size),
            full_kv_heads=max(1, config.full_kv_heads // size) if config.full_kv_heads else 0,
            intermediate_size=config.intermediate_size // size,
            experts=config.experts.split(size) if config.experts else None,
        )

    @property
    def vocab_width(self) -> int:
        """Number of tokens whose logits a rank computes; the last rank may compute fewer."""
        return -(-self.config.vocab_size // self.size)

    @property
    def vocabulary(self) -> slice:
        """The tokens whose logits this rank computes."""
        first = self.rank * self.vocab_width
        return slice(first, min(first + self.vocab_width, self.config.vocab_size))

    def part(self, name: str) -> tuple[slice, ...]:
        """Return the part of a checkpoint's tensor that this rank holds: a slice per dimension; empty for the whole."""
        *_, projection, kind = name.split(".")
        if self.size == 1:
            return ()
        if kind == "sinks":
            return (slice(self.rank * self.local.num_heads, (self.rank + 1) * self.local.num_heads),)
        if projection == "lm_head":
            return self.vocabulary, ALL
        if projection in BY_ROWS:
            return (self._span(name), ALL)[: 2 if kind == "weight" else 1]
        if projection in BY_COLUMNS and kind == "weight":
            return ALL, self._span(name)
        return ()

    def owns_bias(self, name: str) -> bool:
        """Return False for a bias that another rank adds: of products that are all-reduced, rank 0 adds the bias."""
        return self.rank == 0 or not name.endswith(tuple(f"{projection}.bias" for projection in BY_COLUMNS))

    def _span(self, name: str) -> slice:
        local, projection, layer = self.local, name.split(".")[-2], int(name.split(".")[2])
        if projection in ("k_proj", "v_proj"):
            first = self.rank * self.config.kv_heads_of(layer) // self.size * local.head_dim_of(layer)
            return slice(first, first + local.kv_size(layer))
        width = local.inner_of(layer)
        if projection in ("q_proj", "o_proj"):
            width = local.q_size(layer)
        elif local.experts is not None and ".experts." in name:
            width = local.experts.intermediate_size
        return slice(self.rank * width, (self.rank + 1) * width)
