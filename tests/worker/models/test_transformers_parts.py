"""The parts of all ranks add up to the results of the whole module."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from quire.worker.models.transformers_attention import AttentionShape
from quire.worker.models.transformers_config import read_transformers_config
from quire.worker.models.transformers_parts import (
    WHOLE,
    ColumnPart,
    ExpertsPart,
    HeadPart,
    HeadsPart,
    ModulePart,
    Parts,
    RowPart,
    can_share_heads,
)
from quire.worker.models.transformers_weights import load_weights
from tests.support.idle_ranks import IdleRanks
from tests.support.transformers_checkpoints import make_kind

X = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
RANKS = [IdleRanks(rank, 2) for rank in range(2)]


def total(module: nn.Module, parts: list[ModulePart]) -> torch.Tensor:
    """The sum of what the module gives on each rank."""
    results = []
    for part in parts:
        own: Any = copy.deepcopy(module)
        part.cut(own)
        if not isinstance(own, nn.Linear):
            own.nf = own.weight.shape[1]  # Conv1D reads it; a packed layer does not
        results.append(part.give(own(part.take(X))))
    return torch.stack(results).sum(0)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_columns_and_rows_add_up(is_transposed: bool) -> None:
    from transformers.pytorch_utils import Conv1D

    linear = Conv1D(12, 8) if is_transposed else nn.Linear(8, 12)
    nn.init.normal_(linear.bias)
    expected = linear(X)
    spans = ((slice(0, 3), slice(6, 9)), (slice(3, 6), slice(9, 12)))
    torch.testing.assert_close(total(linear, [ColumnPart(one, 12) for one in spans]), expected)
    halves: list[ModulePart] = [RowPart(slice(4 * one.rank, 4 * one.rank + 4), one) for one in RANKS]
    torch.testing.assert_close(total(linear, halves), expected)


def test_columns_of_other_ranks_are_zeros_and_are_gathered_if_asked() -> None:
    ranks = IdleRanks(1, 2)
    given = torch.ones(2, 3)
    assert ColumnPart((slice(2, 5),), 6).give(given).tolist() == [[0, 0, 1, 1, 1, 0]] * 2
    assert ranks.num_sums == 0
    ColumnPart((slice(2, 5),), 6, ranks).give(given)
    assert ranks.num_sums == 1


def test_logits_of_a_vocabulary_that_does_not_divide_are_put_together() -> None:
    head = nn.Linear(8, 7, bias=False)
    parts = [HeadPart(slice(4 * one.rank, min(7, 4 * one.rank + 4)), 4, 7, one) for one in RANKS]
    torch.testing.assert_close(total(head, parts), head(X))
    assert parts[0].give(torch.empty(1, 0, 4)).shape == (1, 0, 7)


@pytest.mark.parametrize("kind", ["qwen3-moe", "gpt-oss"])  # with halves, and with pairs and biases
def test_parts_of_experts_add_up(kind: str, tmp_path: Path) -> None:
    model = load_weights(read_transformers_config(make_kind(tmp_path / kind, kind)), torch.float32)
    experts = next(one for name, one in model.named_modules() if name.endswith("mlp.experts"))
    rows = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    index, weights = torch.tensor([[0, 3]] * 5), torch.rand(5, 2, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = experts(rows, index, weights)
        found = torch.zeros_like(expected)
        for one in RANKS:
            own = copy.deepcopy(experts)
            ExpertsPart(one).cut(own)
            assert own.down_proj.numel() == experts.down_proj.numel() / 2
            found += own(rows, index, weights)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_module_is_cut_once_and_others_are_whole() -> None:
    linear, other = nn.Linear(8, 12), nn.Linear(8, 12)
    parts = Parts({linear: RowPart(slice(0, 4), RANKS[0])})
    assert parts.cut(linear) is parts.cut(linear)
    assert linear.weight.shape == (12, 4)
    assert parts.cut(other) is WHOLE
    assert other.weight.shape == (12, 8)


def test_a_weight_that_is_shared_with_the_embedding_is_cut_in_the_head_only() -> None:
    table, head = nn.Embedding(7, 8), nn.Linear(8, 7, bias=False)
    head.weight = table.weight
    Parts({head: HeadPart(slice(0, 4), 4, 7, RANKS[0])}).cut_all()
    assert (len(table.weight), len(head.weight)) == (7, 4)


def test_heads_are_shared_if_their_numbers_divide() -> None:
    assert [size for size in range(1, 9) if can_share_heads(8, 2, size)] == [1, 2, 4, 8]
    assert [size for size in range(1, 7) if can_share_heads(6, 3, size)] == [1, 3, 6]
    shape = AttentionShape(8, 2, 16, 16, 0.25, 0)
    part = HeadsPart.on(shape, IdleRanks(2, 4))
    assert (part.queries, part.keys) == (slice(4, 6), slice(1, 2))
    assert (part.of(shape).num_heads, part.of(shape).num_kv_heads) == (2, 1)
