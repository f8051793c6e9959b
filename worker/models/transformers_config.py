"""What Transformers says of a checkpoint, for models that it computes. No code of a checkpoint is ever run."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from worker.models.config import FAMILIES, QUANTISED
from worker.models.errors import CheckpointError, NotSupported
from worker.models.fields import Fields, read_json
from worker.models.loader import Weights

INSTALL = "install Transformers (pip install transformers), which computes many others"
ADAPTER = "adapter_config.json"
# Where a checkpoint names files that Transformers reads in place of those that are checked here.
ELSEWHERE = ("transformers_weights", "configuration_files")


@dataclass(frozen=True)
class TransformersConfig:
    """A causal language model that Transformers can build, and whose attention it lets somebody else compute."""

    folder: Path
    architecture: str
    max_position_embeddings: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_layers: int
    elements: int  # of all tensors
    loaded: Any  # transformers.PreTrainedConfig

    def least_weight_bytes(self, dtype: torch.dtype) -> int:
        """Memory of the weights before any is loaded; a backend that packs them may take more."""
        return self.elements * dtype.itemsize


def read_transformers_config(folder: Path) -> TransformersConfig:
    """Read config.json, generation_config.json and the headers of the weights.

    Raises CheckpointError, one line; NotSupported for a kind of model whose steps cannot be run over pages.
    """
    path = folder / "config.json"
    fields = Fields(read_json(path, "give the folder of a complete Hugging Face checkpoint"), str(path))
    for name in QUANTISED:
        if fields.get(name) is not None:
            raise fields.fault(name, "weights that are not quantised; use the checkpoint that these were made from")
    for name in ELSEWHERE:
        if fields.has(name):
            raise fields.fault(name, "no such field: config.json and its weights must have their usual names")
    if (folder / ADAPTER).exists():  # with the package peft installed, Transformers would load it, and what it names
        remedy = "merge the adapter into the weights, or remove this file"
        raise CheckpointError(folder / ADAPTER, "an adapter beside the weights is not applied", remedy)
    config, model_class = _known(folder, fields)
    _refuse_others(path, config, model_class)
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    num_layers, vocab_size = getattr(text, "num_hidden_layers", None), getattr(text, "vocab_size", None)
    for name, value in (("max_position_embeddings", longest), ("num_hidden_layers", num_layers)):
        if type(value) is not int or value < 1:
            raise NotSupported(path, f"Transformers finds no {name} in it", "supported: models that have one")
    if type(vocab_size) is not int or vocab_size < 1:
        raise NotSupported(path, "Transformers finds no vocab_size in it", "supported: models that have one")
    return TransformersConfig(
        folder=folder,
        architecture=model_class.__name__,
        max_position_embeddings=min(longest, _longest_of_one_rope(text) or longest),
        vocab_size=vocab_size,
        eos_token_ids=tuple(token for token in _eos_token_ids(folder, fields, text) if token < vocab_size),
        num_layers=num_layers,
        elements=Weights(folder).num_elements(),
        loaded=config,
    )


def _known(folder: Path, fields: Fields) -> tuple[Any, Any]:
    """The configuration and the class of the model, both of Transformers itself."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers import logging as transformers_logging
    except ImportError:
        kind = str(fields.get("architectures") or fields.get("model_type"))[:120]
        what = f"{kind} is none of the models that Quire's own decoder knows ({', '.join(FAMILIES)})"
        raise NotSupported(fields.where, what, INSTALL) from None
    transformers_logging.set_verbosity_error()
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of its own validation, of the hub's, or of a field of the wrong type
        reason = f"Transformers cannot read it ({type(error).__name__}: {str(error)[:200]})"
        remedy = "a newer Transformers may know it; code of a checkpoint is never run"
        raise NotSupported(fields.where, reason, remedy) from error
    model_class = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if model_class is None:
        raise fields.unsupported("model_type", "causal language models that Transformers knows")
    if fields.get("architectures") not in (None, [model_class.__name__]):
        raise fields.unsupported("architectures", f"{model_class.__name__}, as model_type is {config.model_type}")
    return config, model_class


def _refuse_others(path: Path, config: Any, model_class: Any) -> None:
    """Raise NotSupported for what is more, or less, than causal attention with keys and values of all tokens."""
    text = config.get_text_config()
    why = None
    if config.is_encoder_decoder or getattr(text, "add_cross_attention", False):
        why = "attends to the states of an encoder"
    elif getattr(model_class, "_is_stateful", False):
        why = "keeps a state beside keys and values"
    elif not getattr(model_class, "_supports_attention_backend", False):
        why = "has its attention written out in Transformers, where it cannot be replaced"
    elif "logits_to_keep" not in inspect.signature(model_class.forward).parameters:
        why = "computes the logits of all tokens"
    if why is not None:
        raise NotSupported(path, f"{model_class.__name__} {why}", "give another model")


def _longest_of_one_rope(text: Any) -> int | None:
    """The longest context in which the frequencies of RoPE do not depend on how long a context is, where some do.

    Beyond it Transformers changes them for all tokens of a step, whatever sequences these are of; and keys that are in
    the cache keep their old ones.
    """
    parameters = getattr(text, "rope_parameters", None) or {}
    found = [one for one in (parameters, *parameters.values()) if isinstance(one, dict) and "rope_type" in one]
    limits = [
        one.get("original_max_position_embeddings") or text.max_position_embeddings
        for one in found
        if one["rope_type"] == "longrope" or "dynamic" in one["rope_type"]
    ]
    return min(limits, default=None)


def _eos_token_ids(folder: Path, fields: Fields, text: Any) -> tuple[int, ...]:
    """As generation_config.json says, else config.json, else the configuration's class."""
    path = folder / "generation_config.json"
    if path.exists():
        generation = Fields(read_json(path, "repair the file or remove it"), str(path))
        if generation.get("eos_token_id") is not None:
            return generation.token_ids("eos_token_id")
    return fields.token_ids("eos_token_id", getattr(text, "eos_token_id", None))
