"""The decoder of the Llama-shaped families; a ModelConfig selects the variant of a checkpoint.

Weights are merged while they are loaded: q, k and v into one projection, gate and up into another. The layers between
embeddings and head are `kernels/layers.py`; a backend may run them as one call. With tensor parallelism several
processes hold a part of the model each (`sharding.py`) and run every batch together.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

import torch
import torch.nn.functional as F

import quire.kernels.ops
from quire.kernels import adapter_ends
from quire.kernels.ops import SILU, AdapterBatch, AddedRows, ExpertNorms, Ops, PackedLinear, PackedMoE, PerLayerInput
from quire.kernels.uses import AttentionUse, ExpertsUse, KernelUses, LinearUse
from quire.shared.process.errors import CheckpointError
from quire.worker.engine.forward_batch import ForwardBatch
from quire.worker.engine.paged_model import KVCache, PagedModel
from quire.worker.engine.sequence import Adapter
from quire.worker.models.files.formats import make_reader, open_weights
from quire.worker.models.files.kv_scales import PLAIN, KVFactors, projection_factors, read_kv_factors, scale_names
from quire.worker.models.files.loader import Progress, Weights
from quire.worker.models.files.lora.adapter import BaseFiles, load_adapter
from quire.worker.models.files.weight_reader import WeightReader
from quire.worker.models.native.config import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    SCORES,
    ModelConfig,
    context_remedy,
    read_config,
)
from quire.worker.models.native.expert_weights import load_expert_norms, load_experts
from quire.worker.models.native.gemma4_layers import PerLayerEmbeddings, computed_as, load_layer_input, scaled
from quire.worker.models.native.image_rope import MAX_TOKENS, ImageRope
from quire.worker.models.native.mixed_cache import KVShape, MixedKVCache, alloc_layers, bytes_per_block
from quire.worker.models.native.rope import cos_sin_table
from quire.worker.models.native.sharding import Shard

log = logging.getLogger(__name__)


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
    gate_up: PackedLinear | None
    down: PackedLinear | None
    moe: PackedMoE | None = None  # in place of gate_up and down
    gate: str = SILU
    post_attention_norm: torch.Tensor | None = None  # [H]
    post_mlp_norm: torch.Tensor | None = None
    sinks: torch.Tensor | None = None  # float32 [heads]
    cos_sin: torch.Tensor | None = None  # if the layers differ; shared by layers
    v_norm: torch.Tensor | None = None  # [D]
    shares_kv: bool = False  # qkv gives queries alone
    expert_norms: ExpertNorms | None = None  # of experts next to gate_up and down
    per_layer_input: PerLayerInput | None = None
    output_scale: float = 1.0
    uses_key_ends: bool = False

    @property
    def nbytes(self) -> int:
        parts = (self.input_norm, self.qkv, self.q_norm, self.k_norm, self.v_norm, self.o)
        mlp = (self.mlp_norm, self.gate_up, self.down, self.moe, self.post_attention_norm, self.post_mlp_norm)
        more = (self.expert_norms, self.per_layer_input)
        return sum(part.nbytes for part in (*parts, *mlp, *more) if part is not None)


class TensorParallelGroup(quire.kernels.ops.AllReduceGroup, Protocol):
    """The ranks that hold a part of the model each, seen from one of them."""

    def all_gather(self, columns: torch.Tensor, width: int) -> torch.Tensor:
        """Gather columns [R, C] of each rank -> [R, width] side by side on rank 0; unspecified on all other ranks."""


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
        layer_inputs: PerLayerEmbeddings | None = None,
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
        axes = shard.config.rope_axes
        self._image_rope = ImageRope(cos_sin, axes) if axes else None
        self.max_image_tokens = MAX_TOKENS if axes else 0
        self._cos_sin = self._image_rope.table if self._image_rope else cos_sin  # float32 [max_model_len, D]
        self._layer_inputs = layer_inputs
        self._computed_as = computed_as(shard.config).to(embedding.device) if shard.config.placeholders else None
        self.hidden_size = shard.local.hidden_size
        self._kv_factors: list[KVFactors] = []  # of each layer; empty: none has scales
        self._base: BaseFiles | None = None  # of adapters

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
        bits: int | str = 0,
    ) -> Self:
        """Load a Hugging Face checkpoint for contexts of up to `max_model_len` tokens; 0 is the model's own maximum.

        dtype: type of activations, the same as that of `ops`. Weights keep their stored type if `ops` has it.
        progress: called with the number of bytes read so far, and the number of all bytes.
        ranks: load only the part of this rank.
        bits: quantise the weights to integers of 8 or 4 bits, or to FP8; 0: not.
        Raises CheckpointError, one line, for a checkpoint that is not supported or incomplete, and for a context that
        is longer than the positions of the checkpoint. Raises NotDivisible.
        """
        config = read_config(path)
        local = None
        limit = config.max_position_embeddings
        max_model_len = max_model_len or limit
        if not 0 < max_model_len <= limit:
            what = f"--max-model-len is {max_model_len}, but max_position_embeddings is {limit}"
            raise CheckpointError(path, what, context_remedy(path, limit, max_model_len))
        weights = open_weights(path, config, ops.weight_dtypes, device, progress)
        embedding, head = _tied_names(config, weights)
        expected = config.tensor_shapes() | dict.fromkeys((embedding, head), (config.vocab_size, config.hidden_size))
        if config.num_labels:
            expected[SCORES] = (config.num_labels, config.hidden_size)
        scales = [name for layer in range(config.num_layers) for name in scale_names(layer)]
        of_tower = weights.outside_text() if config.is_wrapped else []  # `quire.worker.models.vision` names the unused
        ignored = (EMBEDDING, HEAD, *scales, *config.unused_tensors(), *of_tower)
        weights.check(expected, ignored)

        def open_again() -> Weights:
            again = open_weights(path, config, ops.weight_dtypes, device)
            again.check(expected, ignored)
            return again

        is_fp8 = ops.kv_dtype is torch.float8_e4m3fn  # only such a cache needs scales
        factors = read_kv_factors(weights, config.num_layers) if is_fp8 else [PLAIN] * config.num_layers
        if num_scaled := sum(factor != PLAIN for factor in factors):
            log.info("KV cache in FP8: %d of %d layers have scales in the checkpoint", num_scaled, config.num_layers)

        shard = Shard(config, ranks.rank, ranks.size) if ranks else Shard(config)
        reader = make_reader(weights, shard, ops, dtype, device, bits)
        if config.local_rope is not None:
            local = cos_sin_table(config.local_rope, config.head_dim, max_model_len).to(device)
        table = reader.embedding(embedding)
        decoder = cls(
            shard,
            ops,
            dtype,
            embedding=table,
            # A layer's tensors are packed and dropped before those of the next are read.
            layers=[
                load_layer(shard.local, reader, index, max_model_len, local, factors[config.kv_source(index)])
                for index in range(config.num_layers)
            ],
            norm=reader.norm(FINAL_NORM, config.norm_offset),
            head=reader.router(SCORES)
            if config.num_labels
            else reader.head(head, table if head == embedding else None),
            cos_sin=cos_sin_table(config.rope, config.full_head_dim or config.head_dim, max_model_len).to(device),
            ranks=ranks,
            layer_inputs=PerLayerEmbeddings.load(reader, config.rms_norm_eps) if config.input_width else None,
        )
        decoder._kv_factors = factors
        decoder._base = BaseFiles(path, open_again, embedding, head)
        reader.finish()
        return decoder

    @property
    def why_no_adapters(self) -> str:
        if self.config.experts is not None:
            return (
                f"LoRA adapters are not computed for layers with experts, which {self.config.architecture} has; merge "
                "the adapter into the model (merge_and_unload() of peft) and serve that folder"
            )
        if self.config.full_head_dim:
            return (
                f"LoRA adapters are not computed for layers of several shapes, which {self.config.architecture} has; "
                "merge the adapter into the model (merge_and_unload() of peft) and serve that folder"
            )
        if self.tower is not None and self.tower.is_deep:
            return (
                "LoRA adapters are not computed next to images that go to several layers, as those of "
                f"{self.config.architecture}; serve the model merged with the adapter (merge_and_unload() of peft)"
            )
        if self._ranks is not None:
            return "LoRA adapters are not served with --tensor-parallel-size above 1; set it to 1, or merge the adapter"
        return ""

    def load_adapter(self, name: str, folder: Path, max_rank: int) -> Adapter:
        return load_adapter(name, folder, self.config, self.ops, max_rank, self._kv_factors, self._base)

    def kernel_uses(self, block_size: int) -> KernelUses:
        config, layers = self.config, self._layers
        attention = (
            AttentionUse(
                config.num_heads,
                config.kv_heads_of(index),
                config.head_dim_of(index),
                config.attention_scale,
                layer.sliding_window,
                config.softcap,
                layer.sinks is not None,
                layer.q_norm is not None,
                layer.v_norm is not None,
                layer.uses_key_ends and self.tower is not None,
            )
            for index, layer in enumerate(layers)
        )
        packed = [
            linear
            for layer in layers
            for linear in (layer.qkv, layer.o, layer.gate_up, layer.down)
            if linear is not None
        ]
        ends = [layer.per_layer_input for layer in layers if layer.per_layer_input is not None]
        packed += [linear for end in ends for linear in (end.gate, end.projection)]
        packed += [self._layer_inputs.projection] if self._layer_inputs is not None else []
        experts = config.experts
        return KernelUses(
            self.hidden_size,
            self.vocab_size if self.config.num_labels else self._head.out_features,
            self.max_model_len,
            block_size,
            tuple(dict.fromkeys(attention)),
            tuple(dict.fromkeys(map(LinearUse.of, packed))),
            LinearUse.of(self._head),
            tuple(
                dict.fromkeys(
                    ExpertsUse.of(layer.moe, has_biases=experts.style.has_biases)
                    for layer in layers
                    if layer.moe is not None and experts is not None
                )
            ),
            self._embedding.dtype,
            has_adapters=not self.why_no_adapters,
            gate=layers[0].gate,
        )

    def tables(self) -> Iterable[torch.Tensor]:
        own = {id(layer.cos_sin): layer.cos_sin for layer in self._layers if layer.cos_sin is not None}
        return (self._cos_sin[: self.max_model_len], *own.values())

    @property
    def weight_bytes(self) -> int:
        whole = self._embedding.nbytes + self._head.nbytes + self._norm.nbytes
        whole += self._layer_inputs.nbytes if self._layer_inputs is not None else 0
        return whole + sum(layer.nbytes for layer in self._layers)

    def alloc_kv_cache(self, num_blocks: int, block_size: int, num_host_blocks: int = 0) -> KVCache:
        config = self.config
        cache = alloc_layers(
            self.ops, [shape for _, shape in self._own_caches], num_blocks, block_size, num_host_blocks
        )
        own = {layer: pair for (layer, _), pair in zip(self._own_caches, cache.layers, strict=True)}
        stack = self.ops.stack_layers(
            self._layers,
            self._norm,
            [own[config.kv_source(index)] for index in range(config.num_layers)],
            self._cos_sin,
            config.num_heads,
            config.kv_heads_of(0),
            config.rms_norm_eps,
            config.attention_scale,
            self._ranks,
            config.softcap,
        )
        parts = cache.parts if isinstance(cache, MixedKVCache) else (cache,)
        return MixedKVCache(cache.layers, stack, self.ops, cache.host, parts=parts)

    def kv_bytes_per_block(self, block_size: int) -> int:
        return bytes_per_block(self.ops, [shape for _, shape in self._own_caches], block_size)

    @property
    def _own_caches(self) -> list[tuple[int, KVShape]]:
        """The layers that write keys and values, each with the shape of these."""
        config = self.config
        layers = (layer for layer in range(config.num_layers) if config.kv_source(layer) == layer)
        return [(layer, KVShape(config.kv_heads_of(layer), config.head_dim_of(layer))) for layer in layers]

    def forward(self, batch: ForwardBatch, kv_cache: KVCache) -> torch.Tensor:
        """Compute a batch. All ranks are called with the same one; rank 0 returns the logits."""
        return self._logits(self._hidden(batch, kv_cache, batch.logits_rows), batch.adapters)

    def forward_pooled(self, batch: ForwardBatch, kv_cache: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute a batch, the same on all ranks. Each has all hidden states: the last layer adds up the parts."""
        assert batch.pooled_rows is not None
        hidden = self._hidden(batch, kv_cache, torch.cat([batch.logits_rows, batch.pooled_rows]))
        num_logits = len(batch.logits_rows)
        return self._logits(hidden[:num_logits], batch.adapters), hidden[num_logits:]

    def _hidden(self, batch: ForwardBatch, kv_cache: KVCache, rows: torch.Tensor) -> torch.Tensor:
        """Compute all layers, and return the hidden states of these tokens [R, H]."""
        token_ids = batch.token_ids if self._computed_as is None else self._computed_as[batch.token_ids]
        residual, positions = self.ops.embed(token_ids, self._embedding), batch.positions  # [T, H], [T]
        if batch.adapters is not None:
            adapter_ends.adapt_embeddings(self.ops, residual, token_ids, batch.adapters)
        if self.config.embedding_scale != 1.0:
            residual = scaled(residual, self.config.embedding_scale)
        added = key_ends = None
        if batch.embeddings is not None:
            own, *deep = torch.split(batch.embeddings.values, self.hidden_size, dim=1)
            residual.index_copy_(0, batch.embeddings.rows, own)
            added = AddedRows(batch.embeddings.rows, deep) if deep else None
            if batch.embeddings.key_ends is not None:
                key_ends = (positions + 1).index_copy_(0, batch.embeddings.rows, batch.embeddings.key_ends)
            if self._image_rope is not None:
                positions = self._image_rope.place(positions, batch.embeddings)
        inputs = None
        if self._layer_inputs is not None:
            inputs = self._layer_inputs.compute(self.ops, token_ids, residual)
        return self.ops.decoder_layers(
            residual,
            kv_cache.stack,
            positions,
            batch.slot_mapping,
            batch.block_tables,
            batch.seq_lens,
            batch.query_start_loc,
            rows,
            adapter_ends.of_layers(batch.adapters),
            batch.interrupt if self._ranks is None else None,
            inputs,
            added,
            key_ends,
        )

    def _logits(self, hidden: torch.Tensor, adapters: AdapterBatch | None = None) -> torch.Tensor:
        """Compute logits: hidden [R, H], of the first wanted tokens -> float32 [R, V] on rank 0."""
        if len(hidden) == 0:
            return torch.empty((0, self.vocab_size), dtype=torch.float32, device=hidden.device)
        logits = adapter_ends.logits_of(self.ops, hidden, self._head, adapters)
        if cap := self.config.final_softcap:
            logits = logits.div_(cap).tanh_().mul_(cap)
        if labels := self.config.num_labels:  # whole on all ranks; they stand for the first tokens of the vocabulary
            return F.pad(logits, (0, self.vocab_size - labels), value=-torch.inf)
        if self._ranks is None:
            return logits
        missing = self._shard.vocab_width - logits.shape[1]
        return self._ranks.all_gather(F.pad(logits, (0, missing)) if missing else logits, self.vocab_size)


def load_layer(
    config: ModelConfig,
    reader: WeightReader,
    index: int,
    max_model_len: int,
    local: torch.Tensor | None = None,
    factors: KVFactors = PLAIN,
) -> Layer:
    """Load a layer. local: the rotations of layers with a window, if they differ. factors: of its keys and values."""
    prefix = f"model.layers.{index}"

    def tensors(block: str, *names: str, has_bias: bool) -> tuple[list[str], list[str]]:
        parts = [f"{prefix}.{block}.{name}_proj" for name in names]
        return [f"{part}.weight" for part in parts], [f"{part}.bias" for part in parts] if has_bias else []

    def norm(name: str) -> torch.Tensor:
        return reader.norm(f"{prefix}.{name}.weight", config.norm_offset)

    window = config.sliding_windows[index]
    after_attention = norm("post_attention_layernorm")
    experts = config.experts if config.has_experts(index) else None
    has_mlp = experts is None or config.adds_experts
    shares_kv, d = config.kv_source(index) != index, config.head_dim_of(index)
    rows = zip(("q_proj", "k_proj", "v_proj"), (config.q_size(index), *[config.kv_size(index)] * 2), strict=True)
    return Layer(
        input_norm=norm("input_layernorm"),
        qkv=reader.linear(
            *tensors("self_attn", *config.qkv_names(index), has_bias=config.qkv_bias),
            projection_factors(
                factors._replace(v=1.0) if config.v_norm else factors,
                list(rows)[: len(config.qkv_names(index))],
                config.qk_norm,
            ),
        ),
        q_norm=norm("self_attn.q_norm") / factors.k if config.qk_norm else None,
        k_norm=norm("self_attn.k_norm") * factors.k if config.qk_norm and not shares_kv else None,
        v_norm=reader.ones(d) * factors.v if config.v_norm and not shares_kv else None,
        shares_kv=shares_kv,
        sliding_window=window if window < max_model_len else 0,
        o=reader.linear(
            *tensors("self_attn", "o", has_bias=config.o_bias),
            input_factor=factors.of_projection("o_proj", config.qk_norm),
        ),
        mlp_norm=norm("pre_feedforward_layernorm") if config.post_norms else after_attention,
        gate_up=reader.gate_up(*tensors("mlp", "gate", "up", has_bias=config.mlp_bias)) if has_mlp else None,
        down=reader.linear(*tensors("mlp", "down", has_bias=config.mlp_bias)) if has_mlp else None,
        moe=load_experts(experts, reader, prefix) if experts else None,
        gate=config.gate,
        post_attention_norm=after_attention if config.post_norms else None,
        post_mlp_norm=norm("post_feedforward_layernorm") if config.post_norms else None,
        sinks=reader.read(f"{prefix}.self_attn.sinks").float() if config.sinks else None,
        cos_sin=local if window else None,
        expert_norms=load_expert_norms(reader, prefix) if config.adds_experts else None,
        per_layer_input=load_layer_input(reader, prefix) if config.input_width else None,
        output_scale=reader.read(f"{prefix}.layer_scalar").item() if config.output_scales else 1.0,
        uses_key_ends=config.is_both_ways(index),
    )


def _tied_names(config: ModelConfig, weights: Weights) -> tuple[str, str]:
    """Return the names of the tensors of embedding and head: the same tensor if the model ties them.

    Tied weights may be stored under either name, and tensors that differ are not tied, as in Transformers.
    """
    if config.num_labels:
        return EMBEDDING, EMBEDDING
    if not config.tie_word_embeddings:
        return EMBEDDING, HEAD
    if HEAD not in weights:
        return EMBEDDING, EMBEDDING
    if EMBEDDING not in weights:
        return HEAD, HEAD
    return EMBEDDING, EMBEDDING if weights.equal(EMBEDDING, HEAD) else HEAD
