"""Reads `adapter_config.json` of a PEFT adapter. A field that would change results is honoured, or refused by name."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

from quire.shared.process.errors import CheckpointError, NotSupported
from quire.worker.models.files.layer_names import PatternError, compile_bounded

ADAPTER_CONFIG = "adapter_config.json"
# The projections of a decoder layer that an adapter may change.
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MERGE = "merge it into its base model (merge_and_unload() of peft) and serve that folder"
# Repeats in a pattern of modules. Matching time grows with this power of a name's length.
MAX_REPEATS = 3
# Fields that other parts of PEFT use, that matter only in training, that the tensors show as well, or that belong to a
# field of REASONS.
WITHOUT_EFFECT = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config",
        "exclude_modules", "inference_mode", "layers_pattern", "layers_to_transform", "lora_bias", "lora_dropout",
        "lora_ga_config", "megatron_core", "modules_to_save", "peft_version", "qalora_group_size", "revision",
        "runtime_config", "target_modules", "task_type",
    }
)  # fmt: skip
# Fields that are read here.
READ = frozenset(
    {
        "alpha_pattern", "bias", "init_lora_weights", "lora_alpha", "peft_type", "r", "rank_pattern",
        "trainable_token_indices", "use_dora", "use_rslora",
    }
)  # fmt: skip
BIASES = (None, "none", "lora_only", "all")
MAX_TOKEN_ROWS = 1 << 16  # of trainable_token_indices
# The reasons for which other fields must be absent or neutral. A field that is in none of these lists may change
# results in a way that the tensors do not show, so it must be neutral, too.
REASONS = {
    "fan_in_fan_out": "the base model stores its weights transposed",
    "layer_replication": "the adapter repeats layers of the base model",
    "target_parameters": "the adapter changes parameters that are no linear layers",
    "alora_invocation_tokens": "the adapter is active only after its invocation tokens",
    "use_qalora": "the adapter pools its inputs",
    "megatron_config": "the base model is one of Megatron",
    "loftq_config": "the adapter belongs to a base model quantised with LoftQ",
    "use_bdlora": "its factors are block-diagonal",
    "arrow_config": "the adapter chooses between other adapters",
    "kasa_config": "the adapter changes the base weights",
    "velora_config": "the adapter has projections of VeLoRA",
    "monteclora_config": "the adapter draws its factors at random",
}
NEUTRAL: tuple[Any, ...] = (None, False, "", "none", [], {})  # 0 is equal to False
# Initialisations that leave the base weights as they are.
INITIALISATIONS = (True, False, None, "gaussian", "eva", "mica", "orthogonal")


Pattern = tuple[re.Pattern[str], float]


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The fields of an adapter that its factors need.

    alphas, ranks: `lora_alpha` and `r` of modules whose whole name an expression matches; the first match counts.
    targets: names of the changed modules, or None if the file selects modules in another way; then the tensors say
    which they are. tokens: of `trainable_token_indices`, with the end of the name of the module that they are rows of.
    saved: ends of names of modules that the adapter replaces.
    """

    rank: int
    alpha: float
    uses_rslora: bool
    uses_dora: bool = False
    base: str = ""
    alphas: tuple[Pattern, ...] = ()
    ranks: tuple[Pattern, ...] = ()
    targets: tuple[str, ...] | None = None
    tokens: tuple[tuple[str, tuple[int, ...]], ...] = ()
    saved: tuple[str, ...] = ()

    def rank_of(self, module: str) -> int:
        """Return the rank of a module, by its name in the model that was trained: `model.layers.0.mlp.up_proj`."""
        return int(_value_of(self.ranks, module, self.rank))

    def scale_of(self, module: str, rank: int) -> float:
        """Return the factor of a module's update."""
        alpha = _value_of(self.alphas, module, self.alpha)
        return float(alpha / (math.sqrt(rank) if self.uses_rslora else rank))

    def own_tokens(self, module: str) -> tuple[int, ...]:
        """Return the tokens whose rows of a module, by its canonical name, the adapter replaces."""
        return next((ids for name, ids in self.tokens if f".{module}".endswith(f".{name.rpartition('.')[2]}")), ())

    @property
    def largest_rank(self) -> int:
        return max([self.rank, *(int(rank) for _, rank in self.ranks)])


def read_adapter_config(data: bytes | bytearray, where: str) -> AdapterConfig:
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
    if values.get("bias") not in BIASES:
        raise NotSupported(where, f"bias is {_shown(values['bias'])}, expected 'none', 'lora_only' or 'all'", MERGE)
    alpha, rank = values.get("lora_alpha", 8), values.get("r", 8)
    if type(rank) is not int or rank < 1:
        raise CheckpointError(where, f"r is {_shown(rank)}, expected a whole number of at least 1", "correct the file")
    return AdapterConfig(
        rank=rank,
        alpha=_number(where, "lora_alpha", alpha),
        uses_rslora=_flag(where, "use_rslora", values.get("use_rslora")),
        uses_dora=_flag(where, "use_dora", values.get("use_dora")),
        base=str(values.get("base_model_name_or_path") or "")[:100],
        alphas=_patterns(where, values, "alpha_pattern"),
        ranks=_patterns(where, values, "rank_pattern"),
        targets=_targets(values),
        tokens=_tokens(where, values.get("trainable_token_indices")),
        saved=_saved(where, values.get("modules_to_save")),
    )


def _tokens(where: str, value: Any) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return the tokens of each module in `trainable_token_indices`."""
    lists = value if isinstance(value, dict) else {"embed_tokens": value} if value is not None else {}
    for ids in lists.values():
        is_list = isinstance(ids, list) and all(type(one) is int and one >= 0 for one in ids)
        if not is_list or not 0 < len(set(ids)) == len(ids) <= MAX_TOKEN_ROWS:
            what = f"trainable_token_indices is {_shown(value)}, expected 1 to {MAX_TOKEN_ROWS} different tokens"
            raise CheckpointError(where, what, "correct the file")
    return tuple((str(name), tuple(ids)) for name, ids in lists.items())


def _saved(where: str, value: Any) -> tuple[str, ...]:
    if value is not None and not (isinstance(value, list) and all(isinstance(name, str) for name in value)):
        raise CheckpointError(where, f"modules_to_save is {_shown(value)}, expected names", "correct the file")
    return tuple(value or ())


def _targets(values: dict[str, Any]) -> tuple[str, ...] | None:
    targets = values.get("target_modules")
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        return None  # a regular expression, or the default of the model's family
    selects = any("." in target for target in targets) or any(
        values.get(name) for name in ("layers_to_transform", "layers_pattern", "exclude_modules")
    )
    return None if selects else tuple(targets)


def _patterns(where: str, values: dict[str, Any], name: str) -> tuple[Pattern, ...]:
    """Return the entries of a field of values by module. PEFT reads the keys as expressions of the ends of names."""
    entries = values.get(name) or {}
    if not isinstance(entries, dict):
        raise CheckpointError(where, f"{name} is {_shown(entries)}, expected an object", "correct the file")
    try:
        for key in entries:
            compile_bounded(key, MAX_REPEATS)
        return tuple((re.compile(rf"(.*\.)?({key})$"), _number(where, name, value)) for key, value in entries.items())
    except (PatternError, re.error) as error:
        raise NotSupported(where, f"{name} {error}", MERGE) from None


def _number(where: str, name: str, value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or not 0 < value < 1e9:
        raise CheckpointError(where, f"{name} is {_shown(value)}, expected a positive number", "correct the file")
    return float(value)


def _flag(where: str, name: str, value: Any) -> bool:
    if value not in (None, True, False):
        raise CheckpointError(where, f"{name} is {_shown(value)}, expected true or false", "correct the file")
    return bool(value)


def _value_of(patterns: tuple[Pattern, ...], module: str, default: float) -> float:
    return next((value for expression, value in patterns if expression.match(module)), default)


def _shown(value: Any) -> str:
    return repr(value)[:80]
