"""Argmax and sampling against probabilities that are spelled out with lists and a sort."""

import pytest
import torch

from quire import kernels
from quire.worker.engine.input_batch import GREEDY_DRAW
from tests.support.kernels.implementations import fewer, make_ops, of_each_kind
from tests.support.kernels.oracle import kept


def sample(ops, logits, uniform, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    rows = len(logits)
    return ops.sample(
        logits,
        torch.full((rows,), temperature),
        torch.full((rows,), top_k, dtype=torch.int32),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
        uniform,
    )


@pytest.fixture(params=of_each_kind())
def drawing_ops(request, monkeypatch):
    """Logits are float32 whatever the activations are."""
    return make_ops(*request.param, monkeypatch)


FILTERS = [
    {},
    {"temperature": 0.3},
    {"temperature": 5.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_p": 0.6},
    {"top_p": 1e-6},
    {"top_p": 0.0},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.7, "min_p": 0.05},
    {"temperature": 2.0, "top_k": 2000, "top_p": 0.95},
]


@pytest.mark.parametrize("settings", FILTERS, ids=str)
def test_frequencies_are_the_probabilities(drawing_ops, settings):
    logits = torch.randn(60) * 2
    draws = fewer(drawing_ops, 6000)
    uniform = torch.rand(draws, dtype=torch.float64)
    found = torch.cat(
        [sample(drawing_ops, logits.expand(len(u), -1).contiguous(), u, **settings) for u in uniform.split(500)]
    )
    counts = torch.bincount(found.long(), minlength=60).double()
    p = kept(logits, **{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | settings)
    assert not counts[p == 0].any()
    likely = p > 12 / draws
    observed, expected = counts[likely].tolist(), (p[likely] * draws).tolist()
    if (rest := draws - sum(observed)) or sum(expected) < draws - 1e-6:
        observed, expected = [*observed, rest], [*expected, draws - sum(expected)]
    if len(observed) > 1:
        stats = pytest.importorskip("scipy.stats", reason="a bare machine with a card may lack scipy")
        assert stats.chisquare(observed, expected).pvalue > 1e-4
    else:
        assert observed == [draws]


@pytest.mark.parametrize(
    ("vocabulary", "settings"),
    [*((255 if i % 2 else 5000, one) for i, one in enumerate(FILTERS)), *((3, one) for one in FILTERS[-2:])]
    + [(49152, FILTERS[i]) for i in (0, 4, 5, 8, 10)],
    ids=str,
)
def test_draws_equal_the_reference(cpu_ops, settings, vocabulary):
    rows = 4 if vocabulary > 10000 else 40
    logits = torch.randn(rows, vocabulary) * 3
    uniform = torch.rand(rows, dtype=torch.float64)
    expected = sample(kernels.ReferenceOps(), logits, uniform, **settings)
    actual = sample(cpu_ops, logits, uniform, **settings)
    for row in (actual != expected).nonzero().flatten().tolist():
        # Only a draw on the very edge between two ids may round to the other one.
        p = kept(logits[row], **{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | settings)
        edge = p.cumsum(0)[min(int(actual[row]), int(expected[row]))]
        assert abs(edge - uniform[row]) < 1e-5


def test_the_draw_is_the_first_id_beyond_the_uniform(drawing_ops):
    logits = torch.tensor([[0.25, 0.0, 0.5, 0.25]]).log().repeat(6, 1)
    uniform = torch.tensor([0.0, 0.2499, 0.2501, 0.7499, 0.7501, 1 - 2**-53], dtype=torch.float64)
    assert sample(drawing_ops, logits, uniform).tolist() == [0, 0, 2, 2, 3, 3]


@pytest.mark.parametrize("vocabulary", [100, 30000])
def test_ties_with_the_last_one_kept_are_kept(drawing_ops, vocabulary):
    draws = max(10, fewer(drawing_ops, 200 if vocabulary < 1000 else 40))
    logits = torch.full((draws, vocabulary), -3.0)
    logits[:, [5, 50, 70]] = torch.tensor([2.0, 1.0, 1.0])
    uniform = torch.linspace(0, 1, draws + 1, dtype=torch.float64)[:-1]
    assert set(sample(drawing_ops, logits, uniform, top_k=2).tolist()) == {5, 50, 70}
    p = torch.tensor([2.0, 1.0, 1.0]).exp()
    assert set(sample(drawing_ops, logits, uniform, top_k=3, top_p=float(p[0] / p.sum()) + 0.01).tolist()) == {
        5,
        50,
        70,
    }
    # Everything ties: nothing may be cut.
    same = torch.zeros(draws, vocabulary)
    for settings in ({"top_k": 3}, {"top_p": 0.3}):
        drawn = sample(drawing_ops, same, uniform, **settings)
        assert (drawn == (uniform * vocabulary).int()).all()


def test_masked_ids_are_never_drawn(drawing_ops):
    rows = fewer(drawing_ops, 300)
    logits = torch.randn(rows, 700)
    logits[torch.rand(rows, 700) < 0.5] = float("-inf")
    uniform = torch.rand(rows, dtype=torch.float64)
    for settings in ({}, {"top_k": 500}, {"top_p": 0.99}, {"top_k": 30, "top_p": 0.5}):
        drawn = sample(drawing_ops, logits, uniform, **settings).long()
        assert logits.gather(1, drawn[:, None]).isfinite().all()
    one = torch.full((1, 700), float("-inf"))
    one[0, 333] = -5.0
    for u in (0.0, 0.5, 1 - 2**-53):
        assert sample(drawing_ops, one, torch.tensor([u], dtype=torch.float64), top_k=4, top_p=0.9).item() == 333


def test_broken_logits_give_an_id_in_range(drawing_ops):
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[nan] * 4, [-inf] * 4, [nan, 1.0, -inf, nan], [0.0, inf, 1.0, nan], [nan, -inf, inf, inf]])
    uniform = torch.full((5,), 0.9, dtype=torch.float64)
    for settings in ({}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}, {"temperature": 1e-38}):
        drawn = sample(drawing_ops, logits, uniform, **settings).tolist()
        assert drawn[:4] == [0, 0, 1, 1]
        assert drawn[4] == 3
    assert drawing_ops.argmax(logits).tolist() == [0, 0, 1, 1, 2]


@pytest.mark.parametrize("vocabulary", [1, 2, 17, 4097])
def test_argmax_takes_the_lowest_of_equals(drawing_ops, vocabulary):
    logits = torch.randint(-3, 3, (50, vocabulary)).float()
    expected = [row.index(max(row)) for row in logits.tolist()]
    actual = drawing_ops.argmax(logits)
    assert actual.dtype == torch.int32
    assert actual.tolist() == expected


@pytest.mark.parametrize("vocabulary", [1, 2, 17, 4097, 30000])
def test_a_greedy_choice_as_a_draw_is_that_of_argmax(drawing_ops, vocabulary):
    """Steps with greedy rows and others draw in all rows."""
    logits = (torch.randn(6, vocabulary) * 2).round()  # with ties
    logits[1] = torch.nextafter(torch.full((vocabulary,), 20.0), torch.randn(vocabulary).sign() * 100)
    logits[2, ::2], logits[3], logits[4, -1], logits[5] = float("nan"), float("-inf"), float("inf"), -0.0
    logits[5, vocabulary // 2] = 0.0
    temperature, top_k, top_p, min_p = GREEDY_DRAW
    found = sample(drawing_ops, logits, torch.zeros(6, dtype=torch.float64), temperature, top_k, top_p, min_p)
    assert found.tolist() == drawing_ops.argmax(logits).tolist()


def test_sampling_leaves_the_logits_alone(drawing_ops):
    logits = torch.randn(4, 1000)
    before = logits.clone()
    sample(drawing_ops, logits, torch.rand(4, dtype=torch.float64), top_k=5, top_p=0.5)
    assert torch.equal(logits, before)


def test_wrong_arguments_are_refused(drawing_ops):
    logits, uniform = torch.randn(4, 10), torch.rand(4, dtype=torch.float64)
    with pytest.raises(TypeError, match="logits"):
        drawing_ops.argmax(logits.double())
    with pytest.raises(ValueError, match="logits has shape"):
        drawing_ops.argmax(logits[0])
    with pytest.raises(TypeError, match="uniform"):
        sample(drawing_ops, logits, uniform.float())
    with pytest.raises(ValueError, match="uniform has shape"):
        sample(drawing_ops, logits, uniform[:3])
