"""Fields of config.json that a family does not know, or that would change results, are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from quire.worker.models.errors import CheckpointError, NotSupported
from quire.worker.models.families import (
    FAMILIES,
    _words_of_transformers,
    family_of,
    is_unknown_to_transformers,
    refuse_unsupported,
)
from quire.worker.models.fields import Fields


def fields(architecture: str, **values: Any) -> Fields:
    return Fields({"architectures": [architecture], "model_type": FAMILIES[architecture].model_type} | values, "here")


def test_architecture_and_model_type_must_agree() -> None:
    assert family_of(fields("MixtralForCausalLM"))[0] == "MixtralForCausalLM"
    assert family_of(Fields({"model_type": "qwen3_moe"}, "here"))[0] == "Qwen3MoeForCausalLM"
    with pytest.raises(NotSupported, match="model_type"):
        family_of(fields("MixtralForCausalLM", model_type="mistral"))


@pytest.mark.parametrize("architecture", ["MixtralForCausalLM", "Qwen3MoeForCausalLM"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("shared_expert_intermediate_size", 32),
        ("experts_implementation", "other"),
        ("final_logit_softcapping", 30.0),
        ("attention_chunk_size", 128),
        ("hidden_act", "gelu"),
    ],
)
def test_a_field_that_a_family_does_not_know_is_refused(architecture: str, name: str, value: Any) -> None:
    refuse_unsupported(fields(architecture), FAMILIES[architecture])
    refuse_unsupported(fields(architecture, **{name: None}), FAMILIES[architecture])
    with pytest.raises(CheckpointError, match=f"{name} is "):
        refuse_unsupported(fields(architecture, **{name: value}), FAMILIES[architecture])


@pytest.mark.parametrize("architecture", [name for name, family in FAMILIES.items() if family.own_fields is not None])
def test_a_field_that_transformers_does_not_know_either_is_left_out(
    architecture: str, caplog: pytest.LogCaptureFixture
) -> None:
    rope = {"rope_scaling": {"rope_type": "yarn"}} if architecture == "GptOssForCausalLM" else {}
    refuse_unsupported(fields(architecture, unsloth_version="2026.9.1", **rope), FAMILIES[architecture])
    assert "here: unsloth_version is not used: Transformers does not read this field, either" in caplog.text


def test_without_transformers_no_field_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_unknown_to_transformers("unsloth_version", "gemma2")
    assert not is_unknown_to_transformers("unsloth-version", "gemma2")
    _words_of_transformers.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not is_unknown_to_transformers("unsloth_version", "gemma2")
    _words_of_transformers.cache_clear()


def test_fields_of_training_and_of_the_hub_are_no_fault() -> None:
    found = fields(
        "MixtralForCausalLM",
        router_aux_loss_coef=0.02,
        output_router_logits=False,
        router_jitter_noise=0.1,
        initializer_range=0.02,
        transformers_version="4.36.0",
        torch_dtype="bfloat16",
        use_cache=True,
        attention_dropout=0.0,
        num_local_experts=8,
        is_encoder_decoder=False,
    )
    refuse_unsupported(found, FAMILIES["MixtralForCausalLM"])


def test_windows_of_all_layers_of_qwen3_moe_are_left_to_transformers() -> None:
    family = FAMILIES["Qwen3MoeForCausalLM"]
    refuse_unsupported(fields("Qwen3MoeForCausalLM", use_sliding_window=False, sliding_window=4096), family)
    with pytest.raises(NotSupported, match="use_sliding_window is true"):
        refuse_unsupported(fields("Qwen3MoeForCausalLM", use_sliding_window=True), family)


GPT_OSS = {"rope_scaling": {"rope_type": "yarn"}, "experts_per_token": 4, "initial_context_length": 4096}


@pytest.mark.parametrize(
    ("architecture", "values", "name"),
    [
        ("GptOssForCausalLM", GPT_OSS | {"swiglu_limit": 5.0}, "swiglu_limit"),
        ("GptOssForCausalLM", GPT_OSS | {"swiglu_alpha": 1.0}, "swiglu_alpha"),
        ("GptOssForCausalLM", GPT_OSS | {"experts_per_token": 3}, "experts_per_token"),
        ("GptOssForCausalLM", GPT_OSS | {"rope_scaling": None}, "rope_parameters"),
        ("GptOssForCausalLM", GPT_OSS | {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("Gemma3ForCausalLM", {"hidden_activation": "silu"}, "hidden_activation"),
        ("Gemma2ForCausalLM", {"embedding_multiplier": 2.0}, "embedding_multiplier"),
        ("Gemma2ForCausalLM", {"attn_implementation": "x"}, "attn_implementation"),
    ],
)
def test_values_that_the_kernels_do_not_compute_are_refused(
    architecture: str, values: dict[str, Any], name: str
) -> None:
    with pytest.raises(CheckpointError, match=f"{name} is "):
        refuse_unsupported(fields(architecture, **values), FAMILIES[architecture])


def test_published_fields_of_gpt_oss_and_gemma_are_read() -> None:
    refuse_unsupported(fields("GptOssForCausalLM", swiglu_limit=7.0, **GPT_OSS), FAMILIES["GptOssForCausalLM"])
    gemma = {"hidden_act": "gelu_pytorch_tanh", "cache_implementation": "hybrid", "query_pre_attn_scalar": 256}
    refuse_unsupported(fields("Gemma2ForCausalLM", **gemma), FAMILIES["Gemma2ForCausalLM"])
    gemma3 = {"rope_local_base_freq": 10_000.0, "sliding_window_pattern": 6, "sliding_window": 512}
    refuse_unsupported(fields("Gemma3ForCausalLM", **gemma3), FAMILIES["Gemma3ForCausalLM"])
