"""The parts of the modules of a Transformers model that one rank computes (tensor parallelism).

The code of a model of Transformers reads the widths of its layers in many ways. So a layer that computes some columns
only returns rows of full width, with zeros in all other columns, and the model runs unchanged. Products,
attention and caches, nearly all of the work and of the memory, have the size of the part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from quire.kernels.ops import AllReduceGroup
from quire.worker.models.transformers.shapes import AttentionShape


class GatheringGroup(AllReduceGroup, Protocol):
    """The ranks that share a model, seen from one of them."""

    def all_gather(self, columns: torch.Tensor, width: int) -> torch.Tensor:
        """Gather columns [R, C] of each rank -> [R, width] side by side on rank 0; unspecified on all other ranks."""


class ModulePart(Protocol):
    """The part of a module that this rank computes."""

    def cut(self, module: Any) -> None:
        """Replace the weights of the module by those of the part."""

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """Return the columns of an input that the part multiplies."""

    def give(self, y: torch.Tensor) -> torch.Tensor:
        """Return the output of the module, from that of the part."""


class WholeModule:
    """A module that each rank computes as a whole."""

    def cut(self, module: Any) -> None:
        pass

    def take(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def give(self, y: torch.Tensor) -> torch.Tensor:
        return y


WHOLE = WholeModule()


@dataclass(frozen=True)
class ColumnPart:
    """Columns of the output of a linear layer.

    spans: ascending ranges of the columns. width: of the whole output. gathered_by: makes the output complete on all
    ranks; without it the other columns are zeros.
    """

    spans: tuple[slice, ...]
    width: int
    gathered_by: AllReduceGroup | None = None

    def cut(self, module: Any) -> None:
        is_transposed = not isinstance(module, nn.Linear)
        weight = module.weight.data.t() if is_transposed else module.weight.data
        rows = torch.cat([weight[span] for span in self.spans])
        module.weight = _parameter(rows.t() if is_transposed else rows)
        if module.bias is not None:
            module.bias = _parameter(torch.cat([module.bias.data[span] for span in self.spans]))

    def take(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def give(self, y: torch.Tensor) -> torch.Tensor:
        output, start = y.new_zeros((*y.shape[:-1], self.width)), 0
        for span in self.spans:
            end = start + span.stop - span.start
            output[..., span] = y[..., start:end]
            start = end
        return output if self.gathered_by is None else self.gathered_by.all_reduce(output)


@dataclass(frozen=True)
class RowPart:
    """The product of some columns of the input of a linear layer. The products of all ranks are added up."""

    span: slice
    ranks: AllReduceGroup

    def cut(self, module: Any) -> None:
        weight = module.weight.data
        module.weight = _parameter(weight[:, self.span] if isinstance(module, nn.Linear) else weight[self.span])
        if module.bias is not None and self.ranks.rank:  # only rank 0 adds the bias
            module.bias = _parameter(torch.zeros_like(module.bias.data))

    def take(self, x: torch.Tensor) -> torch.Tensor:
        return x[..., self.span]

    def give(self, y: torch.Tensor) -> torch.Tensor:
        return self.ranks.all_reduce(y.contiguous())


@dataclass(frozen=True)
class HeadPart:
    """Part of the vocabulary. Rank 0 gets all logits; those of the other ranks are unspecified."""

    span: slice
    width: int
    vocab_size: int
    ranks: GatheringGroup

    def cut(self, module: Any) -> None:
        ColumnPart((self.span,), self.vocab_size).cut(module)

    def take(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def give(self, y: torch.Tensor) -> torch.Tensor:
        if not y.numel():
            return y.new_zeros((*y.shape[:-1], self.vocab_size))
        rows = nn.functional.pad(y.view(-1, y.shape[-1]), (0, self.width - y.shape[-1])).contiguous()
        return self.ranks.all_gather(rows, self.vocab_size).view(*y.shape[:-1], -1)


@dataclass(frozen=True)
class ExpertsPart:
    """Inner features of each expert of a module of `fused_experts`."""

    ranks: AllReduceGroup

    def cut(self, module: Any) -> None:
        rank, size, inner = self.ranks.rank, self.ranks.size, "gate_up_proj" if module.has_gate else "up_proj"
        columns, rows = (2, 1) if module.is_transposed else (1, 2)
        halves = 2 if module.has_gate and module.is_concatenated else 1

        def part(name: str, dim: int, groups: int = 1) -> None:
            chunks = getattr(module, name).data.chunk(groups, dim)
            setattr(module, name, _parameter(torch.cat([half.chunk(size, dim)[rank] for half in chunks], dim)))

        part(inner, columns, halves)
        part("down_proj", rows)
        if module.has_bias:
            part(f"{inner}_bias", 1, halves)
            if rank:
                module.down_proj_bias = _parameter(torch.zeros_like(module.down_proj_bias.data))

    def take(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def give(self, y: torch.Tensor) -> torch.Tensor:
        return self.ranks.all_reduce(y.contiguous())


class HeadsPart(NamedTuple):
    """The heads of an attention call that a rank computes."""

    num_heads: int  # of the whole model
    queries: slice
    keys: slice  # kv heads
    gathered_by: AllReduceGroup | None  # makes the output complete; without it other heads are zeros

    @classmethod
    def on(cls, shape: AttentionShape, ranks: AllReduceGroup, is_gathered: bool = False) -> HeadsPart:
        queries, keys = heads_of(shape, ranks.rank, ranks.size)
        return cls(shape.num_heads, queries, keys, ranks if is_gathered else None)

    def of(self, shape: AttentionShape) -> AttentionShape:
        """Return the shape of the call on this rank."""
        heads, kv_heads = (span.stop - span.start for span in (self.queries, self.keys))
        return replace(shape, num_heads=heads, num_kv_heads=kv_heads)


def can_share_heads(num_heads: int, num_kv_heads: int, size: int) -> bool:
    """Return whether `size` ranks can have equal parts of the heads. Several ranks may have the same kv head."""
    return num_heads % size == 0 and (num_kv_heads % size == 0 or size % num_kv_heads == 0)


def heads_of(shape: AttentionShape, rank: int, size: int) -> tuple[slice, slice]:
    """Return the heads and the kv heads of a rank."""
    heads, kv_heads = shape.num_heads // size, max(1, shape.num_kv_heads // size)
    first = rank * shape.num_kv_heads // size
    return slice(rank * heads, (rank + 1) * heads), slice(first, first + kv_heads)


class Parts:
    """The parts of all modules that this rank computes. Modules that are not in `parts` are computed as a whole."""

    def __init__(self, parts: Mapping[nn.Module, ModulePart] | None = None, heads: Sequence[HeadsPart] = ()) -> None:
        """heads: of each attention call; none if the model is not split."""
        self._parts, self.heads = dict(parts or {}), tuple(heads)
        self._uncut = set(self._parts)

    def cut(self, module: nn.Module) -> ModulePart:
        """Return the part of a module, whose weights are cut at the first call."""
        part = self._parts.get(module, WHOLE)
        if module in self._uncut:
            self._uncut.discard(module)
            part.cut(module)
        return part

    def cut_all(self) -> None:
        """Cut all modules."""
        for module in list(self._uncut):
            self.cut(module)

    def give_left_experts(self) -> None:
        """Add up the results of experts that no fusion has replaced."""
        for module in self._parts:
            part = self._parts[module]
            if isinstance(part, ExpertsPart) and "forward" not in vars(module):
                self.cut(module)
                overridden: Any = module
                overridden.forward = _summed(module.forward, part)


def _summed(forward: Any, part: ModulePart) -> Any:
    def summed(*args: Any, **named: Any) -> torch.Tensor:
        return part.give(forward(*args, **named))

    return summed


def _parameter(values: torch.Tensor) -> nn.Parameter:
    """Return a new parameter: the old one may be shared with another module."""
    return nn.Parameter(values, requires_grad=False)
