"""Seeded inputs of the self-test, and the budget of its cases."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.kernels.fp8_rows import FP8_DYNAMIC
from quire.kernels.grouped_weight import BITS, FP8, GROUP, MAX_ZEROS, GroupedWeight, to_fp8
from quire.kernels.ops import Ops
from quire.kernels.quantization import quantize
from quire.kernels.self_test.cases import UNITS
from quire.kernels.weights import LinearWeight

QUICK, FULL = "quick", "full"
SEED = 20
FLOATS = {"": None, "bfloat16": torch.bfloat16, "float16": torch.float16}  # kinds of `LinearUse`: their types
# Largest number of elements of random weights of a case.
MOST_ELEMENTS = {("cpu", QUICK): 1 << 17, ("cpu", FULL): 1 << 22, ("cuda", QUICK): 1 << 22, ("cuda", FULL): 1 << 25}


@dataclass(frozen=True)
class CaseInputs:
    """Random inputs on the device and in the types of operations. level: QUICK or FULL."""

    ops: Ops
    level: str

    @property
    def unit(self) -> float:
        """The relative difference of two neighbouring numbers of the type of activations."""
        return UNITS[self.ops.dtype]

    @property
    def most_elements(self) -> int:
        return MOST_ELEMENTS[self.ops.device.type, self.level]

    @property
    def types(self) -> str:
        """The types of activations and of the cache, for the log."""
        kinds = dict.fromkeys((self.ops.dtype, self.ops.kv_dtype))
        return " with a cache in ".join(str(kind).removeprefix("torch.") for kind in kinds)

    def generator(self, salt: int = 0) -> torch.Generator:
        """Return a generator of the host, so that inputs are the same on every device."""
        return torch.Generator("cpu").manual_seed(SEED + salt)

    def normal(self, *shape: int, generator: torch.Generator, dtype: torch.dtype | None = None) -> Tensor:
        """Return normal numbers of the type of activations."""
        made = torch.randn(shape, generator=generator, device="cpu")
        return made.to(self.ops.dtype if dtype is None else dtype).to(self.ops.device)

    def angles(self, count: int, width: int, generator: torch.Generator) -> Tensor:
        """Return the cosines and the sines of random angles, [count, 2 * width] float32: a table of rotations."""
        angles = torch.rand(count, width, generator=generator, device="cpu") * (2 * math.pi)
        return torch.cat([angles.cos(), angles.sin()], dim=1).to(self.ops.device)

    def integers(self, numbers: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(numbers, dtype=dtype, device="cpu").to(self.ops.device)

    def weight(self, n: int, k: int, kind: str, generator: torch.Generator) -> tuple[LinearWeight, Tensor]:
        """Return random weights [N, K] of a kind of `LinearUse`, and their values in float32."""
        plain = self.normal(n, k, generator=generator, dtype=torch.float32) / k**0.5
        if kind in FLOATS:
            kept = plain.to(FLOATS[kind] or self.ops.dtype)
            return kept, kept.float()
        if kind in ("int8", "int4"):
            quantised = quantize(plain.cpu(), int(kind[3:]))
            return quantised, quantised.dequantized()
        if kind not in (FP8, FP8_DYNAMIC):
            grouped = self._codes(n, k, kind, generator)
        elif kind == FP8_DYNAMIC:
            grouped = to_fp8(plain)
        else:  # with scales of groups, because weights with a scale per channel may be multiplied by another kernel
            grouped = to_fp8(plain)
            grouped = replace(grouped, scales=grouped.scales * self._halves(grouped.scales.shape[1]))
        return grouped, grouped.dequantized(self.ops.dtype).float()

    def _halves(self, groups: int) -> Tensor:
        """Return 1 and 1/2 in turn."""
        return (-(torch.arange(groups, device=self.ops.device) % 2)).float().exp2()

    def _codes(self, n: int, k: int, kind: str, generator: torch.Generator) -> GroupedWeight:
        groups, device = -(-k // GROUP), self.ops.device

        def integers(low: int, high: int, columns: int) -> Tensor:
            return torch.randint(low, high, (n, columns), generator=generator, device="cpu").to(device)

        codes = integers(0, 1 << BITS[kind], k).to(torch.uint8)
        scales = integers(-3, 1, groups).float().exp2() / (4 * k**0.5)
        zeros = None
        if kind in MAX_ZEROS:
            scales = (scales * 16 / (1 << BITS[kind])).half().float()
            zeros = integers(0, MAX_ZEROS[kind] + 1, groups).to(torch.uint8)
        return GroupedWeight(codes, scales, kind, zeros)
