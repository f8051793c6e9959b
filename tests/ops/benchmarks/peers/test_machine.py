"""Facts about the machine."""

from __future__ import annotations

from pathlib import Path

from quire.ops.benchmarks.peers.machine import machine, processor_flags, quire_version

CPUINFO = "processor\t: 0\nmodel name\t: AMD EPYC\nflags\t\t: fpu sse4_2 avx2 amx_int8 hypervisor f16c\n"


def test_only_instructions_that_matter_are_kept(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(CPUINFO)
    (tmp_path / "meminfo").write_text("MemTotal:       25165824 kB\n")
    found = machine(tmp_path / "cpuinfo", tmp_path / "meminfo")
    assert (found["processor"], found["memory_gib"]) == ("AMD EPYC", 24.0)
    assert found["flags"] == ["amx_int8", "avx2", "f16c", "sse4_2"]


def test_a_system_without_proc_has_no_flags(tmp_path: Path) -> None:
    assert processor_flags(tmp_path / "none") == []


def test_the_version_has_a_number() -> None:
    assert quire_version()[0].isdigit()
