"""The part of `config.json` that gateway and worker share: the longest context."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quire.shared.model.files import ModelError, read_json
from quire.shared.model.folder import CONFIG, find_fault

# Names of the field for the longest context, in the configurations of different model families.
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx")
# Names of the size of a hidden state, in the configurations of different model families.
HIDDEN_KEYS = ("hidden_size", "n_embd", "d_model", "dim")
_ORIGINAL = "original_max_position_embeddings"


def read_model_config(folder: Path) -> dict[str, Any]:
    """Read `config.json` of a model folder.

    Raises ModelError if it is missing or malformed, and for a folder of another format: an adapter, GGUF files, or the
    format of the model's authors.
    """
    if fault := find_fault(folder):
        raise ModelError(f"{fault}.")
    return read_json(folder / CONFIG, required=True)


def context_length(config: Mapping[str, Any]) -> int | None:
    """Return the longest context of a model in tokens; None if the configuration does not give it.

    config: a parsed `config.json`, or its `text_config`. With YaRN the result is the original length times the factor,
    even if `max_position_embeddings` is still the original length, as model cards recommend.

    With longrope and dynamic scaling the result is the length up to which the RoPE frequencies do not depend on the
    length of the context. Beyond it they would change for all sequences of a step, and keys in the cache would keep the
    old frequencies.
    """
    return _context_length(config, is_long=False)


def longest_context(config: Mapping[str, Any]) -> int | None:
    """Return the longest context that a worker may be asked for; None if the configuration does not give it.

    It differs from `context_length` with longrope: beyond the original length all texts have the long factors.
    """
    return _context_length(config, is_long=True)


def _context_length(config: Mapping[str, Any], is_long: bool) -> int | None:
    longest = next((config[key] for key in CONTEXT_KEYS if type(config.get(key)) is int), None)
    if longest is None:
        return None
    limits = []
    for kind, rope in _ropes(config):
        original = _original(config, rope, longest)
        if (kind == "longrope" and not is_long) or "dynamic" in kind:
            limits.append(original)
        elif kind == "yarn":
            longest = max(longest, int(original * _factor(rope)))
    return int(min([longest, *limits]))


def longer_context(config: Mapping[str, Any], asked: int) -> str:
    """Return advice on changing `config.json` for contexts of `asked` tokens; empty if that is not possible.

    For models with RoPE only: learned positions are limited by their table.
    """
    key = next((key for key in CONTEXT_KEYS if type(config.get(key)) is int), CONTEXT_KEYS[0])
    longest = config.get(key)
    if type(longest) is not int or longest < 1:
        return ""
    ropes = dict(_ropes(config))
    if any(kind == "longrope" or "dynamic" in kind for kind in ropes):
        return ""
    if "yarn" in ropes:
        rope = ropes["yarn"]
        name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
        factor = math.ceil(asked / max(1, _original(config, rope, longest)))
        return f"set factor in {name} of config.json to {factor}, if the model is made for that"
    yarn = f'{{"rope_type": "yarn", "factor": {math.ceil(asked / longest)}.0, "{_ORIGINAL}": {longest}}}'
    how = f"set {key} of config.json to {asked}"
    return how + (f", or rope_scaling to {yarn}" if not ropes else "") + ", if the model's card says so"


def _ropes(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the kind and the parameters of each RoPE scaling; some models have one per kind of layer."""
    parameters = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(parameters, Mapping):
        return
    for rope in (parameters, *parameters.values()):
        if isinstance(rope, Mapping):
            kind = rope.get("rope_type") or rope.get("type")
            if isinstance(kind, str) and kind != "default":
                yield kind, rope


def _original(config: Mapping[str, Any], rope: Mapping[str, Any], longest: int) -> int:
    """Return the context length before scaling. The field of the configuration takes precedence, as in Transformers."""
    for value in (config.get(_ORIGINAL), rope.get(_ORIGINAL)):
        if type(value) is int and value > 0:
            return value
    return longest


def _factor(rope: Mapping[str, Any]) -> float:
    factor = rope.get("factor")
    if not isinstance(factor, int | float) or isinstance(factor, bool):
        return 1.0
    return float(factor) if 1 <= factor < float("inf") else 1.0
