"""What Transformers says of a checkpoint, for models that it computes. No code of a checkpoint is ever run."""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quire.shared.model.config import context_length
from quire.shared.model.folder import CONFIG
from quire.worker.models.config import FAMILIES, QUANTISED
from quire.worker.models.errors import NotSupported
from quire.worker.models.fields import Fields, config_fields, read_json
from quire.worker.models.loader import Weights

INSTALL = "install Transformers (pip install transformers), which computes many others"
# The remedy for a model that is refused for its kind.
KINDS = (
    "Quire serves decoder-only models whose layers all have causal or sliding-window attention, with heads of at most "
    '512 elements (256 on GPUs): see docs/quickstart.md, "Which models"'
)
# Layers whose only state is keys and values.
ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
# Types that Transformers does not know. The authors of each say that it is a known type under a new name.
SAME_TYPE = {"kimi_k2": "deepseek_v3"}
# Where a checkpoint names files that Transformers reads in place of those that are checked here.
ELSEWHERE = ("transformers_weights", "configuration_files")


@dataclass(frozen=True)
class TransformersConfig:
    """A causal language model that Transformers can build, and whose attention it lets somebody else compute."""

    folder: Path
    architecture: str
    is_named_otherwise: bool  # the checkpoint has another name for this class
    max_position_embeddings: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_layers: int
    elements: int  # of all tensors
    loaded: Any  # transformers.PreTrainedConfig

    @property
    def has_rope(self) -> bool:
        """True for rotary positions, which a configuration may scale; false for a learned table of positions."""
        return bool(getattr(self.loaded.get_text_config(), "rope_parameters", None))

    def least_weight_bytes(self, dtype: torch.dtype) -> int:
        """Memory of the weights before any is loaded; a backend that packs them may take more."""
        return self.elements * dtype.itemsize


def read_transformers_config(folder: Path) -> TransformersConfig:
    """Read config.json, generation_config.json and the headers of the weights.

    Raises CheckpointError, one line; NotSupported for a kind of model whose steps cannot be run over pages.
    """
    fields, path = config_fields(folder), folder / CONFIG
    for name in QUANTISED:
        if fields.get(name) is not None:
            raise fields.fault(name, "weights that are not quantised; use the checkpoint that these were made from")
    for name in ELSEWHERE:
        if fields.has(name):
            raise fields.fault(name, "no such field: config.json and its weights must have their usual names")
    config, model_class = _known(folder, fields)
    _refuse_others(path, config, model_class)
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    num_layers, vocab_size = getattr(text, "num_hidden_layers", None), getattr(text, "vocab_size", None)
    for name, value in (("max_position_embeddings", longest), ("num_hidden_layers", num_layers)):
        if type(value) is not int or value < 1:
            raise NotSupported(path, f"Transformers finds no {name} in it", f"add {name}, a number above 0")
    if type(vocab_size) is not int or vocab_size < 1:
        raise NotSupported(path, "Transformers finds no vocab_size in it", "add vocab_size, a number above 0")
    contexts = {
        "max_position_embeddings": longest,
        "original_max_position_embeddings": getattr(text, "original_max_position_embeddings", None),
        "rope_parameters": getattr(text, "rope_parameters", None),
    }
    return TransformersConfig(
        folder=folder,
        architecture=model_class.__name__,
        is_named_otherwise=fields.get("architectures") not in (None, [model_class.__name__]),
        max_position_embeddings=context_length(contexts) or longest,
        vocab_size=vocab_size,
        eos_token_ids=tuple(token for token in _eos_token_ids(folder, fields, text) if token < vocab_size),
        num_layers=num_layers,
        elements=Weights(folder).num_elements(),
        loaded=config,
    )


def _known(folder: Path, fields: Fields) -> tuple[Any, Any]:
    """The configuration and the class of the model, both of Transformers itself."""
    try:
        import transformers
        from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
        from transformers import logging as transformers_logging
    except ImportError:
        kind = str(fields.get("architectures") or fields.get("model_type"))[:120]
        what = f"{kind} is none of the models that Quire's own decoder knows ({', '.join(FAMILIES)})"
        raise NotSupported(fields.where, what, INSTALL) from None
    transformers_logging.set_verbosity_error()
    model_type = fields.get("model_type")
    try:
        if model_type in SAME_TYPE:
            values = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
            model_type = values["model_type"] = SAME_TYPE[model_type]
            config = CONFIG_MAPPING[model_type].from_dict(values)
        else:
            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of its own validation, of the hub's, or of a field of the wrong type
        if isinstance(model_type, str) and model_type not in CONFIG_MAPPING:
            raise _unknown_type(fields, transformers.__version__) from None
        reason = f"Transformers cannot read it ({type(error).__name__}: {str(error)[:200]})"
        raise NotSupported(fields.where, reason, "correct the field, or take the config.json of the model") from error
    model_class = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if model_class is None:
        raise fields.unsupported("model_type", f"causal language models that Transformers knows; {KINDS}")
    names, name = fields.get("architectures"), model_class.__name__
    if names in (None, [name]):
        return config, model_class
    if not _is_named_after_type(names, model_type) or names[0] in dir(transformers):
        supported = f"{name}, as model_type is {config.model_type}; correct the field if the weights are of that model"
        raise fields.unsupported("architectures", supported)
    return config, model_class


def _is_named_after_type(architectures: Any, model_type: Any) -> bool:
    """True for the name that the causal class of a type has on the hub: PhiMoEForCausalLM for the type phimoe, where
    Transformers writes Phimoe, or InternLM3ForCausalLM for internlm3, which Transformers computes as Llama. The code of
    any other class is unknown."""
    if not isinstance(architectures, list) or len(architectures) != 1 or not isinstance(architectures[0], str):
        return False
    plain = re.sub(r"[-_.]", "", str(model_type)).lower()
    return architectures[0].lower() == f"{plain}forcausallm"


def _unknown_type(fields: Fields, version: str) -> NotSupported:
    architectures = fields.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and len(architectures) == 1 else None
    known = f'"{FAMILIES[name].model_type}"' if isinstance(name, str) and name in FAMILIES else "that of a known one"
    what = f"model_type is {json.dumps(fields.get('model_type'))[:120]}, which Transformers {version} does not know"
    remedy = (
        "a newer Transformers may know it (pip install --upgrade transformers); if the model is computed as another "
        f"type, by its authors' word, set model_type to {known}; code of a checkpoint is never run"
    )
    return NotSupported(fields.where, what, remedy)


def _refuse_others(path: Path, config: Any, model_class: Any) -> None:
    """Raise NotSupported for what is more, or less, than causal attention with keys and values of all tokens."""
    text = config.get_text_config()
    why = None
    if config.is_encoder_decoder or getattr(text, "add_cross_attention", False):
        why = "attends to the states of an encoder"
    elif getattr(model_class, "_is_stateful", False) and not _has_attention_alone(text):
        why = "keeps a state beside keys and values"
    elif not getattr(model_class, "_supports_attention_backend", False):
        why = "has its attention written out in Transformers, where it cannot be replaced"
    elif "logits_to_keep" not in inspect.signature(model_class.forward).parameters:
        why = "computes the logits of all tokens"
    if why is not None:
        raise NotSupported(path, f"{model_class.__name__} {why}", KINDS)


def _has_attention_alone(text: Any) -> bool:
    """True if no layer keeps a state, although the class of the model may: the smaller Granite 4.0 are like this."""
    kinds = getattr(text, "layer_types", None)
    return isinstance(kinds, list) and len(kinds) == text.num_hidden_layers and set(kinds) <= ATTENTION_LAYERS


def _eos_token_ids(folder: Path, fields: Fields, text: Any) -> tuple[int, ...]:
    """As generation_config.json says, else config.json, else the configuration's class."""
    path = folder / "generation_config.json"
    if path.exists():
        generation = Fields(read_json(path, "repair the file or remove it"), str(path))
        if generation.get("eos_token_id") is not None:
            return generation.token_ids("eos_token_id")
    return fields.token_ids("eos_token_id", getattr(text, "eos_token_id", None))
