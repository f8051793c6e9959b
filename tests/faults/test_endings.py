"""Streams continue after their worker dies, with the same texts and log-probabilities.

This file covers models that Transformers computes, and answers that follow a JSON schema.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from quire.ops.paths import PROJECT_ROOT
from quire.shared.model.model_argument import DEFAULT_MODEL
from tests.conftest import QuireProcess
from tests.support.faults.calls import assert_same, owned
from tests.support.faults.stack import FaultStack, Stream, said
from tests.support.transformers_checkpoints import make_kind

FLAGS = ("--lease-s", "1", "--beat-s", "0.25")
TOKENS = 200
STREAMS = 8
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0, "logprobs": 2},
    {"temperature": 1, "seed": 5, "n": 2, "logprobs": 1, "presence_penalty": 0.6},
    {"temperature": 0.8, "seed": 6, "top_p": 0.9, "frequency_penalty": 0.5},
    {"temperature": 0.5, "seed": 7, "stop": ["never said by anyone"]},
)
# Long enough for a fault in the middle of the answer, and never cut by a length limit.
SCHEMA = {
    "type": "object",
    "properties": {
        "story": {"type": "string", "minLength": 60, "maxLength": 90},
        "pages": {
            "type": "array",
            "items": {"type": "integer", "maximum": 9, "minimum": 0},
            "minItems": 8,
            "maxItems": 9,
        },
        "end": {"enum": ["happy", "sad"]},
    },
    "required": ["story", "pages", "end"],
    "additionalProperties": False,
}
AS_JSON = {"type": "json_schema", "json_schema": {"name": "story", "schema": SCHEMA}}


class Crew:
    """Workers `a` and `b`, a gateway, and the answer of every call without faults."""

    def __init__(self, stack: FaultStack, rest: dict[str, Any]) -> None:
        self.stack, self.rest = stack, rest
        _, self.url = stack.gateway("--write-timeout-s", "60")
        self.workers: dict[str, QuireProcess] = {}
        self.man()
        answers = [Stream(self.url, self.call(number)) for number in range(STREAMS)]
        self.expected = [[said([choice]) for choice in one.wait_end(60).answer["choices"]] for one in answers]

    def man(self) -> None:
        """Start the workers that are not running."""
        self.stack.man(self.workers, *FLAGS)

    def call(self, number: int) -> dict[str, Any]:
        prompt = f"{number}. Once upon a time"
        return {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, **KINDS[number % len(KINDS)], **self.rest}


@pytest.fixture(scope="module", params=["phi3", pytest.param("gemma3", marks=pytest.mark.faults), "json"])
def crew(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    model, rest = PROJECT_ROOT / DEFAULT_MODEL, {"response_format": AS_JSON}
    if request.param != "json":
        longer = {"max_position_embeddings": 512, "original_max_position_embeddings": 512}
        model, rest = tmp_path_factory.mktemp("model") / "tiny", {"min_tokens": TOKENS}
        make_kind(model, request.param, **longer)
    stack = FaultStack(tmp_path_factory.mktemp("endings"), model)
    try:
        yield Crew(stack, rest)
    finally:
        stack.close()


@pytest.mark.faults
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM])
def test_streams_go_on_where_their_worker_ends(crew: Crew, ending: signal.Signals) -> None:
    crew.man()
    streams = {str(number): Stream(crew.url, crew.call(number) | {"stream": True}) for number in range(STREAMS)}
    for stream in streams.values():
        stream.wait_events(5, 60)
    worker = crew.workers[max(crew.workers, key=lambda name: len(owned(crew.stack, name)))]
    os.kill(worker.pid, ending)
    worker.wait()
    assert_same(streams, {name: crew.expected[int(name)] for name in streams})
    crew.stack.assert_invariants()
    if "response_format" in crew.rest:
        for text in (text for texts in crew.expected for text in texts):
            value, _ = json.JSONDecoder().raw_decode(text)  # log-probabilities may follow it
            jsonschema.validate(value, SCHEMA)
