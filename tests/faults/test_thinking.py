"""A worker dies inside reasoning that has a budget, or inside an answer that repeats itself (case 31): both end at the
same token as without the fault."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import QuireProcess
from tests.faults.test_tool_calls import CHAT
from tests.support.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.support.faults.calls import FAST
from tests.support.faults.stack import FaultStack, Stream
from tests.test_structured_reasoning import write_marks

pytestmark = [pytest.mark.faults, pytest.mark.promise, pytest.mark.timeout(120)]

BUDGET = 40
CALL: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "How is the weather?"}],
    "chat_template_kwargs": {"enable_thinking": True},
    "temperature": 1,
    "seed": 3,
    "max_tokens": 90,
    "ignore_eos": True,
    "stream": True,
    "return_token_ids": True,
}


class Thinker:
    """A gateway and a worker of a model that reasons."""

    def __init__(self, folder: Path) -> None:
        model = folder / "thinker"
        make_checkpoint(model, "qwen3", max_position_embeddings=1024, initializer_range=0.02, vocab_size=VOCAB_SIZE + 2)
        self.end = write_marks(model, is_special=False)
        self.stack = FaultStack(folder, model)
        self.url = self.stack.gateway("--repetition-detection", "4:6")[1]
        self.worker = self._start()
        self.call_id = ""

    def _start(self) -> QuireProcess:
        return self.stack.worker("a", *FAST)

    def tokens(self, body: dict[str, Any], kill_at: int = 0, fork_of: str = "") -> tuple[list[int], str]:
        """Return the tokens of a stream and its finish reason. kill_at: tokens after which the worker is killed."""
        stream = Stream(self.url, body, path=f"{CHAT}/{fork_of}/fork" if fork_of else CHAT)
        if kill_at:
            self.stack.wait(lambda: stream.response_headers)
            key = self.stack.keys.request(stream.response_headers["x-request-id"])
            self.stack.wait(lambda: int(self.stack.redis.hget(key, "emitted") or 0) >= kill_at)
            os.kill(self.worker.process.pid, signal.SIGKILL)
            self.worker.wait()
            self.worker = self._start()
        stream.wait_end()
        assert stream.status == 200, stream.text_body
        self.call_id = stream.parsed[0]["id"]
        choices = [choice for chunk in stream.parsed for choice in chunk["choices"]]
        tokens = [token for choice in choices for token in choice.get("token_ids") or ()]
        return tokens, next(choice["finish_reason"] for choice in choices if choice["finish_reason"])


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Thinker]:
    made = Thinker(tmp_path_factory.mktemp("thinker"))
    try:
        yield made
    finally:
        made.stack.close()


def test_reasoning_ends_at_the_same_token_though_its_worker_dies(thinker: Thinker) -> None:
    # Without a bias the end of the reasoning is one token of hundreds.
    bounded = CALL | {"thinking_token_budget": BUDGET, "logit_bias": {str(thinker.end): -100}}
    tokens, reason = thinker.tokens(bounded)
    assert (tokens.index(thinker.end), len(tokens), reason) == (BUDGET, 90, "length")
    fork = {"at": BUDGET // 2, "stream": True, "return_token_ids": True}
    assert thinker.tokens(fork, fork_of=thinker.call_id) == (tokens[BUDGET // 2 :], reason)
    assert thinker.tokens(bounded, BUDGET - 1) == (tokens, reason)


def test_an_answer_that_repeats_itself_ends_at_the_same_token_though_its_worker_dies(thinker: Thinker) -> None:
    """After 30 tokens of its own the answer repeats one token, as the server's setting does not allow."""
    looping = CALL | {"structured_outputs": {"regex": "[a-z ]{200}(ha){100}"}, "max_tokens": 600}
    del looping["ignore_eos"], looping["chat_template_kwargs"]
    looping["chat_template_kwargs"] = {"enable_thinking": False}
    assert thinker.tokens(looping | {"repetition_detection": {"max_pattern_size": 0}})[1] == "stop"
    tokens, reason = thinker.tokens(looping)
    assert reason == "repetition"
    assert thinker.tokens(looping, len(tokens) - 8) == (tokens, reason)
