"""The decoder of the Llama-shaped families; a ModelConfig selects the variant of a checkpoint.

Weights are merged while they are loaded: q, k and v into one projection, gate and up into another. The layers between
embeddings and head are `kernels/layers.py`; a backend may run them as one call. With tensor parallelism several
processes hold a part of the model each (`sharding.py`) and run every batch together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, Self

import torch
import torch.nn.functional as F

import quire.kernels.ops
from quire.kernels.ops import Ops, PackedLinear
from quire.worker.models.batch import ForwardBatch
from quire.worker.models.config import EMBEDDING, FINAL_NORM, HEAD, ModelConfig, context_remedy, read_config
from quire.worker.models.errors import CheckpointError
from quire.worker.models.loader import Progress, Weights
from quire.worker.models.paged import KVCache, PagedModel
from quire.worker.models.rope import cos_sin_table
from quire.worker.models.sharding import Shard


@dataclass(slots=True)
class Layer:
    """The packed weights of one layer: a `quire.kernels.ops.DecoderLayer`."""

    input_norm: torch.Tensor  # [H]
    qkv: PackedLinear
    q_norm: torch.Tensor | None  # [D]
    k_norm: torch.Tensor | None
    sliding_window: int  # 0: none
    o: PackedLinear
    mlp_norm: torch.Tensor  # [H]
    gate_up: PackedLinear
    down: PackedLinear


class TensorParallelGroup(quire.kernels.ops.AllReduceGroup, Protocol):
    """The ranks that hold a part of the model each, seen from one of them."""

    def all_gather(self, columns: torch.Tensor, width: int) -> torch.Tensor:
        """columns [R, C] of each rank -> [R, width] side by side on rank 0; unspecified on all other ranks."""


class Decoder(PagedModel):
    """A loaded decoder, or the part of one rank."""

    implementation = "quire"
    config: ModelConfig  # of this rank's part

    def __init__(
        self,
        shard: Shard,
        ops: Ops,
        dtype: torch.dtype,
        embedding: torch.Tensor,
        layers: list[Layer],
        norm: torch.Tensor,
        head: PackedLinear,
        cos_sin: torch.Tensor,
        ranks: TensorParallelGroup | None = None,
    ) -> None:
        self.config = shard.local
        self._shard, self._ranks = shard, ranks
        self.dtype = dtype
        self.ops = ops
        self.max_model_len = len(cos_sin)
        self._embedding = embedding  # [V, H]
        self._layers = layers
        self._norm = norm  # [H]
        self._head = head
        self._cos_sin = cos_sin  # float32 [max_model_len, D]

    @classmethod
    def load(
        cls,
        path: Path,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device | str,
        max_model_len: int = 0,
        progress: Progress | None = None,
        ranks: TensorParallelGroup | None = None,
    ) -> Self:
        """Load a Hugging Face checkpoint for contexts of up to `max_model_len` tokens; 0 is the model's own maximum.

        dtype: type of weights and activations, the same as that of `ops`.
        progress: called with the number of bytes read so far, and the number of all bytes.
        ranks: load only the part of this rank.
        Raises CheckpointError, one line, for a checkpoint that is not supported or incomplete, and for a context that
        is longer than the positions of the checkpoint. Raises NotDivisible.
        """
        config = read_config(path)
        limit = config.max_position_embeddings
        max_model_len = max_model_len or limit
        if not 0 < max_model_len <= limit:
            what = f"--max-model-len is {max_model_len}, but max_position_embeddings is {limit}"
            raise CheckpointError(path, what, context_remedy(path, limit, max_model_len))
        weights = Weights(path, progress)
        embedding, head = _tied_names(config, weights)
        expected = config.tensor_shapes() | dict.fromkeys((embedding, head), (config.vocab_size, config.hidden_size))
        weights.check(expected, ignored=(EMBEDDING, HEAD))

        shard = Shard(config, ranks.rank, ranks.size) if ranks else Shard(config)
        read = partial(weights.read, dtype=dtype, device=device)

        def read_part(name: str) -> torch.Tensor:
            tensor = read(name, part=shard.part(name))
            return tensor if shard.owns_bias(name) else tensor.zero_()

        table = read(embedding)
        return cls(
            shard,
            ops,
            dtype,
            embedding=table,
            # A layer's tensors are packed and dropped before those of the next are read.
            layers=[
                load_layer(shard.local, ops, read_part, index, max_model_len) for index in range(config.num_layers)
            ],
            norm=read(FINAL_NORM),
            head=ops.pack_linear(table[shard.vocabulary] if head == embedding else read_part(head)),
            cos_sin=cos_sin_table(config.rope, config.head_dim, max_model_len).to(device),
            ranks=ranks,
        )

    def tables(self) -> Iterable[torch.Tensor]:
        return (self._cos_sin,)

    @property
    def weight_bytes(self) -> int:
        packed = [self._head, *(linear for at in self._layers for linear in (at.qkv, at.o, at.gate_up, at.down))]
        norms = [
            self._norm,
            *(norm for at in self._layers for norm in (at.input_norm, at.mlp_norm, at.q_norm, at.k_norm)),
        ]
        return (
            self._embedding.nbytes
            + sum(linear.nbytes for linear in packed)
            + sum(norm.nbytes for norm in norms if norm is not None)
        )

    def alloc_kv_cache(self, num_blocks: int, block_size: int, num_host_blocks: int = 0) -> KVCache:
        config = self.config
        shape = (num_blocks, config.num_kv_heads, block_size, config.head_dim)
        caches = [self.ops.alloc_kv_cache(*shape) for _ in self._layers]
        stack = self.ops.stack_layers(
            self._layers,
            self._norm,
            caches,
            self._cos_sin,
            config.num_heads,
            config.num_kv_heads,
            config.rms_norm_eps,
            config.head_dim**-0.5,
            self._ranks,
        )
        host = self.ops.alloc_host_blocks(stack, num_host_blocks) if num_host_blocks else None
        return KVCache(caches, stack, self.ops, host)

    def kv_bytes_per_block(self, block_size: int) -> int:
        elements = 2 * len(self._layers) * self.config.kv_size * block_size
        return elements * self.ops.kv_dtype.itemsize

    def forward(self, batch: ForwardBatch, kv_cache: KVCache) -> torch.Tensor:
        """All ranks are called with the same batch; rank 0 returns the logits."""
        residual = self.ops.embed(batch.token_ids, self._embedding)  # [T, H]
        hidden = self.ops.decoder_layers(
            residual,
            kv_cache.stack,
            batch.positions,
            batch.slot_mapping,
            batch.block_tables,
            batch.seq_lens,
            batch.query_start_loc,
            batch.logits_rows,
        )  # [R, H]
        if len(hidden) == 0:
            return torch.empty((0, self.vocab_size), dtype=torch.float32, device=hidden.device)
        logits = self.ops.linear_logits(hidden, self._head)
        if self._ranks is None:
            return logits
        missing = self._shard.vocab_width - logits.shape[1]
        return self._ranks.all_gather(F.pad(logits, (0, missing)) if missing else logits, self.vocab_size)


def load_layer(
    config: ModelConfig, ops: Ops, read: Callable[[str], torch.Tensor], index: int, max_model_len: int
) -> Layer:
    """Load a layer. `read` returns a tensor by its name in the checkpoint."""
    prefix = f"model.layers.{index}"

    def merged(block: str, *names: str, has_bias: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        parts = [f"{prefix}.{block}.{name}_proj" for name in names]
        weight = _cat([read(f"{part}.weight") for part in parts])
        return weight, _cat([read(f"{part}.bias") for part in parts]) if has_bias else None

    window = config.sliding_windows[index]
    return Layer(
        input_norm=read(f"{prefix}.input_layernorm.weight"),
        qkv=ops.pack_linear(*merged("self_attn", "q", "k", "v", has_bias=config.qkv_bias)),
        q_norm=read(f"{prefix}.self_attn.q_norm.weight") if config.qk_norm else None,
        k_norm=read(f"{prefix}.self_attn.k_norm.weight") if config.qk_norm else None,
        sliding_window=window if window < max_model_len else 0,
        o=ops.pack_linear(*merged("self_attn", "o", has_bias=config.o_bias)),
        mlp_norm=read(f"{prefix}.post_attention_layernorm.weight"),
        gate_up=ops.pack_gate_up(*merged("mlp", "gate", "up", has_bias=config.mlp_bias)),
        down=ops.pack_linear(*merged("mlp", "down", has_bias=config.mlp_bias)),
    )


def _cat(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _tied_names(config: ModelConfig, weights: Weights) -> tuple[str, str]:
    """The names of the tensors of embedding and head: the same tensor if the model ties them.

    Tied weights may be stored under either name, and tensors that differ are not tied, as in Transformers.
    """
    if not config.tie_word_embeddings:
        return EMBEDDING, HEAD
    if HEAD not in weights:
        return EMBEDDING, EMBEDDING
    if EMBEDDING not in weights:
        return HEAD, HEAD
    return EMBEDDING, EMBEDDING if weights.equal(EMBEDDING, HEAD) else HEAD
