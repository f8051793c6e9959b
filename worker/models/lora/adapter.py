"""Loads a PEFT adapter for a decoder: `adapter_config.json` and `adapter_model.safetensors` of one folder.

Both files are read once, completely and up to a bound that follows from the model; the digest is of the bytes that are
used. Pickled adapters (`adapter_model.bin`) are never read.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from quire.kernels.lora import MAX_RANK, LoraPart
from quire.kernels.ops import Ops
from quire.worker.engine.adapters import Adapter
from quire.worker.models.config import ModelConfig
from quire.worker.models.errors import CheckpointError, NotSupported
from quire.worker.models.kv_scales import KVFactors
from quire.worker.models.lora.adapter_config import (
    ADAPTER_CONFIG,
    MERGE,
    PROJECTIONS,
    AdapterConfig,
    read_adapter_config,
)

ADAPTER_WEIGHTS = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1024 * 1024
MAX_HEADER_BYTES = 16 * 1024 * 1024
DIGEST_BYTES = 16
AGAIN = "copy the adapter again"
_TENSOR = re.compile(
    r"base_model\.model\.(model\.layers\.([0-9]{1,4})\.(?:self_attn|mlp)\.([a-z]{1,4}_proj))\.lora_([AB])\.weight"
)
# The linear layer of `kernels` that each projection is a part of.
_LINEAR_OF = dict(zip(PROJECTIONS, ("qkv", "qkv", "qkv", "o", "gate_up", "gate_up", "down"), strict=True))


def load_adapter(
    name: str, folder: Path, config: ModelConfig, ops: Ops, max_rank: int, kv_factors: Sequence[KVFactors] = ()
) -> Adapter:
    """Load and pack an adapter. Raises CheckpointError: one line with file, field, expected value and remedy.

    kv_factors: of each layer, which its weights already have; empty: none.
    """
    if not folder.is_dir():
        raise CheckpointError(folder, f"the folder of the adapter {name!r} is missing", "correct its path")
    settings = _read(folder / ADAPTER_CONFIG, MAX_CONFIG_BYTES)
    parsed = read_adapter_config(settings, str(folder / ADAPTER_CONFIG))
    path, most = folder / ADAPTER_WEIGHTS, min(max_rank, MAX_RANK)
    for rank in (parsed.rank, *parsed.ranks.values()):
        if rank > most:
            what = f"the rank {rank} is above --max-lora-rank {most}"
            remedy = f"raise it, up to {MAX_RANK}" if rank <= MAX_RANK else MERGE
            raise CheckpointError(folder / ADAPTER_CONFIG, what, remedy)
    expected = dict(_modules(config))
    largest = sum(4 * most * (rows + columns) for rows, columns in expected.values()) + MAX_HEADER_BYTES
    if not path.exists() and (folder / "adapter_model.bin").exists():
        what = "only adapter_model.bin is here, which is pickled and could run code"
        raise NotSupported(path, what, "save it with save_pretrained(..., safe_serialization=True) of peft")
    data = _read(path, largest)
    try:
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(path, f"this is not a complete safetensors file ({error})", AGAIN) from None
    factors = _factors(path, tensors, parsed, expected)
    _check_targets(path, parsed, factors, config)
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for content in (settings, data):
        digest.update(len(content).to_bytes(8, "little") + content)
    q_size, kv_size = config.q_size(0), config.kv_size(0)  # of all layers
    offsets = {"k_proj": q_size, "v_proj": q_size + kv_size, "up_proj": config.intermediate_size}
    layers: list[dict[str, list[LoraPart]]] = [{} for _ in range(config.num_layers)]
    for module, (a, b) in factors.items():
        layer, projection = int(module.split(".")[2]), module.rpartition(".")[2]
        scale = parsed.scale_of(module, len(a))
        if kv_factors:
            scale *= kv_factors[layer].of_projection(projection, config.qk_norm)
        part = LoraPart(a, b, scale, offsets.get(projection, 0))
        layers[layer].setdefault(_LINEAR_OF[projection], []).append(part)
    packed = ops.pack_adapter(layers, config.intermediate_size)
    return Adapter(name, digest.hexdigest(), packed, max((len(a) for a, _ in factors.values()), default=0))


def _modules(config: ModelConfig) -> list[tuple[str, tuple[int, int]]]:
    """Return the shape of each projection of the model by its name, without `.weight`."""
    return [
        (name.removesuffix(".weight"), (shape[0], shape[1]))
        for name, shape in config.tensor_shapes().items()
        if name.endswith("_proj.weight")
    ]


def _factors(
    path: Path, tensors: dict[str, torch.Tensor], config: AdapterConfig, expected: dict[str, tuple[int, int]]
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return A [rank, in] and B [out, rank] of each module, checked."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in sorted(tensors.items()):
        match = _TENSOR.fullmatch(name)
        if match is None or match[3] not in PROJECTIONS:
            what = f"tensor {name[:200]} is not of a projection that an adapter may change ({', '.join(PROJECTIONS)})"
            raise NotSupported(path, what, MERGE)
        if match[1] not in expected:
            what = f"tensor {name} is of a layer that this model does not have{_of(config)}"
            raise CheckpointError(path, what, "give an adapter that was trained for this model")
        found.setdefault(match[1], {})[match[4]] = _checked(path, name, tensor)
    if not found:
        raise CheckpointError(path, "this file has no tensors", AGAIN)
    factors = {}
    for module in (name for name in expected if name in found):
        pair = found[module]
        for side in "AB":
            if side not in pair:
                raise CheckpointError(path, f"tensor base_model.model.{module}.lora_{side}.weight is missing", AGAIN)
        (rows, columns), rank = expected[module], config.rank_of(module)
        for side, shape in (("A", (rank, columns)), ("B", (rows, rank))):
            if pair[side].shape != shape:
                name = f"base_model.model.{module}.lora_{side}.weight"
                what = f"tensor {name} has the shape {list(pair[side].shape)}, expected {list(shape)}{_of(config)}"
                raise CheckpointError(path, what, "give an adapter that was trained for this model")
        kept = torch.bfloat16 if {one.dtype for one in pair.values()} == {torch.bfloat16} else torch.float32
        factors[module] = (pair["A"].to(kept).contiguous(), pair["B"].to(kept).contiguous())
    return factors


def _checked(path: Path, name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        what = f"tensor {name} has the type {str(tensor.dtype)[6:]}, expected float32, bfloat16 or float16"
        raise CheckpointError(path, what, "save the adapter in one of these types")
    if not bool(tensor.isfinite().all()):
        raise CheckpointError(path, f"tensor {name} has values that are not finite", AGAIN)
    return tensor


def _check_targets(
    path: Path, config: AdapterConfig, factors: dict[str, tuple[torch.Tensor, torch.Tensor]], model: ModelConfig
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
