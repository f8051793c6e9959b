"""Draws, penalties and log-probabilities of the Triton kernels against the reference, each row with its settings."""

import pytest
import torch

from quire import kernels
from quire.kernels.reference import penalise
from tests.kernels.conftest import HAS_TRITON, make_triton_ops
from tests.kernels.oracle import kept

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


@pytest.fixture
def ops(monkeypatch):
    if not HAS_TRITON:
        pytest.skip("Triton is not installed")
    return make_triton_ops(torch.float32, monkeypatch)


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


@pytest.mark.parametrize("vocabulary", [1, 17, 4097, 9000])
def test_argmax_takes_the_lowest_of_equals(ops, vocabulary):
    logits = torch.randint(-3, 3, (5, vocabulary)).float()
    assert ops.argmax(logits).tolist() == [row.index(max(row)) for row in logits.tolist()]


@pytest.mark.parametrize("vocabulary", [40, 4097])
def test_log_probabilities_are_exact_and_ordered(ops, vocabulary):
    logits = torch.randn(4, vocabulary).round(decimals=1) * 3
    logits[1, 5:] = float("-inf")
    logits[2, ::3] = float("nan")
    logits[3] *= 30
    values, ids = ops.top_logprobs(logits, 33)
    expected_values, expected_ids = kernels.ReferenceOps(ops.device).top_logprobs(logits, 33)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(values, expected_values, rtol=1e-6, atol=1e-12)
    for i in (0, 3, 32):
        assert torch.equal(ops.logprobs_of(logits, ids[:, i].contiguous()), values[:, i])


def test_log_probabilities_take_no_more_memory_where_rows_are_many(ops, monkeypatch):
    """Their keys are made for a few rows at a time."""
    from quire.kernels.gpu import logprobs

    logits = torch.randn(7, 300)
    expected = ops.top_logprobs(logits, 5)
    monkeypatch.setattr(logprobs, "KEY_BYTES", 3 * 300 * 8)
    empty, sizes = torch.empty, []

    def watched(*args, **kwargs):
        made = empty(*args, **kwargs)
        sizes.append(made.nbytes)
        return made

    monkeypatch.setattr(torch, "empty", watched)
    values, ids = ops.top_logprobs(logits, 5)
    assert max(sizes) == 3 * 300 * 8
    assert torch.equal(values, expected[0])
    assert torch.equal(ids, expected[1])


def test_penalties_change_what_was_seen_and_nothing_else(ops):
    logits = torch.randn(3, 300)
    seen = [{7: 0, 9: 2, 299: 1}, {}, {i: i % 3 for i in range(280)}]
    expected = logits.double()
    repetition, presence, frequency = torch.tensor([[1.5, 2.0, 0.8], [0.5, 9.0, -0.25], [0.25, 9.0, 1.5]])
    for r, counts in enumerate(seen):
        for token, count in counts.items():
            value = expected[r, token]
            value = value / repetition[r] if value > 0 else value * repetition[r]
            expected[r, token] = value - (presence[r] + frequency[r] * count if count else 0)
    starts = torch.tensor([0, *(len(counts) for counts in seen)]).cumsum(0).int()
    ids, counts = (torch.tensor([x for row in seen for x in part(row)]).int() for part in (dict.keys, dict.values))
    ids = torch.cat([ids, torch.tensor([10**6]).int()])  # beyond the last row: not looked at
    plain = logits.clone()
    ops.penalise(logits, starts, ids, counts, repetition, presence, frequency)
    torch.testing.assert_close(logits.double(), expected, rtol=1e-6, atol=1e-6)
    if plain.device.type == "cpu":  # the definition of this operation
        penalise(plain, starts, ids[:-1], counts, repetition, presence, frequency)
        torch.testing.assert_close(plain, logits, rtol=1e-6, atol=1e-6)
