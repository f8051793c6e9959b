"""Writes a Hugging Face checkpoint of Quire's own decoder as a GGUF file, for tests and measurements.

    PYTHONPATH=. python -m quire.ops.tools.gguf_writer models/demo demo.gguf --type Q4_0

The file is written by the package `gguf` of llama.cpp, which also quantises the types of 32 weights. It has no
quantisation to K-quants; `k_quants.py` has a simple one.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray

from quire.ops.tools.k_quants import QUANTIZERS
from quire.worker.models.files.loader import Weights

Array = NDArray[Any]
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", *QUANTIZERS)
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4


def write_gguf(folder: Path, out: Path, kind: str = "F16", pre: str = "gpt-2", **metadata: Any) -> Path:
    """Write the checkpoint in `folder`, with matrices of the type `kind`, and return the path of the file.

    pre: the name of the pre-tokenizer. metadata: further keys, with __ for a dot; None leaves out a key.
    """
    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(None, architecture)
    keys = _model_keys(config, architecture) | _tokenizer_keys(folder, config, pre)
    keys |= {key.replace("__", "."): value for key, value in metadata.items()}
    for key, value in keys.items():
        if value is not None:
            _add(writer, key, value)
    for name, values in _tensors(folder, config, architecture):
        stored = fitting(values, kind) if values.ndim == 2 else "F32"
        raw = quantized(values, stored)
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[stored])
    out.parent.mkdir(parents=True, exist_ok=True)
    writer.write_header_to_file(path=out)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def quantized(values: Array, kind: str) -> Array:
    """Return float32 values as the bytes of a type."""
    if kind in QUANTIZERS:
        return QUANTIZERS[kind](values)
    result: Array = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    return result


def fitting(values: Array, kind: str) -> str:
    """Return the type of a matrix: `kind` if its blocks fit the rows, else a type with smaller blocks."""
    for type_name in (kind, "Q8_0"):
        block, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
        if values.shape[-1] % block == 0:
            return type_name
    return "F16"


def _model_keys(config: dict[str, Any], architecture: str) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    keys = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0),
        "rope.dimension_count": head_dim,
        "vocab_size": config["vocab_size"],
    }
    if rope.get("rope_type") == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    if config["model_type"] == "mistral" and config.get("sliding_window"):
        keys["attention.sliding_window"] = config["sliding_window"]
    return {f"{architecture}.{key}": value for key, value in keys.items()} | {"general.name": "test"}


def _tokenizer_keys(folder: Path, config: dict[str, Any], pre: str) -> dict[str, Any]:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    texts = {token: text for text, token in tokenizer["model"]["vocab"].items()}
    added = {token["id"]: token for token in tokenizer["added_tokens"]}
    texts |= {number: token["content"] for number, token in added.items()}
    size = config["vocab_size"]
    kinds = [(CONTROL if added[at]["special"] else USER_DEFINED) if at in added else NORMAL for at in range(size)]
    merges = tokenizer["model"]["merges"]
    template = folder / "chat_template.jinja"
    eos = config["eos_token_id"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [texts.get(token, f"[PAD{token}]") for token in range(size)],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in merges],
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": eos[0] if isinstance(eos, list) else eos,
        "tokenizer.ggml.padding_token_id": config.get("pad_token_id"),
        "tokenizer.ggml.add_bos_token": tokenizer["post_processor"] is not None,
        "tokenizer.chat_template": template.read_text() if template.exists() else settings.get("chat_template"),
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _tensors(folder: Path, config: dict[str, Any], architecture: str) -> list[tuple[str, Array]]:
    """Return the tensors of a checkpoint in float32, by the names and in the order of rows of llama.cpp."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config["num_hidden_layers"])
    weights = Weights(folder)
    tensors = []
    for name in sorted(weights._tensors):
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        values = weights.read([name], torch.float32).numpy()
        if architecture == "llama" and ".q_proj." in name:
            values = _alternated(values, config["num_attention_heads"])
        if architecture == "llama" and ".k_proj." in name:
            values = _alternated(values, config["num_key_value_heads"])
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        tensors.append((stored, values))
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "llama3":
        tensors.append(("rope_freqs.weight", _rope_divisors(config, rope)))
    return tensors


def _alternated(values: Array, heads: int) -> Array:
    """Return the rows in the order of llama.cpp: the halves of a head alternate."""
    halves = values.reshape(heads, 2, len(values) // heads // 2, -1)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def _rope_divisors(config: dict[str, Any], rope: dict[str, Any]) -> Array:
    """Return the divisors of the frequencies of Llama 3.1."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    wavelengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    turns = rope["original_max_position_embeddings"] / wavelengths
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    share = np.clip((turns - low) / (high - low), 0, 1)
    return np.asarray(1 / ((1 - share) / factor + share), dtype=np.float32)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--type", default="F16", choices=TYPES)
    parser.add_argument("--pre", default="gpt-2")
    args = parser.parse_args()
    print(write_gguf(args.folder, args.out, args.type, args.pre))
    return 0


if __name__ == "__main__":
    sys.exit(main())
