"""Models that Transformers computes, with paged attention and linear layers of Quire's kernels.

Linear layers are most of the work, and on a CPU their rows do not depend on the batch. On a CPU the kernels also
compute the norms, rotary embeddings, gated MLPs and experts that `fused` recognises. Transformers computes all other
operations, one at a time. There is no list of suitable models: each is examined when it is loaded, and a short text
must give the same logits with paged attention, in chunks and next to another text, as it gives alone with the
attention of Transformers. This module is the only one of the bridge that other rooms import.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Self

import torch
from torch import nn

from quire.kernels import CpuOps, triton_failure
from quire.kernels.ops import Ops
from quire.kernels.uses import AttentionUse, KernelUses, LinearUse
from quire.shared.process.errors import CheckpointError, NotSupported
from quire.worker.engine.forward_batch import ForwardBatch
from quire.worker.engine.paged_model import EmptyKVCache, KVCache, PagedModel
from quire.worker.models.files.free_memory import FreeMemory
from quire.worker.models.files.loader import Progress
from quire.worker.models.files.mapped_files import MappedFiles
from quire.worker.models.native.config import context_remedy
from quire.worker.models.native.mixed_cache import KVShape, LatentShape, LayerShape, alloc_layers, bytes_per_block
from quire.worker.models.transformers import attention, trial
from quire.worker.models.transformers.attention import PagedAttention, UnsupportedAttention
from quire.worker.models.transformers.classifiers import as_vocabulary
from quire.worker.models.transformers.config import KINDS, TransformersConfig, read_transformers_config
from quire.worker.models.transformers.examine import FAR, apart, examine
from quire.worker.models.transformers.fused import FusedModules, fuse, packed_bytes
from quire.worker.models.transformers.fused_experts import is_stacked
from quire.worker.models.transformers.fused_norm import NormInputs
from quire.worker.models.transformers.fused_rotary import RotationTables
from quire.worker.models.transformers.hidden import HiddenStates, body_of
from quire.worker.models.transformers.latent_attention import LatentLayer, find_latent_layers
from quire.worker.models.transformers.layer_weights import LayerWeights
from quire.worker.models.transformers.linear import LinearUses, linear_layers, pack
from quire.worker.models.transformers.parts import GatheringGroup, Parts
from quire.worker.models.transformers.quantized import RoundedWeights, layer_weights
from quire.worker.models.transformers.query_scales import take_query_scales
from quire.worker.models.transformers.rope_lengths import keep_frequencies
from quire.worker.models.transformers.shapes import AttentionShape
from quire.worker.models.transformers.sparse_attention import TAKES_INDICES, leave_out_indexers
from quire.worker.models.transformers.split import ONE_PROCESS, CannotSplit, move_part, split
from quire.worker.models.transformers.split_attention import SplitAttention, SplitRotations
from quire.worker.models.transformers.state_pool import StatePool
from quire.worker.models.transformers.states import RecurrentStates, StateStep, running, wrap
from quire.worker.models.transformers.text import drop_unused, positions_of, replaced_embeddings
from quire.worker.models.transformers.weights import copy_weights, load_weights, mapped_weights, nbytes_of
from quire.worker.models.transformers.written_attention import has_alibi, prepare

__all__ = ["StatePool", "TransformersConfig", "TransformersModel", "read_transformers_config"]

log = logging.getLogger(__name__)

CHUNKS_NEED_CPU = "its attention in chunks is computed on CPUs only (--device cpu)"
RELEASED_BYTES = 16 << 20  # of packed weights, after which the pages of files are released
# Largest relative distance if only the steps differ. Mostly the distance is 0.
NEAR = 0.05
# The width of rows in the self-test of a model that does not give its hidden states.
UNKNOWN_WIDTH = 64


class TransformersModel(PagedModel):
    """A causal language model of Transformers with a paged KV cache."""

    implementation = "transformers"
    config: TransformersConfig

    def __init__(
        self,
        config: TransformersConfig,
        ops: Ops,
        model: nn.Module,
        shapes: list[AttentionShape],
        max_model_len: int,
        left_to_torch: list[nn.Module],
        fused: FusedModules,
        states: RecurrentStates | None = None,
        parts: Parts | None = None,
    ) -> None:
        """model: a transformers.PreTrainedModel whose linear layers are packed, except `left_to_torch`.
        shapes: parameters of each of its attention calls. fused: the modules that the kernels compute. states:
        recurrent states of its other layers. parts: those of this rank.
        """
        self.config, self.ops, self.dtype, self.max_model_len = config, ops, ops.dtype, max_model_len
        self._heads = parts.heads if parts is not None else ()
        self._shapes = [heads.of(shape) for heads, shape in zip(self._heads, shapes, strict=True)] if parts else shapes
        self._model, self._left_to_torch = model, left_to_torch
        self._fused = fused
        self._body = body_of(model)
        self._identities = attention.identity_rotations(shapes, ops.device)
        self._states = states
        self._has_integers = False  # true if products round activations to 8 bits
        # True if states continue one token at a time (`StateStep`); set by the trial.
        self._continues_one_by_one = False
        if states is not None:
            self.state_bytes = states.layout.nbytes
            for module in states.modules:
                wrap(module)

    @classmethod
    def load(
        cls,
        config: TransformersConfig,
        ops: Ops,
        device: torch.device | str,
        max_model_len: int = 0,
        read: Progress | None = None,
        packed: Progress | None = None,
        ranks: GatheringGroup | None = None,
        bits: int | str = 0,
    ) -> Self:
        """Load a checkpoint for contexts of up to `max_model_len` tokens; 0 is the model's own maximum.

        Weights and activations have the type of `ops`. `read` and `packed` are called with the bytes that are done and
        with all bytes. ranks: keep only the part of this rank; all ranks call this together. bits: of linear layers
        that are rounded on load, 8 or 4; FP8; 0: not rounded.
        Raises CheckpointError, one line, for an incomplete checkpoint, and for a context that is too long; NotSupported
        for a model that cannot run with paged attention.
        """
        max_model_len = max_model_len or config.max_position_embeddings
        _check_context(config, max_model_len)
        texts = trial.texts(config.vocab_size, max_model_len)
        # Ranks look for their parts on the host: the whole model may be too large for a GPU.
        weights = layer_weights(config, ops, bits, read)
        model = _prepare(config, ops, device if ranks is None else "cpu", max_model_len, texts[0], read, weights)
        try:
            with LinearUses(model) as uses, NormInputs(model) as norms:
                expected = trial.by_transformers(model, texts)
            if isinstance(weights, RoundedWeights):
                left = uses.unpackable()
                layers = [layer for _, layer in linear_layers(model) if layer not in left]
                weights.round(model, layers, [module for module in model.modules() if is_stacked(module, ops.dtype)])
                expected = trial.by_transformers(model, texts)
            take_query_scales(model)
            leave_out_indexers(model, max_model_len)
            shapes, states, modules = examine(model, config, texts[0], ops.dtype, max_model_len)
            if states is not None and ops.device.type == "cuda":
                raise UnsupportedAttention("its recurrent states are computed on CPUs only (--device cpu)")
            if any(shape.chunk for shape in shapes) and ops.device.type == "cuda":
                raise UnsupportedAttention(CHUNKS_NEED_CPU)
            parts = None
            if ranks is not None:
                stateful = () if states is None else states.modules
                parts = split(model, shapes, stateful, texts[0], ranks, uses.unpackable())
                move_part(model, parts, ops.device)
            fused = fuse(model, ops, uses, norms, texts[0], shapes, weights)
            latents: list[LatentLayer] = []
            if parts is None:
                latents, shapes = find_latent_layers(ops, modules, shapes, uses.unpackable())
            mapped = mapped_weights(config.folder)
            mapped.release_all()  # the examination has used all of them
            pack(model, ops, _releasing(mapped, packed), uses.unpackable(), [*fused.fusions, *latents], parts, weights)
            weights.finish()
            if isinstance(ops, CpuOps):
                copy_weights(model)  # those that are not packed
            loaded = cls(config, ops, model, shapes, max_model_len, uses.left_to_torch(model), fused, states, parts)
            loaded._has_integers = weights.has_integers
            if states is not None:
                loaded._continues_one_by_one = not _is_agreed(states.continue_chunks(loaded), ranks)
            fused.log(model)
            paged, alone = trial.over_pages(loaded, texts), trial.one_by_one(loaded, texts)
            loaded.hidden_size = loaded._find_hidden_size(texts[0])
            FreeMemory().give_back()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # any line of a model's code can raise anything
            if triton_failure(error):  # the cause is the GPU or the compiler, not the model
                raise
            raise _not_supported(config, max_model_len, error) from error
        if ranks is None or not ranks.rank:  # rank 0 has the logits
            loaded._check_trial(paged, alone, expected, KINDS if ranks is None else ONE_PROCESS)
        return loaded

    def _check_trial(self, paged: torch.Tensor, alone: torch.Tensor, expected: torch.Tensor, remedy: str) -> None:
        """Compare the logits of the trial: in chunks, with one step per text, and of Transformers. Raises NotSupported.

        remedy: for logits over pages that are not those of Transformers.
        """
        path, name, vocab_size = self.config.folder, self.config.architecture, self.config.vocab_size
        if labels := self.config.num_labels:
            paged, alone, vocab_size = paged[:, :labels], alone[:, :labels], labels
        if paged.shape[1] != vocab_size:
            what = f"{name} gives logits of {paged.shape[1]} tokens, but vocab_size is {vocab_size}"
            raise NotSupported(path, what, f"set vocab_size in config.json to {paged.shape[1]}")
        share, cache_dtype = apart(paged, expected), self.ops.kv_dtype
        # Products of integers round each row of activations to 8 bits.
        if not share < max(FAR[cache_dtype], FAR[torch.int8] if self._has_integers else 0):
            what = f"{name} gives other logits with paged attention than without, by {share:.0%}"
            raise NotSupported(path, what, remedy)
        # Steps may differ by as much as two ways of rounding do where products round by the shape of the batch. Not
        # compared are experts, of which another may be chosen, and steps that find more bits of a key than others.
        near = NEAR if self.is_row_invariant else max(NEAR, 2 * apart(alone, expected))
        is_comparable = not self._experts and not self._fused.has_experts and cache_dtype is not torch.float8_e4m3fn
        if is_comparable and not (share := apart(paged, alone)) < near:
            what = f"{name} gives other logits in chunks and next to another text, by {share:.0%}"
            raise NotSupported(path, what, KINDS)

    @property
    def is_row_invariant(self) -> bool:
        """True if the bits of a row do not depend on the batch: not if torch multiplies, as it does in most routers."""
        has_experts = self._experts or self._fused.has_experts
        in_torch = has_experts or self._left_to_torch or self._states is not None
        return super().is_row_invariant and not in_torch

    def kernel_uses(self, block_size: int) -> KernelUses:
        """Return attention over pages and packed products; Transformers or fused modules compute the rest."""
        packed: Iterable[Any] = (getattr(module, "packed", None) for module in self._model.modules())
        linears = (LinearUse.of(linear) for linear in packed if hasattr(linear, "in_features"))
        attention_uses = (
            AttentionUse(
                shape.num_heads,
                shape.num_kv_heads,
                shape.cache_dim,
                shape.scale,
                shape.sliding_window,
                shape.softcap,
                shape.has_sinks,
            )
            for shape in self._shapes
            if shape.latent is None
        )
        return KernelUses(
            hidden=self.hidden_size or UNKNOWN_WIDTH,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            block_size=block_size,
            attention=tuple(dict.fromkeys(attention_uses)),
            linears=tuple(dict.fromkeys(linears)),
            has_norms=self.hidden_size > 0,
            is_stack=False,
        )

    def tables(self) -> Iterable[torch.Tensor]:
        return self._model.buffers()

    @property
    def weight_bytes(self) -> int:
        return self._packed_bytes + nbytes_of([*self._model.parameters(), *self._model.buffers()])

    @property
    def multiplies_in_torch(self) -> bool:
        """True for most mixtures of experts: torch multiplies by weights with three dimensions."""
        return nbytes_of(self._experts) > self._packed_bytes

    @property
    def _experts(self) -> list[torch.Tensor]:
        modules = [module for module in self._model.modules() if not isinstance(module, nn.Conv1d | nn.Conv2d)]
        return [weight for module in modules for weight in module.parameters(recurse=False) if weight.dim() > 2]

    @property
    def _packed_bytes(self) -> int:
        return packed_bytes(self._model)

    @property
    def _kv_shapes(self) -> list[LayerShape]:
        """The keys of each cache. Calls that share keys and values share a cache."""
        return [
            KVShape(shape.num_kv_heads, shape.cache_dim) if shape.latent is None else LatentShape(shape.latent.width)
            for shape in self._shapes
            if shape.shared_with is None
        ]

    def alloc_kv_cache(self, num_blocks: int, block_size: int, num_host_blocks: int = 0) -> KVCache:
        if not self._shapes:
            return EmptyKVCache([], object(), self.ops, None)
        for chunk in {shape.chunk for shape in self._shapes if shape.chunk % block_size}:
            what = f"{self.config.architecture} has chunks of attention of {chunk} tokens, no multiple of {block_size}"
            raise CheckpointError(self.config.folder, what, "give a --block-size that divides the chunks")
        return alloc_layers(self.ops, self._kv_shapes, num_blocks, block_size, num_host_blocks)

    def alloc_states(self, kv_cache: KVCache, num_slots: int) -> KVCache:
        assert self._states is not None
        return replace(kv_cache, states=StatePool(self._states.layout, num_slots, self.ops.device))

    def kv_bytes_per_block(self, block_size: int) -> int:
        # Without attention the engine still counts blocks.
        return max(1, bytes_per_block(self.ops, self._kv_shapes, block_size))

    def forward(self, batch: ForwardBatch, kv_cache: KVCache) -> torch.Tensor:
        """Compute a batch. All ranks are called with the same one; rank 0 returns the logits."""
        return self._step(batch, kv_cache)

    def _step(self, batch: ForwardBatch, kv_cache: KVCache) -> torch.Tensor:
        given = self.ops, self._shapes, batch, kv_cache.layers, self._identities
        if self._heads:
            paged: PagedAttention = SplitAttention(self._heads, *given, SplitRotations(self._fused.rotations))
        else:
            paged = PagedAttention(*given, RotationTables(self._fused.rotations))
        inputs = batch.token_ids, positions_of(batch), batch.logits_rows
        with attention.running(paged), replaced_embeddings(self._model, batch.embeddings):
            if kv_cache.states is None:
                logits = trial.logits(self._model, *inputs)
            else:
                assert isinstance(kv_cache.states, StatePool)
                states = StateStep(batch, kv_cache.states, self._continues_one_by_one)
                with running(states):
                    logits = trial.logits(self._model, *inputs, states)
        paged.check_all_called()
        return as_vocabulary(logits, self.vocab_size) if self.config.num_labels else logits

    def forward_pooled(self, batch: ForwardBatch, kv_cache: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._body is not None
        assert batch.pooled_rows is not None
        with HiddenStates(self._body) as hidden:
            logits = self._step(batch, kv_cache)
        return logits, hidden.rows(batch.pooled_rows)

    def _find_hidden_size(self, text: torch.Tensor) -> int:
        """Return the size of a hidden state; 0 if the model does not give the hidden states of a text."""
        if self._body is None:
            return 0
        batch = trial.batch([trial.TrialChunk(0, 0, text)])
        batch = replace(batch, pooled_rows=batch.logits_rows).to(self.ops.device)
        cache = self.alloc_kv_cache(1, trial.BLOCK_SIZE)
        if self.state_bytes:
            cache = self.alloc_states(cache, 1)
        try:
            with torch.inference_mode():
                return self.forward_pooled(batch, cache)[1].shape[1]
        except RuntimeError as error:
            log.info("%s makes no embeddings: %s", self.config.architecture, error)
            return 0


def _is_agreed(answer: bool, ranks: GatheringGroup | None) -> bool:
    """Return the answer of rank 0, which alone has logits."""
    if ranks is None:
        return answer
    return bool(ranks.all_reduce(torch.tensor([float(answer and ranks.rank == 0)])).item())


def _check_context(config: TransformersConfig, max_model_len: int) -> None:
    """Raise CheckpointError if the model cannot have contexts of `max_model_len` tokens."""
    path, default = config.folder, config.max_position_embeddings
    limit = config.longest_context or default
    if not 0 < max_model_len <= limit:
        what = f"--max-model-len is {max_model_len}, but the longest context of the model is {limit}"
        raise CheckpointError(path, what, context_remedy(path, limit, max_model_len, config.has_rope, default))


def _prepare(
    config: TransformersConfig,
    ops: Ops,
    device: torch.device | str,
    max_model_len: int,
    text: torch.Tensor,
    read: Progress | None,
    weights: LayerWeights,
) -> nn.Module:
    """Load the model without the modules that `text` does not use. Raises CheckpointError or NotSupported."""
    tensors = weights.tensors()  # reports its own progress
    model: nn.Module = load_weights(config, ops.dtype, read if tensors is None else None, tensors)
    keep_frequencies(model, config, max_model_len)
    model.to(device)
    if has_alibi(model) and ops.kv_dtype.itemsize < 2:
        what = f"{config.architecture} adds positions to its scores (ALiBi), which a cache of 8 bits cannot hold"
        raise NotSupported(config.folder, what, "give --kv-cache-dtype auto")
    prepare(model)
    drop_unused(model, config, text)
    if ops.device.type == "cpu" and not isinstance(ops, CpuOps):  # CpuOps packs copies
        copy_weights(model)
    return model


def _releasing(mapped: MappedFiles, progress: Progress | None) -> Progress:
    """Return a progress that also releases files whose tensors were packed, and memory that was freed."""
    memory, released = FreeMemory(), 0

    def report(done: int, total: int) -> None:
        nonlocal released
        if done - released >= RELEASED_BYTES:
            mapped.release_all()
            memory.give_back()
            released = done
        if progress is not None:
            progress(done, total)

    return report


def _not_supported(config: TransformersConfig, max_model_len: int, error: Exception) -> NotSupported:
    """Return the refusal of a model whose examination, packing or trial raised `error`."""
    if isinstance(error, CannotSplit):
        return NotSupported(config.folder, f"{config.architecture} cannot be split: {error}", ONE_PROCESS)
    why = str(error) if isinstance(error, UnsupportedAttention) else f"{type(error).__name__}: {str(error)[:300]}"
    what = f"{config.architecture} cannot be computed with paged attention: {why}"
    return NotSupported(config.folder, what, remedy_for(why, config, max_model_len))


def remedy_for(why: str, config: TransformersConfig, max_model_len: int) -> str:
    """Return the remedy for a model that cannot be computed for contexts of `max_model_len` tokens."""
    chunk = getattr(config.loaded.get_text_config(), "attention_chunk_size", None)
    if why == CHUNKS_NEED_CPU and type(chunk) is int and 0 < chunk < max_model_len:
        return f"give --max-model-len {chunk}, the length of its chunks of attention, or less"
    selected = getattr(config.loaded.get_text_config(), "index_topk", None)
    if why == TAKES_INDICES and type(selected) is int and 0 < selected < max_model_len:
        return f"give --max-model-len {selected}, the number of tokens that its index selects, or less"
    return KINDS
