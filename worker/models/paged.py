"""What the engine asks of a model, however it is computed: logits for a step's tokens, over a cache in blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from quire.kernels.ops import CacheStack, Ops
from quire.worker.device.memory import available_memory
from quire.worker.models.batch import ForwardBatch


class CheckpointConfig(Protocol):
    """What is known of a checkpoint before its weights are read."""

    @property
    def architecture(self) -> str:
        """The class of the model in Transformers."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_position_embeddings(self) -> int:
        """The longest context that the model is made for, in tokens."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    def least_weight_bytes(self, dtype: torch.dtype) -> int:
        """Memory of the weights before any is loaded; a backend that packs them may take more."""


@dataclass(frozen=True, slots=True)
class KVCache:
    """The paged cache of all layers, and host memory for blocks that are swapped out.

    Block b is index b of dimension 0 in every layer, host block b that of `host`; each move is one call for all layers.
    """

    # Per layer k and v: [num_blocks, num_kv_heads, block_size, head_dim]; the order inside a block is the kernels' own.
    layers: list[tuple[torch.Tensor, torch.Tensor]]
    stack: CacheStack
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


class PagedModel(ABC):
    """A loaded model. It holds no state of sequences: the caches and their layout belong to the caller."""

    implementation: ClassVar[str]  # of `quire.worker.models.choice`
    config: CheckpointConfig
    ops: Ops
    dtype: torch.dtype  # of weights, activations and, unless `ops` says otherwise, the cache
    max_model_len: int
    weights_digest = ""  # of its checkpoint (`quire.worker.inspect.fingerprint`)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def multiplies_in_torch(self) -> bool:
        """Whether much of its work is done by torch, and not by the kernels."""
        return False

    @property
    def is_row_invariant(self) -> bool:
        """Whether the bits of a row depend on itself alone, and are the same in every such process."""
        return self.ops.row_invariant and self.ops.device.type == "cpu"

    def tables(self) -> Iterable[torch.Tensor]:
        """What it computed when it was loaded, such as rotary embeddings, and uses at every position."""
        return ()

    @property
    @abstractmethod
    def weight_bytes(self) -> int:
        """Memory of all weights, packed or not."""

    @abstractmethod
    def alloc_kv_cache(self, num_blocks: int, block_size: int, num_host_blocks: int = 0) -> KVCache:
        """Zeroed caches of all layers, and room for `num_host_blocks` in host memory (`Ops.alloc_host_blocks`)."""

    @abstractmethod
    def kv_bytes_per_block(self, block_size: int) -> int:
        """Memory of a block's keys and values, over all layers."""

    @abstractmethod
    def forward(self, batch: ForwardBatch, kv_cache: KVCache) -> torch.Tensor:
        """Run the tokens of a step, write their keys and values into the cache, and return logits: float32 [R, V].

        Every block up to the end of each sequence's context must be its own or shared read-only. IndexError if an id, a
        position or a slot is outside its table, as far as the host can see it.
        """

    def least_free_memory(self) -> int:
        """Bytes that its device has free, also for torch alone; of several ranks, that of the one which has least."""
        device = self.ops.device
        if device.type != "cuda":
            return available_memory()
        torch.cuda.empty_cache()
        free: int = torch.cuda.mem_get_info(device)[0]
        # What torch has set aside is its own, and of that the cache may have what is not in use.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)

    def check(self) -> None:  # noqa: B027 (most models have nothing to say here)
        """Raise if no later step can succeed (`quire.worker.ranks.leader`)."""

    def close(self) -> None:  # noqa: B027
        """End what belongs to the model."""
