"""`config.json` of a Hugging Face checkpoint as a frozen ModelConfig, read without Transformers.

A field that would change the numbers is honoured or refused by a CheckpointError that names it; it is never ignored.
Defaults are those of the configuration classes of Transformers, which apply to whatever a checkpoint leaves out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quire.shared.model.config import longer_context
from quire.shared.model.folder import CONFIG
from quire.worker.models.errors import CheckpointError, NotSupported
from quire.worker.models.fields import Fields, config_fields, read_json
from quire.worker.models.rope import RopeConfig, parse_rope
from quire.worker.models.tensors import tensor_shapes

DTYPES = ("float32", "bfloat16", "float16")
# Where a checkpoint says how its weights are compressed.
QUANTISED = ("quantization_config", "compression_config")
# Other families scale or bend numbers by these fields. Each must be absent or have a value from here: no effect.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "per_layer_config": (),
    "final_logit_softcapping": (),
    "attn_logit_softcapping": (),
    "attention_chunk_size": (),
    "query_pre_attn_scalar": (),
    "attention_multiplier": (),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "logits_scaling": (1,),
    "logit_scale": (1,),
    "num_local_experts": (0,),
    "num_experts": (0,),
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
}


@dataclass(frozen=True)
class Family:
    """What an architecture fixes in code, and what it defaults to."""

    model_type: str
    qkv_bias: bool | None  # None: by attention_bias, which then covers the output projection as well
    mlp_bias: bool = False  # whether the field mlp_bias is known
    qk_norm: bool = False
    window: str = "none"  # none, all (sliding_window alone), layers (use_sliding_window and its companions)
    defaults: tuple[tuple[str, Any], ...] = ()

    def default(self, name: str) -> Any:
        return dict(self.defaults).get(name)


_BOS_EOS = (("bos_token_id", 1), ("eos_token_id", 2))
_QWEN = (("num_key_value_heads", 32), ("sliding_window", 4096), ("max_window_layers", 28))
FAMILIES = {
    "LlamaForCausalLM": Family("llama", qkv_bias=None, mlp_bias=True, defaults=_BOS_EOS),
    "MistralForCausalLM": Family(
        "mistral",
        qkv_bias=False,
        window="all",
        defaults=(*_BOS_EOS, ("num_key_value_heads", 8), ("sliding_window", 4096)),
    ),
    "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True, window="layers", defaults=_QWEN),
    "Qwen3ForCausalLM": Family(
        "qwen3", qkv_bias=None, qk_norm=True, window="layers", defaults=(*_QWEN, ("head_dim", 128))
    ),
}


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of the Llama shape. Sizes are in elements; `sliding_windows` has an entry per layer, 0 for none."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    sliding_windows: tuple[int, ...]
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str | None  # what the checkpoint says that its weights are: one of DTYPES

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def least_weight_bytes(self, dtype: torch.dtype) -> int:
        """Memory of the weights before any is loaded; a backend that packs them may take more."""
        tables = (1 if self.tie_word_embeddings else 2) * self.vocab_size * self.hidden_size
        return (tables + sum(math.prod(shape) for shape in tensor_shapes(self).values())) * dtype.itemsize


def read_config(folder: Path) -> ModelConfig:
    """Read config.json, and the token ids of generation_config.json where there is one.

    Raises CheckpointError, one line, for anything missing, malformed or not supported; NotSupported for what is right
    and of another kind.
    """
    fields = config_fields(folder)
    architecture, family = _family(fields)
    _refuse_unsupported(fields, family)

    hidden_size = fields.integer("hidden_size")
    num_layers = fields.integer("num_hidden_layers", maximum=10_000)
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", _absent(fields, family, "num_key_value_heads", num_heads))
    max_position_embeddings = fields.integer("max_position_embeddings")
    if num_heads % num_kv_heads:
        raise fields.fault("num_key_value_heads", f"a divisor of num_attention_heads, which is {num_heads}")
    attention_bias = family.qkv_bias is None and fields.flag("attention_bias", False)
    tokens = _token_fields(folder, fields)
    bos_token_ids = tokens["bos_token_id"].token_ids("bos_token_id", _absent(fields, family, "bos_token_id", None))
    eos_token_ids = tokens["eos_token_id"].token_ids("eos_token_id", _absent(fields, family, "eos_token_id", None))
    vocab_size = fields.integer("vocab_size")
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(fields, family, hidden_size, num_heads),
        max_position_embeddings=max_position_embeddings,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=parse_rope(fields, max_position_embeddings),
        sliding_windows=_sliding_windows(fields, family, num_layers),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias,
        mlp_bias=family.mlp_bias and fields.flag("mlp_bias", False),
        qk_norm=family.qk_norm,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        bos_token_id=bos_token_ids[0] if bos_token_ids else None,
        # Where a vocabulary was cut, end tokens may lie behind it: never drawn, and no column of the logits.
        eos_token_ids=tuple(token for token in eos_token_ids if token < vocab_size),
        dtype=_dtype(fields),
    )


def context_remedy(folder: Path, limit: int, asked: int, has_rope: bool = True) -> str:
    """The remedy for a --max-model-len of `asked` tokens where the longest context is `limit`."""
    remedy = f"give --max-model-len from 1 to {limit}, or 0 for {limit}"
    config = read_json(folder / CONFIG, "repair the file")
    inner = config.get("text_config")
    longer = longer_context(inner if isinstance(inner, dict) else config, asked) if has_rope and asked > limit else ""
    return f"{remedy}; for longer contexts {longer}" if longer else remedy


def _family(fields: Fields) -> tuple[str, Family]:
    """By `architectures`, else by `model_type`. Another type with the same class may have other defaults."""
    supported = ", ".join(FAMILIES)
    by_type = {family.model_type: name for name, family in FAMILIES.items()}
    model_type, architectures = fields.get("model_type"), fields.get("architectures")
    if architectures is None:
        if not isinstance(model_type, str):
            raise fields.fault("model_type" if model_type is not None else "architectures", supported)
        if model_type not in by_type:
            raise fields.unsupported("model_type", supported)
        architectures = [by_type[model_type]]
    if not isinstance(architectures, list) or len(architectures) != 1 or not isinstance(architectures[0], str):
        raise fields.fault("architectures", f"one of {supported}")
    if architectures[0] not in FAMILIES:
        raise fields.unsupported("architectures", f"one of {supported}")
    family = FAMILIES[architectures[0]]
    if model_type not in (None, family.model_type):
        raise fields.unsupported("model_type", f"{family.model_type}, as architectures is {architectures[0]}")
    return architectures[0], family


def _absent(fields: Fields, family: Family, name: str, null: Any) -> Any:
    """What stands for an absent field: the default of the family. `null` is for one that is null or has no default."""
    default = family.default(name)
    return null if default is None or fields.has(name) else default


def _head_dim(fields: Fields, family: Family, hidden_size: int, num_heads: int) -> int:
    derived = 0 if hidden_size % num_heads else hidden_size // num_heads
    head_dim = fields.integer("head_dim", _absent(fields, family, "head_dim", derived))
    if head_dim == 0:
        raise fields.fault("num_attention_heads", f"a divisor of hidden_size, which is {hidden_size}, without head_dim")
    if head_dim % 16 or head_dim > 512:
        supported = "supported: a multiple of 16, at most 512; --model-impl auto has others computed by Transformers"
        raise NotSupported(fields.where, f"head_dim is {head_dim}", supported)
    return head_dim


def _refuse_unsupported(fields: Fields, family: Family) -> None:
    for name in QUANTISED:
        if fields.get(name) is not None:
            raise fields.fault(name, "weights that are not quantised; use the checkpoint that these were made from")
    for name, neutral in NEUTRAL.items():
        if fields.get(name) is not None and fields.get(name) not in neutral:
            raise fields.fault(name, " or ".join(["no such field", *(str(value).lower() for value in neutral)]))
    if fields.get("hidden_act", "silu") not in ("silu", "swish"):
        raise fields.unsupported("hidden_act", "silu")
    if family.qkv_bias is False and fields.flag("attention_bias", False):
        raise fields.fault("attention_bias", f"false for {family.model_type}")
    if not family.mlp_bias and fields.flag("mlp_bias", False):
        raise fields.fault("mlp_bias", f"false for {family.model_type}")


def _sliding_windows(fields: Fields, family: Family, num_layers: int) -> tuple[int, ...]:
    """The window of each layer: a query at position p sees the keys in (p - window, p]; 0 sees all."""
    if family.window == "none":
        return (0,) * num_layers
    kinds = fields.get("layer_types")
    known = ("full_attention", "sliding_attention")
    if kinds is not None and (
        not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in known for kind in kinds)
    ):
        raise fields.fault("layer_types", f"one of {' and '.join(known)} for each of {num_layers} layers")
    window = fields.integer("sliding_window", _absent(fields, family, "sliding_window", 0))
    if family.window == "all":
        if kinds is not None and set(kinds) != {"sliding_attention" if window else "full_attention"}:
            raise fields.fault("layer_types", "the same kind for all layers, as sliding_window says")
        return (window,) * num_layers
    if not fields.flag("use_sliding_window", False):
        window = 0
    if kinds is None:
        first = fields.integer("max_window_layers", family.default("max_window_layers"), minimum=0)
        kinds = [known[layer >= first and window > 0] for layer in range(num_layers)]
    if not window and "sliding_attention" in kinds:
        raise fields.fault("layer_types", "sliding_attention only with use_sliding_window and sliding_window")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _token_fields(folder: Path, config: Fields) -> dict[str, Fields]:
    """Where each special token is defined: generation_config.json, if it says so, before config.json."""
    path = folder / "generation_config.json"
    generation = Fields({}, "")
    if path.exists():
        generation = Fields(read_json(path, "repair the file or remove it"), str(path))
    names = ("bos_token_id", "eos_token_id")
    return {name: generation if generation.get(name) is not None else config for name in names}


def _dtype(fields: Fields) -> str | None:
    name = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    dtype = fields.get(name)
    if dtype is None:
        return None
    if not isinstance(dtype, str) or dtype.removeprefix("torch.") not in DTYPES:
        raise fields.fault(name, ", ".join(DTYPES))
    return dtype.removeprefix("torch.")


__all__ = ["CheckpointError", "ModelConfig", "read_config"]
