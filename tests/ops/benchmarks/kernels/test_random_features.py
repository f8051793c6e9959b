"""The model of random layers: its head learns, and each format of weights has a perplexity of its own."""

import sys

import pytest

from quire.ops.benchmarks.kernels import perplexity
from quire.ops.paths import PROJECT_ROOT

pytestmark = pytest.mark.slow


def test_each_format_is_measured(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PROJECT_ROOT))
    command = "perplexity --random-features --training-documents 64 --documents 16"
    monkeypatch.setattr(sys, "argv", command.split())
    assert perplexity.main() == 0
    lines = [line for line in capsys.readouterr().out.splitlines()[1:] if "not measured" not in line]
    if not lines:
        pytest.skip("no C++ kernels")
    found = {line[:40].strip(): float(line[40:].split()[0]) for line in lines}
    plain = found["bfloat16 weights, float32 activations"]
    assert 20 < plain < 700  # of 1,536 words: a head without training has 1,536
    assert abs(found["int8"] / plain - 1) < 0.03
    assert abs(found["int4"] / plain - 1) < 0.2
    assert len(set(found.values())) == len(found)
