"""Draws of the Triton kernels against the reference, each row with settings of its own."""

import pytest
import torch

from quire import kernels
from tests.support.kernels.oracle import kept

SETTINGS = [  # temperature, top_k, top_p, min_p
    (1.0, 0, 1.0, 0.0),
    (1e-6, 0, 1.0, 0.0),
    (100.0, 0, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 7, 1.0, 0.0),
    (2.0, 2000, 0.95, 0.0),
    (1.0, 0, 0.6, 0.0),
    (1.0, 0, 0.0, 0.0),
    (1.0, 0, 1.0, 0.2),
    (1.0, 0, 1.0, 1.0),
    (0.8, 20, 0.7, 0.05),
]


def columns(settings: list[tuple]) -> list[torch.Tensor]:
    dtypes = (torch.float32, torch.int32, torch.float32, torch.float32)
    return [
        torch.tensor(values, dtype=dtype) for values, dtype in zip(zip(*settings, strict=True), dtypes, strict=True)
    ]


@pytest.mark.parametrize("vocabulary", [3, 300, 4099])
def test_every_row_is_drawn_by_its_own_settings(ops, vocabulary):
    rows = len(SETTINGS)
    logits, uniform = torch.randn(rows, vocabulary) * 3, torch.rand(rows, dtype=torch.float64)
    logits[:, 1] = float("nan")
    before = logits.clone()
    actual = ops.sample(logits, *columns(SETTINGS), uniform)
    expected = kernels.ReferenceOps(ops.device).sample(logits, *columns(SETTINGS), uniform)
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    for row in (actual != expected).nonzero().flatten().tolist():
        # Only a draw on the very edge between two ids may round to the other one.
        edge = kept(logits[row], *SETTINGS[row]).cumsum(0)[min(int(actual[row]), int(expected[row]))]
        assert abs(edge - uniform[row]) < 1e-5


def test_draws_follow_the_uniform_numbers_through_what_is_kept(ops):
    """The cumulative distribution is inverted exactly: over a grid of uniform numbers every id gets its share."""
    draws, p = 20, torch.tensor([0.25, 0.0, 0.5, 0.125, 0.125])
    logits = p.log().repeat(draws, 1)
    uniform = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    for settings, shares in [((1.0, 0, 1.0, 0.0), [5, 0, 10, 2, 3]), ((1.0, 0, 0.7, 0.0), [7, 0, 13, 0, 0])]:
        drawn = ops.sample(logits, *columns([settings] * draws), uniform)
        assert torch.bincount(drawn.long(), minlength=5).tolist() == shares
        assert torch.equal(drawn, drawn.sort().values)


def test_ties_and_broken_rows(ops):
    nan, inf = float("nan"), float("inf")
    same = torch.zeros(4, 300)
    uniform = torch.tensor([0.0, 0.3, 0.7, 0.999], dtype=torch.float64)
    for settings in ((1.0, 3, 1.0, 0.0), (1.0, 0, 0.3, 0.0)):
        assert torch.equal(ops.sample(same, *columns([settings] * 4), uniform), (uniform * 300).int())
    broken = torch.tensor([[nan] * 4, [-inf] * 4, [nan, 1.0, -inf, nan], [0.0, inf, 1.0, nan], [nan, -inf, inf, inf]])
    for settings in ((1.0, 0, 1.0, 0.0), (1.0, 2, 0.5, 0.5), (1e-38, 0, 1.0, 0.0)):
        drawn = ops.sample(broken, *columns([settings] * 5), torch.full((5,), 0.9, dtype=torch.float64))
        assert drawn.tolist() == [0, 0, 1, 1, 3]
    assert ops.argmax(broken).tolist() == [0, 0, 1, 1, 2]


def test_a_row_does_not_depend_on_the_others(ops):
    """Continuous batching changes the neighbours of a row at every step; its draw stays."""
    settings = SETTINGS[-2:] * 2
    logits, uniform = torch.randn(4, 700), torch.rand(4, dtype=torch.float64)
    together = ops.sample(logits, *columns(settings), uniform)
    for r in range(4):
        mine = [column[r : r + 1].clone() for column in columns(settings)]
        assert ops.sample(logits[r : r + 1].clone(), *mine, uniform[r : r + 1].clone()) == together[r]
