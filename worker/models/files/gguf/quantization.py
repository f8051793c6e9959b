"""The types of a GGUF file's tensors, and the memory of the weights that are made from them."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from quire.kernels.weights import BITS, BLOCK, GROUP, K_QUANTS
from quire.shared.model.gguf.file import GGUFFile
from quire.worker.models.files.gguf.codes import KINDS

INTEGER_TYPE = "Q4_0"  # the only type whose integers the kernels multiply: groups of 32 with a float16 scale
INTEGER_BITS = 4.5  # of its weights, with the scales

WIDE_BITS = 16  # of weights that have no codes
# Bits of a weight by its type, with headers of 32 bits: one per group, or 10 per block of K-quants.
_KIND_BITS = {kind: bits + 32 / GROUP for kind, bits in BITS.items()} | {
    kind: bits + 32 * (2 + BLOCK // GROUP) / BLOCK for kind, bits in K_QUANTS.items()
}
KEPT_BITS = {"F32": 32.0} | {name: _KIND_BITS[kind] for name, kind in KINDS.items()}


@dataclass(frozen=True)
class GGUFQuantization:
    """The types of a file. weights: number of weights by type, of tensors with two dimensions."""

    weights: tuple[tuple[str, int], ...]

    @property
    def label(self) -> str:
        return f"GGUF, {' and '.join(name for name, _ in self.weights)}"

    @property
    def stored_as(self) -> str:
        """Return "": a table that is also the head would be rounded again by each value of --quantization."""
        return ""

    @property
    def rounds_activations(self) -> bool:
        """True if most weights stay integers: llama.cpp rounds activations to 8 bits for them, as the kernels do."""
        of_type = dict(self.weights)
        return 2 * of_type.get(INTEGER_TYPE, 0) > sum(of_type.values())

    def kept_bytes(self, has_integers: bool) -> int:
        """Return the memory of the weights. has_integers: the integers of INTEGER_TYPE are multiplied."""
        bits = KEPT_BITS | ({INTEGER_TYPE: INTEGER_BITS} if has_integers else {})
        return int(sum(count * bits.get(name, WIDE_BITS) for name, count in self.weights)) // 8


def quantization_of(file: GGUFFile) -> GGUFQuantization | None:
    """Return the types of a file; None if no weight is quantised."""
    counts: Counter[str] = Counter()
    for tensor in file.tensors.values():
        if len(tensor.shape) == 2:
            counts[tensor.type.name] += math.prod(tensor.shape)
    if not any(tensor.type.is_quantized for tensor in file.tensors.values()):
        return None
    return GGUFQuantization(tuple(counts.most_common()))
