"""Quantised weights of the demo model hardly change its perplexity."""

import sys

import pytest

from quire.ops.benchmarks.kernels import perplexity
from quire.ops.paths import PROJECT_ROOT


def test_each_format_is_measured(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PROJECT_ROOT))
    monkeypatch.setattr(sys, "argv", ["perplexity", "--documents", "16"])
    assert perplexity.main() == 0
    lines = [line for line in capsys.readouterr().out.splitlines()[1:] if "not measured" not in line]
    if not lines:
        pytest.skip("no C++ kernels")
    found = {line[:40].strip(): float(line[40:].split()[0]) for line in lines}
    plain = found.pop("bfloat16 weights, float32 activations")
    assert 1 < plain < 1.5
    assert found.pop("int4") < plain * 1.02
    assert all(other < plain * 1.005 for other in found.values())
