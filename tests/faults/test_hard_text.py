"""Text that is hard to stream (case 26) arrives whole, also after a resume at any place or a worker's death."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.support.faults.calls import FAST
from tests.support.faults.stack import FaultStack, Stream

pytestmark = pytest.mark.faults

# Characters of several tokens, combining marks, joined emoji, and every kind of line end.
TEXT = "a😀b e\u0301 👨\u200d👩\u200d👧 x\r\ny\u2028z\u0085 data: evil\r\rid: 7\n\n: \0 \x1b end"
# Bytes that are not UTF-8, as the tokenizer spells them: a lone lead byte, and a byte that never occurs in UTF-8.
INVALID = ("Ã", "ÿ")
STOP = "STOP here"
TAIL = " never seen"


class Speaking:
    """A gateway, and workers that answer a prompt of one token with TEXT, invalid bytes, STOP and TAIL."""

    def __init__(self, stack: FaultStack, model: Path) -> None:
        self.stack = stack
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        invalid = [tokenizer.token_to_id(name) for name in INVALID]
        self.tokens = tokenizer.encode(TEXT).ids + invalid + tokenizer.encode(STOP + TAIL).ids
        self.stop_at = len(tokenizer.encode(TEXT).ids + invalid)
        self.text = tokenizer.decode(self.tokens)
        self.environ = {"TEST_SAYS": ",".join(map(str, self.tokens)), "TEST_STEP_S": "0.02"}
        _, self.url = stack.gateway()
        self.worker()

    def worker(self) -> None:
        self.stack.worker("a", *FAST, **self.environ)

    def ask(self, **others: object) -> Stream:
        call = {"model": "tiny", "prompt": [5], "temperature": 0, "max_tokens": len(self.tokens), "ignore_eos": True}
        return Stream(self.url, call | {"stream": True} | others)

    def kill_at(self, stream: Stream, token: int) -> None:
        """Kill the worker when the log holds `token` tokens, and start it again."""
        self.stack.wait(lambda: stream.response_headers)
        key = self.stack.keys.request(stream.response_headers["x-request-id"])
        self.stack.wait(lambda: int(self.stack.redis.hget(key, "emitted") or 0) >= token)
        process = self.stack.processes[-1]
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert int(self.stack.redis.hget(key, "emitted")) < len(self.tokens) - len(TAIL)
        self.worker()


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory, long_model: Path) -> Iterator[Speaking]:
    stack = FaultStack(tmp_path_factory.mktemp("text"), long_model)
    try:
        yield Speaking(stack, long_model)
    finally:
        stack.close()


def test_the_text_is_whole_and_in_whole_characters(speaking: Speaking) -> None:
    stream = speaking.ask().wait_end()
    assert stream.is_complete
    assert stream.text() == speaking.text
    assert TEXT in speaking.text
    assert speaking.text.count("\ufffd") == len(INVALID)
    # No event contained a part of a character.
    before, _, _ = stream.text().partition("end")
    assert "\ufffd" not in before
    whole = speaking.ask(stream=False).wait_end()
    assert whole.answer["choices"][0]["text"] == speaking.text
    speaking.stack.assert_invariants()


def test_from_every_event_on_the_rest_is_the_rest(speaking: Speaking) -> None:
    stream = speaking.ask().wait_end()
    identity = stream.parsed[0]["id"]
    path = f"/v1/completions/{identity}/stream"
    for index, event in enumerate(stream.events[:-1]):
        rest = Stream(speaking.url, {}, {"Last-Event-ID": event.id}, path, "GET").wait_end()
        assert [later.data for later in rest.events] == [later.data for later in stream.events[index + 1 :]]
        assert [later.id for later in rest.events] == [later.id for later in stream.events[index + 1 :]]
    speaking.stack.assert_invariants()


def test_a_stop_string_over_many_tokens_ends_it_and_is_not_seen(speaking: Speaking) -> None:
    stream = speaking.ask(stop=[STOP]).wait_end()
    assert stream.is_complete
    assert stream.text() == speaking.text.partition(STOP)[0]
    assert stream.parsed[-1]["choices"][0]["finish_reason"] == "stop"
    speaking.stack.assert_invariants()


@pytest.mark.promise
def test_a_worker_that_dies_inside_a_character_changes_nothing(speaking: Speaking) -> None:
    stream = speaking.ask()
    speaking.kill_at(stream, 3)  # two of the four bytes of the first emoji
    assert stream.wait_end().text() == speaking.text
    speaking.stack.assert_invariants()


def test_a_worker_that_dies_inside_a_stop_string_still_finds_it(speaking: Speaking) -> None:
    stream = speaking.ask(stop=[STOP])
    speaking.kill_at(stream, speaking.stop_at + 3)
    assert stream.wait_end().text() == speaking.text.partition(STOP)[0]
    speaking.stack.assert_invariants()
