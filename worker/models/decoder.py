"""The decoder of the Llama family in one definition; a ModelConfig says which of its variations a checkpoint has.

Weights are merged while they are loaded: q, k and v into one projection, gate and up into another. What happens between
the embeddings and the head is `kernels.layers.run`; a backend may run it as one call. Several processes may have a part
of the model each (`sharding.py`): then all of them run every batch, together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, Self

import torch
import torch.nn.functional as F

import kernels.ops
from kernels.ops import LayerStack, Ops, PackedLinear
from worker.memory import available_memory
from worker.models.batch import ForwardBatch
from worker.models.config import ModelConfig, read_config
from worker.models.errors import CheckpointError
from worker.models.loader import Progress, Weights
from worker.models.rope import cos_sin_table
from worker.models.sharding import Shard

EMBEDDING, HEAD, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


@dataclass(frozen=True, slots=True)
class Layer:
    """One transformer block, ready to run: a `kernels.ops.DecoderLayer`."""

    input_norm: torch.Tensor  # [H]
    qkv: PackedLinear
    q_norm: torch.Tensor | None  # [D]
    k_norm: torch.Tensor | None
    sliding_window: int  # 0: none
    o: PackedLinear
    mlp_norm: torch.Tensor  # [H]
    gate_up: PackedLinear
    down: PackedLinear


@dataclass(frozen=True, slots=True)
class KVCache:
    """The paged cache of all layers, and host memory for blocks that are swapped out.

    Block b is index b of dimension 0 in every layer, host block b that of `host`; each move is one call for all layers.
    """

    # Per layer k and v: [num_blocks, num_kv_heads, block_size, head_dim]; the order inside a block is the kernels' own.
    layers: list[tuple[torch.Tensor, torch.Tensor]]
    stack: LayerStack
    ops: Ops
    host: torch.Tensor | None  # of ops.alloc_host_blocks

    def copy_blocks(self, src: list[int], dst: list[int]) -> None:
        """Block dst[i] becomes a copy of block src[i]; no block may occur twice in dst, or in both."""
        self.ops.copy_blocks(self.stack, *self._ids(src, dst))

    def swap_out(self, src: list[int], dst: list[int]) -> None:
        """Host block dst[i] becomes a copy of block src[i]."""
        assert self.host is not None, "the cache has no host blocks"
        self.ops.swap_out(self.stack, self.host, *self._ids(src, dst))

    def swap_in(self, src: list[int], dst: list[int]) -> None:
        """Block dst[i] becomes a copy of host block src[i]."""
        assert self.host is not None, "the cache has no host blocks"
        self.ops.swap_in(self.stack, self.host, *self._ids(src, dst))

    @staticmethod
    def _ids(*lists: list[int]) -> list[torch.Tensor]:
        return [torch.tensor(ids, dtype=torch.int64) for ids in lists]


class Ranks(kernels.ops.Ranks, Protocol):
    """The processes that have a part of the model each, seen from one of them."""

    def collect(self, columns: torch.Tensor, width: int) -> torch.Tensor:
        """columns [R, C] of each rank, C the same on all -> [R, width] on rank 0, side by side; elsewhere anything."""


class Decoder:
    """A loaded model, or a part of one. It holds no state of sequences: the caches and their layout belong to the
    caller."""

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
        ranks: Ranks | None = None,
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
        ranks: Ranks | None = None,
    ) -> Self:
        """Load a Hugging Face checkpoint for contexts of up to `max_model_len` tokens; 0 is the model's own maximum.

        `dtype` is that of weights, activations and cache, and the one that `ops` was made for. `progress` is called
        with the bytes read so far and in all. `ranks`: load the part of this one. Raises CheckpointError, one line, for
        a checkpoint that is not supported or not complete, and for a context that is longer than its positions;
        NotDivisible.
        """
        config = read_config(path)
        limit = config.max_position_embeddings
        max_model_len = max_model_len or limit
        if not 0 < max_model_len <= limit:
            what = f"contexts of {max_model_len} tokens are asked for, but max_position_embeddings is {limit}"
            raise CheckpointError(path, what, f"give --max-model-len from 1 to {limit}, or 0 for {limit}")
        weights = Weights(path, progress)
        embedding, head = _tied_names(config, weights)
        expected = tensor_shapes(config) | dict.fromkeys((embedding, head), (config.vocab_size, config.hidden_size))
        weights.check(expected, ignored=(EMBEDDING, HEAD))

        shard = Shard(config, ranks.rank, ranks.size) if ranks else Shard(config)
        read = partial(weights.read, dtype=dtype, device=device)

        def read_part(name: str) -> torch.Tensor:
            tensor = read(name, part=shard.part(name))
            return tensor if shard.counts(name) else tensor.zero_()

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

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def weight_bytes(self) -> int:
        """Memory of the packed weights and of the table of embeddings."""
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
        """Zeroed caches of all layers, and room for `num_host_blocks` in host memory (`Ops.alloc_host_blocks`)."""
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
        """Memory of a block's keys and values, over all layers."""
        elements = 2 * len(self._layers) * self.config.kv_size * block_size
        return elements * getattr(self.ops, "kv_dtype", self.dtype).itemsize

    def forward(self, batch: ForwardBatch, kv_cache: KVCache) -> torch.Tensor:
        """Run the tokens of a step, write their keys and values into the cache, and return logits: float32 [R, V].

        Of several ranks all are called with the same batch, and only the first has the logits.

        Every block up to the end of each sequence's context must be its own or shared read-only. IndexError if an id, a
        position or a slot is outside its table.
        """
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
        return self._ranks.collect(F.pad(logits, (0, missing)) if missing else logits, self.vocab_size)

    def least_free_memory(self) -> int:
        """Bytes that its device has free, also for torch alone; of several ranks, that of the one which has least."""
        device = self.ops.device
        if device.type != "cuda":
            return available_memory()
        torch.cuda.empty_cache()
        free: int = torch.cuda.mem_get_info(device)[0]
        # What torch has set aside is its own, and of that the cache may have what is not in use.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)

    def check(self) -> None:
        """Raise if no later step can succeed (`worker.ranks.leader`)."""

    def close(self) -> None:
        """End what belongs to the model."""


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of a checkpoint but for embedding and head, as Transformers names and shapes them."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    shapes: dict[str, tuple[int, ...]] = {FINAL_NORM: (hidden,)}
    for index in range(config.num_layers):
        layer = f"model.layers.{index}"
        projections = {
            "self_attn.q_proj": (config.q_size, hidden, config.qkv_bias),
            "self_attn.k_proj": (config.kv_size, hidden, config.qkv_bias),
            "self_attn.v_proj": (config.kv_size, hidden, config.qkv_bias),
            "self_attn.o_proj": (hidden, config.q_size, config.o_bias),
            "mlp.gate_proj": (inner, hidden, config.mlp_bias),
            "mlp.up_proj": (inner, hidden, config.mlp_bias),
            "mlp.down_proj": (hidden, inner, config.mlp_bias),
        }
        for name, (rows, columns, has_bias) in projections.items():
            shapes[f"{layer}.{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{layer}.{name}.bias"] = (rows,)
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        if config.qk_norm:
            shapes[f"{layer}.self_attn.q_norm.weight"] = (head,)
            shapes[f"{layer}.self_attn.k_norm.weight"] = (head,)
    return shapes


def least_weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Memory of the weights before any is loaded; a backend that packs them may take more (`Decoder.weight_bytes`)."""
    tables = (1 if config.tie_word_embeddings else 2) * config.vocab_size * config.hidden_size
    return (tables + sum(math.prod(shape) for shape in tensor_shapes(config).values())) * dtype.itemsize


def load_layer(
    config: ModelConfig, ops: Ops, read: Callable[[str], torch.Tensor], index: int, max_model_len: int
) -> Layer:
    """One layer; `read` gives a tensor by its name in the checkpoint."""
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
    """The tensors of the embedding and of the head: one and the same where the model ties them.

    As in Transformers, tied weights may be stored under either name, and two that differ are not tied after all.
    """
    if not config.tie_word_embeddings:
        return EMBEDDING, HEAD
    if HEAD not in weights:
        return EMBEDDING, EMBEDDING
    if EMBEDDING not in weights:
        return HEAD, HEAD
    return EMBEDDING, EMBEDDING if weights.equal(EMBEDDING, HEAD) else HEAD
