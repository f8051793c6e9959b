"""The families of Quire's own decoder: what an architecture fixes in code, and the fields of its config.json."""

from __future__ import annotations

import importlib.util
import logging
import re
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from quire.kernels.ops import CLAMPED_ALPHA, CLAMPED_LIMIT, GELU, SILU
from quire.shared.model.fields import Fields
from quire.shared.model.labels import SUFFIX as CLASSIFIER

log = logging.getLogger(__name__)

# Fields by which other families scale or cap numbers. Each must be absent or have one of these values: no effect.
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
# Fields of every family that are read elsewhere, or do not change results while a model is served.
COMMON = frozenset(
    (
        *("architectures", "model_type", "transformers_version", "_name_or_path", "name_or_path", "_commit_hash"),
        *("torch_dtype", "dtype", "use_cache", "pad_token_id", "bos_token_id", "eos_token_id", "initializer_range"),
        *("attention_dropout", "return_dict", "output_hidden_states", "output_attentions", "chunk_size_feed_forward"),
        *("id2label", "label2id", "problem_type", "tie_word_embeddings", "vocab_size", "hidden_size", "head_dim"),
        *("intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "rms_norm_eps"),
        *("max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"),
        *("hidden_act", "attention_bias", "mlp_bias", "quantization_config", "compression_config", "auto_map"),
        *("task_specific_params", "tokenizer_class", "unsloth_fixed", "num_labels", "classifier_from_token"),
        *("is_original_qwen3_reranker", "sentence_transformers", "sbert_ce_default_activation_function"),
    )
)
# Losses and noise of training.
ROUTER_TRAINING = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")


@dataclass(frozen=True)
class Family:
    """The properties that an architecture fixes in code, and its defaults."""

    model_type: str
    qkv_bias: bool | None  # None: attention_bias decides
    o_bias: str = "attention_bias"  # the field for the output projection, if attention_bias decides for queries
    mlp_bias: bool = False  # True if the architecture has the field mlp_bias
    qk_norm: bool = False
    # none, all (sliding_window alone), layers (use_sliding_window and its companions), types (layer_types; without them
    # by the default window_pattern, and without this all layers)
    window: str = "none"
    sinks: bool = False
    gate: str = SILU
    is_gemma: bool = False  # norms follow attention and MLP, too; embeddings are scaled
    is_gemma4: bool = False  # fields of `gemma4.py`; the norms of other Gemmas are offsets from 1
    local_rope: bool = False  # layers with a window have rotations of their own
    experts: str = ""  # names of the experts' tensors: a key of `experts.STYLES`
    defaults: tuple[tuple[str, Any], ...] = ()
    own_fields: tuple[str, ...] | None = None  # besides COMMON; other fields are refused. None: only NEUTRAL is checked
    # The first of each is needed, or another one: Transformers has defaults for them that the decoder lacks.
    needed: tuple[tuple[str, ...], ...] = ()

    def default(self, name: str) -> Any:
        return dict(self.defaults).get(name)


_BOS_EOS = (("bos_token_id", 1), ("eos_token_id", 2))
_QWEN = (("num_key_value_heads", 32), ("sliding_window", 4096), ("max_window_layers", 28))
_GEMMA = (
    *(("bos_token_id", 2), ("eos_token_id", 1), ("num_key_value_heads", 4), ("head_dim", 256)),
    *(("query_pre_attn_scalar", 256), ("sliding_window", 4096), ("tie_word_embeddings", True)),
)
_ROPE = ("rope_parameters", "rope_scaling")
_GEMMA_FIELDS = (
    *("hidden_activation", "sliding_window", "layer_types", "query_pre_attn_scalar", "attn_logit_softcapping"),
    *("final_logit_softcapping", "use_bidirectional_attention", "cache_implementation"),
)
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
    "MinistralForCausalLM": Family(
        "ministral",
        qkv_bias=False,
        window="types",
        defaults=(*_BOS_EOS, ("num_key_value_heads", 8), ("sliding_window", 4096)),
        own_fields=("sliding_window", "layer_types"),
    ),
    "SeedOssForCausalLM": Family(
        "seed_oss",
        qkv_bias=None,
        o_bias="attention_out_bias",
        mlp_bias=True,
        defaults=(
            *(("bos_token_id", 0), ("eos_token_id", 2), ("attention_bias", True)),
            *(("num_key_value_heads", 8), ("head_dim", 128)),
        ),
        own_fields=("attention_out_bias", "residual_dropout", "pretraining_tp"),
    ),
    "CwmForCausalLM": Family(
        "cwm",
        qkv_bias=False,
        mlp_bias=True,
        window="types",
        defaults=(
            *(("bos_token_id", 128_000), ("num_key_value_heads", 8), ("head_dim", 128), ("rms_norm_eps", 1e-5)),
            *(("rope_theta", 1_000_000.0), ("sliding_window", 8192)),
        ),
        own_fields=("sliding_window", "layer_types", "pretraining_tp"),
        needed=(("layer_types",), ("eos_token_id",), _ROPE),
    ),
    "IQuestCoderForCausalLM": Family(
        "iquestcoder",
        qkv_bias=None,
        mlp_bias=True,
        defaults=(*_BOS_EOS, ("num_key_value_heads", 8), ("head_dim", 128), ("rms_norm_eps", 1e-5)),
        own_fields=("use_sliding_window", "max_window_layers", "sliding_window"),
    ),
    "MixtralForCausalLM": Family(
        "mixtral",
        qkv_bias=False,
        window="all",
        experts="mixtral",
        defaults=(
            *_BOS_EOS,
            ("num_key_value_heads", 8),
            ("rms_norm_eps", 1e-5),
            ("rope_theta", 1_000_000.0),
            ("num_experts", 8),
            ("num_experts_per_tok", 2),
        ),
        own_fields=("sliding_window", "num_local_experts", "num_experts", "num_experts_per_tok", *ROUTER_TRAINING),
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        qkv_bias=None,
        qk_norm=True,
        experts="qwen3_moe",
        defaults=(
            ("num_key_value_heads", 4),
            ("num_experts", 128),
            ("num_experts_per_tok", 8),
            ("moe_intermediate_size", 768),
        ),
        own_fields=(
            *("sliding_window", "use_sliding_window", "max_window_layers", "num_local_experts", "num_experts"),
            *("num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step"),
            *("mlp_only_layers", *ROUTER_TRAINING),
        ),
    ),
    "GptOssForCausalLM": Family(
        "gpt_oss",
        qkv_bias=None,
        window="types",
        sinks=True,
        experts="gpt_oss",
        defaults=(
            ("attention_bias", True),
            ("num_key_value_heads", 8),
            ("head_dim", 64),
            ("rms_norm_eps", 1e-5),
            ("rope_theta", 150_000.0),
            ("sliding_window", 128),
            ("window_pattern", 2),
            ("num_experts", 128),
            ("num_experts_per_tok", 4),
        ),
        own_fields=(
            *("sliding_window", "layer_types", "num_local_experts", "num_experts", "num_experts_per_tok"),
            *("experts_per_token", "initial_context_length", "swiglu_alpha", "swiglu_limit", *ROUTER_TRAINING),
        ),
        needed=(_ROPE,),
    ),
    "Gemma2ForCausalLM": Family(
        "gemma2",
        qkv_bias=None,
        window="types",
        gate=GELU,
        is_gemma=True,
        defaults=(*_GEMMA, ("window_pattern", 2), ("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0)),
        own_fields=_GEMMA_FIELDS,
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3_text",
        qkv_bias=None,
        qk_norm=True,
        window="types",
        gate=GELU,
        is_gemma=True,
        local_rope=True,
        defaults=(*_GEMMA, ("rope_theta", 1_000_000.0), ("window_pattern", 6)),
        own_fields=(*_GEMMA_FIELDS, "rope_local_base_freq", "sliding_window_pattern", "_sliding_window_pattern"),
    ),
    "Gemma4ForCausalLM": Family(
        "gemma4_text",
        qkv_bias=None,
        qk_norm=True,
        window="types",
        gate=GELU,
        is_gemma=True,
        is_gemma4=True,
        local_rope=True,
        experts="gemma4",
        defaults=(*_GEMMA, ("query_pre_attn_scalar", 1.0), ("sliding_window", 512), ("window_pattern", 6)),
        own_fields=(
            *("hidden_activation", "sliding_window", "layer_types", "final_logit_softcapping", "per_layer_config"),
            *("use_bidirectional_attention", "global_head_dim", "num_global_key_value_heads", "attention_k_eq_v"),
            *("num_kv_shared_layers", "use_double_wide_mlp", "hidden_size_per_layer_input", "enable_moe_block"),
            *("vocab_size_per_layer_input", "num_experts", "top_k_experts", "moe_intermediate_size"),
            *("cache_implementation", "placeholder_token_ids"),
        ),
    ),
}


def family_of(fields: Fields) -> tuple[str, Family]:
    """Return the family that `architectures` names, else `model_type`. Both must agree: defaults depend on the type.

    Raises CheckpointError, and NotSupported for other architectures.
    """
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
    if (name := _causal_name(architectures[0])) not in FAMILIES:
        raise fields.unsupported("architectures", f"one of {supported}")
    family = FAMILIES[name]
    if model_type not in (None, family.model_type):
        raise fields.unsupported("model_type", f"{family.model_type}, as architectures is {architectures[0]}")
    return architectures[0], family


def _causal_name(architecture: str) -> str:
    """Return the name of a family for a model of it with a head for labels; any other name as it is."""
    if not architecture.endswith(CLASSIFIER):
        return architecture
    return f"{architecture.removesuffix(CLASSIFIER).removesuffix('Text')}ForCausalLM"  # Gemma3TextFor...


def refuse_unsupported(fields: Fields, family: Family) -> None:
    """Raise CheckpointError for a field that would change results and is not honoured."""
    own = family.own_fields or ()
    for name, neutral in NEUTRAL.items():
        if name not in own and fields.get(name) is not None and fields.get(name) not in neutral:
            raise fields.fault(name, " or ".join(["no such field", *(str(value).lower() for value in neutral)]))
    if family.own_fields is not None:
        for name in fields.names():
            if name in COMMON or name in own or name in NEUTRAL or fields.get(name) is None:
                continue
            if not is_unknown_to_transformers(name, family.model_type):
                raise fields.unsupported(
                    name, f"no such field, which Quire's decoder does not know for {family.model_type}"
                )
            log.warning("%s: %s is not used: Transformers does not read this field, either", fields.where, name[:80])
    _refuse_values(fields, family)
    for names in family.needed:
        if all(fields.get(name) is None for name in names):
            raise fields.unsupported(names[0], "a value")
    if family.qkv_bias is False and fields.flag("attention_bias", False):
        raise fields.fault("attention_bias", f"false for {family.model_type}")
    if not family.mlp_bias and fields.flag("mlp_bias", False):
        raise fields.fault("mlp_bias", f"false for {family.model_type}")
    if "use_sliding_window" in own and fields.flag("use_sliding_window", False):
        raise fields.unsupported("use_sliding_window", f"false for {family.model_type}")


def is_unknown_to_transformers(name: str, model_type: str) -> bool:
    """Return whether the installed Transformers has no code for a type that contains the name of a field.

    Such a field changes nothing in Transformers, so it has no effect. False if Transformers is not installed.
    """
    words = _words_of_transformers(model_type)
    return bool(words) and name.isidentifier() and name not in words


@cache
def _words_of_transformers(model_type: str) -> frozenset[str]:
    """Return the words of the sources of a type and of those that all types share; none without Transformers."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        return frozenset()
    package = Path(spec.submodule_search_locations[0])
    folders = (package / "models" / model_type.removesuffix("_text"), package, package / "generation")
    files = [sorted(folder.glob("*.py")) for folder in (*folders, package / "integrations")]
    if not files[0]:
        return frozenset()
    return frozenset(word for path in chain(*files) for word in re.findall(r"\w+", path.read_text(encoding="utf-8")))


def _refuse_values(fields: Fields, family: Family) -> None:
    """Raise NotSupported for values of known fields that the kernels do not compute."""
    for name in ("hidden_act", "hidden_activation") if family.is_gemma else ("hidden_act",):
        supported = ("gelu_pytorch_tanh",) if family.is_gemma else ("silu", "swish")
        # Gemma's configurations have both; a class with hidden_activation has that activation.
        if fields.get(name, supported[0]) not in supported and not (family.is_gemma and name == "hidden_act"):
            raise fields.unsupported(name, supported[0])
    if fields.get("quantization_config") is not None:
        has_mxfp4 = fields.section("quantization_config").get("quant_method") == "mxfp4"
        if family.experts == "gpt_oss" and not has_mxfp4:
            raise fields.unsupported("quantization_config", "the quant_method mxfp4, or weights of 16 bits")
        if has_mxfp4 and family.experts != "gpt_oss":
            raise fields.unsupported("quantization_config", "the quant_method mxfp4 for gpt_oss alone")
    # "vision" affects tokens of images alone (`wrappers.both_ways`).
    if fields.get("use_bidirectional_attention") not in (None, False, *(["vision"] if family.is_gemma4 else [])):
        raise fields.unsupported("use_bidirectional_attention", "false")
    if family.experts == "gpt_oss":
        for name, value in (("swiglu_alpha", CLAMPED_ALPHA), ("swiglu_limit", CLAMPED_LIMIT)):
            if fields.number(name, value) != value:
                raise fields.unsupported(name, str(value))
        if fields.get("experts_per_token") not in (None, fields.get("num_experts_per_tok", 4)):
            raise fields.fault("experts_per_token", "the value of num_experts_per_tok")
