"""ALiBi: attention with linear biases (Press et al., 2022), by the kernels for attention without biases.

ALiBi adds slope * (key position - query position) to each score, with a slope per head. The softmax of a query does not
change by a constant, so slope * key position is enough. This bias is a product of a part of the query and a part of the
key: here queries and keys get more elements, whose product is the bias. The cache pads heads to a multiple of 16, and
takes 16 more elements per head for it if the head has no room.
"""

from __future__ import annotations

import math

import torch

# A float32 number is a sum of this many bfloat16 numbers. Any type of activations and of the cache with 16 bits or more
# keeps each of them exactly (float16 those above 1e-7).
PARTS = 3


class AlibiBias:
    """Extends queries and keys so that their scores have a bias.

    slopes [H]: float32. scale: of the scores. rounded: round slopes and biases to bfloat16, as Falcon was trained.
    """

    def __init__(self, slopes: torch.Tensor, scale: float, rounded: bool = False) -> None:
        self._slopes = slopes.bfloat16() if rounded else slopes.float()
        # Kernels multiply the whole score by the scale, so the bias is divided by it.
        inverse = torch.tensor(1 / scale, dtype=torch.float32, device=slopes.device)
        self._factors = split(inverse).repeat_interleave(PARTS)  # each part meets each part of a bias

    def extend(self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q, k [1, H, T, D], positions [T] -> q, k [1, H, T, D + 9]."""
        biases = split((self._slopes[:, None] * positions).float()).repeat(1, 1, PARTS)
        factors = self._factors.to(q.dtype).expand(*q.shape[:3], -1)
        return torch.cat([q, factors], dim=-1), torch.cat([k, biases.to(k.dtype)[None]], dim=-1)


def split(values: torch.Tensor) -> torch.Tensor:
    """Return bfloat16 numbers, as float32 [..., 3], whose sum is the values, float32 [...]."""
    parts, rest = [], values
    for _ in range(PARTS):
        part = rest.bfloat16().float()
        parts.append(part)
        rest = rest - part
    return torch.stack(parts, dim=-1)


def slopes_of(num_heads: int, device: torch.device) -> torch.Tensor:
    """Return the slopes of BLOOM and Falcon, float32 [H]: of n = 2^j heads, head i (from 1 on) has 2^(-8 i / n).

    If there are more heads than a power of 2, the others have the odd ones of those of twice as many heads.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    first = [2.0 ** (-8 * i / power) for i in range(1, power + 1)]
    others = [2.0 ** (-8 * i / (2 * power)) for i in range(1, 2 * (num_heads - power), 2)]
    return torch.tensor(first + others, dtype=torch.float32, device=device)


def mpt_slopes_of(num_heads: int, largest: float, device: torch.device) -> torch.Tensor:
    """Return the slopes of MPT, float32 [H]: of n = 2^j heads, head i (from 1 on) has 2^(-largest * i / n).

    If the number of heads is not a power of 2, they have those of the next power, the even ones first.
    """
    power = 2 ** math.ceil(math.log2(num_heads))
    slopes = [2.0 ** (-largest * i / power) for i in range(1, power + 1)]
    if power != num_heads:
        slopes = (slopes[1::2] + slopes[::2])[:num_heads]
    return torch.tensor(slopes, dtype=torch.float32, device=device)
