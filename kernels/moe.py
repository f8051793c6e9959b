"""Mixtures of experts: their weights, the choice of experts for each token, and the definition in plain torch.

A router gives a logit per expert. Each token is computed by the experts with its largest logits, and their outputs are
added up with weights that the router gives, too.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quire.kernels.weights import LinearWeight

# Activations of gates. GELU, with the approximation by tanh, is that of Gemma's MLPs and experts.
SILU, GELU, CLAMPED = "silu", "gelu_tanh", "clamped"
CLAMPED_ALPHA, CLAMPED_LIMIT = 1.702, 7.0  # of gpt-oss


@dataclass(frozen=True)
class Routing:
    """The choice of experts, and their function between the two products.

    normalised: the weights of the chosen experts are the softmax of their logits alone; otherwise of all logits.
    activation: SILU, silu(gate) * up; GELU, gelu(gate) * up; or CLAMPED, that of gpt-oss: (up + 1) * gate *
    sigmoid(1.702 * gate), with the gate at most 7 and up in -7..7.
    """

    num_experts: int
    top_k: int
    normalised: bool
    activation: str = SILU

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"top_k is {self.top_k}: it must be in 1..{self.num_experts}")
        if self.activation not in (SILU, GELU, CLAMPED):
            raise ValueError(f"activation is {self.activation!r}: it must be {SILU}, {GELU} or {CLAMPED}")


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """The weights of one expert, as torch.nn.Linear keeps them."""

    gate_up: LinearWeight  # [2I, H], I rows of the gate, then I rows of the up projection
    down: LinearWeight  # [H, I]
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


@dataclass(frozen=True, eq=False)
class ExpertNorms:
    """The norms of a layer that adds up an MLP and experts (Gemma 4), each with weights [hidden].

    All start from the residual after attention: the MLP with `mlp_norm` of the layer, the router and the experts with
    norms of their own. The outputs of the MLP and of the experts have a norm each before they are added up.
    """

    router: Tensor  # of the input of the router
    experts: Tensor  # of the input of the experts
    mlp_output: Tensor
    experts_output: Tensor

    @property
    def nbytes(self) -> int:
        return sum(norm.nbytes for norm in (self.router, self.experts, self.mlp_output, self.experts_output))


class PackedMoE(Protocol):
    """The router and the experts of a layer in the layout of an implementation."""

    @property
    def routing(self) -> Routing: ...

    @property
    def hidden(self) -> int: ...

    @property
    def inner(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


def route(logits: Tensor, routing: Routing, scales: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the chosen experts of each row [T, k] int64, the largest logit first, and their weights [T, k] float32.

    logits [T, E]. If logits are equal, the lower expert comes first; NaN counts as minus infinity. scales [E] float32:
    factors of the weights.
    """
    wide = logits.float()
    wide = wide.masked_fill(wide.isnan(), float("-inf"))
    ids = wide.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_k]
    chosen = wide.gather(1, ids)
    weights = chosen.softmax(dim=-1) if routing.normalised else wide.softmax(dim=-1).gather(1, ids)
    return ids, weights if scales is None else weights * scales[ids]


def activate(gate_up: Tensor, activation: str) -> Tensor:
    """Return what an expert computes from gate and up [T, 2I] as [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == SILU:
        return torch.nn.functional.silu(gate) * up
    if activation == GELU:
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    gate, up = gate.float().clamp(max=CLAMPED_LIMIT), up.float().clamp(-CLAMPED_LIMIT, CLAMPED_LIMIT)
    return ((up + 1) * (gate * torch.sigmoid(gate * CLAMPED_ALPHA))).to(gate_up.dtype)


def combine(outputs: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of outputs [T, k, H] times weights [T, k], in float32 and in order, rounded once, as [T, H]."""
    total = torch.zeros_like(outputs[:, 0], dtype=torch.float64 if outputs.dtype is torch.float64 else torch.float32)
    for choice in range(outputs.shape[1]):
        total += outputs[:, choice] * weights[:, choice, None]
    return total.to(outputs.dtype)


def check_scales(scales: Tensor | None, routing: Routing) -> None:
    """Raise TypeError or ValueError unless `scales` is None or has a float32 number for each expert."""
    if scales is not None and scales.dtype is not torch.float32:
        raise TypeError(f"scales is {scales.dtype}, not {torch.float32}")
    if scales is not None and scales.shape != (routing.num_experts,):
        raise ValueError(f"scales has shape {tuple(scales.shape)}, not ({routing.num_experts},)")


def check_experts(routing: Routing, hidden: int, experts: Iterable[ExpertWeights]) -> Iterable[ExpertWeights]:
    """Yield the experts, each after its shapes were compared with those of the first. Raises ValueError."""
    inner, count = 0, 0
    for count, expert in enumerate(experts, 1):
        inner = inner or expert.down.shape[1]
        if tuple(expert.gate_up.shape) != (2 * inner, hidden) or tuple(expert.down.shape) != (hidden, inner):
            shapes = f"{tuple(expert.gate_up.shape)} and {tuple(expert.down.shape)}"
            raise ValueError(
                f"expert {count - 1} has the shapes {shapes}, not [{2 * inner}, {hidden}] and its transpose"
            )
        yield expert
    if count != routing.num_experts:
        raise ValueError(f"{count} experts were given, not {routing.num_experts}")


def compute(
    x: Tensor, ids: Tensor, weights: Tensor, expert: Callable[[int, Tensor], Tensor], num_experts: int
) -> Tensor:
    """Return the sum over the chosen experts, [T, H]: one product after the other, of the rows of each expert.

    ids, weights [T, k]: of `route`. expert: computes rows by the expert of this number.
    """
    outputs = x.new_zeros((*ids.shape, x.shape[1]))
    for number in range(num_experts):
        token, choice = (ids == number).nonzero(as_tuple=True)
        if len(token):
            outputs[token, choice] = expert(number, x[token])
    return combine(outputs, weights)
