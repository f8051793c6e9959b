"""Log-probabilities against log_softmax in float64."""

import itertools

import pytest
import torch
from torch import Tensor

from tests.support.kernels.implementations import few_without_gpu, fewer, make_ops, of_each_kind

NAN, INF = float("nan"), float("inf")


@pytest.fixture(params=of_each_kind())
def logit_ops(request, monkeypatch):
    """Logits are float32 whatever the activations are."""
    return make_ops(*request.param, monkeypatch)


def exact(logits: Tensor) -> Tensor:
    return logits.double().masked_fill(logits.isnan(), -INF).log_softmax(-1)


def ranked(logits: Tensor) -> list[list[int]]:
    """Ids by descending logit, of equals the lower one first."""
    rows = logits.masked_fill(logits.isnan(), -INF).tolist()
    return [sorted(range(len(row)), key=lambda i, row=row: -row[i]) for row in rows]


def check(ops, logits: Tensor, count: int) -> None:
    values, ids = ops.top_logprobs(logits, count)
    assert (values.dtype, ids.dtype) == (torch.float32, torch.int32)
    assert values.shape == ids.shape == (len(logits), count)
    assert ids.tolist() == [row[:count] for row in ranked(logits)]
    expected = exact(logits).gather(1, ids.long())
    torch.testing.assert_close(values.double(), expected, rtol=1e-6, atol=1e-12)
    for i in range(count):
        assert torch.equal(ops.logprobs_of(logits, ids[:, i].contiguous()), values[:, i])


@pytest.mark.parametrize(
    ("count", "vocabulary"),
    few_without_gpu(itertools.product([1, 2, 8, 64], [1, 2, 7, 16, 100, 255, 256, 257, 5000, 49152])),
)
def test_the_best_are_found_and_normalised(logit_ops, vocabulary, count):
    check(logit_ops, torch.randn(4, vocabulary) * 3, min(count, vocabulary))


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", [40, 4097])
def test_of_equals_the_lower_id_comes_first(logit_ops, vocabulary):
    check(logit_ops, torch.randint(-3, 3, (20, vocabulary)).float(), 33)
    check(logit_ops, torch.zeros(2, vocabulary), 5)
    check(logit_ops, torch.randn(3, vocabulary).round(decimals=1), max(2, fewer(logit_ops, vocabulary)))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("offset", [0.0, 100.0, -80.0])
def test_any_range_of_logits_is_exact(logit_ops, scale, offset):
    check(logit_ops, torch.randn(4, 3000) * scale + offset, 10)


@pytest.mark.parametrize("gap", [5.0, 12.0, 40.0])
def test_a_near_certain_token_keeps_its_digits(logit_ops, gap):
    logits = torch.full((1, 1000), -100.0)
    logits[0, [300, 600]] = torch.tensor([gap, 0.0])
    value = logit_ops.logprobs_of(logits, torch.tensor([300])).double()
    torch.testing.assert_close(value, -(-torch.tensor([gap]).double()).exp().log1p(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("vocabulary", [30, 700])
def test_masked_and_broken_logits_have_no_probability(logit_ops, vocabulary):
    logits = torch.randn(6, vocabulary)
    logits[:, 5:] = -INF
    logits[1, 2] = NAN
    logits[2, :3] = NAN
    logits[3] = torch.where(torch.rand(vocabulary) < 0.5, NAN, -INF)
    logits[3, 20] = 4.0
    logits[4, [7, 9]] = torch.tensor([NAN, 0.5])
    check(logit_ops, logits, 12)
    check(logit_ops, logits, vocabulary)
    nothing = torch.full((3, vocabulary), -INF)
    nothing[1] = NAN
    nothing[2, ::2] = NAN
    values, ids = logit_ops.top_logprobs(nothing, 9)
    assert (values == -INF).all()
    assert ids.tolist() == [list(range(9))] * 3
    assert (logit_ops.logprobs_of(nothing, torch.tensor([0, 1, 2])) == -INF).all()


def test_infinite_logits_share_all_of_the_probability(logit_ops):
    logits = torch.randn(1, 50)
    logits[0, [10, 40]] = INF
    values, ids = logit_ops.top_logprobs(logits, 3)
    assert ids[0, :2].tolist() == [10, 40]
    torch.testing.assert_close(values[0], torch.tensor([0.5, 0.5, 0.0]).log())


def test_a_row_does_not_depend_on_the_others(cpu_ops, threads):
    logits = torch.randn(9, 5000)
    threads(1)
    values, ids = cpu_ops.top_logprobs(logits, 8)
    threads(2)
    assert all(torch.equal(a, b) for a, b in zip(cpu_ops.top_logprobs(logits, 8), (values, ids), strict=True))
    for r in range(9):
        one = cpu_ops.top_logprobs(logits[r : r + 1], 8)
        assert torch.equal(one[0][0], values[r])
        assert torch.equal(one[1][0], ids[r])


def test_no_rows_give_no_rows(logit_ops):
    none = torch.zeros(0, 30)
    assert [t.shape for t in logit_ops.top_logprobs(none, 4)] == [(0, 4)] * 2
    assert logit_ops.logprobs_of(none, torch.zeros(0, dtype=torch.int32)).shape == (0,)


def test_wrong_arguments_are_refused(logit_ops):
    logits = torch.randn(3, 10)
    for count in (0, 11, -1):
        with pytest.raises(ValueError, match="count"):
            logit_ops.top_logprobs(logits, count)
    with pytest.raises(TypeError, match="logits"):
        logit_ops.top_logprobs(logits.double(), 2)
    with pytest.raises(ValueError, match="ids has shape"):
        logit_ops.logprobs_of(logits, torch.tensor([1, 2]))
    with pytest.raises(TypeError, match="ids"):
        logit_ops.logprobs_of(logits, torch.randn(3))
    for bad in (-1, 10):
        with pytest.raises(IndexError, match=r"ids\[1\]"):
            logit_ops.logprobs_of(logits, torch.tensor([1, bad, 2]))
