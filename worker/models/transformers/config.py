"""Reads the configuration of a model that Transformers computes. Code of a checkpoint is never run."""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quire.shared.model.config import context_length, longest_context
from quire.shared.model.fields import Fields, config_fields, read_json, special_token_ids
from quire.shared.model.folder import CONFIG, is_gguf
from quire.shared.model.labels import is_classifier
from quire.shared.process.errors import NotSupported
from quire.worker.lean_torch import complete_torch
from quire.worker.models.files.formats import QUANTIZED, Mxfp4, Quantization, open_numbers, read_quantization
from quire.worker.models.files.loader import Weights
from quire.worker.models.native.families import FAMILIES
from quire.worker.models.transformers.classifiers import classifier_class
from quire.worker.models.transformers.written_attention import is_written_out

INSTALL = "install Transformers (pip install transformers), which computes many others"
# The remedy for a model that is refused for its kind.
KINDS = (
    "Quire serves decoder-only models whose layers have causal or sliding-window attention, with heads of at most 512 "
    'elements (256 on GPUs), or on CPUs a recurrent state: see docs/quickstart.md, "Which models"'
)
# Layers whose only state is keys and values.
ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
# Longest context of a model that has no positions, in tokens: it bounds the block tables.
ANY_LENGTH = 1 << 17
# Types that Transformers does not know, and the known types that they are by the word of their authors.
SAME_TYPE = {"kimi_k2": "deepseek_v3"}
# Names of the longest context, the usual one first.
CONTEXT_FIELDS = ("max_position_embeddings", "max_seq_len", "seq_length")
# The context with which BLOOM was trained: `seq_length` of its config.json, a field that its configuration class lacks.
BLOOM_CONTEXT = 2048
# Fields that name files which Transformers would read instead of the files that are checked here.
ELSEWHERE = ("transformers_weights", "configuration_files")


@dataclass(frozen=True)
class TransformersConfig:
    """A causal language model that Transformers can build and whose attention can be replaced."""

    folder: Path
    architecture: str
    is_named_otherwise: bool  # the checkpoint names this class differently
    max_position_embeddings: int  # the longest context, if --max-model-len does not ask for a longer one
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_layers: int
    elements: int  # of all tensors
    model_class: Any  # of Transformers
    loaded: Any  # a transformers.PreTrainedConfig, whose fields depend on the model
    may_keep_states: bool = False  # layers may keep recurrent states besides keys and values
    quantization: Quantization | None = None
    num_labels: int = 0  # of a head for labels in place of that for tokens; 0: none
    longest_context: int = 0  # that --max-model-len may ask for, with longrope; 0: max_position_embeddings

    @property
    def is_wrapped(self) -> bool:
        """True if the model has a text model inside."""
        return self.loaded.get_text_config() is not self.loaded

    @property
    def has_rope(self) -> bool:
        """True for rotary positions, which a configuration may scale; false for a learned table of positions."""
        return bool(getattr(self.loaded.get_text_config(), "rope_parameters", None))

    @property
    def num_heads(self) -> int | None:
        """The number of attention heads, if the configuration has one for all layers."""
        heads = getattr(self.loaded.get_text_config(), "num_attention_heads", None)
        return heads if type(heads) is int and heads > 0 else None

    def least_weight_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of the weights, known before they are loaded. A backend that packs them may take more."""
        return self.elements * dtype.itemsize


def read_transformers_config(folder: Path) -> TransformersConfig:
    """Read config.json, generation_config.json and the headers of the weights.

    Raises CheckpointError, one line; NotSupported for a kind of model that cannot run with paged attention.
    """
    fields, path = config_fields(folder), folder / CONFIG
    quantization = read_quantization(folder, fields)
    if isinstance(quantization, Mxfp4):
        raise fields.unsupported(QUANTIZED[0], "formats other than mxfp4, as Transformers computes this model")
    for name in ELSEWHERE:
        if fields.has(name):
            raise fields.fault(name, "no such field: config.json and its weights must have their usual names")
    complete_torch()  # Transformers builds models without memory
    config, model_class = _known(folder, fields)
    for name in QUANTIZED:  # Transformers gets the numbers that the weights stand for
        if hasattr(config, name):
            delattr(config, name)
    text = config.get_text_config()
    may_keep_states = getattr(model_class, "_is_stateful", False) and not _has_attention_alone(text)
    _refuse_others(path, config, model_class, may_keep_states)
    num_layers, vocab_size = (_size(path, text, name) for name in ("num_hidden_layers", "vocab_size"))
    has_any_length = may_keep_states and not any(hasattr(text, name) for name in CONTEXT_FIELDS)
    longest = ANY_LENGTH if has_any_length else _longest_context(path, text)
    eos_token_ids = special_token_ids(folder, fields, "eos_token_id", getattr(text, "eos_token_id", None))
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
        longest_context=longest_context(contexts) or longest,
        vocab_size=vocab_size,
        eos_token_ids=tuple(token for token in eos_token_ids if token < vocab_size),
        num_layers=num_layers,
        elements=_num_elements(folder, quantization),
        model_class=model_class,
        loaded=config,
        may_keep_states=may_keep_states,
        quantization=quantization,
        num_labels=config.num_labels if is_classifier(config.to_dict()) else 0,
    )


def _num_elements(folder: Path, quantization: Quantization | None) -> int:
    return (open_numbers(folder, quantization, (torch.float32,)) or Weights(folder)).num_elements()


def _longest_context(path: Path, text: Any) -> int:
    """Return the longest context of a configuration, which some types name otherwise or, as BLOOM, need not have."""
    for name in CONTEXT_FIELDS:
        if getattr(text, name, None) is not None:
            return _size(path, text, name)
    return BLOOM_CONTEXT if text.model_type == "bloom" else _size(path, text, CONTEXT_FIELDS[0])


def _size(path: Path, text: Any, name: str) -> int:
    value = getattr(text, name, None)
    if type(value) is not int or value < 1:
        raise NotSupported(path, f"Transformers finds no {name} in it", f"add {name}, a number above 0")
    return value


def _known(folder: Path, fields: Fields) -> tuple[Any, Any]:
    """Return the configuration and the class of the model in Transformers: Any, because each model has its own."""
    try:
        import transformers
        from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
        from transformers import logging as transformers_logging
    except ImportError:
        kind = str(fields.get("architectures") or fields.get("model_type"))[:120]
        what = f"{kind} is none of the models that Quire's own decoder knows ({', '.join(FAMILIES)})"
        raise NotSupported(fields.where, what, INSTALL) from None
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    model_type = fields.get("model_type")
    try:
        if model_type in SAME_TYPE or is_gguf(folder):
            values = read_json(folder / CONFIG, "repair the file")
            model_type = values["model_type"] = SAME_TYPE.get(str(model_type), model_type)
            config = CONFIG_MAPPING[model_type].from_dict(values)
        else:
            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # from its validation, that of the hub, or a field of the wrong type
        if isinstance(model_type, str) and model_type not in CONFIG_MAPPING:
            raise _unknown_type(fields, transformers.__version__) from None
        reason = f"Transformers cannot read it ({type(error).__name__}: {str(error)[:200]})"
        raise NotSupported(fields.where, reason, "correct the field, or take the config.json of the model") from error
    if is_classifier({"architectures": fields.get("architectures")}):
        return config, classifier_class(config, fields)
    # Models that also take images generate text of text alone.
    autos: list[Any] = [AutoModelForCausalLM, AutoModelForImageTextToText]
    classes = [auto._model_mapping[type(config)] for auto in autos if type(config) in auto._model_mapping]
    if not classes:
        raise fields.unsupported("model_type", f"causal language models that Transformers knows; {KINDS}")
    names = fields.get("architectures")
    # Types such as qwen3_5 have two classes: one takes this configuration, the other only its part for text.
    for model_class in classes:
        if names == [model_class.__name__]:
            return (config if _takes(model_class, config) else config.get_text_config()), model_class
    model_class = next((candidate for candidate in classes if _takes(candidate, config)), classes[0])
    if names is not None and (not _is_named_after_type(names, model_type) or names[0] in dir(transformers)):
        supported = f"{' or '.join(candidate.__name__ for candidate in classes)}, as model_type is {config.model_type}"
        raise fields.unsupported("architectures", f"{supported}; correct the field if the weights are of that model")
    return config, model_class


def _takes(model_class: Any, config: Any) -> bool:
    """Return whether a class of Transformers is made from a whole configuration and not from its part for text."""
    return isinstance(config, model_class.config_class or type(config))


def _is_named_after_type(architectures: Any, model_type: Any) -> bool:
    """Return whether the class is named after the type, except for capitals and punctuation.

    PhiMoEForCausalLM is the class of the type phimoe, which Transformers writes Phimoe; InternLM3ForCausalLM that of
    internlm3, which Transformers computes as Llama. The code of any other class is unknown.
    """
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


def _refuse_others(path: Path, config: Any, model_class: Any, may_keep_states: bool) -> None:
    """Raise NotSupported for models that are no decoders, or whose attention cannot be replaced.

    If layers of the model may keep states, the trial decides: its attention may be registered by name nevertheless.
    """
    text = config.get_text_config()
    why = None
    if config.is_encoder_decoder or getattr(text, "add_cross_attention", False):
        why = "attends to the states of an encoder"
    elif not (
        may_keep_states or getattr(model_class, "_supports_attention_backend", False) or is_written_out(model_class)
    ):
        why = "has its attention written out in Transformers, where it cannot be replaced"
    elif "logits_to_keep" not in inspect.signature(model_class.forward).parameters:
        why = "computes the logits of all tokens"
    if why is not None:
        raise NotSupported(path, f"{model_class.__name__} {why}", KINDS)


def _has_attention_alone(text: Any) -> bool:
    """Return whether no layer keeps another state, although the model's class may. Example: the smaller Granite 4.0."""
    kinds = getattr(text, "layer_types", None)
    return isinstance(kinds, list) and len(kinds) == text.num_hidden_layers and set(kinds) <= ATTENTION_LAYERS
