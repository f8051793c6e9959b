"""Random low-rank adapters for the stacks of `stacks.py`."""

import torch

from quire.kernels.lora import LoraLayer, LoraPart
from tests.support.kernels.stacks import BLOCK, HEADS, HIDDEN, INNER, KV_HEADS, QUERIES, D, random

# Offset, width and inputs of each projection, by linear layer.
PROJECTIONS = {
    "qkv": [(0, HEADS * D, HIDDEN), (HEADS * D, KV_HEADS * D, HIDDEN), ((HEADS + KV_HEADS) * D, KV_HEADS * D, HIDDEN)],
    "o": [(0, HIDDEN, HEADS * D)],
    "gate_up": [(0, INNER, HIDDEN), (INNER, INNER, HIDDEN)],
    "down": [(0, HIDDEN, INNER)],
}


def make_factors(
    layers: int, rank: int, dtype: torch.dtype = torch.float32, names: tuple[str, ...] = tuple(PROJECTIONS)
) -> list[LoraLayer]:
    """Make the factors of an adapter that changes these linear layers of each layer."""
    return [
        {
            name: [
                LoraPart(random(rank, k, dtype=dtype), random(width, rank, dtype=dtype), 0.5 + rank / 8, offset)
                for offset, width, k in PROJECTIONS[name]
            ]
            for name in names
        }
        for _ in range(layers)
    ]


def merged(weight: torch.Tensor, parts: list[LoraPart]) -> torch.Tensor:
    """Return the weights [N, K] with these factors added."""
    weight = weight.clone()
    for part in parts:
        weight[part.offset : part.offset + len(part.b)] += part.scale * part.b.float() @ part.a.float()
    return weight


def prompts() -> dict[str, torch.Tensor]:
    """Make a step of whole prompts, as long as QUERIES, with blocks of their own."""
    tables = torch.arange(6).view(3, 2)
    positions = [torch.arange(length) for length in QUERIES]
    return {
        "positions": torch.cat(positions).int(),
        "slot_mapping": torch.cat(
            [tables[at, one // BLOCK] * BLOCK + one % BLOCK for at, one in enumerate(positions)]
        ).int(),
        "block_tables": tables.int(),
        "seq_lens": torch.tensor(QUERIES).int(),
        "query_start_loc": torch.tensor([0, *QUERIES]).cumsum(0).int(),
    }
