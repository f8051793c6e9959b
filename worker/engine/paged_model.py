"""The interface between engine and model: logits for the tokens of a step, with a KV cache in blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch

from quire.kernels import RecordGraph, SelfTestReport, run_self_test
from quire.kernels.ops import AllReduceGroup, CacheStack, Ops
from quire.kernels.uses import KernelUses
from quire.worker.engine.forward_batch import ForwardBatch
from quire.worker.engine.limits import IMAGE_CACHE_BYTES
from quire.worker.host_memory import available_memory

if TYPE_CHECKING:
    from quire.worker.engine.sequence import Adapter

# Tokens of the largest image that memory is planned for.
MOST_IMAGE_TOKENS = 16_384
IMAGE_SHARE = 4


class CheckpointConfig(Protocol):
    """The properties of a checkpoint that any model has, known before its weights are read."""

    @property
    def architecture(self) -> str:
        """The name of the model's class in Transformers."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_position_embeddings(self) -> int:
        """The longest context of the model, in tokens."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def is_wrapped(self) -> bool:
        """True if the model has a text model inside, as vision-language models have."""

    def least_weight_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of the weights, known before they are loaded. A backend that packs them may take more."""


class StateMemory(Protocol):
    """The recurrent states of sequences, one in each slot."""

    def copy(self, source: int, target: int) -> None:
        """Copy all states of one slot to another."""


class ImageTower(Protocol):
    """A vision tower, which makes embeddings of images (`quire.worker.models.vision.tower`)."""

    image_token_id: int
    is_deep: bool  # the first layers of the text model get more of an image than its embeddings
    # The most tokens of an image if they attend to each other in both directions, so that one step computes all of the
    # image; 0: they do not.
    most_whole: int

    def embed(self, pictures: Sequence[bytes]) -> list[torch.Tensor]:
        """Return the embeddings [tokens, hidden] of each image file. Raises what the file is to blame for."""

    def run_bytes(self, num_tokens: int) -> int:
        """Return about how much memory a run takes for an image of this number of tokens."""

    def grid(self, picture: bytes) -> tuple[int, int] | None:
        """Return the rows and columns of an image's tokens if RoPE has axes for them; else None. Raises as `embed`."""


@dataclass(frozen=True, slots=True)
class KVCache:
    """The paged KV cache of all layers, and host memory for blocks that are swapped out.

    Block b is index b of dimension 0 in every layer; host block b is index b of dimension 0 in `host`. Each method
    copies the blocks of all layers with one call.
    """

    # Keys and values per layer: [num_blocks, num_kv_heads, block_size, head_dim]. Kernels choose the order in a block.
    # A layer with a latent cache (`quire.kernels.latent`) has one tensor, twice.
    layers: list[tuple[torch.Tensor, torch.Tensor]]
    stack: CacheStack
    ops: Ops
    host: torch.Tensor | None  # of ops.alloc_host_blocks
    states: StateMemory | None = field(default=None, kw_only=True)  # of models with recurrent states

    @property
    def uniform_parts(self) -> tuple[KVCache, ...]:
        """The caches of layers of one shape each that this cache consists of."""
        return (self,)

    def copy_blocks(self, src: list[int], dst: list[int]) -> None:
        """Copy block src[i] to block dst[i]. No block may occur twice in dst, or in both lists."""
        self.ops.copy_blocks(self.stack, *self._ids(src, dst))

    def swap_out(self, src: list[int], dst: list[int]) -> None:
        """Copy block src[i] to host block dst[i]."""
        assert self.host is not None, "the cache has no host blocks"
        self.ops.swap_out(self.stack, self.host, *self._ids(src, dst))

    def swap_in(self, src: list[int], dst: list[int]) -> None:
        """Copy host block src[i] to block dst[i]."""
        assert self.host is not None, "the cache has no host blocks"
        self.ops.swap_in(self.stack, self.host, *self._ids(src, dst))

    @staticmethod
    def _ids(*lists: list[int]) -> list[torch.Tensor]:
        return [torch.tensor(ids, dtype=torch.int64) for ids in lists]


class EmptyKVCache(KVCache):
    """The cache of a model without attention. Its blocks count tokens and have no contents to copy."""

    def copy_blocks(self, src: list[int], dst: list[int]) -> None:
        pass

    def swap_out(self, src: list[int], dst: list[int]) -> None:
        pass

    def swap_in(self, src: list[int], dst: list[int]) -> None:
        pass


class PagedModel(ABC):
    """A loaded model without state of sequences: the caches belong to the caller."""

    implementation: ClassVar[str]  # a name of `quire.worker.models.choice`
    config: CheckpointConfig
    ops: Ops
    dtype: torch.dtype  # of weights and activations; of the cache too, unless `ops` has another
    max_model_len: int
    # Numbers in the hidden state of a token; 0 if the model gives logits only, so that it cannot make embeddings.
    hidden_size = 0
    # Memory of the recurrent states of one sequence, in bytes; 0 if the model keeps keys and values alone.
    state_bytes = 0
    tower: ImageTower | None = None  # makes embeddings of images
    why_no_images = "this model takes no images"  # the reason, without a tower
    max_image_tokens = 0  # that one step may compute; 0: any number
    weights_digest = ""  # digest of the checkpoint (`quire.worker.inspect.fingerprint`)
    self_test_report = SelfTestReport()  # of the self-test at start

    def least_step(self, max_num_seqs: int) -> int:
        """Return the tokens of a step that computes all of the largest image, and one for each other sequence.

        0 if steps may compute parts of images.
        """
        whole = self.tower.most_whole if self.tower is not None else 0
        return whole and whole + max_num_seqs - 1

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def num_ranks(self) -> int:
        """The number of processes that share the model."""
        return 1

    @property
    def image_bytes(self) -> int:
        """Memory for embeddings of images that are kept, and for a run of the tower; 0 without a tower.

        At most 1 / IMAGE_SHARE of the free memory is set aside: an image for which it does not suffice is an error of
        its call.
        """
        if self.tower is None:
            return 0
        return IMAGE_CACHE_BYTES + self.tower.run_bytes(min(self.max_model_len, MOST_IMAGE_TOKENS))

    @property
    def multiplies_in_torch(self) -> bool:
        """True if torch does a large part of the multiplications, and not the kernels."""
        return False

    @property
    def why_no_adapters(self) -> str:
        """Why batches have no LoRA adapters, with the remedy; "" if they may have some."""
        return (
            "LoRA adapters need Quire's own decoder, and Transformers computes this model; merge the adapter into the "
            "model (merge_and_unload() of peft) and serve that folder"
        )

    def load_adapter(self, name: str, folder: Path, max_rank: int) -> Adapter:
        """Load a LoRA adapter in the format of PEFT. Only models that take adapters do. Raises CheckpointError."""
        raise NotImplementedError(f"{type(self).__name__} has no adapters")

    @property
    def is_row_invariant(self) -> bool:
        """True if the bits of a row do not depend on the batch, and are the same in every process."""
        return self.ops.row_invariant and self.ops.device.type == "cpu"

    def tables(self) -> Iterable[torch.Tensor]:
        """Return the tables that were computed when the model was loaded, such as rotary embeddings."""
        return ()

    @property
    @abstractmethod
    def weight_bytes(self) -> int:
        """Memory of all weights, packed or not, in bytes."""

    @abstractmethod
    def alloc_kv_cache(self, num_blocks: int, block_size: int, num_host_blocks: int = 0) -> KVCache:
        """Allocate zeroed caches of all layers, and `num_host_blocks` in host memory (`Ops.alloc_host_blocks`)."""

    def alloc_states(self, kv_cache: KVCache, num_slots: int) -> KVCache:
        """Return the cache with a pool of slots for recurrent states. Only models with `state_bytes` have such."""
        raise NotImplementedError(f"{type(self).__name__} keeps no recurrent states")

    @abstractmethod
    def kv_bytes_per_block(self, block_size: int) -> int:
        """Return the bytes of the keys and values of a block in all layers."""

    @abstractmethod
    def forward(self, batch: ForwardBatch, kv_cache: KVCache) -> torch.Tensor:
        """Run the tokens of a step, write their keys and values into the cache, and return logits: float32 [R, V].

        Every block of a sequence's context must be its own, or shared and not written. Raises IndexError if a token id,
        a position or a slot is out of range, as far as the host can check it.
        """

    def forward_pooled(self, batch: ForwardBatch, kv_cache: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
        """Do what `forward` does for a batch with `pooled_rows`: return logits, and hidden states [P, hidden_size].

        The hidden states are those after the final norm, in the type of the activations. Only models with a
        `hidden_size` compute them.
        """
        raise NotImplementedError(f"{type(self).__name__} has no hidden states")

    def kernel_uses(self, block_size: int) -> KernelUses | None:
        """Return what the model uses of the kernels; None if the self-test does not cover it."""
        return None

    def self_test(
        self, level: str, block_size: int, record: RecordGraph | None, ranks: AllReduceGroup | None = None
    ) -> SelfTestReport:
        """Test the kernels that the model uses, and replace those with wrong results.

        level, record, ranks: of `run_self_test`. Raises WrongKernel.
        """
        uses = self.kernel_uses(block_size)
        return SelfTestReport() if uses is None else run_self_test(self.ops, uses, level, record, ranks)

    def least_free_memory(self) -> int:
        """Free bytes of the device, with those that torch holds in reserve; the least of all ranks."""
        device = self.ops.device
        if device.type != "cuda":
            return available_memory()
        torch.cuda.empty_cache()
        free: int = torch.cuda.mem_get_info(device)[0]
        # The cache can use memory that torch has reserved and does not use.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)

    def check(self) -> None:  # noqa: B027 (most models need no check)
        """Raise if no later step can succeed (`quire.worker.ranks.leader`)."""

    def close(self) -> None:  # noqa: B027
        """End processes that belong to the model."""
