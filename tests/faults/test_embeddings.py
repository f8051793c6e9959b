"""Workers die, leave and hang while they embed and score prompts. Clients get the same bits as without the fault."""

from __future__ import annotations

import base64
import os
import signal
from typing import Any

import numpy as np
import pytest

from quire.shared.protocol.messages import decode_items
from tests.support.faults.calls import FAST, owned
from tests.support.faults.stack import FaultStack, Stream

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]

# Many steps of few tokens: the longest prompt takes 60 of them.
SLOW = ("--max-num-seqs", "8", "--max-num-batched-tokens", "16")
DEADLY = 3


def call(pooling: str) -> dict[str, Any]:
    inputs = [
        [5 + (7 * index + 3 * at) % 200 for at in range(length)] for index, length in enumerate((960, 5, 300, 77))
    ]
    return {"model": "tiny", "input": inputs, "pooling": pooling, "encoding_format": "base64", "normalize": False}


def embed(url: str, pooling: str, key: str = "") -> Stream:
    """Start a call. The output logs of a call with an idempotency key stay."""
    return Stream(url, call(pooling), {"Idempotency-Key": key} if key else {}, path="/v1/embeddings")


def vectors(stream: Stream) -> list[bytes]:
    assert stream.wait_end().status == 200, stream.text_body
    return [base64.b64decode(one["embedding"]) for one in stream.answer["data"]]


# The vectors of a call without faults by its pooling. They are the same with every stack.
_undisturbed: dict[str, list[bytes]] = {}


def undisturbed(url: str) -> dict[str, list[bytes]]:
    if not _undisturbed:
        _undisturbed.update({pooling: vectors(embed(url, pooling)) for pooling in ("last", "mean")})
    return _undisturbed


def logged(stack: FaultStack, stream: Stream) -> bytes | None:
    """Return the embedding in the output log of the first input."""
    [(_, fields)] = stack.redis.xrange(stack.keys.output(stream.response_headers["x-request-id"]))
    [item] = decode_items(fields[b"item"])
    assert item.outcome is not None
    return item.outcome.embedding


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP], ids=["killed", "told", "asleep"])
@pytest.mark.promise
def test_a_prompt_goes_on_elsewhere_and_gets_the_same_bits(stack: FaultStack, how: signal.Signals) -> None:
    _, url = stack.gateway()
    first = stack.worker("a", *FAST, *SLOW, "--drain-s", "0.1")
    expected = undisturbed(url)
    assert len({*expected["last"], *expected["mean"]}) == 8
    calls = {pooling: embed(url, pooling, key=pooling) for pooling in ("last", "mean")}
    stack.wait(lambda: owned(stack, "a"))
    os.kill(first.pid, how)
    if how is signal.SIGTERM:
        assert first.wait(30) == 0
    second = stack.worker("b", *FAST, *SLOW)
    for pooling, stream in calls.items():
        assert vectors(stream) == expected[pooling]
        assert logged(stack, stream) == expected[pooling][0]
    assert "claiming" in second.stderr or how is signal.SIGTERM
    if how is signal.SIGSTOP:
        os.kill(first.pid, signal.SIGCONT)
        first.wait_for("is lost: it ended or is parked, or another worker has claimed it")
    stack.assert_invariants()


def test_the_answer_is_read_from_the_log_if_the_message_was_lost(stack: FaultStack) -> None:
    _, url = stack.gateway()
    stack.worker("a", *FAST, *SLOW)
    expected = vectors(embed(url, "mean"))
    stream = embed(url, "mean")
    stack.wait(lambda: owned(stack, "a"))
    stack.redis.client_kill_filter(_type="pubsub")
    assert vectors(stream) == expected
    stack.assert_invariants()


def test_a_prompt_that_kills_workers_is_given_up(stack: FaultStack) -> None:
    _, url = stack.gateway()
    flags = {"TEST_DEADLY_TOKEN": str(DEADLY)}
    stream = Stream(url, {"model": "tiny", "input": [DEADLY, 5]}, path="/v1/embeddings")
    for number in range(3):
        worker = stack.worker(f"w{number}", *FAST, **flags)
        assert worker.wait(60) == -signal.SIGKILL
    stack.worker("last", *FAST, **flags)
    assert stream.wait_end().status == 500
    assert stream.answer["error"]["code"] == "quarantined"
    stack.assert_invariants()


def test_embeddings_are_those_of_transformers(stack: FaultStack) -> None:
    import torch
    from transformers import AutoModel

    _, url = stack.gateway()
    stack.worker("a", *FAST)
    model = AutoModel.from_pretrained(stack.model, dtype=torch.float32, attn_implementation="eager")
    for pooling in ("last", "mean"):
        found = vectors(embed(url, pooling))
        for data, prompt in zip(found, call(pooling)["input"], strict=True):
            with torch.inference_mode():
                states = model(torch.tensor([prompt])).last_hidden_state[0]
            expected = states[-1] if pooling == "last" else states.mean(dim=0)
            assert np.abs(np.frombuffer(data, "<f4") - expected.numpy()).max() < 1e-4


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "asleep"])
@pytest.mark.promise
def test_documents_are_ranked_elsewhere_with_the_same_scores(stack: FaultStack, how: signal.Signals) -> None:
    _, url = stack.gateway("--score-tokens", "n,y", "--score-template", "pair")
    first = stack.worker("a", *FAST, *SLOW)
    documents = [f"{index} herons in the reeds " * (1 + 7 * index % 20) for index in range(6)]
    body = {"model": "tiny", "query": "Where are the herons?", "documents": documents}
    expected = Stream(url, body, path="/v1/rerank").wait_end().answer["results"]
    assert len({one["relevance_score"] for one in expected}) == 6
    stream = Stream(url, body | {"cache_salt": "other"}, path="/v1/rerank")
    stack.wait(lambda: owned(stack, "a"))
    os.kill(first.pid, how)
    stack.worker("b", *FAST, *SLOW)
    assert stream.wait_end().answer["results"] == expected
    if how is signal.SIGSTOP:
        os.kill(first.pid, signal.SIGCONT)
        first.wait_for("is lost: it ended or is parked, or another worker has claimed it")
    stack.assert_invariants()
