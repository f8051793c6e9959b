"""The text model inside a vision-language model, read as one of the families of Quire's own decoder.

Such a checkpoint has the text model's configuration in `text_config` (older ones at the top), and its tensors below
a prefix. `quire.worker.models.vision` reads the tensors of the vision tower. Models whose positions have three axes
(M-RoPE) give a token of text the same position on each axis, so RoPE with one axis computes the same.
"""

from __future__ import annotations

from typing import Any

from quire.shared.model.fields import Fields

# Wrappers whose text model computes text as its family does, and the type of a text model that does not name its own.
WRAPPERS: dict[str, str | None] = {
    "Gemma3ForConditionalGeneration": "gemma3_text",
    "Gemma4ForConditionalGeneration": "gemma4_text",
    "Idefics3ForConditionalGeneration": None,
    "InternVLForConditionalGeneration": None,
    "LlavaForConditionalGeneration": None,
    "LlavaNextForConditionalGeneration": None,
    "LlavaOnevisionForConditionalGeneration": None,
    "Mistral3ForConditionalGeneration": None,
    "Qwen2VLForConditionalGeneration": "qwen2_vl_text",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl_text",
    "Qwen3VLForConditionalGeneration": "qwen3_vl_text",
    "SmolVLMForConditionalGeneration": None,
    "VipLlavaForConditionalGeneration": None,
}
# Text models whose positions have three axes, in sections of the dimensions (`mrope_section`).
WITH_AXES = ("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text")
# Type of a text model to the architecture and the type that the decoder knows.
TEXT_MODELS = {
    "gemma3_text": ("Gemma3ForCausalLM", "gemma3_text"),
    "gemma4_text": ("Gemma4ForCausalLM", "gemma4_text"),
    "llama": ("LlamaForCausalLM", "llama"),
    "mistral": ("MistralForCausalLM", "mistral"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen2_vl_text": ("Qwen2ForCausalLM", "qwen2"),
    "qwen2_5_vl_text": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3_vl_text": ("Qwen3ForCausalLM", "qwen3"),
}
# Text models whose defaults are the same in each wrapper; other defaults are those of the family.
DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "max_position_embeddings": 131_072,
        "num_attention_heads": 8,
        "num_hidden_layers": 26,
        "num_key_value_heads": 4,
        "rope_theta": 1_000_000.0,
        "vocab_size": 262_208,
    },
    "gemma4_text": {
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "max_position_embeddings": 131_072,
        "num_attention_heads": 8,
        "num_hidden_layers": 30,
        "num_key_value_heads": 4,
        "rope_theta": 1_000_000.0,
        "vocab_size": 262_144,
    },
}
# The defaults of these fields depend on the wrapper, so that Transformers must supply them if they are absent.
NEEDED = (
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "vocab_size",
)
# Fields with the tokens in whose place a wrapper puts the features of images, videos and audio, and their defaults.
# Without features, these wrappers compute such a token as the padding token.
PLACEHOLDERS = {
    "Gemma4ForConditionalGeneration": {
        "image_token_id": 258_880,
        "video_token_id": 258_884,
        "audio_token_id": 258_881,
    }
}
# Fields that the wrapper may have in place of the text model.
SHARED = ("bos_token_id", "compression_config", "dtype", "eos_token_id", "quantization_config", "torch_dtype")
# Of these, the value of the whole model has precedence, as in the generation configuration that Transformers makes.
TOP = ("bos_token_id", "eos_token_id")


def is_wrapper(fields: Fields) -> bool:
    """Return whether this is the configuration of one of WRAPPERS."""
    names = fields.get("architectures")
    return isinstance(names, list) and len(names) == 1 and names[0] in WRAPPERS


def text_fields(fields: Fields) -> Fields:
    """Return the fields of the text model inside a wrapper; `fields` itself for any other model.

    Raises NotSupported for a text model of another family, or one that leaves fields to defaults.
    """
    if not is_wrapper(fields):
        return fields
    name = fields.get("architectures")[0]
    inner = fields.section("text_config") if fields.get("text_config") else fields
    text_type = inner.get("model_type") if inner is not fields else WRAPPERS[name]
    if not isinstance(text_type, str) or text_type not in TEXT_MODELS:
        raise inner.unsupported("model_type", f"one of {', '.join(TEXT_MODELS)} in {name}")
    has_rope = inner.get("rope_parameters") is not None or inner.get("rope_theta") is not None
    defaults = DEFAULTS.get(text_type, {})
    for field in (*NEEDED, *([] if has_rope else ["rope_theta"])):
        if inner.get(field) is None and field not in defaults:
            raise inner.unsupported(field, "a number, as its default depends on the model")
    values = {key: fields.get(key) for key in SHARED if fields.get(key) is not None}
    values |= {key: defaults[key] for key in NEEDED if key in defaults and not inner.has(key)}
    values |= {key: inner.get(key) for key in inner.names()}
    values |= {key: fields.get(key) for key in TOP if fields.get(key) is not None}
    values["architectures"], values["model_type"] = [TEXT_MODELS[text_type][0]], TEXT_MODELS[text_type][1]
    # Without the field, a head that is absent or equals the embedding is tied to it: `Decoder.load` compares them.
    values["tie_word_embeddings"] = fields.get("tie_word_embeddings", inner.get("tie_word_embeddings", True))
    if name in PLACEHOLDERS:
        values["placeholder_token_ids"] = [fields.get(key, default) for key, default in PLACEHOLDERS[name].items()]
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(values.get(key), dict):
            values[key] = _one_axis(values[key])
    return Fields(values, inner.where)


def rope_axes(fields: Fields, head_dim: int) -> tuple[int, ...]:
    """Return the axis of the positions of image tokens by which each pair of dimensions turns; empty for one axis."""
    if not is_wrapper(fields) or WRAPPERS[fields.get("architectures")[0]] not in WITH_AXES:
        return ()
    inner = fields.section("text_config") if fields.get("text_config") else fields
    for key in ("rope_parameters", "rope_scaling"):
        sections = inner.section(key).get("mrope_section")
        if isinstance(sections, list) and len(sections) == 3 and sum(sections) == head_dim // 2:
            if WRAPPERS[fields.get("architectures")[0]] != "qwen3_vl_text":
                return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
            # The axes take turns, and the first one has the pairs that are left.
            return tuple(pair % 3 if pair < 3 * sections[pair % 3] else 0 for pair in range(head_dim // 2))
    return ()


def both_ways(fields: Fields, text: Fields) -> str:
    """Return the layers in which the tokens of an image attend to each other in both directions.

    text: the fields of the text model. Values as of `ModelConfig.both_ways`.
    """
    name = fields.get("architectures")[0] if is_wrapper(fields) else ""
    if name == "Gemma4ForConditionalGeneration":
        return "windows" if text.get("use_bidirectional_attention") == "vision" else ""
    return "all" if name == "Gemma3ForConditionalGeneration" else ""


def _one_axis(rope: dict[str, Any]) -> dict[str, Any]:
    """Return the RoPE parameters for positions with one axis."""
    return {key: "default" if value == "mrope" else value for key, value in rope.items() if key != "mrope_section"}
