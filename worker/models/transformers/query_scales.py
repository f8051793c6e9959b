"""Scales of queries by position that a model of Transformers takes from the cache of Transformers.

Llama 4 multiplies the queries of its layers without rotary positions by a factor that grows with the position
("temperature tuning"). Transformers counts the positions from the length of its cache, which paged attention does not
have. So the module leaves the factor to paged attention, because that knows the positions of the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

# Positions int [T] -> factors float32 [T].
QueryScale = Callable[[torch.Tensor], torch.Tensor]


class LogQueryScale:
    """1 + weight * log(1 + floor((position + 1) / period))"""

    def __init__(self, weight: float, period: float) -> None:
        self._weight, self._period = weight, period

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        return torch.log1p(torch.floor((positions.float() + 1.0) / self._period)) * self._weight + 1.0


def take_query_scales(model: nn.Module) -> None:
    """Have modules that scale queries by the length of a cache leave this to the attention (`scaled`)."""
    for module in model.modules():
        if type(module).__name__ == "Llama4TextAttention":
            llama: Any = module
            if llama.attn_temperature_tuning and not llama.use_rope:
                llama.attn_temperature_tuning = False
                llama.query_scale = LogQueryScale(llama.attn_scale, llama.floor_scale)


def scaled(module: Any, q: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return queries [1, H, T, D] as the module would scale them at these positions [T]."""
    scale: QueryScale | None = getattr(module, "query_scale", None)
    return q if scale is None else (q * scale(positions)[:, None]).to(q.dtype)
