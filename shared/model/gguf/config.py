"""Translates the metadata of a GGUF file into the fields of `config.json` and `generation_config.json`.

A key that would change results is translated or refused by its name; it is never ignored.
"""

from __future__ import annotations

from typing import Any

from quire.shared.model.gguf.architectures import ARCHITECTURES, NEXTN, Architecture
from quire.shared.model.gguf.file import GGUFArray, GGUFFile, shortest
from quire.shared.model.gguf.keys import SAFETENSORS, ModelKeys, rope_numbers
from quire.shared.model.gguf.vocabulary import GGUFVocabulary
from quire.shared.process.errors import FileError

EMBEDDING, OUTPUT, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
# Keys of an architecture that do not change results, or only do so together with a key that is refused.
_WITHOUT_EFFECT = {"vocab_size", "tensor_data_layout", "rope.scaling.original_context_length", "rope.scaling.finetuned"}
# Keys that must have this value.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_shared_count": (0,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_weights_scale": (0.0, 1.0),
    "expert_gating_func": (0, 1),  # softmax
    "leading_dense_block_count": (0,),
    NEXTN: (0,),
    "attention.causal": (True,),
    "attention.scale": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "use_parallel_residual": (False,),
    "logit_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "rope.scaling.attn_factor": (0.0, 1.0),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}
_READ = {
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scale_linear",
}


def model_config(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of `config.json` for Quire's own decoder or Transformers. Raises FileError."""
    name, architecture = _architecture(file)
    keys = ModelKeys(file, name)
    _refuse_unknown(keys, architecture)
    hidden = keys.integer("embedding_length")
    heads = keys.of_all_layers("attention.head_count")
    if hidden % heads and "attention.key_length" not in keys:
        raise keys.fault("attention.head_count", f"a divisor of embedding_length, which is {hidden}")
    head_dim = keys.integer("attention.key_length", default=hidden // heads)
    whole = ("attention.value_length",) if architecture.partial else ("attention.value_length", "rope.dimension_count")
    for key in whole:
        if keys.integer(key, 0, default=head_dim) != head_dim:
            raise keys.fault(key, f"{head_dim}, as all heads have this size and are rotated as a whole")
    vocabulary = GGUFVocabulary(file)
    config: dict[str, Any] = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "vocab_size": _vocab_size(file, vocabulary),
        "hidden_size": hidden,
        "intermediate_size": _inner(keys),
        "num_hidden_layers": keys.layers - keys.integer(NEXTN, 0, keys.layers - 1, 0),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.of_all_layers("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.number("rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(keys, architecture.scalings),
        "tie_word_embeddings": OUTPUT not in file.tensors,
        "bos_token_id": vocabulary.bos_token_id,
        "eos_token_id": vocabulary.eos_token_ids or None,
        "dtype": _dtype(file),
    }
    return config | architecture.fields(keys, config)


def generation_config(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of `generation_config.json`: the end tokens, and the sampling defaults if the file has some."""
    vocabulary = GGUFVocabulary(file)
    config: dict[str, Any] = {"bos_token_id": vocabulary.bos_token_id}
    if vocabulary.eos_token_ids:
        config["eos_token_id"] = vocabulary.eos_token_ids
    names = {"temp": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}
    for name, field in names.items():
        value = file.metadata.get(f"general.sampling.{name}")
        if isinstance(value, int | float) and not isinstance(value, bool):
            config[field] = value if isinstance(value, int) else shortest(value)
    return config


def rope_factors(file: GGUFFile) -> tuple[float, ...]:
    """Return the divisors of the RoPE frequencies, one for each pair of dimensions; empty if the file has none."""
    return rope_numbers(file, ROPE_FACTORS) if ROPE_FACTORS in file.tensors else ()


def _architecture(file: GGUFFile) -> tuple[str, Architecture]:
    name = file.text("general.architecture")
    if name not in ARCHITECTURES:
        raise file.fault("general.architecture", f"one of {', '.join(ARCHITECTURES)}", SAFETENSORS)
    return name, ARCHITECTURES[name]


def _refuse_unknown(keys: ModelKeys, architecture: Architecture) -> None:
    """Raise FileError for a key of the architecture that may change results and is not read."""
    for name in keys.names():
        if name in _READ or name in architecture.keys or name in _WITHOUT_EFFECT:
            continue
        if name not in _NEUTRAL:
            raise keys.fault(name, "no such key")
        if isinstance(keys.get(name), GGUFArray) or keys.get(name) not in _NEUTRAL[name]:
            values = " or ".join(str(neutral).lower() for neutral in _NEUTRAL[name])
            raise keys.fault(name, f"no such key, or {values}")


def _inner(keys: ModelKeys) -> int:
    """Return the inner features of MLPs; of a mixture of experts without MLPs a file need not give them."""
    name, of_experts = "feed_forward_length", "expert_feed_forward_length"
    if of_experts in keys and keys.get(name) in (None, 0):
        return keys.of_all_layers(of_experts)
    return keys.of_all_layers(name)


def _rope_scaling(keys: ModelKeys, scalings: tuple[str, ...]) -> dict[str, Any] | None:
    factor, kind = "rope.scaling.factor", keys.text("rope.scaling.type", "none")
    if kind == "none":
        if factor in keys and keys.number(factor) != 1:
            raise keys.fault("rope.scaling.type", "linear, as rope.scaling.factor is given")
        factor = "rope.scale_linear"
        if keys.number(factor, 1.0) == 1:
            return None
        kind = "linear"
    if kind not in scalings:
        raise keys.fault("rope.scaling.type", " or ".join(("none", *scalings)))
    if kind == "longrope":  # the architecture reads its factors
        return None
    rope: dict[str, Any] = {"rope_type": kind, "factor": keys.number(factor)}
    if kind == "yarn":
        rope |= {
            "original_max_position_embeddings": keys.integer("rope.scaling.original_context_length"),
            "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0),
        }
        if (attention := "rope.scaling.yarn_attn_factor") in keys:
            rope["attention_factor"] = keys.number(attention)
    return rope


def _vocab_size(file: GGUFFile, vocabulary: GGUFVocabulary) -> int:
    """Return the number of rows of the embedding; tokens without a text may follow those of the vocabulary."""
    tensor = file.tensors.get(EMBEDDING)
    if tensor is None or len(tensor.shape) != 2:
        fault = "is missing" if tensor is None else f"has the shape {list(tensor.shape)}"
        raise FileError(file.path, f"tensor {EMBEDDING} {fault}, expected a row for each token")
    if vocabulary.size > tensor.shape[0]:
        what = f"tensor {EMBEDDING} has {tensor.shape[0]} rows, expected {vocabulary.size} or more, one for each token"
        raise FileError(file.path, what)
    return tensor.shape[0]


def _dtype(file: GGUFFile) -> str:
    """Return the type of most weights as `config.json` names it; quantised weights are float16 once expanded."""
    sizes: dict[str, int] = {}
    for tensor in file.tensors.values():
        name = {"F32": "float32", "BF16": "bfloat16"}.get(tensor.type.name, "float16")
        sizes[name] = sizes.get(name, 0) + tensor.nbytes // tensor.type.nbytes * tensor.type.block
    return max(sizes, key=lambda name: sizes[name])
