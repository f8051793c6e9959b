"""Reads `config.json` of a Hugging Face checkpoint into a frozen ModelConfig, without Transformers.

A field that would change results is honoured, or refused by a CheckpointError that names it; it is never ignored. An
absent field has the default of the configuration class in Transformers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from quire.kernels.ops import SILU
from quire.shared.model.config import longer_context
from quire.shared.model.fields import Fields, config_fields, read_json, special_token_ids
from quire.shared.model.folder import CONFIG
from quire.shared.model.labels import FIELDS as LABEL_FIELDS
from quire.shared.model.labels import is_classifier, num_labels
from quire.shared.process.errors import NotSupported
from quire.worker.models.files.formats import Quantization, has_single_experts, read_quantization, rope_divisors
from quire.worker.models.native.experts import ExpertsConfig, parse_experts
from quire.worker.models.native.families import Family, family_of, refuse_unsupported
from quire.worker.models.native.gemma4 import DEFAULT_ROPES, parse_gemma4
from quire.worker.models.native.rope import DEFAULT_THETA, RopeConfig, parse_rope
from quire.worker.models.native.wrappers import both_ways, is_wrapper, rope_axes, text_fields

# Names of tensors in a checkpoint.
EMBEDDING, HEAD, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
SCORES = "score.weight"  # the head for labels
# Gemma 4 computes the inputs of its layers from a table, and from the embeddings by a projection and a norm.
INPUT_EMBEDDING, INPUT_PROJECTION, INPUT_NORM = (
    f"model.{name}.weight"
    for name in ("embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm")
)
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ModelConfig:
    """A Llama-shaped decoder. Sizes are in elements; `sliding_windows` has an entry per layer, 0 for full attention."""

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
    dtype: str | None  # the type of the weights that the checkpoint declares: one of DTYPES
    quantization: Quantization | None = None
    experts: ExpertsConfig | None = None
    sinks: bool = False
    gate: str = SILU  # activation of MLPs
    norm_offset: float = 0.0  # added to the weights of all norms
    post_norms: bool = False  # norms follow attention and MLP
    embedding_scale: float = 1.0
    query_scalar: float = 0.0  # scores are divided by its square root; 0: head_dim
    softcap: float = 0.0  # of scores; 0: none
    final_softcap: float = 0.0  # of logits
    local_rope: RopeConfig | None = None  # of layers with a window, if they differ
    full_head_dim: int = 0  # of layers without a window; 0: head_dim
    full_kv_heads: int = 0  # of layers without a window; 0: num_kv_heads
    keys_as_values: bool = False  # in layers without a window
    kv_sources: tuple[int, ...] = ()  # the layer whose keys and values each layer reads; empty: its own
    wide_mlps: bool = False  # MLPs of layers that share keys and values have twice the inner features
    v_norm: bool = False  # values are divided by their root mean square
    output_scales: bool = False  # a scale for the output of each layer
    input_width: int = 0  # features of the input that each layer has for a token; 0: none
    input_vocab_size: int = 0
    placeholders: tuple[int, ...] = ()  # tokens that are computed as pad_token_id
    pad_token_id: int = 0
    rope_axes: tuple[int, ...] = ()  # of each pair of dimensions, for image tokens (M-RoPE)
    # Layers in which the tokens of an image attend to each other in both directions: "all", "windows"; empty: none.
    both_ways: str = ""
    num_labels: int = 0  # of a head for labels in place of that for tokens; 0: none
    is_wrapped: bool = False  # the checkpoint is a vision-language model around this text model

    @property
    def attention_scale(self) -> float:
        return float((self.query_scalar or self.head_dim) ** -0.5)

    @property
    def largest_head_dim(self) -> int:
        return max(map(self.head_dim_of, range(self.num_layers)))

    def head_dim_of(self, layer: int) -> int:
        return self.head_dim if self.sliding_windows[layer] else self.full_head_dim or self.head_dim

    def kv_heads_of(self, layer: int) -> int:
        return self.num_kv_heads if self.sliding_windows[layer] else self.full_kv_heads or self.num_kv_heads

    def is_both_ways(self, layer: int) -> bool:
        """Return whether the tokens of an image attend to each other in both directions."""
        return self.both_ways == "all" or (self.both_ways == "windows" and bool(self.sliding_windows[layer]))

    def q_size(self, layer: int) -> int:
        return self.num_heads * self.head_dim_of(layer)

    def kv_size(self, layer: int) -> int:
        return self.kv_heads_of(layer) * self.head_dim_of(layer)

    def kv_source(self, layer: int) -> int:
        """Return the layer whose keys and values this layer reads."""
        return self.kv_sources[layer] if self.kv_sources else layer

    def qkv_names(self, layer: int) -> tuple[str, ...]:
        """Return the projections of a layer that give queries, keys and values, in order. Keys may be values, too."""
        if self.kv_source(layer) != layer:
            return ("q",)
        return ("q", "k", "k") if self.keys_as_values and not self.sliding_windows[layer] else ("q", "k", "v")

    def inner_of(self, layer: int) -> int:
        """Return the inner features of a layer's MLP."""
        return self.intermediate_size * (2 if self.wide_mlps and self.kv_source(layer) != layer else 1)

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer has experts instead of one MLP."""
        return self.experts is not None and self.experts.layers[layer]

    @property
    def has_mlps(self) -> bool:
        """True if a layer has one MLP, of `intermediate_size` inner features."""
        return self.adds_experts or not all(map(self.has_experts, range(self.num_layers)))

    @property
    def adds_experts(self) -> bool:
        """True if layers with experts have an MLP, too."""
        return self.experts is not None and self.experts.style.is_added

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the checkpoint's tensors by name, as in Transformers, without embedding and head.

        Embedding and head have a row per token of the vocabulary, and may be one tensor.
        """
        hidden = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {FINAL_NORM: (hidden,)}
        if width := self.input_width:
            shapes[INPUT_EMBEDDING] = (self.input_vocab_size, self.num_layers * width)
            shapes[INPUT_PROJECTION] = (self.num_layers * width, hidden)
            shapes[INPUT_NORM] = (width,)
        for index in range(self.num_layers):
            layer, inner, head = f"model.layers.{index}", self.inner_of(index), self.head_dim_of(index)
            rows = {"q": self.q_size(index), "k": self.kv_size(index), "v": self.kv_size(index)}
            projections = {
                f"self_attn.{name}_proj": (rows[name], hidden, self.qkv_bias) for name in self.qkv_names(index)
            }
            projections["self_attn.o_proj"] = (hidden, rows["q"], self.o_bias)
            if self.experts is not None and self.has_experts(index):
                shapes |= self.experts.tensor_shapes(layer, hidden)
            if not self.has_experts(index) or self.adds_experts:
                projections |= {
                    "mlp.gate_proj": (inner, hidden, self.mlp_bias),
                    "mlp.up_proj": (inner, hidden, self.mlp_bias),
                    "mlp.down_proj": (hidden, inner, self.mlp_bias),
                }
            if width:
                projections["per_layer_input_gate"] = (width, hidden, False)
                projections["per_layer_projection"] = (hidden, width, False)
                shapes[f"{layer}.post_per_layer_input_norm.weight"] = (hidden,)
            if self.output_scales:
                shapes[f"{layer}.layer_scalar"] = (1,)
            for name, (outputs, inputs, has_bias) in projections.items():
                shapes[f"{layer}.{name}.weight"] = (outputs, inputs)
                if has_bias:
                    shapes[f"{layer}.{name}.bias"] = (outputs,)
            shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
            shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
            if self.post_norms:
                shapes[f"{layer}.pre_feedforward_layernorm.weight"] = (hidden,)
                shapes[f"{layer}.post_feedforward_layernorm.weight"] = (hidden,)
            if self.sinks:
                shapes[f"{layer}.self_attn.sinks"] = (self.num_heads,)
            if self.qk_norm:
                shapes[f"{layer}.self_attn.q_norm.weight"] = (head,)
                if self.kv_source(index) == index:
                    shapes[f"{layer}.self_attn.k_norm.weight"] = (head,)
        return shapes

    def unused_tensors(self) -> list[str]:
        """Return the names of tensors that no layer uses: of keys and values, in layers that share those of others."""
        shared = [layer for layer in range(self.num_layers) if self.kv_source(layer) != layer]
        names = ("k_proj", "v_proj", "k_norm", "v_norm")
        return [f"model.layers.{layer}.self_attn.{name}.weight" for layer in shared for name in names]

    def least_weight_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of the weights, known before they are loaded. A backend that packs them may take more."""
        tables = (1 if self.tie_word_embeddings or self.num_labels else 2) * self.vocab_size * self.hidden_size
        return (tables + sum(math.prod(shape) for shape in self.tensor_shapes().values())) * dtype.itemsize


def read_config(folder: Path) -> ModelConfig:
    """Read config.json, and the token ids of generation_config.json if it exists; or the metadata of a GGUF file.

    Raises CheckpointError, one line, for a field that is missing, malformed or not supported; NotSupported for a valid
    configuration of another kind of model.
    """
    whole = config_fields(folder)
    fields = text_fields(whole)
    architecture, family = family_of(fields)
    refuse_unsupported(fields, family)

    hidden_size = fields.integer("hidden_size")
    num_layers = fields.integer("num_hidden_layers", maximum=10_000)
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", _absent(fields, family, "num_key_value_heads", num_heads))
    max_position_embeddings = fields.integer("max_position_embeddings")
    if num_heads % num_kv_heads:
        raise fields.fault("num_key_value_heads", f"a divisor of num_attention_heads, which is {num_heads}")
    bias_default = bool(_absent(fields, family, "attention_bias", False))
    attention_bias = family.qkv_bias is None and fields.flag("attention_bias", bias_default)
    bos_token_ids = special_token_ids(folder, fields, "bos_token_id", _absent(fields, family, "bos_token_id", None))
    eos_token_ids = special_token_ids(folder, fields, "eos_token_id", _absent(fields, family, "eos_token_id", None))
    vocab_size = fields.integer("vocab_size")
    head_dim = _head_dim(fields, family, hidden_size, num_heads)
    rope, local_rope = _ropes(fields, family, max_position_embeddings)
    sliding_windows = _sliding_windows(fields, family, num_layers)
    gemma4 = parse_gemma4(fields, sliding_windows, num_heads, num_kv_heads) if family.is_gemma4 else {}
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=rope.longest_context(max_position_embeddings),
        rms_norm_eps=fields.number("rms_norm_eps", family.default("rms_norm_eps") or 1e-6),
        rope=replace(rope, divisors=rope_divisors(folder, head_dim)),
        sliding_windows=sliding_windows,
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.o_bias == "attention_bias" else fields.flag(family.o_bias, False),
        mlp_bias=family.mlp_bias and fields.flag("mlp_bias", False),
        qk_norm=family.qk_norm,
        tie_word_embeddings=fields.flag("tie_word_embeddings", bool(family.default("tie_word_embeddings"))),
        bos_token_id=bos_token_ids[0] if bos_token_ids else None,
        # If a vocabulary was cut, end tokens may be outside of it: they have no logits and are never sampled.
        eos_token_ids=tuple(token for token in eos_token_ids if token < vocab_size),
        dtype=_dtype(fields),
        quantization=read_quantization(folder, fields),
        experts=parse_experts(fields, family, num_layers, has_single_experts(folder)),
        sinks=family.sinks,
        gate=family.gate,
        local_rope=local_rope,
        rope_axes=rope_axes(whole, head_dim),
        both_ways=both_ways(whole, fields),
        is_wrapped=is_wrapper(whole),
        num_labels=_num_labels(fields, vocab_size),
        **(_gemma(fields, family, hidden_size) if family.is_gemma else {}),
        **gemma4,
    )


def context_remedy(folder: Path, limit: int, asked: int, has_rope: bool = True, default: int = 0) -> str:
    """Return the remedy for a --max-model-len of `asked` tokens if the longest is `limit`. default: `limit` if 0."""
    remedy = f"give --max-model-len from 1 to {limit}, or 0 for {default or limit}"
    config = read_json(folder / CONFIG, "repair the file")
    inner = config.get("text_config")
    longer = longer_context(inner if isinstance(inner, dict) else config, asked) if has_rope and asked > limit else ""
    return f"{remedy}; for longer contexts {longer}" if longer else remedy


def _is_classifier(fields: Fields) -> bool:
    return is_classifier({"architectures": fields.get("architectures")})


def _num_labels(fields: Fields, vocab_size: int) -> int:
    if not _is_classifier(fields):
        return 0
    if (count := num_labels({name: fields.get(name) for name in LABEL_FIELDS})) > vocab_size:
        raise fields.fault("id2label", f"at most vocab_size labels, which is {vocab_size}")
    return count


def _absent(fields: Fields, family: Family, name: str, null: Any) -> Any:
    """Return the value of an absent field: the default of the family; `null` if the field is null or has no default."""
    default = family.default(name)
    return null if default is None or fields.has(name) else default


def _head_dim(fields: Fields, family: Family, hidden_size: int, num_heads: int) -> int:
    derived = 0 if hidden_size % num_heads else hidden_size // num_heads
    head_dim = fields.integer("head_dim", _absent(fields, family, "head_dim", derived))
    if head_dim == 0:
        raise fields.fault("num_attention_heads", f"a divisor of hidden_size, which is {hidden_size}, without head_dim")
    if head_dim % 16 or head_dim > 512:
        supported = "supported: a multiple of 16, at most 512; with --model-impl auto Transformers computes other sizes"
        raise NotSupported(fields.where, f"head_dim is {head_dim}", supported)
    return head_dim


def _gemma(fields: Fields, family: Family, hidden_size: int) -> dict[str, Any]:
    def cap(name: str) -> float:
        default = _absent(fields, family, name, 0.0)
        return fields.number(name, default) if fields.get(name) is not None else default

    return {
        "norm_offset": 0.0 if family.is_gemma4 else 1.0,
        "post_norms": True,
        "embedding_scale": hidden_size**0.5,
        "query_scalar": fields.number("query_pre_attn_scalar", family.default("query_pre_attn_scalar")),
        "softcap": cap("attn_logit_softcapping"),
        # The scores of labels are not capped.
        "final_softcap": 0.0 if _is_classifier(fields) else cap("final_logit_softcapping"),
    }


def _ropes(fields: Fields, family: Family, max_position_embeddings: int) -> tuple[RopeConfig, RopeConfig | None]:
    """Return the rotations of the layers, and those of layers with a window if a family has both."""
    theta = family.default("rope_theta")
    if not family.local_rope:
        return parse_rope(fields, max_position_embeddings, theta), None
    both = fields.section("rope_parameters")
    full, local = both.get("full_attention"), both.get("sliding_attention")
    if full is None and local is None and family.is_gemma4:
        full, local = DEFAULT_ROPES["full_attention"], DEFAULT_ROPES["sliding_attention"]
    if full is None and local is None:
        own = RopeConfig(theta=fields.number("rope_local_base_freq", DEFAULT_THETA))
        return parse_rope(fields, max_position_embeddings, theta, yarn=False), own
    if not isinstance(full, dict) or not isinstance(local, dict):
        raise fields.fault("rope_parameters", "an object for full_attention and one for sliding_attention")
    of_full, of_local = (
        parse_rope(
            Fields({"rope_parameters": own}, fields.where),
            max_position_embeddings,
            default,
            yarn=False,
            proportional=family.is_gemma4,
        )
        for own, default in ((full, theta), (local, DEFAULT_THETA))
    )
    return of_full, of_local


def _sliding_windows(fields: Fields, family: Family, num_layers: int) -> tuple[int, ...]:
    """Return the window of each layer: a query at position p sees the keys in (p - window, p]; 0 for all keys."""
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
    if family.window == "types":
        if kinds is None:
            pattern = family.default("window_pattern")
            for name in ("sliding_window_pattern", "_sliding_window_pattern"):
                pattern = fields.integer(name, pattern) if family.local_rope else pattern
            of_all = [known[window > 0]] * num_layers
            kinds = of_all if not pattern else [known[(layer + 1) % pattern > 0] for layer in range(num_layers)]
        if not window and "sliding_attention" in kinds:
            raise fields.fault("sliding_window", "an integer above 0 with layers of the type sliding_attention")
        if family.is_gemma4:  # whatever layer_types says
            kinds = [*kinds[:-1], "full_attention"]
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    if not fields.flag("use_sliding_window", False):
        window = 0
    if kinds is None:
        first = fields.integer("max_window_layers", family.default("max_window_layers"), minimum=0)
        kinds = [known[layer >= first and window > 0] for layer in range(num_layers)]
    if not window and "sliding_attention" in kinds:
        raise fields.fault("layer_types", "sliding_attention only with use_sliding_window and sliding_window")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _dtype(fields: Fields) -> str | None:
    name = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    dtype = fields.get(name)
    if dtype is None:
        return None
    if not isinstance(dtype, str) or dtype.removeprefix("torch.") not in DTYPES:
        raise fields.fault(name, ", ".join(DTYPES))
    return dtype.removeprefix("torch.")
