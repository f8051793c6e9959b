"""The operations in float64, dense and without a cache, and the allowed difference between a result and theirs."""

import math

import torch
from torch import Tensor


def assert_close(actual: Tensor, exact: Tensor, scale: Tensor | float = 1.0, rounds: int = 1) -> None:
    """Assert that a result is close to the exact one.

    scale: the size of the summed terms. rounds: how many times a 16-bit result may be rounded.
    """
    relative = rounds * {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}.get(actual.dtype, 0.0)
    difference = (actual.double() - exact).abs()
    allowed = relative * exact.abs() + 1e-5 * scale + 1e-30
    worst = (difference / allowed).max().item() if difference.numel() else 0.0
    assert worst <= 1.0, f"{worst:.2f} times the allowed difference (NaN: {actual.isnan().any().item()})"


def slack(dtype: torch.dtype, bf16: float) -> float:
    """Return a factor for `scale` of operations with rounded intermediate values. bf16: the factor for bfloat16."""
    return {torch.bfloat16: bf16, torch.float16: max(1.0, bf16 / 8)}.get(dtype, 1.0)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def rotate(x: Tensor, cos_sin: Tensor, positions: Tensor) -> Tensor:
    """Rotate x [T, H, D]."""
    d = x.shape[-1]
    cos, sin = cos_sin.double()[positions.long(), None].split(d // 2, dim=-1)
    a, b = x.double().split(d // 2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int = 0,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    ends: Tensor | None = None,
) -> Tensor:
    """Return the attention of one sequence, [queries, H * D].

    q [queries, H, D]: the queries of the last tokens; k, v [length, H_kv, D]. ends [queries]: of the keys of each.
    """
    queries, heads, _ = q.shape
    length, kv_heads, _ = k.shape
    k, v = (x.double().repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
    position, key = torch.arange(length - queries, length)[:, None], torch.arange(length)
    hidden = key > position if ends is None else key >= ends[:, None]
    if window:
        hidden |= key <= position - window
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(hidden, -math.inf)
    weights = scores.softmax(-1)
    if sinks is not None:  # the share of the keys in the denominator
        weights = weights * torch.sigmoid(scores.logsumexp(-1, keepdim=True) - sinks.double()[:, None, None])
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


def kept(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Return the probabilities [V] of one row after the filters, computed with lists and a sort."""
    values = [-math.inf if math.isnan(x) else x for x in logits.double().tolist()]
    largest = max(values)
    p = [math.exp((x - largest) / temperature) for x in values]
    order = sorted(range(len(p)), key=lambda i: -values[i])
    if 0 < top_k < len(p):
        threshold = values[order[top_k - 1]]
        p = [weight if x >= threshold else 0.0 for weight, x in zip(p, values, strict=True)]
    if top_p < 1:
        total, mass = sum(p), 0.0
        for i in order:
            mass += p[i]
            if mass >= top_p * total:
                threshold = p[i]
                break
        p = [weight if weight >= threshold else 0.0 for weight in p]
    p = [weight if weight >= min_p * max(p) else 0.0 for weight in p]
    return torch.tensor(p, dtype=torch.float64) / sum(p)
