"""The part of `config.json` that gateway and worker share: both announce the same longest context."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quire.shared.model.folder import CONFIG, find_fault
from quire.shared.text.tokenizer import ModelError, read_json

# The names under which configurations of the families give the longest context.
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx")
_ORIGINAL = "original_max_position_embeddings"


def read_model_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a model folder.

    Raises ModelError, one line, where it is missing or malformed, and for a folder that holds something else: an
    adapter, GGUF files, or the files of the model's authors.
    """
    if fault := find_fault(folder):
        raise ModelError(f"{fault}.")
    return read_json(folder / CONFIG, required=True)


def context_length(config: Mapping[str, Any]) -> int | None:
    """The longest context in tokens that a model is made for; None where the configuration does not say.

    `config` is a parsed `config.json`, or its `text_config`. With YaRN it is the original length times the factor, also
    where `max_position_embeddings` still is the original length, as model cards tell users to leave it.

    With longrope and dynamic scaling it is the length up to which the frequencies of RoPE do not depend on how long a
    context is. Beyond it, they would change for all sequences of a step, and keys in the cache would keep the old ones.
    """
    longest = next((config[key] for key in CONTEXT_KEYS if type(config.get(key)) is int), None)
    if longest is None:
        return None
    limits = []
    for kind, rope in _ropes(config):
        original = _original(config, rope, longest)
        if kind == "longrope" or "dynamic" in kind:
            limits.append(original)
        elif kind == "yarn":
            longest = max(longest, int(original * _factor(rope)))
    return int(min([longest, *limits]))


def longer_context(config: Mapping[str, Any], asked: int) -> str:
    """Which field of `config.json` makes room for contexts of `asked` tokens; empty where none does.

    For models with RoPE: learned positions end where their table does.
    """
    key = next((key for key in CONTEXT_KEYS if type(config.get(key)) is int), CONTEXT_KEYS[0])
    longest = config.get(key)
    if type(longest) is not int or longest < 1:
        return ""
    found = dict(_ropes(config))
    if any(kind == "longrope" or "dynamic" in kind for kind in found):
        return ""
    if "yarn" in found:
        rope = found["yarn"]
        name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
        factor = math.ceil(asked / max(1, _original(config, rope, longest)))
        return f"set factor in {name} of config.json to {factor}, if the model is made for that"
    yarn = f'{{"rope_type": "yarn", "factor": {math.ceil(asked / longest)}.0, "{_ORIGINAL}": {longest}}}'
    how = f"set {key} of config.json to {asked}"
    return how + (f", or rope_scaling to {yarn}" if not found else "") + ", if the model's card says so"


def _ropes(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The sets of RoPE parameters that scale, each with its kind; some models have one for each kind of layer."""
    parameters = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(parameters, Mapping):
        return
    for one in (parameters, *parameters.values()):
        if isinstance(one, Mapping):
            kind = one.get("rope_type") or one.get("type")
            if isinstance(kind, str) and kind != "default":
                yield kind, one


def _original(config: Mapping[str, Any], rope: Mapping[str, Any], longest: int) -> int:
    """The length of contexts before scaling. The field of the whole configuration wins, as in Transformers."""
    for value in (config.get(_ORIGINAL), rope.get(_ORIGINAL)):
        if type(value) is int and value > 0:
            return value
    return longest


def _factor(rope: Mapping[str, Any]) -> float:
    factor = rope.get("factor")
    if not isinstance(factor, int | float) or isinstance(factor, bool):
        return 1.0
    return float(factor) if 1 <= factor < float("inf") else 1.0
