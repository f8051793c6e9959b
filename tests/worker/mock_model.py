"""A model whose every token depends on every token before it, read through the block tables as attention would read
them.

What a wrong slot, a stale block table or a missed recomputation would do to attention, it does here: the text changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from worker.models.batch import ForwardBatch

VOCAB = 97
EOS = 0


def next_token(token_ids: list[int]) -> int:
    """The token that the mock model draws greedily after `token_ids`: a hash of all of them, in order."""
    state = 7
    for token in token_ids:
        state = (state * 31 + token + 1) % 1_000_003
    return state % VOCAB


def continuation(prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    """What the engine must produce greedily: up to EOS or `max_tokens`."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] == EOS:
            break
    return tokens[len(prompt) :]


class MockOps:
    """Greedy, and drawing from a distribution that is flat over three tokens around the greedy one."""

    name = "mock"

    def top_logprobs(self, logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        values, ids = torch.log_softmax(logits, dim=-1).topk(count)
        return values, ids.to(torch.int32)

    def logprobs_of(self, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(logits, dim=-1).gather(1, ids.long()[:, None])[:, 0]

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.argmax(dim=-1).to(torch.int32)

    def sample(self, logits: torch.Tensor, temperature: Any, top_k: Any, top_p: Any, min_p: Any, uniform: Any) -> Any:
        return ((logits.argmax(dim=-1) + (uniform * 3).long()) % VOCAB).to(torch.int32)


UNUSED = -(10**6)


class MockCache:
    """Blocks of token ids, on the device and on the host. What is freed keeps its contents, as memory does."""

    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int) -> None:
        self.device = torch.full((num_blocks, block_size), UNUSED, dtype=torch.int64)
        self.host = torch.full((num_host_blocks, block_size), UNUSED, dtype=torch.int64)

    def copy_blocks(self, src: list[int], dst: list[int]) -> None:
        assert len(set(dst)) == len(dst)
        assert not set(src) & set(dst)
        self.device[dst] = self.device[src]

    def swap_out(self, src: list[int], dst: list[int]) -> None:
        assert len(set(dst)) == len(dst)
        self.host[dst] = self.device[src]

    def swap_in(self, src: list[int], dst: list[int]) -> None:
        assert len(set(dst)) == len(dst)
        self.device[dst] = self.host[src]


@dataclass
class MockModel:
    """Stands where a decoder stands. Its cache holds token ids; an unused slot holds what no token is."""

    ops: Any = None
    vocab_size: int = VOCAB

    def __post_init__(self) -> None:
        self.ops = self.ops or MockOps()

    def alloc_kv_cache(self, num_blocks: int, block_size: int, num_host_blocks: int = 0) -> MockCache:
        return MockCache(num_blocks, block_size, num_host_blocks)

    def forward(self, batch: ForwardBatch, cache: MockCache) -> torch.Tensor:
        kv_cache = cache.device
        slots = batch.slot_mapping.long()
        written = slots >= 0
        slots = slots[written]
        assert len(set(slots.tolist())) == len(slots), "two tokens of a step share a slot"
        kv_cache.view(-1)[slots] = batch.token_ids.long()[written]
        starts = batch.query_start_loc.tolist()
        sequence_of_row = {end - 1: index for index, end in enumerate(starts[1:])}
        logits = torch.zeros(len(batch.logits_rows), VOCAB)
        for out, row in enumerate(batch.logits_rows.tolist()):
            index = sequence_of_row[row]
            length = int(batch.seq_lens[index])
            assert int(batch.positions[row]) == length - 1
            blocks = batch.block_tables[index, : -(-length // kv_cache.shape[1])].long()
            logits[out, next_token(kv_cache[blocks].flatten()[:length].tolist())] = 1.0
        return logits
