"""A checkpoint is not in memory twice while it is loaded: the packed weights and a tenth of them are the peak."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from quire.kernels import CpuOps, KernelsUnavailable
from quire.ops.paths import PROJECT_ROOT
from tests.conftest import clean_environ
from tests.support.checkpoints import make_checkpoint
from tests.support.large_checkpoints import ALL, make_large_checkpoint

pytestmark = [pytest.mark.alone, pytest.mark.timeout(900)]

MIB = 1 << 20
LARGEST_PEAK = 1.10  # of the packed weights
LARGEST_FILE_PAGES = 48 * MIB
TIMEOUT_S = 300


def measure(folder: Path, bits: str, tiny: Path) -> dict[str, int]:
    """Load a checkpoint in a process of its own. Returns what `resident_memory` prints."""
    command = [sys.executable, "-m", "tests.support.resident_memory", str(folder), bits, str(tiny)]
    environ = clean_environ() | {"PYTHONPATH": f"{PROJECT_ROOT / 'src'}:{PROJECT_ROOT}"}
    done = subprocess.run(command, cwd=PROJECT_ROOT, env=environ, timeout=TIMEOUT_S, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        # All take minutes, so CI measures one.
        pytest.param("bf16", ("4",), marks=pytest.mark.slow),
        pytest.param("bf16", ("0", "8", "fp8"), marks=pytest.mark.soak),
        *(pytest.param(kind, ("0",), marks=pytest.mark.soak) for kind in ALL if kind != "bf16"),
    ],
)
def test_the_peak_is_the_packed_weights_and_a_tenth(kind: str, settings: tuple[str, ...], tmp_path: Path) -> None:
    try:
        CpuOps()
    except KernelsUnavailable as missing:
        pytest.skip(str(missing))
    tiny = make_checkpoint(tmp_path / "tiny", "llama")
    folder = make_large_checkpoint(tmp_path / kind, kind)
    for bits in settings:
        found = measure(folder, bits, tiny)
        said = {name: f"{size / MIB:.0f} MiB" for name, size in found.items()}
        print(kind, bits, said)
        assert found["weights"] > 150 * MIB, said
        assert found["peak"] <= LARGEST_PEAK * found["weights"], said
        assert found["file"] <= LARGEST_FILE_PAGES, said
