"""Finds how the modules of a Transformers model can be split over ranks (tensor parallelism).

A short text is run with random numbers as the outputs of all linear layers and of the attention. Gradients then show on
which of these numbers each input depends:

- The columns on which the heads of a rank depend, and no other input depends, are those that the rank computes.
- If equal parts of the input of a layer depend on such columns or heads of one rank each, each rank multiplies its
  part, and the products are added up.
- All other layers are needed whole. Queries and keys of models with a norm over all heads are gathered.

The results of layers that differ in numbers of their names only, such as those of all blocks, are put together.

Transformers publishes plans for its own tensor parallelism (`base_model_tp_plan`), and a test compares them with what
is found here. They do not replace it: a quarter of the served configurations have none, such as those of GPT-2, OPT,
Falcon and Mamba. A plan names a dozen styles, each with code of its own in Transformers that cuts a module and changes
what the model reads of it. Plans gather layers that need no gathering, as the merged layers of Phi-3, and do not know
ranks that share a key-value head.

If the text lacks a dependency that another text has, a column may look unneeded. Then the layer is not split, since
each column must be needed by a rank: that costs speed alone. If two parts look independent and are not, the ranks
compute something else. So the trial compares the logits of all ranks together with those of the whole model, and the
model is refused. Only an error below the bounds of the trial (`examine.FAR`) would pass.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from quire.worker.models.transformers import attention, trial
from quire.worker.models.transformers.fused_experts import is_stacked
from quire.worker.models.transformers.linear import kind_of, linear_layers
from quire.worker.models.transformers.parts import (
    ColumnPart,
    ExpertsPart,
    GatheringGroup,
    HeadPart,
    HeadsPart,
    ModulePart,
    Parts,
    RowPart,
    can_share_heads,
    heads_of,
)
from quire.worker.models.transformers.shapes import AttentionShape

log = logging.getLogger(__name__)

ONE_PROCESS = "lower --tensor-parallel-size to 1"

# Layers of one kind differ in the numbers of their names only, and have outputs of one width.
Kind = tuple[str, int]


class CannotSplit(Exception):
    """Ranks cannot share a model. The message names the reason."""


@dataclass(eq=False)
class Leaf:
    """Random numbers that stand for the output of a linear layer or of an attention call.

    needed: bool [ranks, columns or heads], those on which the parts of the ranks depend.
    """

    values: torch.Tensor
    kind: Kind | None  # None for an attention call
    needed: torch.Tensor
    is_whole: bool = False  # some input depends on all of it
    feeds_attention: bool = False


@dataclass
class RowInput:
    """The input of a linear layer whose equal parts depend on parts of these leaves."""

    kind: Kind
    leaves: list[Leaf]


@dataclass
class DependencyProbe:
    """Records dependencies while a model runs inside `watching`. The probe is the attention of the model."""

    layers: dict[Any, Kind]  # linear layers
    shapes: list[AttentionShape]
    size: int
    leaves: list[Leaf] = field(default_factory=list)
    rows: list[RowInput] = field(default_factory=list)
    other_kinds: set[Kind] = field(default_factory=set)  # whose input is needed whole
    calls: Counter[nn.Module] = field(default_factory=Counter)
    attentions: list[Leaf] = field(default_factory=list)  # of each attention call

    @contextmanager
    def watching(self) -> Iterator[None]:
        hooks = [module.register_forward_pre_hook(self._before) for module in self.layers]
        hooks += [module.register_forward_hook(self._after) for module in self.layers]
        try:
            with torch.enable_grad(), attention.running(self):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def attend(self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **rest: Any) -> torch.Tensor:
        shape, parts = self.shapes[len(self.attentions)], []
        for rank in range(self.size):
            queries, keys = heads_of(shape, rank, self.size)
            parts.append([q[:, queries], k[:, keys], v[:, keys]])
        for leaf, needed in self._needed(parts).items():
            leaf.feeds_attention = True
            leaf.needed |= needed
        values = torch.randn(1, q.shape[2], q.shape[1], v.shape[3], dtype=v.dtype)
        leaf = self._leaf(values, None, q.shape[1])
        self.attentions.append(leaf)
        return leaf.values.clone()

    def _before(self, module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, kind = args[0], self.layers[module]
        self.calls[module] += 1
        width = x.shape[-1]
        if width % self.size == 0:
            needed = self._needed([[part] for part in x.split(width // self.size, dim=-1)])
            if needed and all(bool((mask.sum(0) <= 1).all()) for mask in needed.values()) and self._keep_order(needed):
                for leaf, mask in needed.items():
                    leaf.needed |= mask
                self.rows.append(RowInput(kind, list(needed)))
                return (x.detach(), *args[1:])
        else:
            needed = self._needed([[x]] * self.size)
        for leaf in needed:
            leaf.is_whole = True
        self.other_kinds.add(kind)
        return (x.detach(), *args[1:])

    def _after(self, module: Any, _: Any, output: torch.Tensor) -> torch.Tensor:
        leaf = self._leaf(torch.randn_like(output), self.layers[module], output.shape[-1])
        return leaf.values.clone()

    def _leaf(self, values: torch.Tensor, kind: Kind | None, width: int) -> Leaf:
        leaf = Leaf(values.requires_grad_(), kind, torch.zeros(self.size, width, dtype=torch.bool))
        self.leaves.append(leaf)
        return leaf

    def _keep_order(self, needed: dict[Leaf, torch.Tensor]) -> bool:
        """Return whether the part of each rank depends on the heads of that rank only."""
        for leaf, mask in needed.items():
            if leaf.kind is None:
                of_rank = torch.arange(mask.shape[1]) // (mask.shape[1] // self.size)
                if bool((mask & (of_rank != torch.arange(self.size)[:, None])).any()):
                    return False
        return True

    def _needed(self, parts: list[list[torch.Tensor]]) -> dict[Leaf, torch.Tensor]:
        """Return the leaves on which these tensors of each rank depend, and their columns or heads: bool [ranks, N]."""
        unknown = [leaf for leaf in self.leaves if not leaf.is_whole]  # all parts need a whole leaf
        needed = {leaf: torch.zeros_like(leaf.needed) for leaf in unknown}
        for rank, tensors in enumerate(parts):
            depending = [tensor for tensor in tensors if tensor.requires_grad]
            if not depending or not unknown:
                continue
            total = torch.stack([(tensor.float() * torch.randn(tensor.shape)).sum() for tensor in depending]).sum()
            values = [leaf.values for leaf in unknown]
            gradients = torch.autograd.grad(total, values, retain_graph=True, allow_unused=True)
            for leaf, gradient in zip(unknown, gradients, strict=True):
                if gradient is not None:
                    if leaf.kind is None:  # [1, T, H, D]
                        gradient = gradient.transpose(2, 3).abs().sum(2)
                    needed[leaf][rank] |= (gradient != 0).flatten(0, -2).any(0)
        return {leaf: mask for leaf, mask in needed.items() if bool(mask.any())}


class Splitter:
    """Chooses the part of each module, from the dependencies in a text."""

    def __init__(self, probe: DependencyProbe, layers: dict[Any, Kind]) -> None:
        """layers: those that can be split."""
        self._probe, self._size = probe, probe.size
        once = set(layers.values())
        for module, kind in probe.layers.items():
            if module not in layers or probe.calls[module] != 1:
                once.discard(kind)
        self._needed: dict[Kind, torch.Tensor] = {}
        for leaf in probe.leaves:
            if leaf.kind is not None:
                self._needed[leaf.kind] = self._needed.get(leaf.kind, torch.zeros_like(leaf.needed)) | leaf.needed
        self.rows = {row.kind for row in probe.rows} & once - probe.other_kinds
        self.columns = self._columns(once)
        while True:
            kept = {kind for kind in self.rows if not self._depends_on_whole(kind)}
            if kept == self.rows:
                break
            self.rows = kept
            self.columns = self._columns(once)
        feeding = {leaf.kind for leaf in probe.leaves if leaf.kind is not None and leaf.feeds_attention}
        rest = (once & feeding) - self.rows - self.columns
        self.gathered = {kind for kind in rest if self._needed[kind].shape[1] % self._size == 0}

    def _columns(self, once: set[Kind]) -> set[Kind]:
        whole = {leaf.kind for leaf in self._probe.leaves if leaf.is_whole}
        for row in self._probe.rows:
            if row.kind not in self.rows:
                whole |= {leaf.kind for leaf in row.leaves}
        splittable = once - self.rows - whole
        return {kind for kind in splittable if self._is_partial(self._needed[kind])}

    @staticmethod
    def _is_partial(needed: torch.Tensor) -> bool:
        """Return whether each column is needed by a rank, and no rank needs all."""
        return bool(needed.any(0).all()) and not bool(needed.all(1).any())

    def _depends_on_whole(self, kind: Kind) -> bool:
        sources = {leaf.kind for row in self._probe.rows if row.kind == kind for leaf in row.leaves}
        return not (sources - {None}) <= self.columns

    def is_partial_attention(self, leaf: Leaf) -> bool:
        """Return whether only layers that multiply parts of their input use the output of this attention call."""
        return not leaf.is_whole and all(row.kind in self.rows for row in self._probe.rows if leaf in row.leaves)

    def part_of(self, module: Any, kind: Kind, ranks: GatheringGroup) -> ModulePart | None:
        """Return the part of a linear layer; None if each rank computes it as a whole."""
        rank, size = ranks.rank, ranks.size
        inputs, width = _widths(module)
        if kind in self.rows:
            return RowPart(_equal_part(inputs, rank, size), ranks)
        if kind in self.columns:
            return ColumnPart(_spans(self._needed[kind][rank]), width)
        if kind in self.gathered and width >= inputs:  # gathering costs more than the product of a narrow layer
            return ColumnPart((_equal_part(width, rank, size),), width, ranks)
        return None


def split(
    model: Any,
    shapes: list[AttentionShape],
    stateful: Collection[nn.Module],
    text: torch.Tensor,
    ranks: GatheringGroup,
    unpackable: set[nn.Module],
) -> Parts:
    """Find the parts of a model on the CPU, whose attention is `attention.PAGED`.

    shapes: of its attention calls. stateful: modules that keep recurrent states; each rank computes them as a whole,
    with states of its own. unpackable: linear layers that stay whole. Raises CannotSplit.
    """
    size = ranks.size
    for shape in shapes:
        if not can_share_heads(shape.num_heads, shape.num_kv_heads, size):
            heads = f"{shape.num_heads} heads and {shape.num_kv_heads} key-value heads"
            raise CannotSplit(f"{size} ranks cannot share {heads}")
    head, names = model.get_output_embeddings(), linear_layers(model)
    layers = {module: (kind_of(name), _widths(module)[1]) for name, module in names}
    dtype = model.dtype
    whole = {part for module in stateful for part in module.modules()} | unpackable
    usable = {
        module: kind
        for module, kind in layers.items()
        if module not in whole and module is not head and module.weight.dtype is dtype
    }
    probe = DependencyProbe(layers, shapes, size)
    try:
        with torch.random.fork_rng(), probe.watching():
            torch.manual_seed(0)  # all ranks find the same
            trial.logits(model, text, None, torch.tensor([len(text) - 1]))
    except Exception as error:  # any line of a model's code can raise anything
        raise CannotSplit(f"its layers cannot be examined ({type(error).__name__}: {str(error)[:200]})") from error
    splitter = Splitter(probe, usable)
    chosen = {module: splitter.part_of(module, kind, ranks) for module, kind in usable.items()}
    parts: dict[nn.Module, ModulePart] = {module: part for module, part in chosen.items() if part is not None}
    experts = [module for module in model.modules() if is_stacked(module, dtype) and _divides(module, size)]
    parts |= {module: ExpertsPart(ranks) for module in experts}
    if not parts:
        raise CannotSplit(f"{size} ranks cannot share any of its products")
    if type(head) is nn.Linear and head not in unpackable and head.weight.dtype is dtype:
        vocab_size = len(head.weight)
        width = -(-vocab_size // size)
        if (size - 1) * width < vocab_size:
            span = slice(ranks.rank * width, min((ranks.rank + 1) * width, vocab_size))
            parts[head] = HeadPart(span, width, vocab_size, ranks)
    is_partial = [splitter.is_partial_attention(leaf) for leaf in probe.attentions]
    of_calls = [HeadsPart.on(shape, ranks, not partial) for shape, partial in zip(shapes, is_partial, strict=True)]
    kinds = Counter(type(part) for part in parts.values())
    gathered = sum(isinstance(part, ColumnPart) and part.gathered_by is not None for part in parts.values())
    log.info(
        "%s on %d ranks: %d of %d linear layers are split by output (%d of them gathered), %d by input; "
        "%d of %d attention calls are gathered; %d modules of experts are split",
        *(type(model).__name__, size, kinds[ColumnPart], len(layers), gathered, kinds[RowPart]),
        *(is_partial.count(False), len(is_partial), len(experts)),
    )
    return Parts(parts, of_calls)


def move_part(model: nn.Module, parts: Parts, device: torch.device) -> None:
    """Move the part of a model to a device; parts on a CPU are cut when they are packed."""
    if device.type != "cpu":
        parts.cut_all()
        model.to(device)


def _widths(module: Any) -> tuple[int, int]:
    """Return the columns of the input and of the output of a linear layer."""
    first, second = module.weight.shape
    return (second, first) if isinstance(module, nn.Linear) else (first, second)


def _divides(module: Any, size: int) -> bool:
    inner: int = module.down_proj.shape[1 if module.is_transposed else 2]
    return inner % size == 0


def _equal_part(width: int, rank: int, size: int) -> slice:
    return slice(rank * width // size, (rank + 1) * width // size)


def _spans(needed: torch.Tensor) -> tuple[slice, ...]:
    """Return the ranges of true elements of bool [N]."""
    edges = torch.diff(nn.functional.pad(needed.int(), (1, 1)))
    starts, ends = (edges == 1).nonzero().flatten().tolist(), (edges == -1).nonzero().flatten().tolist()
    return tuple(slice(start, end) for start, end in zip(starts, ends, strict=True))
