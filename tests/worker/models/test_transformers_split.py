"""Modules of Transformers are split over ranks, and the parts add up."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from quire.worker.models.transformers import trial
from quire.worker.models.transformers.bridge import examine
from quire.worker.models.transformers.config import read_transformers_config
from quire.worker.models.transformers.linear import LinearUses
from quire.worker.models.transformers.parts import (
    ColumnPart,
    ExpertsPart,
    HeadPart,
    HeadsPart,
    ModulePart,
    Parts,
    RowPart,
    can_share_heads,
)
from quire.worker.models.transformers.shapes import AttentionShape
from quire.worker.models.transformers.split import CannotSplit, split
from quire.worker.models.transformers.weights import load_weights
from tests.support.architectures import ARCHITECTURES
from tests.support.hybrid_checkpoints import make_hybrid
from tests.support.transformers_checkpoints import LLAMA_LIKE, make_kind, make_other

# --- idle ranks -------------------------------------------------------------------------------------------------------
# One rank of several whose other ranks do nothing.


class IdleRanks:
    """A `GatheringGroup`: the other ranks add zeros."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.num_sums = 0

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        self.num_sums += 1
        return values

    def all_gather(self, columns: torch.Tensor, width: int) -> torch.Tensor:
        found = columns.new_zeros(len(columns), self.size * columns.shape[1])
        found[:, self.rank * columns.shape[1] :][:, : columns.shape[1]] = columns
        return found[:, :width]


def split_for(path: Path, rank: int = 0, size: int = 2, **changes: Any) -> tuple[Any, Parts]:
    """A model, and the parts of a rank."""
    config = read_transformers_config(path)
    model = load_weights(config, torch.float32)
    text = trial.texts(config.vocab_size, 64)[0]
    with LinearUses(model) as uses:
        trial.by_transformers(model, [text])
    shapes, states, *_ = examine(model, config, text, torch.float32, 64)
    given = {"stateful": () if states is None else states.modules} | changes
    parts = split(model, shapes, text=text, ranks=IdleRanks(rank, size), unpackable=uses.unpackable(), **given)
    return model, parts


def described(model: nn.Module, parts: Parts) -> dict[str, str]:
    """The part of each linear layer of the first block, and of the head."""
    names = {
        re.sub(r".*\b(?:layers|h)\.0\.", "", name): parts._parts.get(module)
        for name, module in model.named_modules()
        if not re.search(r"\.[1-9]\d*\.", name)
    }
    found = {}
    for name, part in names.items():
        if isinstance(part, ColumnPart):
            spans = " ".join(f"{one.start}-{one.stop}" for one in part.spans)
            found[name] = ("gathered " if part.gathered_by else "columns ") + spans
        elif isinstance(part, RowPart | HeadPart):
            found[name] = f"{'rows' if isinstance(part, RowPart) else 'head'} {part.span.start}-{part.span.stop}"
        elif isinstance(part, ExpertsPart):
            found[name] = "experts"
    return found


# 4 heads of 16, 2 kv heads, 96 inner features, on rank 1 of 2.
SPLIT = {
    "gpt2": {  # queries, keys and values in one layer
        "attn.c_attn": "columns 32-64 96-128 160-192",
        "attn.c_proj": "rows 32-64",
        "mlp.c_fc": "columns 48-96",
        "mlp.c_proj": "rows 48-96",
    },
    "gpt-neox": {  # the same, head by head
        "attention.query_key_value": "columns 96-192",
        "attention.dense": "rows 32-64",
        "mlp.dense_h_to_4h": "columns 48-96",
        "mlp.dense_4h_to_h": "rows 48-96",
    },
    "phi3": {  # fewer kv heads; gate and up in one layer
        "self_attn.qkv_proj": "columns 32-64 80-96 112-128",
        "self_attn.o_proj": "rows 32-64",
        "mlp.gate_up_proj": "columns 48-96 144-192",
        "mlp.down_proj": "rows 48-96",
    },
    "olmo2": {  # a norm over all queries
        "self_attn.q_proj": "gathered 32-64",
        "self_attn.v_proj": "columns 16-32",
        "self_attn.o_proj": "rows 32-64",
        "mlp.gate_proj": "columns 48-96",
        "mlp.up_proj": "columns 48-96",
        "mlp.down_proj": "rows 48-96",
    },
    "qwen3-moe": {  # the router is whole
        "self_attn.q_proj": "columns 32-64",
        "self_attn.k_proj": "columns 16-32",
        "self_attn.v_proj": "columns 16-32",
        "self_attn.o_proj": "rows 32-64",
        "mlp.experts": "experts",
    },
}


@pytest.mark.parametrize("kind", SPLIT)
def test_layers_are_split_by_what_depends_on_them(kind: str, tmp_path: Path) -> None:
    model, parts = split_for(make_kind(tmp_path / kind, kind), rank=1)
    found = described(model, parts)
    head = next((name for name, one in model.named_modules() if one is model.get_output_embeddings()), "")
    vocab_size = len(model.get_output_embeddings().weight)
    assert found.pop(head) == f"head {-(-vocab_size // 2)}-{vocab_size}"
    assert found == SPLIT[kind]
    assert all(one.gathered_by is None for one in parts.heads)


@pytest.mark.parametrize("kind", ["llama", "cohere2", "gpt-neox", "apertus", "phi", "exaone4", "deepseek-v3"])
def test_layers_are_split_as_in_the_plans_of_transformers(kind: str, tmp_path: Path) -> None:
    model_type, fields = ARCHITECTURES[kind]
    model, parts = split_for(make_other(tmp_path / kind, model_type, **fields), rank=1)
    plan = {re.escape(name).replace(r"\*", r"\d+"): style for name, style in model.config.base_model_tp_plan.items()}
    styles = {
        module: style
        for name, module in model.base_model.named_modules()
        for pattern, style in plan.items()
        if re.fullmatch(pattern, name) and isinstance(module, nn.Linear)
    }
    found = {module: parts._parts[module] for module in styles}
    assert set(styles.values()) == {"colwise", "rowwise"}
    for module, part in found.items():
        assert isinstance(part, ColumnPart if styles[module] == "colwise" else RowPart)
        assert not isinstance(part, ColumnPart) or part.gathered_by is None


def test_more_ranks_than_kv_heads_share_them(tmp_path: Path) -> None:
    model, parts = split_for(make_kind(tmp_path / "phi3", "phi3"), rank=3, size=4)
    assert described(model, parts)["self_attn.qkv_proj"] == "columns 48-64 80-96 112-128"
    assert [(one.queries, one.keys) for one in parts.heads] == [(slice(3, 4), slice(1, 2))] * 3


def test_attention_whose_heads_are_mixed_is_gathered(tmp_path: Path) -> None:
    """DiffLlama subtracts the results of half of the heads from those of the others."""
    model, parts = split_for(make_kind(tmp_path / "diffllama", "diffllama"))
    assert all(one.gathered_by is not None for one in parts.heads)
    found = described(model, parts)
    assert "self_attn.o_proj" not in found
    assert found["mlp.down_proj"] == "rows 0-48"


def test_all_ranks_together_hold_each_weight(tmp_path: Path) -> None:
    path = make_other(tmp_path / "llama", "llama", **LLAMA_LIKE)
    both = [split_for(path, rank) for rank in range(2)]
    for _, parts in both:
        parts.cut_all()
    whole = dict(load_weights(read_transformers_config(path), torch.float32).named_parameters())
    first, second = (dict(model.named_parameters()) for model, _ in both)
    for name, values in whole.items():
        if first[name].shape == values.shape:  # norms and embeddings
            assert torch.equal(first[name], values)
        else:
            dim = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
            assert torch.equal(torch.cat([first[name], second[name]], dim), values)


def test_what_ranks_cannot_share_is_refused(tmp_path: Path) -> None:
    path = make_kind(tmp_path / "gpt2", "gpt2")
    with pytest.raises(CannotSplit, match="3 ranks cannot share 4 heads and 4 key-value heads"):
        split_for(path, size=3)


def test_layers_of_modules_with_states_stay_whole(tmp_path: Path) -> None:
    model, parts = split_for(make_hybrid(tmp_path / "lfm2", "lfm2"))
    split = {name for name, module in model.named_modules() if module in parts._parts}
    assert any(".self_attn." in name for name in split)
    assert any(".feed_forward." in name for name in split)
    assert not any(".conv." in name for name in split)


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
