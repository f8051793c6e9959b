"""A checkpoint with random weights and a published shape, for measuring: speed does not depend on the weights."""

from __future__ import annotations

import json
import random
from pathlib import Path

# hidden, intermediate, layers, heads, key-value heads, vocabulary (SmolLM2-135M: its config.json on Hugging Face)
SHAPES = {
    "llama135m": (576, 1536, 30, 9, 3, 49152),
    "tiny": (128, 384, 4, 4, 2, 2048),
}
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


def make_checkpoint(folder: Path, shape: str) -> Path:
    """Write the checkpoint into `folder` unless it exists: bf16 weights, and a tokenizer with one word per token."""
    import torch
    from safetensors.torch import save_file

    if (folder / "model.safetensors").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
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
    write_tokenizer(folder, vocab)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(tensors, str(folder / "model.safetensors"), {"format": "pt"})
    return folder


def make_following(folder: Path, shape: str) -> tuple[Path, list[int]]:
    """Write a checkpoint in which each token is followed by another, whatever came before.

    It costs what `make_checkpoint` does. The attention and the MLP of a layer add little to the embedding of a token,
    and the row of the head of its follower is that embedding. Returns the folder, and the follower of each token.
    """
    import torch
    from safetensors.torch import load_file, save_file

    make_checkpoint(folder, shape)
    tensors = load_file(str(folder / "model.safetensors"))
    embeddings = tensors["model.embed_tokens.weight"]
    followers = followers_of(shape)
    head = torch.zeros_like(embeddings)
    head[followers[2:]] = embeddings[2:] * 25
    tensors["lm_head.weight"] = head
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = tensors[name] * 0.02
    save_file(tensors, str(folder / "model.safetensors"), {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}, indent=2))
    return folder, followers


def followers_of(shape: str) -> list[int]:
    """Return the follower of each token of `make_following`. The special tokens follow themselves."""
    order = list(range(2, SHAPES[shape][-1]))
    random.Random(5).shuffle(order)
    followers = dict(zip(order, [*order[1:], order[0]], strict=True))
    return [0, 1, *(followers[token] for token in range(2, SHAPES[shape][-1]))]


def write_tokenizer(folder: Path, vocab: int) -> None:
    """Write a tokenizer with one word per token."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    words = {"<s>": 0, "</s>": 1} | {f"w{i}": i for i in range(2, vocab)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE})
    )
