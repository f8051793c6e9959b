"""The comparison of formats of weights prints a line for each number of rows."""

import pytest

from quire.kernels.grouped_weight import KINDS
from quire.kernels.k_quant_weight import K_QUANTS
from quire.ops.benchmarks.kernels import formats


def test_each_format_has_a_time(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.kernels.set_num_threads", lambda count: None)  # the threads of the other tests stay
    assert formats.main(["--width", "256", "--rows", "1", "3", "--rounds", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    measured = [line for line in lines if "not measured" not in line]
    for line in measured:
        assert f"{formats.BASE} " in line
        assert all(f"{kind} " in line for kind in (*KINDS, *K_QUANTS))
        assert (", int8 " in line) == line.startswith("float32")
    assert len(lines) >= 2
