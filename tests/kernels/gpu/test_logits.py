"""The kernels over logits: argmax, draws, penalties and log-probabilities."""

import pytest
import torch

from quire import kernels
from quire.kernels.reference import penalise
from tests.support.kernels.implementations import LONG_WITHOUT_GPU, few_without_gpu
from tests.support.kernels.oracle import kept

# --- argmax of the Triton kernels -------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [1, 17, 4097, 9000])
def test_argmax_takes_the_lowest_of_equals(ops, vocabulary):
    logits = torch.randint(-3, 3, (5, vocabulary)).float()
    assert ops.argmax(logits).tolist() == [row.index(max(row)) for row in logits.tolist()]


def test_argmax_compares_the_segments_of_a_row(ops):
    nan, lowest = float("nan"), float("-inf")
    logits = torch.randint(-3, 3, (5, 20000)).float()
    logits[0, [8191, 8192, 19999]] = 7.0
    logits[1, 19999] = 7.0
    logits[2, :8192] = nan
    logits[3] = lowest
    logits[3, 16384:] = nan
    logits[4] = lowest
    logits[4, 16390] = -1e30
    expected = [8191, 19999, 8192 + int(logits[2, 8192:].argmax()), 0, 16390]
    assert ops.argmax(logits).tolist() == expected


# --- draws of the Triton kernels against the reference, each row with settings of its own -----------------------------

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


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", [4099, 300, 3])
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


@LONG_WITHOUT_GPU
def test_draws_follow_the_uniform_numbers_through_what_is_kept(ops):
    """The cumulative distribution is inverted exactly: over a grid of uniform numbers every id gets its share."""
    draws, p = 20, torch.tensor([0.25, 0.0, 0.5, 0.125, 0.125])
    logits = p.log().repeat(draws, 1)
    uniform = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    for settings, shares in [((1.0, 0, 1.0, 0.0), [5, 0, 10, 2, 3]), ((1.0, 0, 0.7, 0.0), [7, 0, 13, 0, 0])]:
        drawn = ops.sample(logits, *columns([settings] * draws), uniform)
        assert torch.bincount(drawn.long(), minlength=5).tolist() == shares
        assert torch.equal(drawn, drawn.sort().values)


@pytest.mark.slow
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


SEGMENTED = 20000  # ids of a row that three programs read
TOP = 1 - 2.0**-53


def spread(kind: str) -> torch.Tensor:
    """Return distinct logits [SEGMENTED] in random order."""
    number = torch.randperm(SEGMENTED).float()
    return {
        "normal": torch.special.ndtri((number + 0.5) / SEGMENTED),
        "adjacent": 10 + number * 2.0**-20,  # every float32 from 10 on
        "negative": -torch.exp(number / 2000),
        "huge": (number - 9000) * 1e34,
    }[kind]


def check_edges(ops, logits: torch.Tensor, settings: tuple, rank: int) -> None:
    """Check that the `rank` largest logits are kept: the last of them can be drawn, and the next one cannot.

    The first id of a row is drawn with 0 and the last one with nearly 1, if they are kept.
    """
    order = logits.argsort(descending=True)
    last_kept, dropped = order[rank - 1], order[rank]
    rows = []
    for first, last in [(last_kept, dropped), (dropped, last_kept)]:
        others = torch.ones(len(logits), dtype=torch.bool)
        others[first] = others[last] = False
        rows.append(torch.cat([logits[first, None], logits[others], logits[last, None]]))
    uniform = torch.tensor([0.0, TOP, 0.0, TOP], dtype=torch.float64)
    drawn = ops.sample(torch.stack(rows).repeat_interleave(2, 0), *columns([settings] * 4), uniform).tolist()
    end = len(logits) - 1
    assert (drawn[0], drawn[3]) == (0, end)
    assert drawn[1] != end
    assert drawn[2] != 0


@LONG_WITHOUT_GPU
@pytest.mark.parametrize("kind", ["adjacent", "normal", "negative", "huge"])
@pytest.mark.parametrize("rank", [1500, 1, 60, 19999])
def test_top_k_keeps_as_many_ids_as_it_says_in_rows_of_several_programs(ops, kind, rank):
    # At a high temperature the last id that is kept has a mass that rounding does not lose.
    temperature = {"negative": 1000.0, "huge": 1e38}.get(kind, 1.0)
    check_edges(ops, spread(kind), (temperature, rank, 1.0, 0.0), rank)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adjacent", "normal"])
@pytest.mark.parametrize("rank", [1500, 1, 60, 19999])
@pytest.mark.parametrize("top_k", [0, 19999])
def test_top_p_ends_at_the_id_that_reaches_the_share(ops, kind, rank, top_k):
    logits = spread(kind)
    p = (logits.sort(descending=True).values[: top_k or None].double() - float(logits.max())).exp()
    mass = torch.cat([torch.zeros(1), p.cumsum(0)])
    top_p = float((mass[rank - 1] + mass[rank]) / 2 / mass[-1])
    check_edges(ops, logits, (1.0, top_k, top_p, 0.0), rank)


def test_top_p_next_to_one_cuts_no_more_than_its_share(ops):
    """All ids but one together have 2^-23 of the mass. The largest float32 below 1 cuts about half of them."""
    logits = torch.full((1, 9000), -25.0) - torch.arange(9000) * 2.0**-18  # in descending order
    logits[0, 0] = 0.0
    top_p = 1 - 2.0**-24
    mass = logits[0].double().exp().cumsum(0)
    last = int((mass < top_p * mass[-1]).sum())
    assert 4000 < last < 5000
    drawn = ops.sample(logits, *columns([(1.0, 0, top_p, 0.0)]), torch.tensor([TOP], dtype=torch.float64))
    assert abs(int(drawn) - last) < 100  # ids of 2^-36 of the mass each


def test_the_least_mass_counts_for_a_uniform_number_of_zero(ops):
    logits = torch.zeros(1, SEGMENTED)
    logits[0, 0], logits[0, 1] = float("-inf"), -100.0  # exp(-100) is a subnormal float32
    zero = torch.zeros(1, dtype=torch.float64)
    assert ops.sample(logits, *columns([(1.0, 0, 1.0, 0.0)]), zero).tolist() == [1]
    assert ops.sample(logits, *columns([(1.0, 0, 0.5, 0.0)]), zero).tolist() == [2]


@pytest.mark.slow
def test_rows_of_several_programs_follow_the_reference_and_not_their_neighbours(ops):
    rows = len(SETTINGS)
    logits, uniform = torch.randn(rows, SEGMENTED) * 3, torch.rand(rows, dtype=torch.float64)
    logits[:, 8000:9000] = float("-inf")
    logits[0, :8192] = float("nan")  # a whole segment
    together = ops.sample(logits, *columns(SETTINGS), uniform)
    expected = kernels.ReferenceOps(ops.device).sample(logits, *columns(SETTINGS), uniform)
    for row in (together != expected).nonzero().flatten().tolist():
        edge = kept(logits[row], *SETTINGS[row]).cumsum(0)[min(int(together[row]), int(expected[row]))]
        assert abs(edge - uniform[row]) < 1e-5
    for row in few_without_gpu(range(rows), 4):
        mine = [column[row : row + 1].clone() for column in columns(SETTINGS)]
        assert ops.sample(logits[row : row + 1].clone(), *mine, uniform[row : row + 1].clone()) == together[row]


# --- log-probabilities of the Triton kernels against the reference ----------------------------------------------------


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
    """The kernel makes the sort keys for a few rows at a time."""
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


# --- penalties on logits ----------------------------------------------------------------------------------------------


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
    ids = torch.cat([ids, torch.tensor([10**6]).int()])  # after the last row: ignored
    plain = logits.clone()
    ops.penalise(logits, starts, ids, counts, repetition, presence, frequency)
    torch.testing.assert_close(logits.double(), expected, rtol=1e-6, atol=1e-6)
    if plain.device.type == "cpu":  # the plain function that defines the operation
        penalise(plain, starts, ids[:-1], counts, repetition, presence, frequency)
        torch.testing.assert_close(plain, logits, rtol=1e-6, atol=1e-6)
