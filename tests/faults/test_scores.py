"""Scores of prompts are those of Transformers, and unchanged when their worker is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from quire.ops.paths import PROJECT_ROOT
from quire.shared.model.model_argument import DEFAULT_MODEL
from tests.support.faults.calls import owned
from tests.support.faults.stack import FaultStack, Stream

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]

MODEL = PROJECT_ROOT / DEFAULT_MODEL
# Small steps, so that the score of a prompt takes many of them.
FLAGS = ("--lease-s", "1.0", "--beat-s", "0.25", "--max-num-batched-tokens", "64", "--max-num-seqs", "32")
STORY = "Once upon a time there was a little heron who lived by the river. "
CHOICES = [" The heron was happy.", " The fox said hello.", " xyzzy"]
LONG = STORY * 40


def ask(prompt: Any, **parameters: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "echo": True, "temperature": 0, **parameters}


CALLS: dict[str, dict[str, Any]] = {
    "scores": ask(LONG, logprobs=3, max_tokens=0),
    "scores and answer": ask(LONG, logprobs=0, max_tokens=60, ignore_eos=True, n=2, return_token_ids=True),
    "stream": ask(LONG, logprobs=2, max_tokens=60, ignore_eos=True, stream=True, return_token_ids=True),
    "vllm": ask([LONG, STORY], prompt_logprobs=4, max_tokens=2, echo=False),
    "text": ask(LONG, max_tokens=60, ignore_eos=True, stream=True, stream_options={"include_usage": True}),
}


class Scoring:
    """A gateway, and the workers of a test."""

    def __init__(self, stack: FaultStack) -> None:
        self.stack = stack
        _, self.url = stack.gateway()

    def start(self, name: str, step_s: float) -> Any:
        worker = self.stack.worker(name, *FLAGS, ready=False, TEST_STEP_S=str(step_s))
        worker.wait_for("ready: worker", 100)
        return worker


@pytest.fixture
def scoring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scoring]:
    stack = FaultStack(tmp_path_factory.mktemp("scores"), MODEL)
    try:
        yield Scoring(stack)
    finally:
        stack.close()


def counts(usage: dict[str, Any]) -> dict[str, Any]:
    return {name: count for name, count in usage.items() if name != "prompt_tokens_details"}


def said(stream: Stream) -> Any:
    """Return the contents of an answer, without its id and time, the boundaries of its events, and the cached tokens.

    The cached tokens depend on the requests that a worker ran before.
    """
    if stream.text_body:
        answer = stream.answer
        return [answer["choices"], counts(answer["usage"])]
    assert stream.is_complete, stream.error
    text, scores, ids, last = "", [], [], {}
    for piece in stream.choices():
        text += piece["text"]
        ids += piece.get("token_ids", [])
        if piece["logprobs"]:
            scores += zip(*piece["logprobs"].values(), strict=True)
        if piece["finish_reason"]:
            last = piece
    return [text, scores, ids, last, [counts(data["usage"]) for data in stream.parsed if data.get("usage")]]


def test_likelihoods_are_those_of_transformers(scoring: Scoring) -> None:
    """The calls of lm-evaluation-harness: several prompts of token ids, echoed and scored, with one token of answer."""
    import torch
    import transformers

    scoring.start("a", 0)
    encode = scoring.stack.tokenizer.encode
    context = encode(STORY, add_special_tokens=False).ids
    whole = [[*context, *encode(one, add_special_tokens=False).ids] for one in CHOICES]
    call = Stream(scoring.url, ask(whole, logprobs=1, max_tokens=1, seed=1234)).wait_end()
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    for choice, ids in zip(call.answer["choices"], whole, strict=True):
        with torch.inference_mode():
            rows = torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), dim=-1)
        found = choice["logprobs"]
        assert found["token_logprobs"][0] is None
        assert len(found["tokens"]) == len(ids) + 1
        continuation = range(len(context), len(ids))
        expected = sum(float(rows[at - 1, ids[at]]) for at in continuation)
        assert sum(found["token_logprobs"][at] for at in continuation) == pytest.approx(expected, abs=1e-3)
        # The harness compares these to find out if the continuation is the greedy one.
        for at in continuation:
            best = max(found["top_logprobs"][at].values())
            assert best == pytest.approx(float(rows[at - 1].max()), abs=1e-4)
    scoring.stack.assert_invariants()


@pytest.mark.parametrize("when", ["in its prompt", "in its answer"])
def test_a_killed_workers_scores_are_computed_again_and_equal(scoring: Scoring, when: str) -> None:
    first = scoring.start("a", 0.0)
    expected = {name: said(Stream(scoring.url, body).wait_end()) for name, body in CALLS.items()}
    first.send(signal.SIGTERM)
    first.wait(30)
    slow = scoring.start("slow", 0.05)
    streams = {name: Stream(scoring.url, body) for name, body in CALLS.items()}
    if when == "in its answer":
        for name in ("stream", "text"):
            streams[name].wait_events(12, 60)
    else:
        scoring.stack.wait(lambda: len(owned(scoring.stack, "slow")) == len(CALLS) + 1, 30)
    assert owned(scoring.stack, "slow")
    os.kill(slow.pid, signal.SIGKILL)
    slow.wait()
    scoring.start("b", 0.0)
    for name, stream in streams.items():
        assert said(stream.wait_end(60)) == expected[name], name
    scoring.stack.assert_invariants()
