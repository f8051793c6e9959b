"""The tensors of a PEFT adapter by the module that they change, each with a name, a shape and a type that fit."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from quire.shared.process.errors import CheckpointError, NotSupported
from quire.worker.models.files.loader import TORCH_DTYPES
from quire.worker.models.files.lora.adapter_config import MERGE, PROJECTIONS, AdapterConfig
from quire.worker.models.files.tensor_names import text_tensor_name

AGAIN = "copy the adapter again"
OTHER_MODEL = "give an adapter that was trained for this model"
PREFIX = "base_model.model."
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
# Ends of names of tensors, and what the tensor is of its module. The first that fits counts.
ENDINGS = {
    ".lora_A.weight": "A",
    ".lora_B.weight": "B",
    ".lora_embedding_A": "A",
    ".lora_embedding_B": "B",
    ".lora_B.bias": "bias of B",
    ".lora_magnitude_vector": "magnitude",
    ".lora_magnitude_vector.weight": "magnitude",
    ".token_adapter.trainable_tokens_delta": "rows",
    ".base_layer.weight": "weight",
    ".base_layer.bias": "bias",
    ".weight": "weight",
    ".bias": "bias",
}
FACTORS = frozenset({"A", "B", "bias of B", "magnitude"})
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Other types are refused by name, or are of towers.
STORED = TORCH_DTYPES | {
    "F64": torch.float64, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModuleTensors:
    """The tensors of one module.

    name: of the module in the model that was trained. parts: by the values of ENDINGS, each with its name.
    """

    name: str
    parts: dict[str, tuple[str, torch.Tensor]] = field(default_factory=dict)

    def get(self, part: str) -> torch.Tensor | None:
        return self.parts[part][1] if part in self.parts else None

    def factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A [rank, K] and B [N, rank] in one type: bfloat16, or float32."""
        a, b = self.parts["A"][1], self.parts["B"][1]
        kept = torch.bfloat16 if {a.dtype, b.dtype} == {torch.bfloat16} else torch.float32
        return a.to(kept).contiguous(), b.to(kept).contiguous()

    @property
    def has_factors(self) -> bool:
        return "A" in self.parts


def parse_tensors(path: Path, data: bytearray) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file as views of its content.

    The library copies each tensor and holds Python's lock meanwhile, so steps would wait for large tables. Raises
    CheckpointError.
    """
    try:
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:start])
        header.pop("__metadata__", None)
        return {name: _view(data, start, entry) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        what = f"this is not a complete safetensors file ({str(error)[:200]})"
        raise CheckpointError(path, what, AGAIN) from None


def _view(data: bytearray, start: int, entry: dict[str, Any]) -> torch.Tensor:
    """Return a tensor by its entry of the header. start: of all tensors. Raises ValueError, KeyError, TypeError."""
    dtype, shape, (first, end) = STORED[entry["dtype"]], entry["shape"], entry["data_offsets"]
    numbers = (*shape, first, end)
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("a shape or an offset is no whole number")
    if start + end > len(data) or math.prod(shape) * dtype.itemsize != end - first:
        raise ValueError(f"bytes {first} to {end} are not a tensor of the shape {shape}")
    if first == end:
        return torch.empty(shape, dtype=dtype)
    stored = torch.frombuffer(data, dtype=torch.uint8, count=end - first, offset=start + first)
    return (stored.clone() if (start + first) % dtype.itemsize else stored).view(dtype).view(shape)


def sort_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], config: AdapterConfig, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, ModuleTensors]:
    """Return the tensors of an adapter by the canonical names of their modules, in the order of `shapes`.

    shapes: of the weights that an adapter may change, by module: projections, EMBEDDING, HEAD and norms. Raises
    CheckpointError.
    """
    modules: dict[str, ModuleTensors] = {}
    for name, tensor in sorted(tensors.items()):
        own, part = _module_of(path, name)
        module = text_tensor_name(f"{own}.").removesuffix(".")
        if module not in shapes:
            what = f"tensor {name[:200]} is of a layer that this model does not have{_of(config)}"
            raise CheckpointError(path, what, OTHER_MODEL)
        _check_kind(path, name, module, part, shapes[module])
        found = modules.setdefault(module, ModuleTensors(own))
        if part in found.parts:
            raise CheckpointError(path, f"tensors {found.parts[part][0]} and {name} are of the same module", AGAIN)
        found.parts[part] = name, _checked(path, name, tensor)
    if not modules:
        raise CheckpointError(path, "this file has no tensors of the text model", AGAIN)
    ordered = {module: modules[module] for module in shapes if module in modules}
    for module, found in ordered.items():
        _check_shapes(path, module, found, config, shapes[module])
    return ordered


def _module_of(path: Path, name: str) -> tuple[str, str]:
    """Return the module that a tensor belongs to, and what it is of it."""
    end = next((end for end in ENDINGS if name.endswith(end)), None)
    if end is None or not name.startswith(PREFIX):
        raise _unknown(path, name)
    return name.removeprefix(PREFIX).removesuffix(end), ENDINGS[end]


def _check_kind(path: Path, name: str, module: str, part: str, shape: tuple[int, ...]) -> None:
    """Raise NotSupported for a part that a module of this kind may not have."""
    is_projection = module.rpartition(".")[2] in PROJECTIONS
    if is_projection and part == "weight":
        what = f"tensor {name[:200]} replaces a linear layer, and only embed_tokens, lm_head and norms may be replaced"
        raise NotSupported(path, what, MERGE)
    allowed = {"weight"} if len(shape) == 1 else FACTORS | {"bias"} if is_projection else FACTORS | {"weight", "rows"}
    if part not in allowed or (module == EMBEDDING and part == "bias of B"):
        raise _unknown(path, name)


def _unknown(path: Path, name: str) -> NotSupported:
    what = (
        f"tensor {name[:200]} is not of a layer that an adapter may change ({', '.join(PROJECTIONS)}, embed_tokens, "
        "lm_head, norms)"
    )
    return NotSupported(path, what, MERGE)


def _check_shapes(
    path: Path, module: str, found: ModuleTensors, config: AdapterConfig, weight: tuple[int, ...]
) -> None:
    tensors = {part: tensor for part, (_, tensor) in found.parts.items()}
    for part in "AB":
        if part not in tensors and tensors.keys() & FACTORS:
            end = f"lora_embedding_{part}" if module == EMBEDDING else f"lora_{part}.weight"
            raise CheckpointError(path, f"tensor {PREFIX}{found.name}.{end} is missing", AGAIN)
    if found.has_factors and ("magnitude" in tensors) != config.uses_dora:
        name = found.parts["magnitude" if "magnitude" in tensors else "A"][0]
        what = f"use_dora is {config.uses_dora}, and the module of tensor {name} has"
        raise CheckpointError(path, f"{what} {'a' if 'magnitude' in tensors else 'no'} lora_magnitude_vector", AGAIN)
    rank = config.rank_of(found.name)
    # The embedding is a table of rows, so its factors are those of the transposed weights.
    rows, columns = (weight[::-1] if module == EMBEDDING else weight) if len(weight) == 2 else (weight[0], 0)
    expected: dict[str, tuple[int, ...]] = {
        "A": (rank, columns),
        "B": (rows, rank),
        "bias of B": (rows,),
        "magnitude": (rows,),
        "bias": (rows,),
        "weight": weight,
    }
    if "rows" in tensors:
        expected["rows"] = (len(config.own_tokens(module)), weight[-1])
    for part, (name, tensor) in found.parts.items():
        shape = expected[part]
        if part == "weight" and len(shape) == 2 and tensor.dim() == 2 and len(tensor) > shape[0]:
            what = f"tensor {name} has {len(tensor)} tokens, and the model has {shape[0]}: added tokens are not served"
            raise NotSupported(path, what, MERGE)
        if tensor.shape != shape:
            what = f"tensor {name} has the shape {list(tensor.shape)}, expected {list(shape)}{_of(config)}"
            raise CheckpointError(path, what, OTHER_MODEL)


def _checked(path: Path, name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype not in DTYPES:
        what = f"tensor {name} has the type {str(tensor.dtype)[6:]}, expected float32, bfloat16 or float16"
        raise CheckpointError(path, what, "save the adapter in one of these types")
    if not bool(tensor.isfinite().all()):
        raise CheckpointError(path, f"tensor {name} has values that are not finite", AGAIN)
    return tensor


def _of(config: AdapterConfig) -> str:
    return f" (base_model_name_or_path of the adapter: {config.base})" if config.base else ""
