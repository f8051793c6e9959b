"""Worker and gateway together need at most 350 MiB besides the packed weights and the KV cache."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from quire.ops.benchmarks.stack.checkpoint import make_checkpoint
from tests.conftest import StartQuire, children_of

BOUND_MIB = 350


def resident_mib(pids: list[int]) -> float:
    """The memory of processes in MiB. Pages of a file that several processes map are counted once."""
    private, files = 0, Counter[str]()
    for pid in pids:
        own, name = Counter[str](), ""
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            words = line.split()
            if not words[0].endswith(":"):
                name = words[5] if len(words) > 5 else ""
            elif words[0] == "Rss:":
                own[name] += int(words[1])
            elif words[0] == "Anonymous:":
                own[name] -= int(words[1])
                private += int(words[1])
        files |= own  # the larger count of each file
    return (private + files.total()) / 1024


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("dtype", ["auto", pytest.param("float32", marks=pytest.mark.soak)])
def test_memory_besides_weights_and_kv_cache_is_bounded(
    start_quire: StartQuire, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, dtype: str
) -> None:
    model = make_checkpoint(tmp_path_factory.getbasetemp() / "llama135m", "llama135m")
    state = tmp_path / "state"
    flags = ["--port", "0", "--state-dir", str(state), "--dtype", dtype]
    process = start_quire("serve", str(model), *flags)
    process.wait_ready()
    log = (state / "logs" / "worker-1.log").read_text()
    found = re.search(r"(\d+) MiB of weights; KV cache of", log)
    assert found is not None
    pids = [pid for pid in children_of(process.pid) if is_service(pid)]
    assert len(pids) == 2
    rest = resident_mib(pids) - int(found[1])  # the KV cache is not in use yet
    print(f"{dtype}: {rest:.0f} MiB besides {found[1]} MiB of weights")
    assert rest <= BOUND_MIB


def is_service(pid: int) -> bool:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return b"worker" in words or b"gateway" in words
