"""Attention to the keys that an index selects (DeepSeek-V3.2), in contexts so short that it selects all of them.

Attention to compressed keys (DeepSeek-V4) is refused.

The indexer of a layer scores all keys and selects `index_topk` of them for each query. A context of up to `index_topk`
tokens is attended to as a whole, so the indexers are left out, and the attention is that of DeepSeek-V3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

TAKES_INDICES = "its attention takes indices"
COMPRESSED = "compressed"  # part of the names of such layers in `layer_types`


def leave_out_indexers(model: nn.Module, max_model_len: int) -> None:
    """Have attention modules select no keys, if each indexer selects all keys of `max_model_len` tokens."""
    modules: list[Any] = [
        module for module in model.modules() if isinstance(getattr(module, "indexer", None), nn.Module)
    ]
    counts = [getattr(module.indexer, "index_topk", None) for module in modules]
    if not all(type(count) is int and count >= max_model_len for count in counts):
        return
    for module in modules:
        module.indexer.forward = _no_indices
        module.register_forward_pre_hook(_with_mask, with_kwargs=True)


def compressed_keys(config: Any) -> str:
    """Return why a model whose layers attend to compressed keys is refused; "" if no layer does.

    config: of Transformers.
    """
    kinds = [kind for kind in getattr(config, "layer_types", None) or () if COMPRESSED in str(kind)]
    if not kinds:
        return ""
    named = ", ".join(dict.fromkeys(kinds))
    return (
        f"its layers attend to compressed keys, one for several tokens (layer_types {named}), which Quire neither "
        "computes nor caches"
    )


def _no_indices(*_: Any, **__: Any) -> torch.Tensor:
    """Return indices of no keys, in place of the forward of an indexer: some layers check that there are indices."""
    return torch.zeros(0, dtype=torch.int32)


def _with_mask(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Give the module a mask, which it reads for its indexer. Paged attention uses none."""
    if "attention_mask" in kwargs and kwargs["attention_mask"] is None:
        kwargs = kwargs | {"attention_mask": torch.zeros(1, 1, 1, 1)}
    return args, kwargs
