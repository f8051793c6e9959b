"""The weights of a linear layer that an implementation packs: all at once, or a few rows at a time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.grouped_weight import GroupedWeight
from quire.kernels.k_quant_weight import KQuantWeight
from quire.kernels.quantization import QuantizedWeight


class RowsDiffer(ValueError):
    """The rows of a weight have several dtypes, kinds or orders, so that they cannot be packed as one."""


LinearWeight = Tensor | QuantizedWeight | GroupedWeight | KQuantWeight
Ranges = Sequence[tuple[int, int]]  # of rows: first, and one after the last


@dataclass(frozen=True, eq=False)
class WeightRows:
    """Weights that are read while they are packed, so that few of them are in memory twice.

    shape: [N, K]. read: returns the rows of some ranges as one weight. All rows have the same dtype or kind.
    """

    shape: torch.Size
    read: Callable[[Ranges], LinearWeight]


def whole(weight: LinearWeight | WeightRows) -> LinearWeight:
    """Return all rows of a weight."""
    return weight.read([(0, weight.shape[0])]) if isinstance(weight, WeightRows) else weight
