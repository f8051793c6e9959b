"""Predictions through gateway, Redis and an engine with the demo model: fewer steps, the same texts, right counts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from quire.ops.paths import PROJECT_ROOT
from quire.shared.model.model_argument import DEFAULT_MODEL
from tests.support.faults.stack import MODEL, FaultStack, Stream
from tests.test_metrics import Scrape, scrape

# Starting the processes takes seconds.
pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"
TOKENS = 120
FLAGS = ("--speculation", "suffix", "--lease-s", "1", "--beat-s", "0.25")
METRICS = r"for operators: (http://[\d.:]+)/metrics"


class Asked(NamedTuple):
    """A call's answer, and what the metrics of the worker counted meanwhile."""

    text: str
    usage: dict[str, Any]
    before: Scrape
    after: Scrape

    def grown(self, name: str, **labels: str) -> float:
        return self.after(name, **labels) - self.before(name, **labels)

    @property
    def steps(self) -> float:
        return self.grown("quire_engine_steps_total")

    @property
    def counts(self) -> tuple[int, int]:
        """Accepted and rejected tokens of the prediction."""
        details = self.usage["completion_tokens_details"]
        return details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]


class Service:
    """One gateway and one worker that drafts whatever may be right."""

    def __init__(self, stack: FaultStack) -> None:
        _, self.url = stack.gateway()
        self.metrics = stack.worker("a", *FLAGS, TEST_STEP_S="0").wait_for(METRICS)[1]
        self.plain = self.ask("plain")

    def body(self, salt: str, prediction: Any = None, **others: Any) -> dict[str, Any]:
        """salt: keeps earlier answers out of the drafts of this one."""
        return {
            "model": MODEL,
            "messages": [{"role": "user", "content": "Tell me a story about a fox."}],
            "temperature": 0,
            "max_tokens": TOKENS,
            "cache_salt": salt,
            "prediction": prediction if prediction is None else {"type": "content", "content": prediction},
            **others,
        }

    def ask(self, salt: str, prediction: Any = None, **others: Any) -> Asked:
        before = scrape(self.metrics)
        stream = Stream(self.url, self.body(salt, prediction, **others), path=CHAT).wait_end()
        if others.get("stream"):
            assert stream.is_complete
            return Asked(stream.text(), stream.parsed[-1]["usage"], before, scrape(self.metrics))
        answer = stream.answer
        text = answer["choices"][0]["message"]["content"]
        return Asked(text, answer["usage"], before, scrape(self.metrics))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    stack = FaultStack(tmp_path_factory.mktemp("redis"), PROJECT_ROOT / DEFAULT_MODEL)
    try:
        yield Service(stack)
    finally:
        stack.close()


def assert_counted(asked: Asked) -> None:
    """Check that the usage of the only call has what the worker counted."""
    accepted, rejected = asked.counts
    assert asked.grown("quire_accepted_tokens_total", source="prediction") == accepted
    assert asked.grown("quire_drafted_tokens_total", source="prediction") == accepted + rejected
    saved = asked.grown("quire_accepted_tokens_total")
    assert asked.grown("quire_saved_steps_total") == saved
    assert asked.steps == TOKENS - saved
    assert asked.grown("quire_engine_tokens_total", phase="decode") == TOKENS - 1


def test_a_call_without_a_prediction_has_no_counts(service: Service) -> None:
    assert service.plain.usage["completion_tokens"] == TOKENS
    assert "completion_tokens_details" not in service.plain.usage
    assert service.plain.grown("quire_drafted_tokens_total", source="prediction") == 0


@pytest.mark.parametrize("is_in_parts", [False, True])
def test_the_answer_as_its_own_prediction_takes_fewer_steps(service: Service, is_in_parts: bool) -> None:
    text = service.plain.text
    parts = [{"type": "text", "text": piece} for piece in (text[:33], text[33:])]
    asked = service.ask(f"right {is_in_parts}", parts if is_in_parts else text)
    assert asked.text == text
    assert asked.steps < service.plain.steps / 4
    assert asked.counts[0] > TOKENS / 2
    assert_counted(asked)
    assert {name: asked.usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")} == {
        name: service.plain.usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")
    }


def test_a_wrong_prediction_changes_no_token(service: Service) -> None:
    asked = service.ask("wrong", service.plain.text[:40] + "zebra " * 30)
    assert asked.text == service.plain.text
    assert asked.counts[1] > 10
    assert asked.counts[0] < 40
    assert_counted(asked)


def test_a_stream_has_the_same_text_and_counts(service: Service) -> None:
    prediction = service.plain.text.replace("Stozz", "Maria")
    whole = service.ask("changed", prediction)
    streamed = service.ask("changed, streamed", prediction, stream=True, stream_options={"include_usage": True})
    assert whole.text == streamed.text == service.plain.text
    for asked in (whole, streamed):
        assert min(asked.counts) > 0
        assert_counted(asked)


def test_a_prediction_survives_its_worker_and_the_counts_are_those_of_the_last_attempt(
    service: Service, tmp_path: Path
) -> None:
    """The end of the answer is predicted, and is written by the worker that takes over."""
    end = service.plain.text[len(service.plain.text) // 2 :]
    stack = FaultStack(tmp_path, PROJECT_ROOT / DEFAULT_MODEL)
    try:
        _, url = stack.gateway()
        first = stack.worker("a", *FLAGS, TEST_STEP_S="0.1")
        body = service.body("recovered", end, stream=True, stream_options={"include_usage": True})
        stream = Stream(url, body, path=CHAT).wait_events(5)
        first.kill()
        second = stack.worker("b", *FLAGS, TEST_STEP_S="0")
        metrics = second.wait_for(METRICS)[1]
        stream.wait_end()
        assert stream.is_complete
        seen = scrape(metrics)
        assert seen("quire_migrations_total") == 1
        recovered = Asked(stream.text(), stream.parsed[-1]["usage"], seen, seen)
        assert recovered.text == service.plain.text
        accepted, rejected = recovered.counts
        assert accepted > 20
        assert seen("quire_accepted_tokens_total", source="prediction") == accepted
        assert seen("quire_drafted_tokens_total", source="prediction") == accepted + rejected
        stack.wait(stack.is_drained)
        stack.assert_invariants()
    finally:
        stack.close()
