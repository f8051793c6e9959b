"""Measures the memory of a process that loads a checkpoint.

    python -m tests.support.resident_memory FOLDER BITS TINY

Prints JSON: the bytes of the packed weights, and the largest resident memory while the checkpoint is loaded, less that
after a tiny checkpoint was loaded: in all, and of anonymous and of file pages.
"""

from __future__ import annotations

import gc
import json
import sys
import threading
from pathlib import Path

import torch

from quire import kernels
from quire.worker.models.native.decoder import Decoder

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"


def resident() -> dict[str, int]:
    """Return the fields of /proc/self/status that are sizes, in bytes."""
    lines = (line.split() for line in STATUS.read_text().splitlines())
    return {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines if line[-1] == "kB"}


class Peaks:
    """The largest anonymous and file pages, looked up all the time."""

    def __init__(self) -> None:
        self.largest = {"RssAnon": 0, "RssFile": 0}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Peaks:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(0.002):
            found = resident()
            self.largest = {name: max(size, found[name]) for name, size in self.largest.items()}


def main() -> None:
    folder, bits, tiny = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    torch.set_num_threads(1)
    ops = kernels.CpuOps(torch.float32)
    Decoder.load(tiny, ops, torch.float32, "cpu")
    gc.collect()
    before = resident()
    CLEAR_REFS.write_text(RESET_PEAK)
    with Peaks() as peaks:
        model = Decoder.load(folder, ops, torch.float32, "cpu", bits=int(bits) if bits.isdigit() else bits)
    after = resident()
    found = {
        "weights": model.weight_bytes,
        "peak": after["VmHWM"] - before["VmRSS"],
        "anonymous": peaks.largest["RssAnon"] - before["RssAnon"],
        "file": peaks.largest["RssFile"] - before["RssFile"],
        "after": after["VmRSS"] - before["VmRSS"],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
