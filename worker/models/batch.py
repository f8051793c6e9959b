"""One step of the engine as the model sees it: the tokens of all scheduled sequences, one after the other."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """T tokens of S sequences. Sequence s owns the tokens query_start_loc[s] .. query_start_loc[s + 1] - 1, which are
    the last of its seq_lens[s] tokens; everything before them is in the cache already.

    A token's slot is the place where its key and value go: physical block * block size + offset in the block.
    """

    token_ids: torch.Tensor  # int32 [T]
    positions: torch.Tensor  # int32 [T], from 0
    slot_mapping: torch.Tensor  # int32 [T]
    block_tables: torch.Tensor  # int32 [S, max_blocks]; columns behind a sequence's last block are never read
    seq_lens: torch.Tensor  # int32 [S], the context with this step's tokens
    query_start_loc: torch.Tensor  # int32 [S + 1]
    logits_rows: torch.Tensor  # int64 [R], rows of T whose logits are wanted

    def parts(self) -> list[torch.Tensor]:
        return [getattr(self, one.name) for one in fields(self)]

    def to(self, device: torch.device) -> ForwardBatch:
        """The same on another device, as `send` does it."""
        return ForwardBatch(*(send(part, device) for part in self.parts()))


def send(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Host memory on a device, in the order of its stream and without waiting for it.

    A copy to a CUDA device out of memory that is not pinned would wait for every step that is under way. The pinned
    copy belongs to torch's allocator, which uses it again only after the device has read it; `values` may change at
    once. For a CPU it is no copy.
    """
    if device.type == "cuda" and values.numel():
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)
