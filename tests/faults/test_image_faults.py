"""Faults in the middle of answers about images (case 38): the texts are those of a run without faults."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import QuireProcess
from tests.support.faults.calls import FAST, owned
from tests.support.faults.stack import FaultStack, Stream
from tests.support.vision_questions import random_picture
from tests.test_images import data_url, make_seeing

pytest.importorskip("transformers")
pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

CALLS = 12
TOKENS = 100
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1, "seed": 5},
    {"temperature": 1, "seed": 6, "n": 2},
    {"use_beam_search": True, "beam_width": 3, "temperature": 0},
)


def call(number: int) -> dict[str, Any]:
    """Return a call about one, two or three images."""
    draw = random.Random(number)
    urls = [data_url(random_picture(draw)) for _ in range(1 + number % 3)]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": f"What is image {number}?"}]}]
    asked = {"model": "tiny", "messages": messages, "max_tokens": TOKENS, "ignore_eos": True}
    kind = KINDS[number % len(KINDS)]
    return asked | kind | {"stream": "use_beam_search" not in kind}


class Answers:
    """The calls of a round, and their texts."""

    def __init__(self, url: str) -> None:
        self._streams = [Stream(url, call(number), path="/v1/chat/completions") for number in range(CALLS)]

    def wait_for_tokens(self) -> None:
        """Wait until all that stream are in the middle of their answers; beam searches do not."""
        for stream in self._streams:
            if stream.body["stream"]:
                stream.wait_events(5)

    def texts(self) -> list[list[str]]:
        """Return the texts of the choices of each call."""
        found = []
        for stream in self._streams:
            stream.wait_end(120)
            if stream.body["stream"]:
                assert stream.is_complete, stream.error or stream.text_body
                found.append([stream.text(choice) for choice in range(stream.body.get("n", 1))])
            else:
                assert stream.status == 200, stream.text_body
                found.append([choice["message"]["content"] for choice in stream.answer["choices"]])
        return found


class Seeing:
    """One gateway, the workers `a` and `b`, and the answers without faults."""

    def __init__(self, stack: FaultStack) -> None:
        self.stack, self.workers = stack, dict[str, QuireProcess]()
        _, self.url = stack.gateway()
        self.stack.man(self.workers, *FAST)
        self.expected = Answers(self.url).texts()

    def begin(self) -> Answers:
        self.stack.man(self.workers, *FAST)
        answers = Answers(self.url)
        answers.wait_for_tokens()
        return answers

    def owner(self) -> str:
        return max(self.workers, key=lambda name: len(owned(self.stack, name)))

    def assert_same(self, answers: Answers) -> None:
        assert [one for one, other in zip(answers.texts(), self.expected, strict=True) if one != other] == []
        self.stack.assert_invariants()


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeing]:
    model = make_seeing(tmp_path_factory.mktemp("models") / "seeing")
    stack = FaultStack(tmp_path_factory.mktemp("images"), model)
    try:
        yield Seeing(stack)
    finally:
        stack.close()


@pytest.mark.promise
def test_answers_about_images_of_a_killed_worker_go_on_elsewhere(seeing: Seeing) -> None:
    answers = seeing.begin()
    name = seeing.owner()
    assert owned(seeing.stack, name)
    os.kill(seeing.workers[name].pid, signal.SIGKILL)
    seeing.workers[name].wait()
    seeing.assert_same(answers)


def test_answers_about_images_of_a_worker_that_sleeps_go_on_elsewhere(seeing: Seeing) -> None:
    answers = seeing.begin()
    name = seeing.owner()
    seeing.workers[name].send(signal.SIGSTOP)
    try:
        seeing.stack.wait(lambda: not owned(seeing.stack, name), 20)
        texts = answers.texts()
    finally:
        seeing.workers[name].send(signal.SIGCONT)
    assert texts == seeing.expected
    seeing.stack.assert_invariants()


def test_answers_about_images_survive_a_redis_that_is_killed(seeing: Seeing) -> None:
    """The files of the images are in the append-only file."""
    answers = seeing.begin()
    process = seeing.stack.redis_server.process
    assert process is not None
    time.sleep(1.2)  # the append-only file is fsynced every second
    process.kill()
    process.wait()
    seeing.stack.redis_server.start()
    # The other worker reads the files again.
    name = seeing.owner()
    os.kill(seeing.workers[name].pid, signal.SIGKILL)
    seeing.workers[name].wait()
    seeing.assert_same(answers)
