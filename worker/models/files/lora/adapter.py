"""Loads a PEFT adapter for a decoder: `adapter_config.json` and `adapter_model.safetensors` of one folder.

An adapter of a vision-language model may change other parts than the text model. These are left out with a warning.
Both files are read once, completely and up to a bound that follows from the model; the digest is of the bytes that are
used. Pickled adapters (`adapter_model.bin`) are never read.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from quire.kernels.adapter_ends import AdapterWithEnds
from quire.kernels.ops import ENDS, MAX_RANK, LoraPart, NormsOfLayer, Ops, PackedAdapter
from quire.shared.process.errors import CheckpointError, NotSupported
from quire.worker.engine.sequence import Adapter
from quire.worker.models.files.kv_scales import PLAIN, KVFactors
from quire.worker.models.files.lora.adapter_config import (
    ADAPTER_CONFIG,
    MERGE,
    PROJECTIONS,
    AdapterConfig,
    read_adapter_config,
)
from quire.worker.models.files.lora.base_weights import BaseFiles, BaseWeights
from quire.worker.models.files.lora.gains import gains_of
from quire.worker.models.files.lora.tensors import (
    AGAIN,
    EMBEDDING,
    HEAD,
    OTHER_MODEL,
    PREFIX,
    ModuleTensors,
    parse_tensors,
    sort_tensors,
)
from quire.worker.models.files.tensor_names import text_tensor_name

__all__ = ["BaseFiles", "load_adapter"]

log = logging.getLogger(__name__)

ADAPTER_WEIGHTS = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1024 * 1024
MAX_HEADER_BYTES = 16 * 1024 * 1024
DIGEST_BYTES = 16
# Names of a text model begin so. All other tensors of a vision-language model are those of towers and projectors.
TEXT = ("model.layers.", "model.norm.", "model.embed_tokens.", "lm_head.", "layers.", "norm.", "embed_tokens.")
# The linear layer of `kernels` that each projection is a part of.
_LINEAR_OF = dict(zip(PROJECTIONS, ("qkv", "qkv", "qkv", "o", "gate_up", "gate_up", "down"), strict=True))
FINAL_NORM = "model.norm"


class AdaptedModel(Protocol):
    """The configuration of the model that an adapter changes."""

    @property
    def num_layers(self) -> int: ...

    @property
    def intermediate_size(self) -> int: ...

    @property
    def qk_norm(self) -> bool: ...

    @property
    def post_norms(self) -> bool: ...

    @property
    def norm_offset(self) -> float:
        """A number that is added to the stored weights of norms."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def is_wrapped(self) -> bool:
        """True if the checkpoint is a vision-language model around this text model."""

    def q_size(self, layer: int) -> int: ...

    def kv_size(self, layer: int) -> int: ...

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]: ...


def load_adapter(
    name: str,
    folder: Path,
    config: AdaptedModel,
    ops: Ops,
    max_rank: int,
    kv_factors: Sequence[KVFactors] = (),
    base: BaseFiles | None = None,
) -> Adapter:
    """Load and pack an adapter. Raises CheckpointError: one line with file, field, expected value and remedy.

    kv_factors: of each layer, which its weights already have; empty: none. base: the files of the model that the
    adapter changes, which only some adapters need.
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
    shapes = _shapes(config)
    for module, ids in parsed.tokens:
        if max(ids) >= config.vocab_size:
            what = f"trainable_token_indices of {module} has {max(ids)}, and the model has {config.vocab_size} tokens"
            raise NotSupported(folder / ADAPTER_CONFIG, what, MERGE)
    if not path.exists() and (folder / "adapter_model.bin").exists():
        what = "only adapter_model.bin is here, which is pickled and could run code"
        raise NotSupported(path, what, "save it with save_pretrained(..., safe_serialization=True) of peft")
    data = _read(path, _largest(config, shapes, most))
    tensors = parse_tensors(path, data)
    _check_saved(path, parsed, tensors)
    if config.is_wrapped:
        tensors = _of_text(path, tensors)
    modules = sort_tensors(path, tensors, parsed, shapes)
    _check_targets(path, parsed, modules, shapes)
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for content in (settings, data):
        digest.update(len(content).to_bytes(8, "little") + content)
    packer = _Packer(path, config, ops, parsed, modules, kv_factors, BaseWeights(base) if base else None)
    ranks = (len(tensors.factors()[0]) for tensors in modules.values() if tensors.has_factors)
    return Adapter(name, digest.hexdigest(), packer.pack(), max(ranks, default=0))


@dataclass(frozen=True, slots=True)
class _Packer:
    """Packs the checked tensors of an adapter."""

    path: Path
    config: AdaptedModel
    ops: Ops
    settings: AdapterConfig
    modules: Mapping[str, ModuleTensors]
    kv_factors: Sequence[KVFactors]
    base: BaseWeights | None

    def pack(self) -> PackedAdapter:
        config = self.config
        layers: list[dict[str, list[LoraPart]]] = [{} for _ in range(config.num_layers)]
        q_size, kv_size = config.q_size(0), config.kv_size(0)  # of all layers
        offsets = {"k_proj": q_size, "v_proj": q_size + kv_size, "up_proj": config.intermediate_size}
        for module in self.modules:
            projection = module.rpartition(".")[2]
            if projection in PROJECTIONS and (part := self._part(module, offsets.get(projection, 0))) is not None:
                layers[_layer_of(module)].setdefault(_LINEAR_OF[projection], []).append(part)
        ends = {end: self._part(module) for end, module in zip(ENDS, (EMBEDDING, HEAD), strict=True)}
        if of_ends := {end: [part] for end, part in ends.items() if part is not None}:
            layers.append(of_ends)
        packed = self.ops.pack_adapter(layers, config.intermediate_size, self._norms())
        return self._with_ends(packed)

    def _part(self, module: str, offset: int = 0) -> LoraPart | None:
        """Return the factors and gains of a module, or None if the adapter does not change its outputs so."""
        tensors = self.modules.get(module)
        if tensors is None or not (tensors.has_factors or "bias" in tensors.parts):
            return None
        scale = input_factor = output_factor = 1.0
        if self.kv_factors and (projection := module.rpartition(".")[2]) in PROJECTIONS:
            factors = self.kv_factors[_layer_of(module)].of_projection(projection, self.config.qk_norm)
            input_factor, output_factor = (factors, 1.0) if projection == "o_proj" else (1.0, factors)
        if tensors.has_factors:
            a, b = tensors.factors()
            scale = self.settings.scale_of(tensors.name, len(a))
        else:  # a bias alone
            rows, columns = _shapes(self.config)[module]
            a, b = torch.zeros(1, columns), torch.zeros(rows, 1)
        gains = None
        if tensors.parts.keys() & {"magnitude", "bias of B", "bias"}:
            assert self.base is not None
            gains = gains_of(self.path, module, tensors, (a, b), scale, self.base, output_factor)
        return LoraPart(a, b, scale * input_factor * output_factor, offset, gains)

    def _norms(self) -> list[NormsOfLayer]:
        """Return the norms of the adapter in the type of activations, in the layout of `Ops.pack_adapter`."""
        names = _norm_names(self.config)
        found: list[dict[str, torch.Tensor]] = [{} for _ in range(self.config.num_layers + 1)]
        for module, tensors in self.modules.items():
            if module != FINAL_NORM and module.rpartition(".")[2] not in names:
                continue
            weight = tensors.get("weight")
            assert weight is not None
            weight = weight.to(self.ops.dtype) + self.config.norm_offset
            if module == FINAL_NORM:
                found[-1]["input_norm"] = weight.contiguous()
                continue
            at, name = _layer_of(module), names[module.rpartition(".")[2]]
            factors = self.kv_factors[at] if self.kv_factors else PLAIN
            weight = weight * {"q_norm": 1 / factors.k, "k_norm": factors.k}.get(name, 1.0)
            found[at][name] = weight.contiguous()
        return [*found] if any(found) else []

    def _with_ends(self, packed: PackedAdapter) -> PackedAdapter:
        """Add the rows of embedding and head that the adapter replaces."""
        table, table_ids = self._own_rows(EMBEDDING)
        head, head_ids = self._own_rows(HEAD)
        if head is None and self.base is not None and self.base.is_tied and table_ids is not None:
            head, head_ids = table, table_ids  # PEFT ties rows of single tokens, and tables only if it stores both
        if table is None and head is None:
            return packed
        device = self.ops.device
        return AdapterWithEnds(
            packed,
            None if table is None else self._kept(table).to(device),
            None if table_ids is None else table_ids.to(device),
            None if head is None else self.ops.pack_linear(self._kept(head).to(device)),
            None if head_ids is None else head_ids.to(device),
        )

    def _own_rows(self, module: str) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the rows of a module that the adapter replaces, and their tokens; None for all."""
        tensors = self.modules.get(module)
        if tensors is None:
            return None, None
        if (rows := tensors.get("rows")) is not None:
            ids, order = torch.tensor(self.settings.own_tokens(module), dtype=torch.int64).sort()
            return rows[order], ids
        weight = tensors.get("weight")
        if weight is not None and not self._is_base(module, weight):
            return weight, None
        return None, None

    def _is_base(self, module: str, weight: torch.Tensor) -> bool:
        """Return whether weights are those of the model: PEFT stores these next to factors of embedding and head."""
        if self.base is None:
            return False
        chunks = self.base.chunks(module, weight.shape[1], len(weight))
        return all(torch.equal(rows.to(weight.dtype), weight[place]) for place, rows in chunks)

    def _kept(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a copy of weights, in a type that the kernels have. The file's content is freed."""
        kept = weight.dtype if weight.dtype in self.ops.weight_dtypes else self.ops.dtype
        return weight.to(kept, copy=True).contiguous()


def _layer_of(module: str) -> int:
    return int(module.split(".")[2])


def _norm_names(config: AdaptedModel) -> dict[str, str]:
    """Return the norms of `kernels` by the names that norms of layers have in checkpoints."""
    names = {"input_layernorm": "input_norm", "q_norm": "q_norm", "k_norm": "k_norm"}
    if not config.post_norms:
        return names | {"post_attention_layernorm": "mlp_norm"}
    return names | {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "mlp_norm",
        "post_feedforward_layernorm": "post_mlp_norm",
    }


def _shapes(config: AdaptedModel) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights of all modules that an adapter may change."""
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys((EMBEDDING, HEAD), (config.vocab_size, config.hidden_size))
    norms = _norm_names(config)
    for name, shape in config.tensor_shapes().items():
        module = name.removesuffix(".weight")
        end = module.rpartition(".")[2]
        if module != name and (end in PROJECTIONS or end in norms or module == FINAL_NORM):
            shapes[module] = shape
    return shapes


def _largest(config: AdaptedModel, shapes: Mapping[str, tuple[int, ...]], rank: int) -> int:
    """Return the most bytes of the tensors of an adapter, in float32."""
    matrices = [shape for shape in shapes.values() if len(shape) == 2]
    factors = sum(rank * sum(shape) + 3 * shape[0] for shape in matrices)  # with magnitudes and biases
    replaced = (
        sum(shape[0] for shape in shapes.values() if len(shape) == 1) + 2 * config.vocab_size * config.hidden_size
    )
    towers = 2 if config.is_wrapped else 1  # a tower is smaller than its text model
    return 4 * (factors * towers + replaced) + MAX_HEADER_BYTES


def _check_saved(path: Path, config: AdapterConfig, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise CheckpointError if a module of `modules_to_save` has no tensor."""
    for module in config.saved:
        if not any(f"{module}." in name for name in tensors):
            what = f"modules_to_save has {module[:80]}, and no tensor is of such a module"
            raise CheckpointError(path, what, AGAIN)


def _of_text(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of the text model, and log a warning about others."""
    others = sorted(name for name in tensors if not text_tensor_name(name.removeprefix(PREFIX)).startswith(TEXT))
    if others:
        shown = ", ".join(others[:2])[:400] + (", ..." if len(others) > 2 else "")
        log.warning("%s: %d tensors are not of the text model and are not used: %s", path, len(others), shown)
    return {name: tensor for name, tensor in tensors.items() if name not in set(others)}


def _check_targets(
    path: Path, config: AdapterConfig, modules: Mapping[str, ModuleTensors], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise CheckpointError if a module of `target_modules` has no factors, or one that is not in it has some."""
    if config.targets is None:
        return
    for module in shapes:
        has_factors = module in modules and modules[module].has_factors
        name = f"{PREFIX}{module}.lora_A.weight"
        if module.rpartition(".")[2] not in PROJECTIONS:
            continue
        if module.rpartition(".")[2] in config.targets and not has_factors:
            raise CheckpointError(path, f"tensor {name} is missing, and target_modules has its module", AGAIN)
        if has_factors and module.rpartition(".")[2] not in config.targets:
            raise CheckpointError(path, f"tensor {name} is of no module of target_modules", AGAIN)


def _read(path: Path, limit: int) -> bytearray:
    """Read a file of at most `limit` bytes. Raises CheckpointError."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = bytearray(min(size, limit + 1))
            read = file.readinto(data)
    except FileNotFoundError:
        raise CheckpointError(path, "this file of the adapter is missing", AGAIN) from None
    except OSError as error:
        raise CheckpointError(path, f"this file cannot be read ({error.strerror})", AGAIN) from None
    if len(data) > limit:
        what = f"this file is larger than {limit} bytes, the most for this model and --max-lora-rank"
        raise CheckpointError(path, what, OTHER_MODEL)
    del data[read:]
    return data
