"""Translates the metadata of a GGUF file into the fields of `config.json` and `generation_config.json`.

A key that would change results is translated or refused by its name; it is never ignored.
"""

from __future__ import annotations

import struct
from typing import Any

from quire.shared.model.gguf.file import GGUFArray, GGUFFile, shortest
from quire.shared.model.gguf.vocabulary import GGUFVocabulary
from quire.shared.process.errors import FileError

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",  # Mistral models are stored as llama
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
EMBEDDING, OUTPUT, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
SAFETENSORS = "give the Hugging Face folder that it was made from"
_LARGEST = 2**31 - 1
# Keys of an architecture that do not change results, or only do so together with a key that is refused.
_WITHOUT_EFFECT = {"vocab_size", "tensor_data_layout", "rope.scaling.original_context_length", "rope.scaling.finetuned"}
# Keys that must have this value.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.causal": (True,),
    "attention.scale": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "use_parallel_residual": (False,),
    "logit_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "rope.scaling.attn_factor": (0.0, 1.0),
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
    "attention.sliding_window",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scale_linear",
}


def model_config(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of `config.json` for Quire's own decoder. Raises FileError."""
    architecture = _architecture(file)
    _refuse_unknown(file, architecture)

    def key(name: str) -> str:
        return f"{architecture}.{name}"

    layers = file.integer(key("block_count"), 1, 10_000)
    hidden = file.integer(key("embedding_length"), 1, _LARGEST)
    heads = _per_layer(file, key("attention.head_count"), layers)
    kv_heads = _per_layer(file, key("attention.head_count_kv"), layers, heads)
    if hidden % heads and key("attention.key_length") not in file.metadata:
        raise file.fault(key("attention.head_count"), f"a divisor of embedding_length, which is {hidden}")
    head_dim = file.integer(key("attention.key_length"), 1, _LARGEST, hidden // heads)
    if head_dim % 16 or head_dim > 512:
        name = "attention.key_length"
        if key(name) not in file.metadata:
            name = "attention.head_count"
        raise file.fault(key(name), "heads whose size is a multiple of 16, at most 512", SAFETENSORS)
    for name in ("attention.value_length", "rope.dimension_count"):
        if file.integer(key(name), 0, _LARGEST, head_dim) != head_dim:
            raise file.fault(key(name), f"{head_dim}, as all heads have this size and are rotated as a whole")
    bias = "blk.0.attn_q.bias" in file.tensors
    vocabulary = GGUFVocabulary(file)
    context = file.integer(key("context_length"), 1, _LARGEST)
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "vocab_size": _vocab_size(file, vocabulary),
        "hidden_size": hidden,
        "intermediate_size": _per_layer(file, key("feed_forward_length"), layers),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": file.number(key("attention.layer_norm_rms_epsilon")),
        "rope_theta": file.number(key("rope.freq_base"), 10_000.0),
        "rope_scaling": _rope_scaling(file, architecture),
        "tie_word_embeddings": OUTPUT not in file.tensors,
        "bos_token_id": vocabulary.bos_token_id,
        "eos_token_id": vocabulary.eos_token_ids or None,
        "dtype": _dtype(file),
    }
    if architecture != "qwen2":
        config["attention_bias"] = bias
    if architecture == "llama":
        config["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    window = file.integer(key("attention.sliding_window"), 0, _LARGEST, 0)
    if 0 < window < context:
        if architecture != "llama" or bias:
            raise file.fault(key("attention.sliding_window"), "no such key for this architecture", SAFETENSORS)
        for name in ("attention_bias", "mlp_bias"):
            del config[name]
        config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    return config


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
    tensor = file.tensors.get(ROPE_FACTORS)
    if tensor is None:
        return ()
    if tensor.type.name != "F32" or len(tensor.shape) != 1 or tensor.nbytes > 4096:
        what = f"tensor {ROPE_FACTORS} is {tensor.type.name} {list(tensor.shape)}, expected F32 with half of head_dim"
        raise FileError(file.path, what)
    factors = struct.unpack_from(f"<{tensor.shape[0]}f", file.map, tensor.start)
    if not all(0 < factor < float("inf") for factor in factors):
        raise FileError(file.path, f"tensor {ROPE_FACTORS} has other values than numbers above 0")
    return factors


def _architecture(file: GGUFFile) -> str:
    architecture = file.text("general.architecture")
    if architecture not in ARCHITECTURES:
        raise file.fault("general.architecture", f"one of {', '.join(ARCHITECTURES)}", SAFETENSORS)
    if file.integer("split.count", 0, 65_535, 1) > 1:
        raise file.fault("split.count", "one file", "merge the parts with llama-gguf-split --merge")
    return architecture


def _refuse_unknown(file: GGUFFile, architecture: str) -> None:
    """Raise FileError for a key of the architecture that may change results and is not read."""
    prefix = f"{architecture}."
    for key, value in file.metadata.items():
        name = key.removeprefix(prefix)
        if name == key or name in _READ or name in _WITHOUT_EFFECT:
            continue
        if name not in _NEUTRAL:
            raise file.fault(key, "no such key", SAFETENSORS)
        if isinstance(value, GGUFArray) or value not in _NEUTRAL[name]:
            values = " or ".join(str(neutral).lower() for neutral in _NEUTRAL[name])
            raise file.fault(key, f"no such key, or {values}", SAFETENSORS)


def _per_layer(file: GGUFFile, key: str, layers: int, default: int | None = None) -> int:
    """Return an integer that may be stored once for each layer, and must be the same for all."""
    if not isinstance(file.metadata.get(key), GGUFArray):
        return file.integer(key, 1, _LARGEST, default)
    values = file.numbers(key)
    first = values[0] if values else 0
    if len(values) != layers or set(values) != {first} or not isinstance(first, int) or not 0 < first <= _LARGEST:
        raise file.fault(key, f"the same integer for each of {layers} layers", SAFETENSORS)
    return first


def _rope_scaling(file: GGUFFile, architecture: str) -> dict[str, Any] | None:
    kind = file.text(f"{architecture}.rope.scaling.type", "none")
    factor_key = f"{architecture}.rope.scaling.factor"
    older = f"{architecture}.rope.scale_linear"
    if kind == "none":
        if factor_key in file.metadata and file.number(factor_key) != 1:
            raise file.fault(f"{architecture}.rope.scaling.type", "linear, as rope.scaling.factor is given")
        factor = file.number(older, 1.0)
        return None if factor == 1 else {"rope_type": "linear", "factor": factor}
    if kind != "linear":
        raise file.fault(f"{architecture}.rope.scaling.type", "none or linear", SAFETENSORS)
    return {"rope_type": "linear", "factor": file.number(factor_key)}


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
