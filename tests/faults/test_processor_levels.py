"""Running answers keep their text when they move between processors of different kinds, with weights in 8 and 4 bits.

One machine plays the processors: KERNELS_CPU_ISA holds a worker to the instructions of an older one. The older
processor has AVX2 only, the newer one is this machine with all that it has.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.kernels.cpu.levels import LEVELS, Level
from quire.ops.paths import PROJECT_ROOT
from quire.shared.model.model_argument import DEFAULT_MODEL
from tests.conftest import QuireProcess
from tests.support.faults.calls import assert_same
from tests.support.faults.stack import FaultStack, Stream, said

TOKENS, STREAMS = 120, 8
OLDER = Level.avx2
NEWER = next((level for level in LEVELS[torch.float32] if level.is_supported), OLDER)

pytestmark = [
    pytest.mark.faults,
    pytest.mark.timeout(120),
    pytest.mark.skipif(NEWER is OLDER, reason="this processor has no level above AVX2"),
]


def call(number: int) -> dict[str, Any]:
    sampling: dict[str, Any] = {"temperature": 1, "seed": number} if number % 2 else {"temperature": 0}
    prompt = f"{number}. A story about a lighthouse:"
    return {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "min_tokens": TOKENS, **sampling}


def start(stack: FaultStack, name: str, level: Level, quantization: str) -> QuireProcess:
    flags = ("--lease-s", "1", "--beat-s", "0.25", "--quantization", quantization)
    worker = stack.worker(name, *flags, ready=False, KERNELS_CPU_ISA=level.name, TEST_STEP_S="0.02")
    worker.wait_for("ready: worker", 100)
    return worker


def results_of(worker: QuireProcess) -> str:
    """The digest of the results, which a worker logs when it starts."""
    found = re.search(r"results (\w+)", worker.stderr)
    assert found is not None
    return found[1]


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[FaultStack]:
    stack = FaultStack(tmp_path, PROJECT_ROOT / DEFAULT_MODEL)
    try:
        yield stack
    finally:
        stack.close()


@pytest.mark.parametrize(("first", "second"), [(OLDER, NEWER), (NEWER, OLDER)], ids=["to_newer", "to_older"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_an_answer_moves_to_another_kind_of_processor(
    demo: FaultStack, quantization: str, first: Level, second: Level
) -> None:
    _, url = demo.gateway()
    worker = start(demo, "a", first, quantization)
    whole = {str(number): Stream(url, call(number)) for number in range(STREAMS)}
    expected = {
        name: [said([choice]) for choice in answer.wait_end(60).answer["choices"]] for name, answer in whole.items()
    }
    streams = {str(number): Stream(url, call(number) | {"stream": True}) for number in range(STREAMS)}
    for stream in streams.values():
        stream.wait_events(10, 30)
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    heir = start(demo, "b", second, quantization)
    assert_same(streams, expected)
    assert results_of(heir) == results_of(worker)
    demo.assert_invariants()
