"""The fields of Gemma 4 in `config.json`: what its layers have besides those of earlier Gemmas.

Layers without a window ("full attention") have wider heads, may have fewer kv heads, and may use their keys as values.
The last layers may share the keys and values of an earlier layer of their kind. Each layer may have an input of its own
for each token (per-layer embeddings), and may add up an MLP and experts.
"""

from __future__ import annotations

from typing import Any

from quire.shared.model.fields import Fields
from quire.shared.process.errors import NotSupported

MAX_HEAD_DIM = 512
DEFAULT_HEAD_DIM, DEFAULT_FULL_HEAD_DIM = 256, 512
DEFAULT_INPUT_WIDTH = 256
# RoPE of the two kinds of layers without `rope_parameters`.
DEFAULT_ROPES: dict[str, dict[str, Any]] = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}


def parse_gemma4(fields: Fields, sliding_windows: tuple[int, ...], num_heads: int, num_kv_heads: int) -> dict[str, Any]:
    """Return the fields of a ModelConfig that Gemma 4 alone has.

    sliding_windows: of each layer, 0 for full attention. Raises CheckpointError and NotSupported.
    """
    full_layers = [layer for layer, window in enumerate(sliding_windows) if not window]
    keys_as_values = fields.flag("attention_k_eq_v", False)
    head_dim, kv_heads = _full_attention(fields, full_layers, keys_as_values, num_kv_heads)
    if head_dim % 16 or head_dim > MAX_HEAD_DIM:
        what = f"the head_dim of full attention is {head_dim}"
        supported = "supported: a multiple of 16, at most 512; with --model-impl auto Transformers computes other sizes"
        raise NotSupported(fields.where, what, supported)
    if num_heads % kv_heads:
        what = f"full attention has {kv_heads} key-value heads"
        raise NotSupported(fields.where, what, f"supported: a divisor of num_attention_heads, which is {num_heads}")
    vocab_size = fields.integer("vocab_size")
    width = fields.integer("hidden_size_per_layer_input", DEFAULT_INPUT_WIDTH, minimum=0)
    input_vocab_size = fields.integer("vocab_size_per_layer_input", 262_144)
    if width and input_vocab_size < vocab_size:
        raise fields.fault("vocab_size_per_layer_input", f"at least vocab_size, which is {vocab_size}")
    return {
        "full_head_dim": head_dim,
        "full_kv_heads": kv_heads,
        "keys_as_values": keys_as_values,
        "kv_sources": _kv_sources(fields, sliding_windows),
        "wide_mlps": fields.flag("use_double_wide_mlp", False),
        "v_norm": True,
        "output_scales": True,
        "input_width": width,
        "input_vocab_size": input_vocab_size,
        "placeholders": tuple(token for token in fields.token_ids("placeholder_token_ids", []) if token < vocab_size),
        "pad_token_id": fields.integer("pad_token_id", 0, minimum=0, maximum=vocab_size - 1),
    }


def _full_attention(fields: Fields, full_layers: list[int], keys_as_values: bool, num_kv_heads: int) -> tuple[int, int]:
    """Return the dimensions of a head and the kv heads of layers with full attention."""
    by_layer = fields.get("per_layer_config")
    if by_layer is None:
        kv_heads = fields.integer("num_global_key_value_heads", num_kv_heads) if keys_as_values else num_kv_heads
        return fields.integer("global_head_dim", DEFAULT_FULL_HEAD_DIM), kv_heads
    # Transformers writes this object in place of the two fields: for each layer with full attention, such as "05", what
    # differs from the fields of all layers.
    entries = list(by_layer.values()) if isinstance(by_layer, dict) else [None]
    alike = entries[0] if entries else {}
    layers = sorted(int(name) if name.isdecimal() else -1 for name in by_layer) if isinstance(by_layer, dict) else []
    if not isinstance(alike, dict) or any(entry != alike for entry in entries) or layers not in ([], full_layers):
        raise fields.unsupported("per_layer_config", "equal entries for all layers with full_attention, and no others")
    inner = Fields(alike, f"{fields.where}, per_layer_config")
    for name in inner.names():
        if name not in ("head_dim", "num_key_value_heads"):
            raise inner.unsupported(name, "no such field")
    head_dim = inner.integer("head_dim", fields.integer("head_dim", DEFAULT_HEAD_DIM))
    return head_dim, inner.integer("num_key_value_heads", num_kv_heads)


def _kv_sources(fields: Fields, sliding_windows: tuple[int, ...]) -> tuple[int, ...]:
    """Return the layer whose keys and values each layer reads: its own, or an earlier one of the same kind."""
    num_layers = len(sliding_windows)
    num_shared = fields.integer("num_kv_shared_layers", 0, minimum=0, maximum=num_layers)
    first = num_layers - num_shared
    last_of_kind = {window: layer for layer, window in enumerate(sliding_windows[:first])}
    if set(sliding_windows) != set(last_of_kind):
        raise fields.fault("num_kv_shared_layers", "a number that leaves each of layer_types a layer with its own keys")
    return (*range(first), *(last_of_kind[window] for window in sliding_windows[first:]))
