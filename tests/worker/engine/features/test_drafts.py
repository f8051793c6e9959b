"""Speculation: no draft changes a token, whoever drafts; and drafts are found, counted, bounded and kept apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from quire.ops.paths import PROJECT_ROOT
from quire.shared.model.model_argument import DEFAULT_MODEL
from quire.shared.process.errors import StartError
from quire.shared.protocol.messages import SamplingParams
from quire.worker.build import build_engine
from quire.worker.engine.engine import Engine
from quire.worker.engine.features.drafts.costs import StepCosts, choose_lengths, may_pay
from quire.worker.engine.features.drafts.drafts import Drafts
from quire.worker.engine.features.drafts.start import measure_costs, start_drafts, why_none
from quire.worker.engine.features.drafts.texts import DEPTH, FixedTokens, GrowingTokens, RecentTexts, TextStores
from quire.worker.engine.offline import complete
from quire.worker.engine.sequence import Sequence
from quire.worker.settings import WorkerSettings
from tests.support import mock_model
from tests.support.checkpoints import FAMILIES, make_checkpoint
from tests.support.guesses import knowing
from tests.support.hybrid_checkpoints import make_hybrid
from tests.support.mock_model import ENDLESS
from tests.support.parity import load, load_own, make_engine, prompts
from tests.support.transformers_checkpoints import make_kind

DRAWN = SamplingParams(max_tokens=24, temperature=1.0, seed=3)
SAMPLINGS = [
    replace(DRAWN, temperature=0.0),
    DRAWN,
    replace(DRAWN, logprobs=True, top_logprobs=3),
    replace(DRAWN, frequency_penalty=0.7, repetition_penalty=1.2, logit_bias=((5, 2.0),)),
    replace(DRAWN, min_tokens=9, top_k=20, top_p=0.9, stop_token_ids=(17, 30)),
    replace(DRAWN, best_of=3, n=2),
    replace(DRAWN, n=2),
]
OWN = [pytest.param(name, marks=() if name in ("llama", "gemma3") else pytest.mark.slow) for name in FAMILIES]


def assert_no_token_changes(engine: Engine) -> None:
    """Run all samplings without drafts, then with right and wrong ones, and compare."""
    if why := why_none(engine.runner.model):
        pytest.skip(why)
    asked = [prompts()[number % 12] for number in range(2 * len(SAMPLINGS))]
    sampling = [SAMPLINGS[number % len(SAMPLINGS)] for number in range(len(asked))]
    engine.drafts = None
    expected = complete(engine, asked, sampling)

    def answer(sequence: Sequence) -> tuple[int, ...]:
        choices = expected[int(sequence.group.request_id)]
        return choices[sequence.choice % len(choices)].token_ids

    engine.drafts = drafts = Drafts(engine.groups, None, knowing(answer))
    assert complete(engine, asked, sampling) == expected
    assert engine.scheduler.blocks.num_free == engine.limits.num_blocks
    assert drafts.counters.drafted["own"] > drafts.counters.accepted["own"] > 40


@pytest.mark.parametrize("name", OWN)
def test_no_draft_changes_a_token(name: str, tmp_path: Path) -> None:
    """Every kind of request, in an engine that preempts and computes prompts in chunks."""
    model = load_own(make_checkpoint(tmp_path, name, initializer_range=0.1))
    engine = make_engine(model, num_blocks=60)
    assert_no_token_changes(engine)
    assert engine.groups.num_preemptions > 0


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "bfloat16"},
        {"quantization": "int8"},
        *(
            pytest.param(settings, marks=pytest.mark.slow)
            for settings in (
                {"quantization": "int4"},
                {"quantization": "fp8", "dtype": "bfloat16"},
                {"kv_cache_dtype": "int8"},
                {"kv_cache_dtype": "fp8", "dtype": "bfloat16"},
            )
        ),
    ],
    ids=str,
)
def test_no_draft_changes_a_token_of_weights_and_caches_of_fewer_bits(settings: dict[str, str]) -> None:
    chosen = WorkerSettings(model=str(PROJECT_ROOT / DEFAULT_MODEL), num_blocks=200, threads=1, **settings)
    engine = build_engine(chosen, "test")
    engine.checks_itself = True
    assert_no_token_changes(engine)


@pytest.mark.slow
def test_drafted_tokens_are_drawn_as_often_as_others(tmp_path: Path) -> None:
    """Answers with a drafted second token, and others with other seeds, have one distribution."""
    engine = make_engine(load_own(make_checkpoint(tmp_path, "llama", initializer_range=0.1)))
    sampling = SamplingParams(max_tokens=3, temperature=1.0, ignore_eos=True, allowed_token_ids=(20, 40, 60, 80))
    counts = []
    for seeds, has_drafts in (range(2000), False), (range(2000, 4000), True):
        engine.drafts = Drafts(engine.groups, None, knowing(lambda _: (40, 40, 40))) if has_drafts else None
        asked = [replace(sampling, seed=seed) for seed in seeds]
        drawn = complete(engine, [prompts()[0]] * len(asked), asked)
        counts.append(Counter(choice.token_ids for (choice,) in drawn))
    assert engine.drafts is not None
    accepted, drafted = engine.drafts.counters.accepted.total(), engine.drafts.counters.drafted.total()
    assert 0 < accepted < drafted
    table = [[count[answer] for answer in sorted(counts[0] | counts[1])] for count in counts]
    assert stats.chi2_contingency(table).pvalue > 1e-4


def build(model: Any, mode: str = "auto", **limits: Any) -> Drafts | None:
    return start_drafts(mode, make_engine(model, **limits))


@pytest.mark.parametrize(("kind", "reason"), [("phi3", "torch computes"), ("lfm2", "recurrent states")])
def test_a_model_whose_tokens_drafts_could_change_has_none(kind: str, reason: str, tmp_path: Path) -> None:
    path = make_kind(tmp_path, kind) if kind == "phi3" else make_hybrid(tmp_path, kind)
    assert build(load(path)) is None
    with pytest.raises(StartError, match=reason):
        build(load(path), "suffix")


def test_kernels_that_are_not_invariant_have_no_drafts(tmp_path: Path) -> None:
    model = load_own(make_checkpoint(tmp_path, "llama"), "reference")
    assert build(model) is None
    with pytest.raises(StartError, match="--batch-invariant"):
        build(model, "suffix")
    assert build(model, "off") is None


# --- where drafts are found -------------------------------------------------------------------------------------------


def test_the_longest_of_the_newest_matches_is_found() -> None:
    text = [1, 2, 3, 4, 50, 9, 2, 3, 4, 60, 7, 9, 2, 3, 4, 70]
    growing, fixed = GrowingTokens(text), FixedTokens(tuple(text))
    growing.index()
    for one in (growing, fixed):
        found = one.find([8, 9, 2, 3, 4])
        assert found is not None
        assert (found.text[found.end], found.length) == (70, 4)  # the newest of two
        found = one.find([7, 9, 2, 3, 4])
        assert found is not None
        assert (found.text[found.end], found.length) == (70, 5)
        found = one.find([1, 2, 3, 4])
        assert found is not None
        assert (found.text[found.end], found.length) == (50, 4)  # longer than the newest
        assert one.find([3, 4, 70]) is None  # nothing follows
        assert one.find([2, 4, 3]) is None
        assert one.find([3, 4]) is None


def test_a_growing_text_finds_what_was_added_since() -> None:
    tokens = [*range(10)]
    text = GrowingTokens(tokens, start=4)
    text.index()
    assert text.find([0, 1, 2]) is None  # before its start
    tokens += [20, 21, 22, 23]
    assert text.find([20, 21, 22]) is None
    text.index()
    found = text.find([20, 21, 22])
    assert found is not None
    assert found.end == 13


@given(
    text=st.lists(st.integers(0, 3), max_size=120).map(tuple),
    tokens=st.lists(st.integers(0, 3), max_size=90).map(tuple),
)
def test_both_kinds_of_text_find_a_true_match(text: tuple[int, ...], tokens: tuple[int, ...]) -> None:
    growing = GrowingTokens([*text])
    growing.index()
    found = growing.find(tokens)
    other = FixedTokens(text).find(tokens)
    assert (found is None) == (other is None)
    if found is None or other is None:
        return
    assert (found.end, found.length) == (other.end, other.length)
    assert 3 <= found.length <= DEPTH
    assert text[found.end - found.length : found.end] == tokens[-found.length :]


def test_texts_of_a_tenant_are_bounded_and_the_newest_stay() -> None:
    recent = RecentTexts()
    for number in range(20):
        recent.add([number, number, number, *([99] * 5000), 7])
    found = [recent.find([19, 19, 19]) for _ in range(8)][-1]  # each lookup indexes a part
    assert found is not None
    assert found.text[found.end] == 99
    assert recent.find([0, 0, 0]) is None


def test_a_tenant_finds_no_text_of_another() -> None:
    stores = TextStores()
    stores.of(b"a").add([1, 2, 3, 4])
    assert stores.of(b"a").find([1, 2, 3]) is not None
    assert stores.of(b"b").find([1, 2, 3]) is None


# --- how many are drafted ---------------------------------------------------------------------------------------------

FLAT = StepCosts({1: 1.0, 64: 1.1})
STEEP = StepCosts({1: 1.0, 64: 64.0})


def test_drafts_are_taken_by_their_probability_while_they_pay() -> None:
    survivals = [[0.9, 0.8, 0.1], [0.95, 0.05]]
    assert choose_lengths(survivals, 2, 2, 64, FLAT) == [3, 2]
    assert choose_lengths(survivals, 2, 2, 2, FLAT) == [1, 1]
    assert choose_lengths(survivals, 2, 2, 64, STEEP) == [0, 0]
    half = StepCosts({1: 1.0, 2: 1.0, 64: 1.0 + 62 * 0.25})  # a row costs 0.25, a sequence alone 0.5
    assert choose_lengths(survivals, 2, 2, 64, half) == [2, 1]


def test_where_no_draft_can_pay_none_is_looked_for() -> None:
    assert may_pay(1, 1, 64, FLAT)
    assert not may_pay(1, 1, 64, STEEP)
    assert not may_pay(1, 64, 64, FLAT)  # larger steps were not measured


def test_costs_never_fall_and_are_a_line_between_measurements() -> None:
    costs = StepCosts({1: 2.0, 3: 1.0, 5: 4.0}, overhead_s=0.5)
    assert [costs.seconds(rows) for rows in range(1, 6)] == [2.5, 2.5, 2.5, 3.5, 4.5]


def test_costs_are_measured_on_the_engine_and_leave_nothing_behind(tmp_path: Path) -> None:
    engine = make_engine(load_own(make_checkpoint(tmp_path, "llama")))
    costs = measure_costs(engine)
    assert costs is not None
    assert 0 < costs.seconds(1) <= costs.seconds(32)
    assert costs.most == 32  # the token budget of a step
    mock_model.assert_idle(engine)


# --- in an engine -----------------------------------------------------------------------------------------------------


PROMPT = (3, 1, 4, 1, 5)
ANSWER = mock_model.continuation(PROMPT, 40, ignore_eos=True)


def engine_with_drafts(**limits: Any) -> tuple[Engine, Drafts]:
    roomy = {"num_blocks": 200, "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 400}
    engine = mock_model.make_engine(False, **(roomy | limits))
    engine.drafts = drafts = Drafts(engine.groups, None)
    return engine, drafts


def ask(engine: Engine, name: str, scope: str = "", prediction: SequenceOf[int] = (), **params: Any) -> tuple[int, ...]:
    """Run a request for 40 tokens. Returns its text."""
    asked = mock_model.request(name, PROMPT, max_tokens=40, ignore_eos=True, **params)
    engine.add(replace(asked, cache_scope=scope))
    assert engine.drafts is not None
    engine.drafts.expect(engine.requests[name], tuple(prediction))
    return mock_model.final(mock_model.run(engine), name)[0].token_ids


def test_an_answer_that_was_given_before_takes_few_steps_for_its_tenant_alone() -> None:
    engine, drafts = engine_with_drafts()
    assert ask(engine, "a", "tenant") == tuple(ANSWER)
    steps = engine.num_steps
    assert steps == 40
    assert ask(engine, "b", "tenant") == tuple(ANSWER)
    assert engine.num_steps - steps < 8
    assert drafts.counters.drafted == drafts.counters.accepted == {"tenant": drafts.counters.accepted["tenant"]}
    drafted = drafts.counters.drafted.total()
    steps = engine.num_steps
    assert ask(engine, "c", "other") == tuple(ANSWER)
    assert engine.num_steps - steps == 40
    assert drafts.counters.drafted.total() == drafted


def test_a_prediction_that_is_right_in_parts_saves_steps() -> None:
    engine, drafts = engine_with_drafts()
    wrong = [*ANSWER[:12], 90, 91, 92, *ANSWER[14:]]
    counts = []
    engine.observer = lambda step: counts.extend(map(drafts.prediction_counts, engine.requests.values()))
    assert ask(engine, "a", prediction=wrong) == tuple(ANSWER)
    assert engine.num_steps < 12
    assert drafts.counters.accepted["prediction"] >= 30
    accepted, rejected = counts[-1]
    assert accepted + rejected <= drafts.counters.drafted["prediction"]
    assert rejected >= 3
    engine, drafts = engine_with_drafts()
    assert ask(engine, "a", prediction=[96, *range(90)]) == tuple(ANSWER)
    assert drafts.counters.accepted["prediction"] == 0


def test_forced_tokens_of_a_grammar_are_drafted_and_verified() -> None:
    engine, drafts = engine_with_drafts()
    asked = [mock_model.request(f"r{first}", (first, 1, 4), max_tokens=40, grammar=ENDLESS) for first in range(1, 25)]
    for one in asked:
        engine.add(one)
    items = mock_model.run(engine)
    assert drafts.counters.drafted["grammar"] > 5
    assert [mock_model.final(items, one.id) for one in asked] == [mock_model.alone(one) for one in asked]


@pytest.mark.parametrize("method", [{"n": 2}, {"beam_width": 2}])
def test_beams_and_several_streamed_choices_have_no_drafts(method: dict[str, int]) -> None:
    engine, drafts = engine_with_drafts()
    ask(engine, "a", prediction=ANSWER, **method)
    ask(engine, "b", prediction=ANSWER, **method)
    assert not drafts.counters.drafted


def test_drafts_take_free_blocks_only_and_give_back_those_of_rejected_tokens() -> None:
    """Three requests fill 33 of 36 blocks: a draft may take what is free, and nobody is preempted for it."""
    engine, drafts = engine_with_drafts(num_blocks=36, max_num_seqs=3)
    drafts = engine.drafts = Drafts(engine.groups, None, knowing(lambda sequence: ANSWER))
    names = [f"r{number}" for number in range(3)]
    for name in names:
        engine.add(mock_model.request(name, PROMPT, max_tokens=39, ignore_eos=True))
    items = mock_model.run(engine)  # checks after each step that no sequence holds an empty block
    assert {mock_model.final(items, name)[0].token_ids for name in names} == {tuple(ANSWER[:39])}
    assert drafts.counters.accepted.total() > 60
    assert engine.groups.num_preemptions == 0


def test_blocks_with_rejected_tokens_are_never_found_again() -> None:
    found = []
    for drafter in (None, knowing(lambda sequence: ANSWER)):
        engine, _ = engine_with_drafts(prefix_caching=True)
        engine.drafts = Drafts(engine.groups, None, drafter) if drafter else None
        engine.add(mock_model.request("a", PROMPT, max_tokens=38, ignore_eos=True))
        mock_model.run(engine)
        found.append(len(engine.scheduler.blocks.known()))
    assert found[0] == found[1] == (len(PROMPT) + 37) // 4


def test_a_step_never_has_more_tokens_than_its_budget() -> None:
    engine, _ = engine_with_drafts(max_num_seqs=4, max_num_batched_tokens=8)
    engine.drafts = Drafts(engine.groups, None, knowing(lambda sequence: ANSWER))
    sizes = []
    engine.observer = lambda step: sizes.append(step.num_tokens)
    for number in range(4):
        engine.add(mock_model.request(f"r{number}", PROMPT, max_tokens=40, ignore_eos=True))
    mock_model.run(engine)
    assert max(sizes) == 8
