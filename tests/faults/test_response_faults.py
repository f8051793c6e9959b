"""Responses of /v1/responses survive their processes: streamed ones go on elsewhere, those in the background need only
Redis."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import openai
import pytest

from tests.support.faults.calls import FAST
from tests.support.faults.stack import KEYS, FaultStack

MODEL = "tiny"
TOKENS = 60


def asked(stack: FaultStack, **more: Any) -> dict[str, Any]:
    """A request whose answer has TOKENS tokens: the end token is banned."""
    end = json.loads((stack.model / "config.json").read_text())["eos_token_id"]
    extra = {"seed": 7, "logit_bias": {str(end): -100}}
    return {"model": MODEL, "input": "w10 w20 w30", "max_output_tokens": TOKENS, "extra_body": extra, **more}


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=60)


@pytest.mark.faults
def test_a_response_in_the_background_needs_only_redis(stack: FaultStack) -> None:
    """All gateways and workers are killed in the middle of it; new ones end it with the same tokens."""
    gateway, url = stack.gateway()
    worker = stack.worker("a", *FAST)
    with client(url) as here:
        expected = here.responses.create(**asked(stack)).output_text
        response = here.responses.create(**asked(stack, background=True))
        assert response.status == "queued"
        stack.wait(lambda: len(here.responses.retrieve(response.id).output_text) > 20)
    for process in (gateway, worker):
        os.kill(process.pid, signal.SIGKILL)
    _, other = stack.gateway()
    with client(other) as there:
        assert there.responses.retrieve(response.id).status == "in_progress"
        stack.worker("b", *FAST)
        stack.wait(lambda: there.responses.retrieve(response.id).status == "incomplete", 30)
        ended = there.responses.retrieve(response.id)
        following = there.responses.create(**asked(stack, previous_response_id=response.id))
    assert ended.output_text == expected
    assert ended.usage is not None
    assert ended.usage.output_tokens == TOKENS
    assert following.usage is not None
    assert following.usage.input_tokens > ended.usage.total_tokens
    call_id = response.id.removeprefix("resp_")
    assert stack.redis.ttl(KEYS.conversation(call_id)) > 0
    stack.assert_invariants()


@pytest.mark.faults
@pytest.mark.promise
def test_a_streamed_response_of_a_killed_worker_goes_on_without_a_gap(stack: FaultStack) -> None:
    _, url = stack.gateway()
    workers = {name: stack.worker(name, *FAST) for name in "ab"}
    with client(url) as here:
        whole = here.responses.create(**asked(stack))
        events: list[Any] = []
        for event in here.responses.create(**asked(stack, stream=True)):
            events.append(event)
            if len(events) == 15:
                owner = stack.redis.hget(KEYS.request(events[0].response.id.removeprefix("resp_")), "owner")
                assert owner is not None
                os.kill(workers[owner.decode()].pid, signal.SIGKILL)
        again = here.responses.retrieve(events[0].response.id)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.incomplete"
    assert events[-1].response == again
    assert again.output_text == whole.output_text
    stack.assert_invariants()
