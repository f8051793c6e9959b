"""Reads `adapter_config.json` of a PEFT adapter. A field that would change results is honoured, or refused by name."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

from quire.worker.models.errors import CheckpointError, NotSupported

ADAPTER_CONFIG = "adapter_config.json"
# The projections of a decoder layer that an adapter may change.
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MERGE = "merge it into its base model (merge_and_unload() of peft) and serve that folder"
# Fields that other parts of PEFT use, or that matter only in training.
WITHOUT_EFFECT = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config",
        "exclude_modules", "inference_mode", "layers_pattern", "layers_to_transform", "lora_dropout", "lora_ga_config",
        "peft_version", "qalora_group_size", "revision", "runtime_config", "target_modules", "task_type",
    }
)  # fmt: skip
# Fields that are read here.
READ = frozenset({"peft_type", "r", "lora_alpha", "alpha_pattern", "rank_pattern", "use_rslora", "init_lora_weights"})
# The reasons for which other fields must be absent, null, false or empty.
REASONS = {
    "use_dora": "DoRA scales whole columns of the base weights",
    "modules_to_save": "the adapter replaces whole layers",
    "bias": "the adapter changes biases",
    "lora_bias": "the adapter has biases",
    "fan_in_fan_out": "the base model stores its weights transposed",
    "layer_replication": "the adapter repeats layers of the base model",
    "trainable_token_indices": "the adapter replaces embeddings",
    "target_parameters": "the adapter changes parameters that are no linear layers",
    "alora_invocation_tokens": "the adapter is active only after its invocation tokens",
    "use_qalora": "the adapter pools its inputs",
    "megatron_config": "the base model is one of Megatron",
    "loftq_config": "the adapter belongs to a base model quantised with LoftQ",
}
NEUTRAL: tuple[Any, ...] = (None, False, "none", [], {})
# Initialisations that leave the base weights as they are.
INITIALISATIONS = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The fields of an adapter that its factors need.

    alphas: `lora_alpha` of single modules, by the end of their names. targets: names of the changed projections, or
    None if the file selects modules in another way; then the tensors say which they are.
    """

    rank: int
    alpha: float
    uses_rslora: bool
    base: str = ""
    alphas: dict[str, float] = field(default_factory=dict)
    ranks: dict[str, int] = field(default_factory=dict)
    targets: tuple[str, ...] | None = None

    def rank_of(self, module: str) -> int:
        """Return the rank of a module such as `model.layers.0.mlp.up_proj`."""
        return int(_value_of(self.ranks, module, self.rank))

    def scale_of(self, module: str, rank: int) -> float:
        """Return the factor of a module's update."""
        alpha = _value_of(self.alphas, module, self.alpha)
        return float(alpha / (math.sqrt(rank) if self.uses_rslora else rank))


def read_adapter_config(data: bytes, where: str) -> AdapterConfig:
    """Read the content of `adapter_config.json`. where: the file, for errors. Raises CheckpointError."""
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(where, f"this file is not valid JSON ({error})", "copy the adapter again") from None
    if not isinstance(values, dict):
        raise CheckpointError(where, "this file is not a JSON object", "copy the adapter again")
    if values.get("peft_type") != "LORA":
        raise NotSupported(where, f"peft_type is {_shown(values.get('peft_type'))}, expected 'LORA'", MERGE)
    if values.get("init_lora_weights", True) not in INITIALISATIONS:
        what = f"init_lora_weights is {_shown(values['init_lora_weights'])}, which changes the base weights"
        raise NotSupported(where, what, "convert it to a plain adapter (path_initial_model_for_weight_conversion)")
    for name, value in values.items():
        if name not in WITHOUT_EFFECT | READ and value not in NEUTRAL:
            reason = REASONS.get(name, "this field is not known")
            raise NotSupported(where, f"{name[:80]} is {_shown(value)}: {reason}", MERGE)
    alpha, rank = values.get("lora_alpha", 8), values.get("r", 8)
    if type(rank) is not int or rank < 1:
        raise CheckpointError(where, f"r is {_shown(rank)}, expected a whole number of at least 1", "correct the file")
    return AdapterConfig(
        rank=rank,
        alpha=_number(where, "lora_alpha", alpha),
        uses_rslora=_flag(where, "use_rslora", values.get("use_rslora")),
        base=str(values.get("base_model_name_or_path") or "")[:100],
        alphas={key: _number(where, "alpha_pattern", one) for key, one in _pattern(where, values, "alpha_pattern")},
        ranks={key: int(_number(where, "rank_pattern", one)) for key, one in _pattern(where, values, "rank_pattern")},
        targets=_targets(where, values),
    )


def _targets(where: str, values: dict[str, Any]) -> tuple[str, ...] | None:
    targets = values.get("target_modules")
    if not isinstance(targets, list) or not all(isinstance(one, str) for one in targets):
        return None  # a regular expression, or the default of the model's family
    unsupported = sorted(one for one in targets if one.rpartition(".")[2] not in PROJECTIONS)
    if unsupported:
        what = f"target_modules has {_shown(unsupported[0])}, expected some of {', '.join(PROJECTIONS)}"
        raise NotSupported(where, what, MERGE)
    selects = any("." in one for one in targets) or any(
        values.get(name) for name in ("layers_to_transform", "layers_pattern", "exclude_modules")
    )
    return None if selects else tuple(targets)


def _pattern(where: str, values: dict[str, Any], name: str) -> list[tuple[str, Any]]:
    """Return the entries of a field of values by module. PEFT reads the keys as regular expressions."""
    entries = values.get(name) or {}
    if not isinstance(entries, dict):
        raise CheckpointError(where, f"{name} is {_shown(entries)}, expected an object", "correct the file")
    for key in entries:
        if not key.removeprefix("^").replace(".", "").replace("_", "").isalnum():
            what = f"{name} has the key {_shown(key)}, expected the name of a module"
            raise NotSupported(where, what, MERGE)
    return [(key.removeprefix("^"), one) for key, one in entries.items()]


def _number(where: str, name: str, value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or not 0 < value < 1e9:
        raise CheckpointError(where, f"{name} is {_shown(value)}, expected a positive number", "correct the file")
    return float(value)


def _flag(where: str, name: str, value: Any) -> bool:
    if value not in (None, True, False):
        raise CheckpointError(where, f"{name} is {_shown(value)}, expected true or false", "correct the file")
    return bool(value)


def _value_of(values: dict[str, Any], module: str, default: Any) -> Any:
    return next((one for key, one in values.items() if module == key or module.endswith("." + key)), default)


def _shown(value: Any) -> str:
    return repr(value)[:80]
