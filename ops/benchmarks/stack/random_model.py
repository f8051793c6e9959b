"""Decoders with random weights and published shapes, made in memory without reading or writing files."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quire.kernels.ops import Ops
from quire.worker.models.files.weight_reader import WeightReader
from quire.worker.models.native.config import EMBEDDING, FINAL_NORM, HEAD, ModelConfig, read_config
from quire.worker.models.native.decoder import Decoder, load_layer
from quire.worker.models.native.rope import cos_sin_table
from quire.worker.models.native.sharding import Shard

# The values are those of config.json on Hugging Face.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    # A tiny model for rehearsals and tests on a CPU.
    "small": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    },
}
COMMON = {"hidden_act": "silu", "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1}


def config_json(name: str, num_layers: int = 0) -> str:
    """Return the configuration of a model. num_layers: 0 for all."""
    fewer = {"num_hidden_layers": num_layers} if num_layers else {}
    return json.dumps(COMMON | CONFIGS[name] | fewer, indent=1)


def random_decoder(name: str, ops: Ops, dtype: torch.dtype, max_model_len: int, num_layers: int = 0) -> Decoder:
    """Return a model of a published shape on the device of `ops`. Weights are normal, scaled as trained weights are.

    num_layers: 0 for all.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(config_json(name, num_layers))
        config = read_config(Path(folder))
    shard = Shard(config)
    reader = WeightReader(RandomWeights(shapes_of(config), dtype), shard, ops, dtype, ops.device)
    table = reader.embedding(EMBEDDING)
    return Decoder(
        shard,
        ops,
        dtype,
        embedding=table,
        layers=[load_layer(config, reader, index, max_model_len) for index in range(config.num_layers)],
        norm=reader.read(FINAL_NORM),
        head=reader.head(HEAD, table if config.tie_word_embeddings else None),
        cos_sin=cos_sin_table(config.rope, config.head_dim, max_model_len).to(ops.device),
    )


@dataclass(frozen=True)
class RandomWeights:
    """Random tensors by name: ones for the norms, a normal distribution for the rest."""

    shapes: dict[str, tuple[int, ...]]
    dtype: torch.dtype

    def stored_dtype(self, name: str) -> torch.dtype:
        return self.dtype

    def read(
        self,
        names: Sequence[str],
        dtype: torch.dtype,
        device: torch.device | str,
        parts: Sequence[tuple[slice, ...]] = (),
    ) -> torch.Tensor:
        return self.rows(names, dtype, device, parts)

    def rows(
        self,
        names: Sequence[str],
        dtype: torch.dtype,
        device: torch.device | str,
        parts: Sequence[tuple[slice, ...]] = (),
    ) -> torch.Tensor:
        shapes = []
        for at, name in enumerate(names):
            shape, part = self.shapes[name], parts[at] if parts else ()
            shapes.append((len(range(*part[0].indices(shape[0]))), *shape[1:]) if part else shape)
        made = [self._tensor(shape, name, dtype, device) for name, shape in zip(names, shapes, strict=True)]
        return torch.cat(made)

    def finished(self, names: Sequence[str]) -> None:
        """Do nothing: nothing is counted."""

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    @staticmethod
    def _tensor(shape: tuple[int, ...], name: str, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
        if len(shape) == 1 and name.endswith("norm.weight"):
            return torch.ones(shape, dtype=dtype, device=device)
        return torch.randn(shape, dtype=dtype, device=device) * 0.02


def shapes_of(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return all tensors of a checkpoint, by name."""
    table = (config.vocab_size, config.hidden_size)
    shapes = config.tensor_shapes() | {EMBEDDING: table}
    return shapes if config.tie_word_embeddings else shapes | {HEAD: table}
