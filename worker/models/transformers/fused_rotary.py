"""Rotary embeddings of models that Transformers computes, left to the operation that writes keys to the cache.

Most attention modules of Transformers rotate queries and keys by a function named `apply_rotary_pos_emb`. The forward
of such a module gets another function, which returns queries and keys as they are and keeps the cosines and sines for
the attention. That is done only for modules that give the results of the function directly to their attention.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import nn

from quire.worker.models.transformers.fused_norm import is_near

ROTATE = "apply_rotary_pos_emb"


class Rotation:
    """The rotation of one attention module: the function that its forward calls, and the call that is pending."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self._original = original
        self.is_deferred = False  # else the original function is called, and its results are recorded
        self.is_direct = True  # the results went to the attention directly, in every recorded call
        self.width = 0  # of a head, once recorded
        self._given: tuple[Any, ...] = ()
        self._rotated: tuple[Any, ...] = ()

    def __call__(self, q: Any, k: Any, cos: Any = None, sin: Any = None, *rest: Any, **more: Any) -> Any:
        self._given = q, k, cos, sin
        if self.is_deferred:
            self._rotated = q, k
            return q, k
        self.is_direct &= not self._rotated and not rest and not (set(more) - {"unsqueeze_dim"})
        self._rotated = self._original(q, k, cos, sin, *rest, **more)
        return self._rotated

    def check(self, q: torch.Tensor, k: torch.Tensor) -> None:
        """Note whether these are the rotated queries and keys [1, H, T, D], rotated as the kernels rotate."""
        given, rotated, self._given, self._rotated = self._given, self._rotated, (), ()
        is_rotated = len(rotated) == 2 and rotated[0] is q and rotated[1] is k
        self.is_direct &= is_rotated and _is_plain(*given)
        if self.is_direct:
            self.width = q.shape[-1]
            self.is_direct = all(
                is_near(_rotate(rows, *given[2:]), to) for rows, to in zip(given[:2], rotated, strict=True)
            )

    def take(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines [1, T, D] for these queries and keys. Raises RuntimeError for other tensors."""
        (_, _, cos, sin), rotated, self._given, self._rotated = self._given, self._rotated, (), ()
        if rotated[0] is not q or rotated[1] is not k:
            raise RuntimeError("the model changes queries or keys after their rotation")
        return cos, sin


class RotationProbe:
    """Attention that returns zeros, and checks how queries and keys were rotated."""

    def __init__(self, rotations: dict[nn.Module, Rotation]) -> None:
        self._rotations = rotations

    def attend(self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **rest: Any) -> torch.Tensor:
        if module in self._rotations:
            self._rotations[module].check(q, k)
        return v.new_zeros((1, q.shape[2], q.shape[1], v.shape[3]))


class RotationTables:
    """The rotations of a step as tables for the kernels [T, D]: cosines and then sines of each token."""

    def __init__(self, rotations: dict[nn.Module, Rotation]) -> None:
        self._rotations = rotations
        self._tables: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by the id of the cosines, which it keeps

    def table_for(self, module: nn.Module, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
        """Return the table for a call of attention, or None if its queries and keys are rotated already."""
        rotation = self._rotations.get(module)
        if rotation is None:
            return None
        cos, sin = rotation.take(q, k)  # [1, T, D], whose second half repeats the first
        if id(cos) not in self._tables:
            half = cos.shape[-1] // 2
            self._tables[id(cos)] = cos, torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=-1).float()
        return self._tables[id(cos)][1]


def replace_rotations(model: nn.Module) -> dict[nn.Module, Rotation]:
    """Give each module whose forward calls ROTATE a `Rotation` in its place."""
    rotations: dict[nn.Module, Rotation] = {}
    for module in model.modules():
        forward = type(module).forward
        if "forward" not in vars(module) and _calls_rotate(forward):
            rotations[module] = Rotation(forward.__globals__[ROTATE])
            names = forward.__globals__ | {ROTATE: rotations[module]}
            copy = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
            copy.__kwdefaults__ = forward.__kwdefaults__
            overridden: Any = module
            overridden.forward = copy.__get__(module)
    return rotations


def _calls_rotate(forward: Any) -> bool:
    """Return whether a forward calls ROTATE as usual. That of GPT-J and Gemma 4 takes one tensor at a time."""
    if not isinstance(forward, FunctionType) or ROTATE not in forward.__code__.co_names:
        return False
    rotate = forward.__globals__.get(ROTATE)
    return rotate is not None and [*inspect.signature(rotate).parameters][:4] == ["q", "k", "cos", "sin"]


def defer(rotations: dict[nn.Module, Rotation], widths: set[int]) -> dict[nn.Module, Rotation]:
    """Defer the rotations that were recorded as direct, and take back the others. Returns those that are deferred.

    widths: of heads that the caches keep without padding.
    """
    for module, rotation in rotations.items():
        rotation.is_deferred = rotation.is_direct and rotation.width in widths
        if not rotation.is_deferred:
            del module.forward
    return {module: rotation for module, rotation in rotations.items() if rotation.is_deferred}


def joined_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return queries, keys and values [1, H, T, D] as rows [T, (H + 2 H_kv) * D].

    Nothing is copied if they are views of such rows, as those of a joined product are.
    """
    heads, tokens, width = q.shape[1], q.shape[2], q.shape[3]
    columns = (heads + 2 * k.shape[1]) * width
    step, strides = k.shape[1] * width * q.element_size(), (width, columns, 1)
    first = q.data_ptr() + heads * width * q.element_size()
    if (
        q.stride()[1:] == k.stride()[1:] == v.stride()[1:] == strides
        and (k.data_ptr(), v.data_ptr()) == (first, first + step)
        and q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    ):
        return q.as_strided((tokens, columns), (columns, 1))
    return torch.cat([part[0].transpose(0, 1) for part in (q, k, v)], dim=1).view(tokens, columns)


def _is_plain(q: Any, k: Any, cos: Any, sin: Any) -> bool:
    """Return whether each token of [1, H, T, D] is rotated by D / 2 angles that are given twice."""
    if not all(isinstance(part, torch.Tensor) for part in (q, k, cos, sin)) or cos.dim() != 3 or cos.shape != sin.shape:
        return False
    half = cos.shape[-1] // 2
    shape = (1, q.shape[2], q.shape[3])
    is_twice = all(torch.equal(angles[..., :half], angles[..., half:]) for angles in (cos, sin))
    return q.dim() == k.dim() == 4 and tuple(cos.shape) == shape and k.shape[2:] == q.shape[2:] and is_twice


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.float().chunk(2, dim=-1)
    rotated = x.float() * cos[:, None].float() + torch.cat([-b, a], dim=-1) * sin[:, None].float()
    return rotated.to(x.dtype)
