"""Loads a PEFT adapter for a decoder: `adapter_config.json` and `adapter_model.safetensors` of one folder.

An adapter of a vision-language model may change other parts than the text model. These are left out with a warning.
Both files are read once, completely and up to a bound that follows from the model; the digest is of the bytes that are
used. Pickled adapters (`adapter_model.bin`) are never read.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from quire.kernels.ops import MAX_RANK, LoraPart, Ops
from quire.shared.process.errors import CheckpointError, NotSupported
from quire.worker.engine.sequence import Adapter
from quire.worker.models.files.kv_scales import KVFactors
from quire.worker.models.files.lora.adapter_config import (
    ADAPTER_CONFIG,
    MERGE,
    PROJECTIONS,
    AdapterConfig,
    read_adapter_config,
)
from quire.worker.models.files.tensor_names import text_tensor_name

log = logging.getLogger(__name__)

ADAPTER_WEIGHTS = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1024 * 1024
MAX_HEADER_BYTES = 16 * 1024 * 1024
DIGEST_BYTES = 16
AGAIN = "copy the adapter again"
PREFIX = "base_model.model."
FACTORS = {".lora_A.weight": "A", ".lora_B.weight": "B"}
_PROJECTION = re.compile(r"model\.layers\.[0-9]{1,4}\.(?:self_attn|mlp)\.([a-z]{1,4}_proj)")
# Names of a text model begin so. All other tensors of a vision-language model are those of towers and projectors.
TEXT = ("model.layers.", "model.norm.", "model.embed_tokens.", "lm_head.", "layers.", "norm.", "embed_tokens.")
# The linear layer of `kernels` that each projection is a part of.
_LINEAR_OF = dict(zip(PROJECTIONS, ("qkv", "qkv", "qkv", "o", "gate_up", "gate_up", "down"), strict=True))


class AdaptedModel(Protocol):
    """The configuration of the model that an adapter changes."""

    @property
    def num_layers(self) -> int: ...

    @property
    def intermediate_size(self) -> int: ...

    @property
    def qk_norm(self) -> bool: ...

    @property
    def is_wrapped(self) -> bool:
        """True if the checkpoint is a vision-language model around this text model."""

    def q_size(self, layer: int) -> int: ...

    def kv_size(self, layer: int) -> int: ...

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]: ...


def load_adapter(
    name: str, folder: Path, config: AdaptedModel, ops: Ops, max_rank: int, kv_factors: Sequence[KVFactors] = ()
) -> Adapter:
    """Load and pack an adapter. Raises CheckpointError: one line with file, field, expected value and remedy.

    kv_factors: of each layer, which its weights already have; empty: none.
    """
    if not folder.is_dir():
        raise CheckpointError(folder, f"the folder of the adapter {name!r} is missing", "correct its path")
    settings = _read(folder / ADAPTER_CONFIG, MAX_CONFIG_BYTES)
    parsed = read_adapter_config(settings, str(folder / ADAPTER_CONFIG))
    path, most = folder / ADAPTER_WEIGHTS, min(max_rank, MAX_RANK)
    if parsed.largest_rank > most:
        what = f"the rank {parsed.largest_rank} is above --max-lora-rank {most}"
        remedy = f"raise it, up to {MAX_RANK}" if parsed.largest_rank <= MAX_RANK else MERGE
        raise CheckpointError(folder / ADAPTER_CONFIG, what, remedy)
    expected = dict(_modules(config))
    largest = sum(4 * most * (rows + columns) for rows, columns in expected.values())
    largest = largest * (2 if config.is_wrapped else 1) + MAX_HEADER_BYTES  # a tower is smaller than its text model
    if not path.exists() and (folder / "adapter_model.bin").exists():
        what = "only adapter_model.bin is here, which is pickled and could run code"
        raise NotSupported(path, what, "save it with save_pretrained(..., safe_serialization=True) of peft")
    data = _read(path, largest)
    try:
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(path, f"this is not a complete safetensors file ({error})", AGAIN) from None
    if config.is_wrapped:
        tensors = _of_text(path, tensors)
    factors, names = _factors(path, tensors, parsed, expected)
    _check_targets(path, parsed, factors, config)
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for content in (settings, data):
        digest.update(len(content).to_bytes(8, "little") + content)
    q_size, kv_size = config.q_size(0), config.kv_size(0)  # of all layers
    offsets = {"k_proj": q_size, "v_proj": q_size + kv_size, "up_proj": config.intermediate_size}
    layers: list[dict[str, list[LoraPart]]] = [{} for _ in range(config.num_layers)]
    for module, (a, b) in factors.items():
        layer, projection = int(module.split(".")[2]), module.rpartition(".")[2]
        scale = parsed.scale_of(names[module], len(a))
        if kv_factors:
            scale *= kv_factors[layer].of_projection(projection, config.qk_norm)
        part = LoraPart(a, b, scale, offsets.get(projection, 0))
        layers[layer].setdefault(_LINEAR_OF[projection], []).append(part)
    packed = ops.pack_adapter(layers, config.intermediate_size)
    return Adapter(name, digest.hexdigest(), packed, max((len(a) for a, _ in factors.values()), default=0))


def _modules(config: AdaptedModel) -> list[tuple[str, tuple[int, int]]]:
    """Return the shape of each projection of the model by its name, without `.weight`."""
    return [
        (name.removesuffix(".weight"), (shape[0], shape[1]))
        for name, shape in config.tensor_shapes().items()
        if name.endswith("_proj.weight")
    ]


def _of_text(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of the text model, and log a warning about others."""
    others = sorted(name for name in tensors if not text_tensor_name(name.removeprefix(PREFIX)).startswith(TEXT))
    if others:
        shown = ", ".join(others[:2])[:400] + (", ..." if len(others) > 2 else "")
        log.warning("%s: %d tensors are not of the text model and are not used: %s", path, len(others), shown)
    return {name: tensor for name, tensor in tensors.items() if name not in set(others)}


def _factors(
    path: Path, tensors: dict[str, torch.Tensor], config: AdapterConfig, expected: dict[str, tuple[int, int]]
) -> tuple[dict[str, tuple[torch.Tensor, torch.Tensor]], dict[str, str]]:
    """Return A [rank, in] and B [out, rank] of each module, checked, and the names that the adapter has for modules."""
    pairs: dict[str, dict[str, tuple[str, torch.Tensor]]] = {}
    names = {}
    for name, tensor in sorted(tensors.items()):
        own, side = _module_of(path, name)
        module = text_tensor_name(own)
        if module not in expected:
            what = f"tensor {name} is of a layer that this model does not have{_of(config)}"
            raise CheckpointError(path, what, "give an adapter that was trained for this model")
        pair = pairs.setdefault(module, {})
        if side in pair:
            raise CheckpointError(path, f"tensors {pair[side][0]} and {name} are of the same module", AGAIN)
        pair[side], names[module] = (name, _checked(path, name, tensor)), own
    if not pairs:
        raise CheckpointError(path, "this file has no tensors of the text model", AGAIN)
    factors = {}
    for module in (name for name in expected if name in pairs):
        pair = pairs[module]
        for side in "AB":
            if side not in pair:
                raise CheckpointError(path, f"tensor {PREFIX}{names[module]}.lora_{side}.weight is missing", AGAIN)
        (rows, columns), rank = expected[module], config.rank_of(names[module])
        for side, shape in (("A", (rank, columns)), ("B", (rows, rank))):
            name, tensor = pair[side]
            if tensor.shape != shape:
                what = f"tensor {name} has the shape {list(tensor.shape)}, expected {list(shape)}{_of(config)}"
                raise CheckpointError(path, what, "give an adapter that was trained for this model")
        a, b = pair["A"][1], pair["B"][1]
        kept = torch.bfloat16 if {a.dtype, b.dtype} == {torch.bfloat16} else torch.float32
        factors[module] = (a.to(kept).contiguous(), b.to(kept).contiguous())
    return factors, names


def _module_of(path: Path, name: str) -> tuple[str, str]:
    """Return the module and the factor, A or B, that a tensor belongs to."""
    end = next((end for end in FACTORS if name.endswith(end)), None)
    if end is not None and name.startswith(PREFIX):
        module = name.removeprefix(PREFIX).removesuffix(end)
        match = _PROJECTION.fullmatch(text_tensor_name(module))
        if match is not None and match[1] in PROJECTIONS:
            return module, FACTORS[end]
    what = f"tensor {name[:200]} is not of a projection that an adapter may change ({', '.join(PROJECTIONS)})"
    raise NotSupported(path, what, MERGE)


def _checked(path: Path, name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        what = f"tensor {name} has the type {str(tensor.dtype)[6:]}, expected float32, bfloat16 or float16"
        raise CheckpointError(path, what, "save the adapter in one of these types")
    if not bool(tensor.isfinite().all()):
        raise CheckpointError(path, f"tensor {name} has values that are not finite", AGAIN)
    return tensor


def _check_targets(
    path: Path, config: AdapterConfig, factors: dict[str, tuple[torch.Tensor, torch.Tensor]], model: AdaptedModel
) -> None:
    """Raise CheckpointError if a module of `target_modules` has no tensors, or one that is not in it has some."""
    if config.targets is None:
        return
    for module, _ in _modules(model):
        if module.rpartition(".")[2] in config.targets and module not in factors:
            what = f"tensor base_model.model.{module}.lora_A.weight is missing, and target_modules has its module"
            raise CheckpointError(path, what, AGAIN)
    for module in factors:
        if module.rpartition(".")[2] not in config.targets:
            what = f"tensor base_model.model.{module}.lora_A.weight is of no module of target_modules"
            raise CheckpointError(path, what, AGAIN)


def _of(config: AdapterConfig) -> str:
    return f" (base_model_name_or_path of the adapter: {config.base})" if config.base else ""


def _read(path: Path, limit: int) -> bytes:
    """Read a file of at most `limit` bytes. Raises CheckpointError."""
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except FileNotFoundError:
        raise CheckpointError(path, "this file of the adapter is missing", AGAIN) from None
    except OSError as error:
        raise CheckpointError(path, f"this file cannot be read ({error.strerror})", AGAIN) from None
    if len(data) > limit:
        what = f"this file is larger than {limit} bytes, the most for this model and --max-lora-rank"
        raise CheckpointError(path, what, "give an adapter that was trained for this model")
    return data
