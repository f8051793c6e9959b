"""Memory for the recurrent states of sequences: a pool of slots, each with the states of all layers.

A layer such as a short convolution, Mamba or linear attention keeps a state of fixed size instead of keys and values
of all tokens. The states of all layers of one sequence lie together in one slot, so that a copy of a slot is a copy of
the whole state. The engine decides which slot belongs to what (`quire.worker.engine.features.states.slots`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

# Offset of each state in a slot, in bytes: a multiple of the longest vector of a processor.
ALIGNMENT = 64


class StateKey(NamedTuple):
    """The name of one state: a layer may have several of each kind."""

    layer: int
    kind: str  # "conv" or "recurrent"
    number: int


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Shape and type of each state of one sequence, without a dimension for the batch."""

    shapes: dict[StateKey, tuple[tuple[int, ...], torch.dtype]]

    @property
    def nbytes(self) -> int:
        """Memory of a slot, in bytes."""
        return sum(_padded_bytes(shape, dtype) for shape, dtype in self.shapes.values())


class StatePool:
    """`num_slots` slots of one layout. The contents of a new slot are zeros."""

    def __init__(self, layout: StateLayout, num_slots: int, device: torch.device | str) -> None:
        self.num_slots = num_slots
        self._memory = torch.zeros(num_slots, layout.nbytes, dtype=torch.uint8, device=device)
        # Views of the memory: [num_slots, *shape].
        self.states: dict[StateKey, torch.Tensor] = {}
        offset = 0
        for key, (shape, dtype) in layout.shapes.items():
            size = torch.Size(shape).numel() * dtype.itemsize
            part = self._memory[:, offset : offset + size].view(dtype)
            self.states[key] = part.view(num_slots, *shape)
            offset += _padded_bytes(shape, dtype)

    def copy(self, source: int, target: int) -> None:
        """Copy all states of one slot to another."""
        self._memory[target].copy_(self._memory[source])

    def copy_states(self, keys: set[StateKey], source: int, target: int) -> None:
        """Copy only these states of a slot to another."""
        for key in keys:
            self.states[key][target].copy_(self.states[key][source])


def _padded_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return -(-torch.Size(shape).numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT
