"""Speculation changes no text: a thousand seeded calls, with workers that draft and are killed in between (case 1)."""

from __future__ import annotations

import random
import urllib.request
from typing import Any

import pytest

from quire.ops.local.ports import free_port
from quire.ops.paths import PROJECT_ROOT
from quire.shared.model.model_argument import DEFAULT_MODEL
from tests.faults.test_real_engine import FLAGS, SUBJECTS, kill
from tests.support.faults.calls import assert_same
from tests.support.faults.stack import FaultStack, Stream, said

pytestmark = [pytest.mark.faults, pytest.mark.timeout(500)]

CALLS = 64
AT_ONCE = 32
TOKENS = 60
PLACE = {"type": "object", "properties": {"place": {"enum": ["Rome", "Paris"]}, "degrees": {"type": "integer"}}}
PLACE |= {"required": ["place", "degrees"], "additionalProperties": False}
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "frequency_penalty": 0.5},
    {"temperature": 0.7, "repetition_penalty": 1.2, "logit_bias": {"40": 2}, "min_tokens": 20},
    {"temperature": 1, "n": 2, "logprobs": 2},
    {"temperature": 0.7, "stop": [".", "never said by anyone"]},
    {"temperature": 1, "structured_outputs": {"json": PLACE}},
)


def call(number: int) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": f"{number}. A story about {SUBJECTS[number % len(SUBJECTS)]}:",
        "max_tokens": TOKENS,
        "seed": number,
        **KINDS[number % len(KINDS)],
    }


def answers(url: str, numbers: list[int]) -> list[list[str]]:
    """Return the choices of these calls, of which AT_ONCE run at a time."""
    found = []
    for first in range(0, len(numbers), AT_ONCE):
        streams = [Stream(url, call(number)) for number in numbers[first : first + AT_ONCE]]
        found += [[said([choice]) for choice in stream.wait_end(100).answer["choices"]] for stream in streams]
    return found


def accepted(port: int) -> float:
    """Return how many drafted tokens a worker has accepted."""
    lines = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("quire_accepted_tokens_total{"))


@pytest.mark.promise
@pytest.mark.parametrize("count", [96, pytest.param(1000, marks=pytest.mark.soak)])
def test_killed_workers_that_draft_give_the_texts_of_one_that_does_not(
    count: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    stack = FaultStack(tmp_path_factory.mktemp("drafts"), PROJECT_ROOT / DEFAULT_MODEL)
    try:
        _, url = stack.gateway("--write-timeout-s", "60")
        plain = stack.worker("plain", *FLAGS, "--speculation", "off", TEST_STEP_S="0")
        plain.wait_for("ready: worker", 100)
        expected = answers(url, [*range(CALLS)])
        kill(plain)
        draw, crew, ports = random.Random(3), {}, {"a": free_port(), "b": free_port()}
        done, saved = 0, 0.0
        while done < count:
            for name in ("a", "b"):
                if name not in crew or crew[name].process.poll() is not None:
                    flags = (*FLAGS, "--speculation", "suffix", "--internal-port", str(ports[name]))
                    crew[name] = stack.worker(name, *flags, ready=False, TEST_STEP_S="0")
            for worker in crew.values():
                worker.wait_for("ready: worker", 100)
            numbers = [draw.randrange(CALLS) for _ in range(AT_ONCE)]
            streams = [Stream(url, call(number) | {"stream": True}) for number in numbers]
            for stream in streams[:: AT_ONCE // 4]:
                stream.wait_events(draw.randint(1, 30), 100)
            saved += sum(map(accepted, ports.values()))
            kill(crew[draw.choice("ab")])
            named = dict(zip(map(str, range(AT_ONCE)), streams, strict=True))
            assert_same(named, {str(index): expected[number] for index, number in enumerate(numbers)})
            done += len(numbers)
        assert saved > count
        stack.assert_invariants()
    finally:
        stack.close()
