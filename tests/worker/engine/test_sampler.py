"""Draws follow the exact probabilities; penalties, top-k, top-p and min-p are those of their definitions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats
from transformers.generation import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from quire import kernels
from quire.shared.protocol.messages import SamplingParams
from quire.worker.engine import sampler as sampler_module
from quire.worker.engine.input_batch import InputBatch
from quire.worker.engine.limits import EngineLimits
from quire.worker.engine.sampler import Sampler, restrict_on_device, restrict_on_host
from quire.worker.engine.sequence import Sequence, SequenceGroup

VOCAB = 40
DRAWS = 4000


def sequence(
    prompt: tuple[int, ...] = (1,), output: tuple[int, ...] = (), choice: int = 0, **params: object
) -> Sequence:
    params.setdefault("n", choice + 1)
    group = SequenceGroup("r", prompt, SamplingParams(max_tokens=100, **params))  # type: ignore[arg-type]
    return Sequence(group, choice, prompt, output)


class RowSampler:
    """A sampler with an input batch, whose rows an engine would fill."""

    def __init__(self, kernel: str) -> None:
        self.ops = kernels.select_ops("cpu", torch.float32, kernel)

    def sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[int]:
        rows = InputBatch(EngineLimits(8, 16, len(sequences), len(sequences), 128))
        for one in sequences:
            rows.reserve(one.group, 1)
            rows.assign(one)
        at = np.array([one.row for one in sequences])
        return Sampler(self.ops, (3, 5), rows).sample(logits, at, sequences).tolist()


@pytest.fixture(params=["reference", "auto"])
def sampler(request: pytest.FixtureRequest) -> RowSampler:
    return RowSampler(request.param)


def logits(seed: int = 0) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def assert_drawn_from(sampler: RowSampler, row: torch.Tensor, probabilities: torch.Tensor, **params: object) -> None:
    """Draw with many seeds, and compare with the exact probabilities by a chi-square test."""
    sequences = [sequence(seed=seed, **params) for seed in range(DRAWS)]
    counts = torch.bincount(torch.tensor(sampler.sample(row.repeat(DRAWS, 1), sequences)), minlength=VOCAB)
    assert counts[probabilities == 0].sum() == 0
    expected = probabilities.double() * DRAWS
    often = expected >= 5
    observed = [*counts[often].tolist(), int(counts[~often].sum())]
    wanted = [*expected[often].tolist(), float(expected[~often].sum())]
    if wanted[-1] < 1e-9:
        observed, wanted = observed[:-1], wanted[:-1]
    if len(wanted) > 1:
        assert stats.chisquare(observed, wanted, sum_check=False).pvalue > 1e-4


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draws_follow_the_softmax_of_the_logits_over_the_temperature(sampler: RowSampler, temperature: float) -> None:
    row = logits()
    assert_drawn_from(sampler, row, (row / temperature).softmax(-1), temperature=temperature)


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 5},
        {"top_k": 1},
        {"top_p": 0.7},
        {"top_p": 0.05},
        {"min_p": 0.1},
        {"top_k": 12, "top_p": 0.8, "min_p": 0.05},
        {"top_k": 500, "top_p": 0.9},
    ],
)
def test_draws_follow_what_hugging_face_leaves_after_its_filters(sampler: RowSampler, params: dict[str, float]) -> None:
    row = logits(1)
    filters = LogitsProcessorList([TemperatureLogitsWarper(0.8)])
    if "top_k" in params:
        filters.append(TopKLogitsWarper(int(params["top_k"])))
    if "top_p" in params:
        filters.append(TopPLogitsWarper(params["top_p"]))
    if "min_p" in params:
        filters.append(MinPLogitsWarper(params["min_p"]))
    left = filters(torch.tensor([[1]]), row[None].clone())[0]
    assert_drawn_from(sampler, row, left.softmax(-1), temperature=0.8, **params)


def test_temperature_zero_takes_the_largest_and_ignores_the_filters(sampler: RowSampler) -> None:
    rows = torch.stack([logits(seed) for seed in range(6)])
    sequences = [sequence(temperature=0.0, top_k=7, top_p=0.1, seed=seed) for seed in range(6)]
    assert sampler.sample(rows.clone(), sequences) == rows.argmax(-1).tolist()


def test_greedy_and_drawn_rows_share_a_batch(sampler: RowSampler) -> None:
    rows = torch.stack([logits(seed) for seed in range(6)])
    sequences = [sequence(temperature=float(seed % 2), seed=seed) for seed in range(6)]
    together = sampler.sample(rows.clone(), sequences)
    assert together == [sampler.sample(rows[i : i + 1].clone(), [sequences[i]])[0] for i in range(6)]
    assert together[::2] == rows[::2].argmax(-1).tolist()


def test_repetition_penalty_is_that_of_hugging_face_over_prompt_and_output(sampler: RowSampler) -> None:
    row = logits(2)
    expected = RepetitionPenaltyLogitsProcessor(1.6)(torch.tensor([[4, 9, 9, 2]]), row[None].clone())[0]
    one = sequence(prompt=(4, 9), output=(9, 2), repetition_penalty=1.6, temperature=0.0)
    adjusted = row[None].clone()
    assert sampler.sample(adjusted, [one]) == [int(expected.argmax())]
    assert torch.equal(adjusted[0], expected)


@pytest.mark.parametrize("repetition", [1.0, 1.6])
@pytest.mark.parametrize(("presence", "frequency"), [(0.5, 0.25), (0.5, 0.0), (0.0, 0.25)])
def test_presence_and_frequency_penalties_count_the_output_only(
    sampler: RowSampler, presence: float, frequency: float, repetition: float
) -> None:
    row = logits(3)
    penalties = {"presence_penalty": presence, "frequency_penalty": frequency, "repetition_penalty": repetition}
    one = sequence(prompt=(4, 4, 6), output=(9, 2, 9), temperature=0.0, **penalties)
    expected = RepetitionPenaltyLogitsProcessor(repetition)(torch.tensor([[4, 6, 9, 2]]), row[None].clone())[0]
    expected[9] -= presence + 2 * frequency
    expected[2] -= presence + frequency
    adjusted = row[None].clone()
    sampler.sample(adjusted, [one])
    assert torch.allclose(adjusted[0], expected, atol=1e-6)


def test_biases_are_added_after_penalties_to_the_rows_that_ask_for_them(sampler: RowSampler) -> None:
    rows = torch.stack([logits(seed) for seed in range(3)])
    biased = sequence(output=(9,), temperature=0.0, presence_penalty=0.5, logit_bias=((9, 2.0), (0, -100.0), (39, 7.5)))
    expected = rows.clone()
    expected[1, [9, 0, 39]] += torch.tensor([1.5, -100.0, 7.5])
    plain = [sequence(temperature=0.0) for _ in range(2)]
    assert sampler.sample(rows, [plain[0], biased, plain[1]]) == expected.argmax(-1).tolist()
    assert torch.allclose(rows, expected, atol=1e-6)


def test_a_bias_bans_a_token_or_makes_it_the_only_one(sampler: RowSampler) -> None:
    for seed in range(20):
        row = logits(seed)[None]
        best = int(row.argmax())
        banned = sequence(seed=seed, temperature=1.0, logit_bias=((best, -100.0),))
        assert sampler.sample(row.clone(), [banned]) != [best]
        forced = sequence(seed=seed, temperature=1.0, logit_bias=((seed, 100.0),))
        assert sampler.sample(row.clone(), [forced]) == [seed]


def test_end_tokens_are_banned_until_min_tokens(sampler: RowSampler) -> None:
    row = torch.zeros(VOCAB)
    row[3] = row[5] = 50.0
    early = sequence(output=(7,), min_tokens=2, temperature=1.0)
    assert sampler.sample(row[None].clone(), [early])[0] not in (3, 5)
    late = sequence(output=(7, 7), min_tokens=2, temperature=1.0)
    assert sampler.sample(row[None].clone(), [late])[0] in (3, 5)


def test_log_probabilities_of_new_tokens_are_summed_for_best_of(
    sampler: RowSampler,
) -> None:
    rows = torch.stack([logits(seed) for seed in range(4)])
    sequences = [sequence(output=(2,), seed=s, best_of=3 * (s % 2), presence_penalty=0.5 * s) for s in range(4)]
    for one in sequences:
        one.logprob = -1.0
    tokens = sampler.sample(rows.clone(), sequences)
    expected = rows.double().log_softmax(-1)
    sums = [-1.0, -1.0 + float(expected[1, tokens[1]]), -1.0, -1.0 + float(expected[3, tokens[3]])]
    assert [one.logprob for one in sequences] == pytest.approx(sums, abs=1e-5)


@pytest.mark.parametrize(("vocabulary", "words"), [(64, 2), (70, 3), (70, 5), (33, 2), (5000, 157)])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.5, 0.99, 0.999, 1.0])
@pytest.mark.parametrize("restrict", [restrict_on_host, restrict_on_device])
def test_tokens_without_a_bit_are_banned(
    vocabulary: int, words: int, share: float, restrict: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """share: of the tokens that are allowed. Rows 0 and 2 have a mask, and row 1 has none."""
    monkeypatch.setattr(sampler_module, "MASKED_BYTES", 4 * 4999)  # masks of 5,000 tokens are expanded one by one
    draw = np.random.default_rng(0)
    bits = draw.random((3, words * 32)) < share
    masks = {row: np.packbits(bits[row], bitorder="little").view(np.int32) for row in (0, 2)}
    logits = torch.randn(3, vocabulary)
    has_bit = torch.from_numpy(bits[:, :vocabulary])
    has_bit[1] = True
    expected = logits.masked_fill(~has_bit, float("-inf"))
    restrict(logits, masks)
    assert torch.equal(logits, expected)


def test_masks_are_expanded_in_as_few_parts_as_the_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_module, "MASKED_BYTES", 4 * 64 * 3)
    parts: list[list[int]] = []
    send = sampler_module.send

    def noted(host: torch.Tensor, device: torch.device) -> torch.Tensor:
        if host.ndim == 1:
            parts.append(host.tolist())
        return send(host, device)

    monkeypatch.setattr(sampler_module, "send", noted)
    restrict_on_device(torch.randn(9, 64), {row: np.full(2, -1, np.int32) for row in range(8)})
    assert parts == [[0, 1, 2], [3, 4, 5], [6, 7]]
