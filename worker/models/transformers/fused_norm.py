"""Norms of models that Transformers computes, as one operation each.

A norm is written there as some six operations of torch, and every model has a class of its own. So a norm is recognised
by its results: a module without children is replaced if one of the candidates gives the same on random rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from quire.kernels.ops import Ops

Forward = Callable[[torch.Tensor], torch.Tensor]

# Scales of the rows of a comparison. The epsilon of a norm shows in the smallest ones only.
SCALES = (1.0, 1e-3, 30.0)
# Largest relative distance of an output row. In few bits the order of roundings differs.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 6e-3, torch.float16: 2e-3}


class RmsNorm:
    """The forward of a module that is x / rms(x) * weight."""

    def __init__(self, ops: Ops, weight: torch.Tensor, eps: float, original: Forward) -> None:
        """weight [H]; original: the forward for activations of another type than those of `ops`."""
        self.weight, self.eps, self.original = weight, eps, original
        self._rms_norm, self._dtype = ops.rms_norm, ops.dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not self._dtype:
            return self.original(x)
        return self._rms_norm(x.contiguous(), self.weight, self.eps)


class NormInputs:
    """Records the last dimension of the inputs of modules that may be norms, while the model runs in this context."""

    def __init__(self, model: nn.Module) -> None:
        self.widths: dict[nn.Module, set[int]] = {}
        self._candidates = [module for module in model.modules() if _may_be_norm(module)]
        self._hooks: list[Any] = []

    def __enter__(self) -> NormInputs:
        self._hooks = [module.register_forward_pre_hook(self._record) for module in self._candidates]
        return self

    def __exit__(self, *error: Any) -> None:
        for hook in self._hooks:
            hook.remove()

    def _record(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        width = args[0].shape[-1] if len(args) == 1 and isinstance(args[0], torch.Tensor) and args[0].dim() else 0
        self.widths.setdefault(module, set()).add(width)


def fuse_norms(inputs: NormInputs, ops: Ops) -> int:
    """Replace the forward of each recorded module that is a norm. Returns their number."""
    count = 0
    for module, widths in inputs.widths.items():
        if len(widths) == 1 and (width := max(widths)) > 1:
            forward = recognise(module, width, ops)
            if forward is not None:
                overridden: Any = module
                overridden.forward = forward
                count += 1
    return count


def recognise(module: nn.Module, width: int, ops: Ops) -> Forward | None:
    """Return a forward of one operation that gives the results of the module for rows of this width, or None."""
    dtype = ops.dtype
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(len(SCALES), 4, width, generator=generator) * torch.tensor(SCALES)[:, None, None]
    rows = (rows + rows.abs().mean(dim=-1, keepdim=True) * 0.1).to(dtype)  # with a mean, which layer norms subtract
    original: Forward = module.forward
    with torch.inference_mode():
        try:
            expected = original(rows.clone())
        except Exception:  # any line of a model's code can raise anything
            return None
        if not isinstance(expected, torch.Tensor) or expected.shape != rows.shape or expected.dtype is not dtype:
            return None
        for candidate in _candidates(module, width, original, ops):
            if is_near(candidate(rows.clone()), expected):
                return candidate
    return None


def _may_be_norm(module: nn.Module) -> bool:
    if next(module.children(), None) is not None or type(module).__module__.startswith("torch."):
        return False
    own = dict(module.named_parameters(recurse=False))
    if not set(own) <= {"weight"} or next(module.buffers(), None) is not None:
        return False
    if own and own["weight"].dim() != 1:
        return False
    parameters = inspect.signature(module.forward).parameters.values()
    needed = [parameter for parameter in parameters if parameter.default is parameter.empty]
    return len(needed) == 1 and needed[0].kind is needed[0].POSITIONAL_OR_KEYWORD and bool(_epsilons(module))


def _epsilons(module: nn.Module) -> list[float]:
    return sorted({value for value in vars(module).values() if isinstance(value, float) and 0 < value < 0.01})


def _candidates(module: nn.Module, width: int, original: Forward, ops: Ops) -> Iterator[Forward]:
    own = getattr(module, "weight", None)
    if own is not None and own.shape != (width,):
        return
    ones = torch.ones(width, device=ops.device)
    weights = [ones] if own is None else [own.data.float(), 1 + own.data.float()]
    for eps in _epsilons(module):
        for weight in weights:
            yield RmsNorm(ops, weight.to(ops.dtype, copy=True), eps, original)
        yield _layer_norm(weights[0].to(ops.dtype, copy=True), eps, original)


def _layer_norm(weight: torch.Tensor, eps: float, original: Forward) -> Forward:
    shape, dtype = weight.shape, weight.dtype

    def forward(x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, shape, weight, None, eps) if x.dtype is dtype else original(x)

    return forward


def is_near(actual: torch.Tensor, expected: torch.Tensor, roundings: int = 1) -> bool:
    """Return whether each row differs by rounding only, by `roundings` times as much as that of a norm.

    False for rows of zeros, which tell nothing, and for another type.
    """
    if actual.shape != expected.shape or actual.dtype is not expected.dtype or expected.dtype not in TOLERANCE:
        return False
    differ, size = (actual.double() - expected.double()).norm(dim=-1), expected.double().norm(dim=-1)
    return bool(((size > 0) & (differ <= roundings * TOLERANCE[expected.dtype] * size)).all())
