"""Small random checkpoints of every supported family, written by Transformers, with a tokenizer and a chat template.

The weights are so large that greedy outputs vary and the best logit stands out. Norms and biases are random too, so
that a test fails if the model leaves one out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

SPECIAL_TOKENS = ("<|bos|>", "<|im_start|>", "<|im_end|>")
MERGES = ("t h", "th e", "i n", "e r", "a n", "r e", "o n", "Ġ the", "Ġ a", "in g")
VOCAB_SIZE = 256 + len(MERGES) + len(SPECIAL_TOKENS)  # bytes, merges and special tokens: each id has a text
EOS_TOKEN_ID = VOCAB_SIZE - 1  # <|im_end|>
BOS_TOKEN_ID = VOCAB_SIZE - 3
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": BOS_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
SHORT_YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 16}
TWO_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 50_000.0, "factor": 2.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}
TWO_WINDOWS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 8}
EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2}
# Heads of two widths, and an input for each layer. FULL: other numbers of kv heads, and keys that are values.
GEMMA4 = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "sliding_window": 8,
    "head_dim": 16,
    "global_head_dim": 48,
    "hidden_size_per_layer_input": 24,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "final_logit_softcapping": 15.0,
}
GEMMA4_FULL = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0}
WINDOW_8_FROM_LAYER_1 = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}

# Family name to its class in Transformers without the suffix, and the fields that differ from COMMON.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "llama3-rope": ("Llama", {"rope_parameters": LLAMA3_ROPE, "head_dim": 32, "num_key_value_heads": 1}),
    "llama-linear-rope": ("Llama", {"rope_parameters": LINEAR_ROPE, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", WINDOW_8_FROM_LAYER_1),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-bias": ("Qwen3", {"head_dim": 16, "attention_bias": True, **WINDOW_8_FROM_LAYER_1}),
    "mistral": ("Mistral", {"sliding_window": 8, "num_attention_heads": 6, "head_dim": 16}),
    "mixtral": ("Mixtral", EXPERTS),
    "mixtral-window": ("Mixtral", {**EXPERTS, "sliding_window": 8, "head_dim": 32}),
    "qwen3-moe": ("Qwen3Moe", {**EXPERTS, "moe_intermediate_size": 40, "head_dim": 16, "norm_topk_prob": True}),
    "qwen3-moe-mixed": (
        "Qwen3Moe",
        {**EXPERTS, "moe_intermediate_size": 32, "head_dim": 16, "mlp_only_layers": [1], "tie_word_embeddings": True},
    ),
    "gpt-oss": ("GptOss", {**EXPERTS, **TWO_WINDOWS, "head_dim": 16, "rope_parameters": YARN}),
    "gemma3": ("Gemma3", {**TWO_WINDOWS, "head_dim": 16, "query_pre_attn_scalar": 24, "rope_parameters": TWO_ROPES}),
    "gemma2": ("Gemma2", {**TWO_WINDOWS, "head_dim": 16, "attn_logit_softcapping": 4.0, "tie_word_embeddings": True}),
    "gemma4": ("Gemma4", {**GEMMA4, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}),
    "gemma4-full": ("Gemma4", {**GEMMA4, **GEMMA4_FULL, "tie_word_embeddings": True}),
    "gemma4-moe": (
        "Gemma4",
        {**GEMMA4, **GEMMA4_FULL, "enable_moe_block": True, "num_experts": 5, "top_k_experts": 2}
        | {"moe_intermediate_size": 40},
    ),
    "mistral-full": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "ministral": ("Ministral", {**TWO_WINDOWS, "head_dim": 16}),
    "seed-oss": ("SeedOss", {"attention_bias": True, "attention_out_bias": False, "mlp_bias": True, "head_dim": 32}),
    "cwm": ("Cwm", {**TWO_WINDOWS, "head_dim": 16, "rope_parameters": LLAMA3_ROPE}),
    # Texts of tests are longer than the original context of 16 tokens.
    "llama-yarn": ("Llama", {"rope_parameters": SHORT_YARN}),
    "qwen3-yarn": ("Qwen3", {"head_dim": 32, "rope_parameters": SHORT_YARN | {"attention_factor": 1.2}}),
}


def make_checkpoint(
    folder: Path,
    family: str,
    *,
    seed: int = 0,
    sharded: bool = False,
    dtype: torch.dtype = torch.float32,
    initializer_range: float = 0.3,
    **overrides: Any,
) -> Path:
    """Write a checkpoint into `folder`, create the folder if necessary, and return it.

    `family` is a key of FAMILIES; `overrides` are fields of its configuration. Equal arguments give equal weights.
    """
    import transformers

    class_name, differences = FAMILIES[family]
    text = "Text" if class_name in ("Gemma3", "Gemma4") else ""
    config = getattr(transformers, f"{class_name}{text}Config")(**(COMMON | differences | overrides))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, f"{class_name}ForCausalLM")(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("norm.weight"):
                    parameter.uniform_(0.5, 1.5)
                else:
                    parameter.normal_(std=initializer_range)
            for name, buffer in model.named_buffers():
                if name.endswith("layer_scalar"):
                    buffer.uniform_(0.5, 1.5)
    folder.mkdir(parents=True, exist_ok=True)
    model.to(dtype).save_pretrained(folder, max_shard_size="80KB" if sharded else "1GB")
    make_tokenizer(folder)
    return folder


def make_tokenizer(folder: Path) -> None:
    """Write a byte-level BPE tokenizer that encodes any text, with a chat template of its special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]
    merges = [tuple(merge.split()) for merge in MERGES]
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIAL_TOKENS[0],
        eos_token=SPECIAL_TOKENS[2],
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder)
