"""The memory that a worker may plan with: that of the machine, within the limit of the container."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from quire.worker.device import memory
from quire.worker.device.memory import available_memory, of_container

MIB = 1024**2


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_inactive_page_cache_counts_as_free(tmp_path: Path) -> None:
    write(tmp_path, memory__max=f"{100 * MIB}\n", memory__current=f"{70 * MIB}\n")
    write(tmp_path, memory__stat=f"anon 1\ninactive_file {20 * MIB}\nactive_file 7\n")
    assert of_container(tmp_path) == 50 * MIB


def test_control_groups_of_version_1(tmp_path: Path) -> None:
    write(
        tmp_path / "memory",
        memory__limit_in_bytes=f"{100 * MIB}\n",
        memory__usage_in_bytes=f"{70 * MIB}\n",
        memory__stat=f"inactive_file 5\ntotal_inactive_file {10 * MIB}\n",
    )
    assert of_container(tmp_path) == 40 * MIB


def test_a_full_container_has_nothing_left(tmp_path: Path) -> None:
    write(tmp_path, memory__max="10\n", memory__current="20\n", memory__stat="inactive_file 5\n")
    assert of_container(tmp_path) == 0


def test_no_limit(tmp_path: Path) -> None:
    assert of_container(tmp_path) == sys.maxsize, "no control groups at all"
    write(tmp_path, memory__max="max\n", memory__current="20\n", memory__stat="inactive_file 5\n")
    assert of_container(tmp_path) == sys.maxsize


def test_the_smaller_of_machine_and_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)
    assert 100 * MIB < available_memory() < sys.maxsize
    write(tmp_path, memory__max=f"{10 * MIB}\n", memory__current="0\n", memory__stat="")
    assert available_memory() == 10 * MIB
