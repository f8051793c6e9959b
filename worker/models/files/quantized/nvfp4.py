"""NVFP4: 4-bit floating-point numbers with an E4M3 scale per 16 of them, and a float32 scale for all of the tensor.

The codes [n, k / 2] uint8 have two numbers per byte, the first in the lower bits. weight[n, k] = E2M1[code] *
(weight_scale[n, k // 16] * s). Model Optimizer stores s as `weight_scale_2`, and compressed-tensors stores 1 / s as
`weight_global_scale`.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.kernels.weights import NVFP4_GROUP, Nvfp4Weight
from quire.worker.models.files.quantized.layout import (
    E4M3,
    Load,
    Stored,
    StoredShape,
    TensorFault,
    matrix_shape,
    required,
)
from quire.worker.models.files.quantized.weight import StoredCodes
from quire.worker.models.files.quantized.words import unpack_nibbles

SCALARS: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1))


@dataclass(frozen=True)
class Nvfp4Layer:
    """A layer. codes, whole: the ends of the names of the codes and of the scale of all. divides: by this scale."""

    codes: str
    whole: str
    divides: bool
    label: str = "NVFP4"
    scale: str = "weight_scale"
    stored_as: str = ""
    integer_bits: int = 0

    def row_unit(self, k: int) -> int:
        return 1

    def shape(self, stored_shape: StoredShape, load: Load) -> tuple[int, int]:
        n, half = matrix_shape(stored_shape, self.codes)
        return n, 2 * half

    def tensors(self, n: int, k: int) -> dict[str, Stored]:
        return {
            self.codes: Stored(("U8",), ((n, -(-k // 2)),)),
            self.scale: Stored((E4M3,), ((n, -(-k // NVFP4_GROUP)),)),
            self.whole: Stored(("F32",), SCALARS),
        }

    def weight(self, n: int, k: int, load: Load) -> StoredCodes:
        if k % NVFP4_GROUP:
            what = f"is of {k} input features, expected a multiple of {NVFP4_GROUP}"
            raise TensorFault(self.scale, what, "use a checkpoint of another format")
        whole = required(load, self.whole).reshape(1)
        channel = 1 / whole if self.divides else whole
        if not bool(channel.isfinite()):
            raise TensorFault(self.whole, "is 0, expected another number", "quantise the model again")
        codes = unpack_nibbles(required(load, self.codes))
        return StoredCodes(Nvfp4Weight(codes, required(load, self.scale).contiguous(), channel.repeat(n)))


def modelopt_nvfp4() -> Nvfp4Layer:
    """Return the layout of Model Optimizer."""
    return Nvfp4Layer("weight", "weight_scale_2", divides=False)


def compressed_nvfp4() -> Nvfp4Layer:
    """Return the layout of compressed-tensors."""
    return Nvfp4Layer("weight_packed", "weight_global_scale", divides=True)
