"""Writes the weights of bitsandbytes and of 4-bit floating-point formats, from the descriptions of their layouts."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Write = Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]  # a weight: tensors by their ends, and what they stand for

NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
FP4_TWELFTHS = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
TABLES = {
    "nf4": torch.tensor(NF4_VALUES),
    "fp4": torch.tensor([*FP4_TWELFTHS, *(-value for value in FP4_TWELFTHS)]) / 12,
}
E2M1 = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)])


def nearest(values: Tensor, table: Tensor) -> Tensor:
    """Return the index of the nearest entry of a table for each value."""
    return (values[..., None] - table).abs().argmin(-1)


def blocks_of(values: Tensor, size: int) -> Tensor:
    """Return values, one after another, in blocks [blocks, size]; the last one is filled with zeros."""
    flat = values.flatten()
    return torch.nn.functional.pad(flat, (0, -len(flat) % size)).view(-1, size)


def bnb_4bit(kind: str, double: bool = False, block: int = 64, table: Tensor | None = None) -> Write:
    """table: of the codes, in place of that of the kind."""
    entries = TABLES[kind] if table is None else table

    def write(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        values = blocks_of(weight.float(), block)
        absmax = values.abs().amax(1)
        state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "float32", "shape": [*weight.shape]}
        tensors = {"weight.quant_map": entries.clone()}
        if double:
            nested_map, offset = torch.linspace(-1, 1, 256), float(absmax.mean())
            nested = blocks_of(absmax - offset, 256)
            nested_absmax = nested.abs().amax(1)
            stored = nearest(nested / nested_absmax[:, None], nested_map).flatten()[: len(absmax)].to(torch.uint8)
            tensors |= {"weight.nested_absmax": nested_absmax, "weight.nested_quant_map": nested_map}
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
            absmax = nested_map[stored.int()] * nested_absmax.repeat_interleave(256)[: len(absmax)] + offset
        codes = nearest(values / absmax[:, None].clamp_min(1e-30), entries)
        flat = codes.flatten()[: weight.numel() + weight.numel() % 2].to(torch.uint8)
        tensors |= {
            "weight": (flat[0::2] << 4 | flat[1::2])[:, None],
            "weight.absmax": stored if double else absmax,
            f"weight.quant_state.bitsandbytes__{kind}": torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8),
        }
        made = (entries[codes] * absmax[:, None]).flatten()[: weight.numel()]
        return tensors, made.view(weight.shape)

    return write


def bnb_8bit(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    weight = weight.float()
    largest = weight.abs().amax(1)
    values = (weight / largest[:, None] * 127).round().to(torch.int8)
    tensors = {"weight": values, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, values.float() * (largest / 127)[:, None]


def nvfp4(modelopt: bool) -> Write:
    """Return the writer of Model Optimizer's tensors, or of those of compressed-tensors."""

    def write(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        groups = weight.float().view(len(weight), -1, 16)
        divisor = 448 * 6 / groups.abs().amax()
        whole = 1 / divisor
        scales = (groups.abs().amax(2) / 6 * divisor).to(torch.float8_e4m3fn)
        of_groups = (scales.float() * whole)[..., None]
        codes = nearest(groups / of_groups.clamp_min(1e-30), E2M1)
        names = ("weight", "weight_scale_2") if modelopt else ("weight_packed", "weight_global_scale")
        tensors = {
            names[0]: nibbles(codes.flatten(1)),
            "weight_scale": scales,
            names[1]: whole.clone() if modelopt else divisor[None],
            "input_scale" if modelopt else "input_global_scale": torch.tensor(0.5),
        }
        return tensors, (E2M1[codes] * of_groups).flatten(1)

    return write


def mxfp4(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    groups = weight.float().view(len(weight), -1, 32)
    exponents = groups.abs().amax(2).clamp_min(1e-30).log2().floor() - 2
    codes = nearest(groups / exponents.exp2()[..., None], E2M1)
    tensors = {"weight_packed": nibbles(codes.flatten(1)), "weight_scale": (exponents + 127).to(torch.uint8)}
    return tensors, (E2M1[codes] * exponents.exp2()[..., None]).flatten(1)


def nibbles(codes: Tensor) -> Tensor:
    """Pack codes [R, C] into bytes, the first in the lower bits."""
    stored = codes.to(torch.uint8)
    return stored[:, 0::2] | stored[:, 1::2] << 4
