"""A checkpoint with random weights and a published shape, for measuring: speed does not depend on the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# hidden, intermediate, layers, heads, key-value heads, vocabulary (SmolLM2-135M: its config.json on Hugging Face)
SHAPES = {
    "llama135m": (576, 1536, 30, 9, 3, 49152),
    "tiny": (128, 384, 4, 4, 2, 2048),
}
_SMALL: dict[str, object] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_size": 512,
    "vocab_size": 8192,
}
_GEMMA4: dict[str, object] = {
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "global_head_dim": 128,
    "hidden_size_per_layer_input": 64,
    "vocab_size_per_layer_input": 8192,
}
# Other families: the model type in Transformers and the fields of its configuration.
FAMILY_SHAPES: dict[str, tuple[str, dict[str, object]]] = {
    "mixtral": ("mixtral", {**_SMALL, "intermediate_size": 1024, "num_hidden_layers": 8, "num_local_experts": 8}),
    "qwen3-moe": (
        "qwen3_moe",
        {**_SMALL, "moe_intermediate_size": 256, "num_hidden_layers": 8, "num_experts": 32, "num_experts_per_tok": 4},
    ),
    "gpt-oss": (
        "gpt_oss",
        {**_SMALL, "intermediate_size": 256, "num_hidden_layers": 8, "num_local_experts": 32, "num_experts_per_tok": 4},
    ),
    "gemma3": ("gemma3_text", {**_SMALL, "intermediate_size": 1536, "num_hidden_layers": 12}),
    # As E2B: inputs of layers, wider heads in full attention, and half of the layers share keys and values.
    "gemma4": ("gemma4_text", {**_SMALL, **_GEMMA4, "num_kv_shared_layers": 6, "use_double_wide_mlp": True}),
    # As 26B-A4B: an MLP and experts in each layer, and keys that are values in full attention.
    "gemma4-moe": (
        "gemma4_text",
        {**_SMALL, **_GEMMA4, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True}
        | {"num_global_key_value_heads": 1, "enable_moe_block": True, "num_experts": 32, "top_k_experts": 4}
        | {"moe_intermediate_size": 256, "intermediate_size": 768},
    ),
}
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


def make_checkpoint(folder: Path, shape: str) -> Path:
    """Write the checkpoint into `folder` unless it exists: bf16 weights, and a tokenizer with one word per token."""
    import torch
    from safetensors.torch import save_file

    if (folder / "model.safetensors").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    if shape in FAMILY_SHAPES:
        return _make_family(folder, shape)
    hidden, inner, layers, heads, kv_heads, vocab = SHAPES[shape]
    head = hidden // heads
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "bfloat16",
    }
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return (torch.randn(*size, generator=generator) * 0.04).bfloat16()

    tensors = {"model.embed_tokens.weight": random(vocab, hidden), "model.norm.weight": torch.ones(hidden).bfloat16()}
    for i in range(layers):
        prefix = f"model.layers.{i}"
        for name, rows, columns in (
            ("self_attn.q_proj", heads * head, hidden),
            ("self_attn.k_proj", kv_heads * head, hidden),
            ("self_attn.v_proj", kv_heads * head, hidden),
            ("self_attn.o_proj", hidden, heads * head),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            tensors[f"{prefix}.{name}.weight"] = random(rows, columns)
        tensors[f"{prefix}.input_layernorm.weight"] = torch.ones(hidden).bfloat16()
        tensors[f"{prefix}.post_attention_layernorm.weight"] = torch.ones(hidden).bfloat16()
    _write_tokenizer(folder, vocab)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(tensors, str(folder / "model.safetensors"), {"format": "pt"})
    return folder


def _make_family(folder: Path, shape: str) -> Path:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, fields = FAMILY_SHAPES[shape]
    config = AutoConfig.for_model(model_type, bos_token_id=0, eos_token_id=1, max_position_embeddings=4096, **fields)
    torch.manual_seed(0)
    make: Any = AutoModelForCausalLM.from_config
    make(config, dtype=torch.bfloat16).save_pretrained(folder)
    _write_tokenizer(folder, config.vocab_size)
    return folder


def _write_tokenizer(folder: Path, vocab: int) -> None:
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    words = {"<s>": 0, "</s>": 1} | {f"w{i}": i for i in range(2, vocab)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE})
    )
