"""Models that are none of Quire's own families: Transformers computes them, and Quire their attention, over its pages.

Products are those of the kernels, too: they are most of the work, and on a CPU their rows do not depend on the batch.
Everything else is as Transformers has it, an operation at a time, so that such a model is slower than one of
`decoder.py`. What makes a model suitable is not a list of names: it is examined as it is loaded, and a short text must
give the same logits over pages, in chunks and beside another, as it gives alone with the attention of Transformers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, Self

import torch
from torch import nn

from quire.kernels import CpuOps, triton_failure
from quire.kernels.ops import Ops
from quire.worker.models import transformers_attention as attention
from quire.worker.models import transformers_trial as trial
from quire.worker.models.batch import ForwardBatch
from quire.worker.models.config import context_remedy
from quire.worker.models.errors import CheckpointError, NotSupported
from quire.worker.models.loader import AGAIN, Progress
from quire.worker.models.paged import KVCache, PagedModel
from quire.worker.models.transformers_attention import (
    AttentionProbe,
    AttentionRecorder,
    AttentionShape,
    PagedAttention,
    UnsupportedAttention,
)
from quire.worker.models.transformers_config import KINDS, TransformersConfig
from quire.worker.models.transformers_linear import LinearUses, PackedLinearModule, pack

log = logging.getLogger(__name__)

SAME_MODEL = "config.json and the weights must be of the same model"
# How far the logits of the trial may be apart, as a share of their size, by the type of the cache: in few bits another
# expert may be chosen. What is computed wrongly is further off.
FAR = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.25, torch.float8_e4m3fn: 0.3}
# The same where nothing but the steps differ: mostly it is 0.
NEAR = 0.05


class TransformersModel(PagedModel):
    """A causal language model of Transformers over a paged cache."""

    implementation = "transformers"
    config: TransformersConfig

    def __init__(
        self,
        config: TransformersConfig,
        ops: Ops,
        model: nn.Module,
        asked: list[AttentionShape],
        max_model_len: int,
        left_to_torch: list[nn.Module],
    ) -> None:
        """model: a transformers.PreTrainedModel whose linear layers are `PackedLinearModule`, except `left_to_torch`;
        asked: by each call of its attention."""
        self.config, self.ops, self.dtype, self.max_model_len = config, ops, ops.dtype, max_model_len
        self._model, self._asked, self._left_to_torch = model, asked, left_to_torch
        self._identity = torch.zeros(1, asked[0].cache_dim, device=ops.device)
        self._identity[:, : asked[0].cache_dim // 2] = 1  # cosines, then sines

    @classmethod
    def load(
        cls,
        config: TransformersConfig,
        ops: Ops,
        device: torch.device | str,
        max_model_len: int = 0,
        read: Progress | None = None,
        packed: Progress | None = None,
    ) -> Self:
        """Load a checkpoint for contexts of up to `max_model_len` tokens; 0 is the model's own maximum.

        Weights and activations have the type of `ops`. `read` and `packed` are called with the bytes done so far and in
        all. Raises CheckpointError, one line, for a checkpoint that is not complete, and for a context that is too
        long; NotSupported for a model that cannot be run over pages.
        """
        path, limit = config.folder, config.max_position_embeddings
        max_model_len = max_model_len or limit
        if not 0 < max_model_len <= limit:
            what = f"contexts of {max_model_len} tokens are asked for, but its longest one is of {limit}"
            raise CheckpointError(path, what, context_remedy(path, limit, max_model_len, config.has_rope))
        model = load_weights(config, ops.dtype, read).to(device)
        packing_copies = isinstance(ops, CpuOps)
        if not packing_copies and ops.device.type == "cpu":
            copy_weights(model)
        texts = trial.texts(config.vocab_size, max_model_len)
        try:
            with LinearUses(model) as uses:
                expected = trial.by_transformers(model, texts)
            asked = examine(model, config, texts[0], ops.dtype, max_model_len)
            pack(model, ops, packed, uses.unpackable())
            if packing_copies:
                copy_weights(model)  # the others
            loaded = cls(config, ops, model, asked, max_model_len, uses.left_to_torch(model))
            found, alone = trial.over_pages(loaded, texts), trial.one_by_one(loaded, texts)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of any line of a model that is none of ours
            if triton_failure(error):  # the GPU's or the compiler's, not the model's
                raise
            why = (
                str(error) if isinstance(error, UnsupportedAttention) else f"{type(error).__name__}: {str(error)[:300]}"
            )
            what = f"{config.architecture} cannot be computed over pages: {why}"
            raise NotSupported(path, what, remedy_for(why, config, max_model_len)) from error
        if found.shape[1] != config.vocab_size:
            what = f"{config.architecture} gives logits of {found.shape[1]} tokens, and has {config.vocab_size}"
            raise NotSupported(path, what, f"set vocab_size in config.json to {found.shape[1]}")
        share, cache_dtype = apart(found, expected), ops.kv_dtype
        if not share < FAR[cache_dtype]:
            what = f"{config.architecture} gives other logits over pages than without, by {share:.0%}"
            raise NotSupported(path, what, KINDS)
        # Steps may differ by as much as two ways of rounding do where products round by the shape of the batch. Not
        # compared are experts, of which another may be chosen, and steps that find more bits of a key than others.
        near = NEAR if loaded.is_row_invariant else max(NEAR, 2 * apart(alone, expected))
        is_comparable = not loaded._experts and cache_dtype is not torch.float8_e4m3fn
        if is_comparable and not (share := apart(found, alone)) < near:
            what = f"{config.architecture} gives other logits in chunks and beside another text, by {share:.0%}"
            raise NotSupported(path, what, KINDS)
        return loaded

    @property
    def is_row_invariant(self) -> bool:
        """Whether a row depends on itself alone: not with products of torch, as those of experts are."""
        return super().is_row_invariant and not self._experts and not self._left_to_torch

    def tables(self) -> Iterable[torch.Tensor]:
        return self._model.buffers()

    @property
    def weight_bytes(self) -> int:
        return self._packed_bytes + _nbytes([*self._model.parameters(), *self._model.buffers()])

    @property
    def multiplies_in_torch(self) -> bool:
        """As mixtures of experts do, whose weights are in tensors of three dimensions."""
        return _nbytes(self._experts) > self._packed_bytes

    @property
    def _experts(self) -> list[torch.Tensor]:
        modules = [module for module in self._model.modules() if not isinstance(module, nn.Conv1d | nn.Conv2d)]
        return [one for module in modules for one in module.parameters(recurse=False) if one.dim() > 2]

    @property
    def _packed_bytes(self) -> int:
        return sum(module.packed.nbytes for module in self._model.modules() if isinstance(module, PackedLinearModule))

    def alloc_kv_cache(self, num_blocks: int, block_size: int, num_host_blocks: int = 0) -> KVCache:
        heads, width = self._asked[0].num_kv_heads, self._asked[0].cache_dim
        caches = [self.ops.alloc_kv_cache(num_blocks, heads, block_size, width) for _ in self._asked]
        stack = self.ops.stack_caches(caches)
        host = self.ops.alloc_host_blocks(stack, num_host_blocks) if num_host_blocks else None
        return KVCache(caches, stack, self.ops, host)

    def kv_bytes_per_block(self, block_size: int) -> int:
        elements = sum(2 * one.num_kv_heads * one.cache_dim for one in self._asked) * block_size
        return elements * self.ops.kv_dtype.itemsize

    def forward(self, batch: ForwardBatch, kv_cache: KVCache) -> torch.Tensor:
        paged = PagedAttention(self.ops, self._asked, batch, kv_cache.layers, self._identity)
        with attention.running(paged):
            found = trial.logits(self._model, batch.token_ids, batch.positions, batch.logits_rows)
        paged.check_all_called()
        return found


def _nbytes(tensors: list[torch.Tensor]) -> int:
    """Of all, tied ones once."""
    return sum({one.data_ptr(): one.nbytes for one in tensors}.values())


def load_weights(config: TransformersConfig, dtype: torch.dtype, progress: Progress | None = None) -> Any:
    """The model as Transformers loads it, in host memory. Raises CheckpointError."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    path = config.folder
    log.info("Transformers loads %s, %.0f MiB", config.architecture, config.least_weight_bytes(dtype) / 2**20)
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            path,
            config=config.loaded,
            dtype=dtype,
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            experts_implementation=None,  # chosen here: a checkpoint could name one that is code of the hub
            ignore_mismatched_sizes=True,  # named below
            output_loading_info=True,
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of any line of a model, where a field has a value that nobody foresaw
        reason = f"Transformers cannot load it ({type(error).__name__}: {str(error)[:300]})"
        raise CheckpointError(path, reason, SAME_MODEL) from error
    if mismatched := sorted(found["mismatched_keys"]):
        name, shape, expected = mismatched[0]
        what = f"tensor {name} has the shape {list(shape)}, expected {list(expected)}"
        raise CheckpointError(path, what, SAME_MODEL)
    if missing := sorted(map(str, found["missing_keys"])):
        names = ", ".join(missing[:4]) + (", ..." if len(missing) > 4 else "")
        what = f"{len(missing)} tensors are missing: {names}"
        remedy = "config.json must describe these weights, and the checkpoint must be complete"
        raise CheckpointError(path, what, remedy)
    if unknown := sorted(map(str, found["unexpected_keys"])):
        names = ", ".join(unknown[:4]) + (", ..." if len(unknown) > 4 else "")
        if config.is_named_otherwise:
            what = f"{len(unknown)} tensors are not part of {config.architecture}, which its model_type is: {names}"
            remedy = f'set architectures to ["{config.architecture}"] in config.json to serve the model without them'
            raise NotSupported(path, what, remedy)
        log.warning("%s: %d tensors are not part of this model and are not used: %s", path, len(unknown), names)
    done, total = 0, _nbytes([*model.parameters()])
    for name, values in model.named_parameters():
        low, high = values.detach().aminmax()  # now it is read from the disk
        done += values.nbytes
        if progress is not None:
            progress(done, total)
        if not (low.isfinite() and high.isfinite()):
            what = f"tensor {name} has values that are not finite as {str(dtype)[6:]}"
            raise CheckpointError(path, what, f"take another --dtype, or {AGAIN}")
    for module in model.modules():
        keep_frequencies(module)
    return model.eval().requires_grad_(False)


def remedy_for(why: str, config: TransformersConfig, max_model_len: int) -> str:
    """The remedy for a model that cannot be computed for contexts of `max_model_len` tokens."""
    chunk = getattr(config.loaded.get_text_config(), "attention_chunk_size", None)
    if why == attention.OTHER_MASKS and type(chunk) is int and 0 < chunk < max_model_len:
        return f"give --max-model-len {chunk}, the length of its chunks of attention, or less"
    return KINDS


def copy_weights(model: nn.Module) -> None:
    """Have them in memory, one by one, and not in the mapped file: its later changes would be changes of the model."""
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data = tensor.data.clone()


def keep_frequencies(module: Any) -> None:
    """Have a RoPE keep its frequencies, which depend on the context only where that is longer than any here can be.

    Transformers would look at the positions of each step on the host.
    """
    kinds = getattr(module, "rope_type", None)
    if isinstance(kinds, str):
        module.rope_type = "default"
    elif isinstance(kinds, dict):
        module.rope_type = dict.fromkeys(kinds, "default")


def examine(
    model: Any, config: TransformersConfig, text: torch.Tensor, dtype: torch.dtype, max_model_len: int
) -> list[AttentionShape]:
    """What each call of attention asks for. From here on the attention of the model is ours. Raises Unsuitable."""
    attention.register()
    examination = AttentionProbe(dtype, max_model_len)
    model.set_attn_implementation(attention.EXAMINED)
    with attention.running(examination):
        trial.by_transformers(model, [text])
    model.set_attn_implementation(attention.PAGED)
    asked = examination.asked
    if len(asked) < config.num_layers:
        raise UnsupportedAttention(
            f"{config.num_layers - len(asked)} of its {config.num_layers} layers have no attention"
        )
    if len({(one.num_kv_heads, one.head_dim) for one in asked}) > 1:
        raise UnsupportedAttention("its layers differ in the shapes of their keys")
    if not ignores_the_past(model, text, FAR[dtype], max_model_len):
        raise UnsupportedAttention("it takes positions from its cache, which is not here")
    return asked


def ignores_the_past(model: Any, text: torch.Tensor, far: float, max_model_len: int) -> bool:
    """Whether all that is said of the place of a token are the positions that are given with it.

    Some count the tokens in their cache beside that, and scale scores by it where a context is long. There is no such
    cache here, so that they would count the tokens of a step.
    """
    said = []
    for past in (None, trial.long_past()):
        recording = AttentionRecorder()
        with attention.running(recording):
            last = trial.at_the_end(model, text, max_model_len, past)
        said.append([*recording.given, last])
    return all(apart(here, there) < far for here, there in zip(*said, strict=True))


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    """How far these are apart in the row where it is most, as a share of their size."""
    differ = (found - expected).float().norm(dim=-1)
    return float((differ / expected.float().norm(dim=-1).clamp(min=1e-30)).max())
