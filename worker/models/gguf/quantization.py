"""The types of a GGUF file's tensors, and the memory of the weights that are made from them."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from quire.shared.gguf.file import GGUFFile
from quire.worker.models.quantized.layout import LayerLayout, StoredType

INTEGER_TYPE = "Q4_0"  # the only type that the kernels multiply as it is stored: groups of 32 with a float16 scale


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
        """Return the memory of the weights. has_integers: those of INTEGER_TYPE stay as they are stored."""
        of_type = dict(self.weights)
        integers = of_type.pop(INTEGER_TYPE, 0) if has_integers else 0
        return integers * 18 // 32 + 2 * sum(of_type.values()) + 2 * of_type.pop("F32", 0)

    def layer(self, name: str, stored_type: StoredType) -> LayerLayout | None:
        """Return None: each tensor of a GGUF file says its own type."""


def quantization_of(file: GGUFFile) -> GGUFQuantization | None:
    """Return the types of a file; None if no weight is quantised."""
    counts: Counter[str] = Counter()
    for tensor in file.tensors.values():
        if len(tensor.shape) == 2:
            counts[tensor.type.name] += math.prod(tensor.shape)
    if not any(tensor.type.is_quantized for tensor in file.tensors.values()):
        return None
    return GGUFQuantization(tuple(counts.most_common()))
