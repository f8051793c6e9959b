"""Writes quantised checkpoints of each format from a plain one, with the weights that they stand for.

The layouts are written from their descriptions, apart from the readers: docs/models.md says how the published tools
were compared.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.quantized_floats import Write, bnb_4bit, bnb_8bit, mxfp4, nvfp4

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MIXTRAL_EXPERTS = ("w1", "w2", "w3")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass
class Integers:
    """values [N, K] from 0; weight = (values - zeros) * scales by groups [K]."""

    values: Tensor
    zeros: Tensor  # [N, G]
    scales: Tensor  # [N, G]
    groups: Tensor
    bits: int

    @property
    def weight(self) -> Tensor:
        return (self.values - self.zeros[:, self.groups]).float() * self.scales.float()[:, self.groups]


def rounded(weight: Tensor, bits: int, size: int, symmetric: bool, dtype: torch.dtype, order: bool = False) -> Integers:
    """Round to groups of `size` input features; 0: one group. order: the features of a group are far apart."""
    k = weight.shape[1]
    groups = torch.arange(k) // (size or k)
    if order:
        groups = groups[torch.randperm(k, generator=torch.Generator().manual_seed(3))]
    levels, count = (1 << bits) - 1, int(groups.max()) + 1
    high = torch.stack([weight[:, groups == at].amax(1) for at in range(count)], 1).clamp_min(0)
    low = torch.stack([weight[:, groups == at].amin(1) for at in range(count)], 1).clamp_max(0)
    if symmetric:
        largest = torch.maximum(high, -low)
        scales = (largest / (levels // 2)).to(dtype)
        zeros = torch.full_like(scales, (levels + 1) // 2, dtype=torch.int64)
    else:
        scales = ((high - low) / levels).to(dtype)
        zeros = (-low / scales.float()).round().clamp(0, levels).long()
    values = (weight / scales.float()[:, groups]).round() + zeros[:, groups]
    return Integers(values.clamp(0, levels).long(), zeros, scales, groups, bits)


def packed(values: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack the last dimension of integers from 0 into words of 32 bits, the first in the lowest bits."""
    per_word = 32 // bits
    padded = torch.nn.functional.pad(values, (0, -values.shape[-1] % per_word)).view(len(values), -1, per_word)
    if order:
        padded = padded[..., list(order)]
    words = (padded << (torch.arange(per_word) * bits)).sum(-1)
    return words.to(torch.int32) if bits else words


def gptq(bits: int = 4, size: int = 32, symmetric: bool = True, order: bool = False, version: int = 1) -> Write:
    def write(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        made = rounded(weight, bits, size, symmetric, torch.float16, order)
        zeros = packed(made.zeros.T, bits)
        if version == 1:
            zeros = zeros - (0x11111111 if bits == 4 else 0x01010101)
        tensors = {
            "qweight": packed(made.values, bits).T,
            "qzeros": zeros,
            "scales": made.scales.T,
            "g_idx": made.groups.int(),
        }
        return tensors, made.weight

    return write


def awq(size: int = 32) -> Write:
    def write(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        made = rounded(weight, 4, size, False, torch.float16)
        tensors = {
            "qweight": packed(made.values.T, 4, AWQ_ORDER),
            "qzeros": packed(made.zeros.T, 4, AWQ_ORDER),
            "scales": made.scales.T,
        }
        return tensors, made.weight

    return write


def compressed(
    bits: int,
    size: int = 0,
    symmetric: bool = True,
    pack: bool = True,
    order: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Write:
    def write(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        made = rounded(weight, bits, size, symmetric, dtype, order)
        half = 1 << (bits - 1)
        tensors = {"weight_scale": made.scales}
        if pack:
            tensors["weight_packed"] = packed(made.values, bits)
            tensors["weight_shape"] = torch.tensor(weight.shape)
        else:
            tensors["weight"] = (made.values - half).to(torch.int8)
        if not symmetric:
            zeros = packed(made.zeros.T, bits).T if pack else (made.zeros - half).to(torch.int8)
            tensors["weight_zero_point"] = zeros
        if order:
            tensors["weight_g_idx"] = made.groups.int()
        return tensors, made.weight

    return write


def fp8(block: tuple[int, int] | None, scale: str, dtype: torch.dtype = torch.float32, flat: bool = False) -> Write:
    """block: None for a scale per tensor; (1, 0) for one per channel."""

    def write(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        n, k = weight.shape
        height, width = (n, k) if block is None else (block[0], block[1] or k)
        rows, columns = torch.arange(n) // height, torch.arange(k) // width
        padded = torch.nn.functional.pad(weight.abs(), (0, -k % width, 0, -n % height))
        scales = padded.view(-1, height, padded.shape[1] // width, width).amax((1, 3)).float() / 448
        scales = scales.to(dtype)
        spread = scales.float()[rows][:, columns]
        values = (weight / spread).to(torch.float8_e4m3fn)
        stored = scales.reshape(()) if flat else scales
        return {"weight": values, scale: stored}, values.float() * spread

    return write


def group(bits: int, kind: str = "int", activations: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    """Return one group of a compressed-tensors configuration."""
    weights = {"num_bits": bits, "type": kind, "symmetric": True, "dynamic": False, **weights}
    return {"targets": ["Linear"], "weights": weights, "input_activations": activations}


def scheme(stored: str, of_group: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Return a compressed-tensors configuration of one group."""
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": of_group},
        **fields,
    }


def bnb(**fields: Any) -> dict[str, Any]:
    """Return a configuration of bitsandbytes."""
    return {"quant_method": "bitsandbytes", "llm_int8_threshold": 6.0, "llm_int8_skip_modules": None, **fields}


TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
BF16 = torch.bfloat16
# Name: writer, configuration.
FORMATS: dict[str, tuple[Write, dict[str, Any]]] = {
    "gptq": (gptq(), {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}),
    "gptq-asym": (gptq(symmetric=False), {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}),
    "gptq-v2-asym": (
        gptq(symmetric=False, version=2),
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "checkpoint_format": "gptq_v2"},
    ),
    "gptq-order": (
        gptq(size=16, order=True),
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": True, "desc_act": True},
    ),
    "gptq-order-32": (
        gptq(size=32, order=True, symmetric=False),
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": True},
    ),
    "gptq-8-asym": (
        gptq(bits=8, size=32, symmetric=False),
        {"quant_method": "gptq", "bits": 8, "group_size": 32, "sym": False},
    ),
    "gptq-8": (gptq(bits=8, size=0), {"quant_method": "gptq", "bits": 8, "group_size": -1, "sym": True}),
    "awq": (awq(), {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}),
    "w8a8": (
        compressed(8, pack=False),
        scheme("int-quantized", group(8, strategy="channel", activations=TOKENS)),
    ),
    "w4a16": (
        compressed(4, 32),
        scheme("pack-quantized", group(4, strategy="group", group_size=32)),
    ),
    "w4a16-asym": (
        compressed(4, 16, symmetric=False),
        scheme("pack-quantized", group(4, strategy="group", group_size=16, symmetric=False)),
    ),
    "w4a16-order": (
        compressed(4, 32, order=True),
        scheme("pack-quantized", group(4, strategy="group", group_size=32, actorder="group")),
    ),
    "w4a16-channel": (compressed(4), scheme("pack-quantized", group(4, strategy="channel"))),
    "w8a16": (compressed(8), scheme("pack-quantized", group(8, strategy="channel"))),
    "w8a16-asym": (
        compressed(8, 32, symmetric=False),
        scheme("pack-quantized", group(8, strategy="group", group_size=32, symmetric=False)),
    ),
    "w8a16-float32": (compressed(8, dtype=torch.float32), scheme("pack-quantized", group(8, strategy="channel"))),
    "ct-fp8-channel": (
        fp8((1, 0), "weight_scale", BF16),
        scheme("float-quantized", group(8, "float", strategy="channel")),
    ),
    "ct-fp8-block": (
        fp8((32, 32), "weight_scale"),
        scheme("float-quantized", group(8, "float", strategy="block", block_structure=[32, 32])),
    ),
    "fp8-block": (
        fp8((32, 32), "weight_scale_inv"),
        {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic", "fmt": "e4m3"},
    ),
    "fp8-tensor": (fp8(None, "weight_scale", flat=True), {"quant_method": "fp8", "activation_scheme": "static"}),
    "fbgemm": (fp8((1, 0), "weight_scale"), {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}),
    "nf4": (bnb_4bit("nf4"), bnb(load_in_4bit=True, bnb_4bit_quant_type="nf4")),
    "nf4-double": (bnb_4bit("nf4", double=True), bnb(load_in_4bit=True, bnb_4bit_quant_type="nf4")),
    "fp4": (bnb_4bit("fp4"), bnb(load_in_4bit=True, bnb_4bit_quant_type="fp4")),
    "bnb-int8": (bnb_8bit, bnb(load_in_8bit=True)),
    "modelopt-nvfp4": (
        nvfp4(modelopt=True),
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"], "kv_cache_scheme": "FP8"},
    ),
    "modelopt-fp8": (
        fp8(None, "weight_scale", flat=True),
        {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head", "model.layers.0*"]},
    ),
    "ct-nvfp4": (
        nvfp4(modelopt=False),
        scheme("nvfp4-pack-quantized", group(4, "float", strategy="tensor_group", group_size=16)),
    ),
    "ct-mxfp4": (mxfp4, scheme("mxfp4-pack-quantized", group(4, "float", strategy="group", group_size=32))),
    "gptq-auto-round": (
        gptq(symmetric=False, version=2),
        {"quant_method": "auto-round", "packing_format": "auto_round", "bits": 4, "group_size": 32, "sym": False},
    ),
    "awq-auto-round": (
        awq(),
        {"quant_method": "intel/auto-round", "packing_format": "auto_round:auto_awq", "bits": 4, "group_size": 32},
    ),
}
# The kinds of weights in memory that the names of the formats do not say.
KINDS = {"nf4": "nf4", "nf4-double": "nf4", "fp4": "fp4", "bnb-int8": "sint8", "w8a16-float32": "sint8",
         "modelopt-nvfp4": "nvfp4", "ct-nvfp4": "nvfp4", "ct-mxfp4": "mxfp4"}  # fmt: skip


# The value of --quantization that keeps all quantised layers of a format as they are stored; "": none does.
STORED_AS = dict.fromkeys(FORMATS, "") | {
    **dict.fromkeys(("gptq", "w4a16", "w4a16-channel"), "int4"),
    **dict.fromkeys(("gptq-8", "w8a8", "w8a16", "w8a16-float32", "bnb-int8"), "int8"),
    **dict.fromkeys(("modelopt-fp8", "ct-fp8-channel", "ct-fp8-block", "fp8-block", "fp8-tensor", "fbgemm"), "fp8"),
}


def quantize_checkpoint(
    source: Path,
    folder: Path,
    name: str,
    dtype: torch.dtype = torch.float32,
    layers: tuple[str, ...] = PROJECTIONS + MIXTRAL_EXPERTS,
) -> Path:
    """Write `source` in a format of FORMATS, and the dequantised weights in `dtype` into its folder `plain`.

    layers: last parts of the names of the layers that are quantised. Returns the folder.
    """
    write, quantization = FORMATS[name]
    plain = load_file(source / "model.safetensors")
    stored: dict[str, Tensor] = {}
    for tensor_name, tensor in plain.items():
        *_, layer, kind = tensor_name.split(".")
        if layer not in layers or kind != "weight":
            stored[tensor_name] = tensor.to(torch.bfloat16)
            plain[tensor_name] = stored[tensor_name].float()
            continue
        tensors, weight = write(tensor)
        plain[tensor_name] = weight.to(dtype).float()
        stored |= {tensor_name.removesuffix("weight") + end: part.contiguous() for end, part in tensors.items()}
    for path, tensors in ((folder, stored), (folder / "plain", plain)):
        shutil.copytree(source, path)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, quantization_config=quantization)
    return folder


def edit_config(folder: Path, **fields: Any) -> None:
    """Change fields of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Change the tensors of a checkpoint."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
