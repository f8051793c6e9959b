"""The prediction of a request: its drafts are counted in the outcome, in the steps and in the decoded tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from quire.kernels import StepInterrupted
from quire.shared.protocol.messages import Delta, GenerationRequest, Outcome, PredictionCounts, StepItem
from quire.worker.engine.engine import Engine
from quire.worker.engine.features.drafts.drafts import Drafts
from quire.worker.engine.limits import RequestRefused
from quire.worker.engine.runner import Runner, StepOutput
from quire.worker.engine.step import Step
from tests.support.mock_model import VOCAB, continuation, final, make_engine, request, run

PROMPT = (3, 1, 4, 1, 5)
LENGTH = 40
ANSWER = tuple(continuation(PROMPT, LENGTH, ignore_eos=True))
ROOMY = {"num_blocks": 200, "max_num_batched_tokens": 64, "max_model_len": 400}


def speculating(speculates: bool = True, **others: Any) -> Engine:
    engine = make_engine(**(ROOMY | others))
    engine.drafts = Drafts(engine.groups, None) if speculates else None
    return engine


def asked(prediction: tuple[int, ...] = (), **params: Any) -> GenerationRequest:
    return replace(request("r", PROMPT, max_tokens=LENGTH, ignore_eos=True, **params), prediction=prediction)


def outcome(engine: Engine, request: GenerationRequest, earlier: tuple[StepItem, ...] = ()) -> Outcome:
    """Run a request, check its answer, and return its outcome."""
    engine.add(request, earlier)
    items = run(engine)
    if not earlier:
        assert final(items, "r")[0].token_ids == ANSWER
    assert items[-1].outcome is not None
    return items[-1].outcome


def test_a_right_prediction_saves_steps_and_is_accepted() -> None:
    engine = speculating()
    # Each step gives a token that is not drafted: the prompt's, the one after 32 drafted tokens, and the last one.
    assert outcome(engine, asked(ANSWER)).prediction == PredictionCounts(LENGTH - 3, 0)
    assert engine.num_steps == 3
    # The step of the prompt decodes nothing.
    assert engine.num_decode_tokens == LENGTH - 1


def test_a_wrong_prediction_changes_nothing_and_is_rejected() -> None:
    engine = speculating()
    wrong = (ANSWER[0], *((token + 1) % VOCAB for token in ANSWER[1:]))
    counts = outcome(engine, asked(wrong)).prediction
    assert counts is not None
    assert counts.accepted == 0
    assert counts.rejected > 0
    assert engine.num_steps == LENGTH
    # A text that is wrong from its first token on is not drafted at all.
    assert outcome(speculating(), asked(wrong[1:])).prediction == PredictionCounts(0, 0)


@pytest.mark.parametrize("quiet", range(40, 44))
def test_a_prediction_is_followed_at_once_after_many_steps_without_drafts(quiet: int) -> None:
    engine = speculating()
    engine.add(request("q", (2, 7, 1), max_tokens=quiet, ignore_eos=True))
    run(engine)
    assert engine.drafts is not None
    assert not engine.drafts.counters.drafted
    assert engine.num_steps == quiet
    outcome(engine, asked(ANSWER))
    assert engine.num_steps - quiet == 3


def test_a_prediction_that_is_never_drafted_has_counts_of_zero() -> None:
    engine = speculating()
    engine.add(asked(ANSWER, n=2))
    assert run(engine)[-1].outcome == Outcome("length", prediction=PredictionCounts(0, 0))


@pytest.mark.parametrize(("speculates", "prediction"), [(True, ()), (False, ANSWER), (False, ())])
def test_without_a_prediction_or_speculation_the_outcome_has_no_counts(
    speculates: bool, prediction: tuple[int, ...]
) -> None:
    assert outcome(speculating(speculates), asked(prediction)) == Outcome("length")


def test_every_choice_of_an_answer_counts() -> None:
    engine = speculating()
    engine.add(asked(ANSWER, best_of=2))
    (item,) = run(engine)
    assert item.outcome == Outcome("length", prediction=PredictionCounts(2 * (LENGTH - 3), 0))


def test_a_request_that_was_cancelled_has_no_counts() -> None:
    engine = speculating()
    engine.add(asked(ANSWER))
    engine.step()
    item = engine.finish("r", "cancelled")
    assert item is not None
    assert item.outcome == Outcome("cancelled")


def test_after_a_recovery_the_counts_are_those_of_the_last_attempt() -> None:
    engine = speculating()
    earlier = (StepItem("r", 0, (Delta(0, ANSWER[:20]),)),)
    assert outcome(engine, asked(ANSWER), earlier).prediction == PredictionCounts(LENGTH - 20 - 2, 0)


@pytest.mark.parametrize("wrong", [(5, VOCAB), (2**31,)])
def test_a_prediction_with_tokens_outside_of_the_vocabulary_is_refused(wrong: tuple[int, ...]) -> None:
    for speculates in (True, False):
        engine = speculating(speculates)
        with pytest.raises(RequestRefused, match="outside the vocabulary"):
            engine.add(asked(wrong))
        assert not engine.has_work


def test_a_step_says_how_many_drafted_tokens_were_accepted() -> None:
    engine = speculating()
    shown: list[Step] = []
    engine.observer = shown.append
    counts = outcome(engine, asked((*ANSWER[:10], 90, *ANSWER[11:20]))).prediction
    assert counts is not None
    verified = [verification for step in shown for verification in step.verifications]
    assert sum(verification.accepted for verification in verified) == counts.accepted
    assert sum(len(verification.draft) - verification.accepted for verification in verified) == counts.rejected
    assert verified[0].accepted == 9
    assert counts.rejected >= 10


class Full(Runner):
    """A runner that has no memory for the first step with drafted tokens."""

    has_failed = False

    def execute(self, step: Step) -> StepOutput | None:
        if step.verifications and not self.has_failed:
            self.has_failed = True
            self.move_blocks(step)
            return None
        return super().execute(step)


class Interrupted(Full):
    """A runner whose first step with drafted tokens is interrupted."""

    def execute(self, step: Step) -> StepOutput | None:
        if (output := super().execute(step)) is None:
            raise StepInterrupted
        return output


@pytest.mark.parametrize("runner", [Full, Interrupted])
def test_drafted_tokens_that_no_step_has_computed_are_not_counted(runner: type[Full]) -> None:
    engine = speculating(runner=runner)
    counts = outcome(engine, asked(ANSWER)).prediction
    assert engine.drafts is not None
    assert isinstance(engine.runner, Full)
    assert engine.runner.has_failed
    accepted = LENGTH - engine.num_steps
    assert engine.drafts.counters.drafted == engine.drafts.counters.accepted == {"prediction": accepted}
    assert counts == PredictionCounts(accepted, 0)
