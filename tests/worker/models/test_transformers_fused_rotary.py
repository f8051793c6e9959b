"""Rotations that are left to the attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from quire.worker.models.transformers_fused_rotary import (
    Rotation,
    RotationProbe,
    RotationTables,
    defer,
    joined_rows,
    replace_rotations,
)

HEADS, TOKENS, WIDTH = 2, 5, 16


def apply_rotary_pos_emb(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    def rotate(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, dim=-1)
        return x * cos.unsqueeze(unsqueeze_dim) + torch.cat([-b, a], dim=-1) * sin.unsqueeze(unsqueeze_dim)

    return rotate(q), rotate(k)


class Attending(nn.Module):
    """Rotates, and calls an attention. `change` is what a model may do between the two."""

    def __init__(self, change: Any = None) -> None:
        super().__init__()
        self.change = change

    def forward(self, q: Any, k: Any, cos: Any, sin: Any, attention: Any) -> Any:
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        if self.change is not None:
            q = self.change(q)
        return attention.attend(self, q, k, k)


class Plain(nn.Module):
    def forward(self, x: Any) -> Any:
        return x


def inputs() -> tuple[torch.Tensor, ...]:
    angles = torch.rand(1, TOKENS, WIDTH // 2)
    both = torch.cat([angles, angles], dim=-1)
    return torch.randn(1, HEADS, TOKENS, WIDTH), torch.randn(1, 1, TOKENS, WIDTH), both.cos(), both.sin()


def recorded(module: nn.Module, *given: torch.Tensor) -> dict[nn.Module, Rotation]:
    rotations = replace_rotations(nn.ModuleList([module, Plain()]))
    assert list(rotations) == [module]
    module(*given, RotationProbe(rotations))
    return rotations


class Keeping:
    def __init__(self, tables: RotationTables) -> None:
        self.tables = tables

    def attend(self, module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return self.tables.table_for(module, q, k), q, k


def test_a_direct_rotation_is_deferred_and_gives_its_table() -> None:
    module, (q, k, cos, sin) = Attending(), inputs()
    deferred = defer(recorded(module, q, k, cos, sin), {WIDTH})
    assert list(deferred) == [module]
    attention = Keeping(RotationTables(deferred))
    table, q_given, k_given = module(q, k, cos, sin, attention)
    assert q_given is q
    assert k_given is k
    half = WIDTH // 2
    assert torch.equal(table, torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=-1))
    assert module(q, k, cos, sin, attention)[0] is table
    assert attention.tables.table_for(Plain(), q, k) is None


@pytest.mark.parametrize("case", ["changed", "interleaved", "padded", "angles differ"])
def test_other_rotations_stay_with_the_model(case: str) -> None:
    module, (q, k, cos, sin) = Attending((lambda q: q * 2) if case == "changed" else None), inputs()
    if case == "interleaved":
        rotations = replace_rotations(module)
        original = rotations[module]._original
        rotations[module]._original = lambda q, k, *more, **rest: original(q.flip(-1), k, *more, **rest)
        module(q, k, cos, sin, RotationProbe(rotations))
    else:
        rotations = recorded(module, q, k, cos, sin.cumsum(-1) if case == "angles differ" else sin)
    assert defer(rotations, {WIDTH + 16} if case == "padded" else {WIDTH}) == {}
    assert "forward" not in vars(module)


def test_queries_that_change_in_a_step_are_an_error() -> None:
    module, given = Attending(), inputs()
    deferred = defer(recorded(module, *given), {WIDTH})
    module.change = torch.clone
    with pytest.raises(RuntimeError, match="after their rotation"):
        module(*given, Keeping(RotationTables(deferred)))


def test_rows_of_one_product_are_not_copied() -> None:
    rows = torch.randn(TOKENS, (HEADS + 2) * WIDTH)
    parts = rows.split([HEADS * WIDTH, WIDTH, WIDTH], dim=-1)
    q, k, v = (part.view(1, TOKENS, -1, WIDTH).transpose(1, 2) for part in parts)
    assert joined_rows(q, k, v).data_ptr() == rows.data_ptr()
    assert torch.equal(joined_rows(q, k, v), rows)
    for apart in ((q.clone(), k, v), (q, k.clone(), v), (q, v, k)):
        expected = torch.cat([part[0].transpose(0, 1).reshape(TOKENS, -1) for part in apart], dim=-1)
        assert torch.equal(joined_rows(*apart), expected)
