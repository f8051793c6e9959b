"""Conversations of the API survive their processes: the items of a response are added exactly once."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from tests.faults.test_response_faults import asked, client
from tests.support.faults.calls import FAST
from tests.support.faults.stack import KEYS, FaultStack


def items_of(here: Any, name: str) -> list[tuple[str, str]]:
    items = here.conversations.items.list(name, order="asc", limit=100)
    return [(item.role, item.content[0].text) for item in items]


@pytest.mark.faults
@pytest.mark.promise
def test_a_turn_is_added_once_though_all_gateways_and_workers_are_killed(stack: FaultStack) -> None:
    """In the middle of the answer, and again between the end of the answer and the next look at the conversation."""
    gateway, url = stack.gateway()
    worker = stack.worker("a", *FAST)
    with client(url) as here:
        expected = here.responses.create(**asked(stack)).output_text
        name = here.conversations.create().id
        first = here.responses.create(**asked(stack, background=True, conversation=name))
        stack.wait(lambda: len(here.responses.retrieve(first.id).output_text) > 20)
    for process in (gateway, worker):
        os.kill(process.pid, signal.SIGKILL)
    stack.worker("b", *FAST)
    record = KEYS.request(first.id.removeprefix("resp_"))
    stack.wait(lambda: stack.redis.hget(record, "state") == b"done", 60)
    turn = [("user", "w10 w20 w30"), ("assistant", expected)]
    _, one = stack.gateway()
    _, two = stack.gateway()
    with client(one) as here, client(two) as there:
        assert items_of(here, name) == items_of(there, name) == turn
        # The conversation goes on at another gateway, which is killed after the answer.
        following = there.responses.create(**asked(stack, conversation=name))
        assert following.usage is not None
        assert following.usage.input_tokens > 60
        assert items_of(here, name) == [*turn, turn[0], ("assistant", following.output_text)]
        assert following.conversation is not None
        assert following.conversation.id == name
    stack.wait(lambda: not stack.redis.scard(KEYS.answering))
    stack.assert_invariants()


@pytest.mark.faults
def test_a_conversation_is_free_again_after_the_client_died_with_its_gateway(stack: FaultStack) -> None:
    """Nobody comes back for the answer, so its worker ends it, and nothing is added."""
    gateway, url = stack.gateway()
    stack.worker("a", *FAST, "--orphan-s", "1")
    _, other = stack.gateway()
    with client(other) as there:
        name = there.conversations.create().id
        with client(url) as here:
            long = asked(stack, conversation=name, stream=True) | {"max_output_tokens": 1500}
            stream = iter(here.responses.create(**long))
            for _ in range(8):
                next(stream)
            os.kill(gateway.pid, signal.SIGKILL)

        def is_free() -> bool:
            return not stack.redis.hget(KEYS.kept_conversation(name.removeprefix("conv_")), "open")

        stack.wait(is_free, 60)
        assert items_of(there, name) == []
        answer = there.responses.create(**asked(stack, conversation=name))
        assert items_of(there, name) == [("user", "w10 w20 w30"), ("assistant", answer.output_text)]
    stack.assert_invariants()
