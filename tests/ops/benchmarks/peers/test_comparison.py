"""The parts of the comparison with other servers: programs, processes, rounds, results and tables."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from quire.ops.benchmarks.peers import results
from quire.ops.benchmarks.peers.document import PAGE, with_tables
from quire.ops.benchmarks.peers.machine import machine
from quire.ops.benchmarks.peers.processes import ServerProcess, answers, descendants
from quire.ops.benchmarks.peers.programs import LLAMACPP_FLAGS, LlamaCpp, Quire, find_program
from quire.ops.benchmarks.peers.rounds import Side, case_seed, rotated
from quire.ops.benchmarks.peers.tables import tables
from quire.ops.benchmarks.stack.load import CASES
from quire.ops.local.ports import free_port
from quire.shared.config.command_line import CommandError
from tests.conftest import has_ended

# --- machine ----------------------------------------------------------------------------------------------------------
# Facts about the machine.


CPUINFO = "processor\t: 0\nmodel name\t: AMD EPYC\nflags\t\t: fpu sse4_2 avx2 amx_int8 hypervisor f16c\n"


def test_only_instructions_that_matter_are_kept(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(CPUINFO)
    (tmp_path / "meminfo").write_text("MemTotal:       25165824 kB\n")
    found = machine(tmp_path / "cpuinfo", tmp_path / "meminfo")
    assert (found["processor"], found["memory_gib"]) == ("AMD EPYC", 24.0)
    assert found["flags"] == ["amx_int8", "avx2", "f16c", "sse4_2"]


# --- programs ---------------------------------------------------------------------------------------------------------
# The programs of the peers and their flags.


def test_every_case_has_its_flags_and_fits_into_a_slot() -> None:
    assert LLAMACPP_FLAGS.keys() == CASES.keys()
    for name, case in CASES.items():
        command = LlamaCpp("llama-server", Path("m.gguf"), None).command(name, 1)
        slots, context = (int(command[command.index(flag) + 1]) for flag in ("-np", "-c"))
        assert context // slots >= case.shared_prefix + case.input_tokens + case.output_tokens


def test_a_program_is_found_by_flag_variable_or_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("given", "named", "program"):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = [
        find_program("p", given, "P", "program", {"P": named} if named else {})
        for given, named in (
            (str(tmp_path / "given"), str(tmp_path / "named")),
            ("", str(tmp_path / "named")),
            ("", ""),
        )
    ]
    assert found == [str(tmp_path / name) for name in ("given", "named", "program")]
    with pytest.raises(CommandError, match="--peer p: there is no 'other'; pass --p PATH, set P, or name"):
        find_program("p", "other", "P", "program", {})


def test_the_format_of_quire_is_read_from_the_log_of_its_worker(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "worker-0.log"
    log.write_text("12:00:00 loading /m as bfloat16 with cpu-amx kernels on 2 threads\n")
    assert Quire(Path("/m"), [], tmp_path).format() == "bfloat16, cpu-amx"
    log.write_text(
        "loading /m as float32 with int8 weights with cpu-amx kernels on 2 threads, with a KV cache in float16\n"
    )
    assert Quire(Path("/m"), [], tmp_path).format() == "int8 weights, float32, KV cache float16, cpu-amx"
    assert Quire(Path("/m"), [], tmp_path / "none").format() == ""
    assert Quire(Path("/m"), [], tmp_path).environ().keys() <= {"KERNELS_CPU_ISA"} <= {*os.environ, "KERNELS_CPU_ISA"}


# --- processes --------------------------------------------------------------------------------------------------------
# Server processes, with the time and memory of their descendants.


# A server whose child uses memory and processor time.
SERVER = """
import subprocess, sys
from http.server import HTTPServer, SimpleHTTPRequestHandler
child = subprocess.Popen([sys.executable, "-c", "memory = b'x' * (64 << 20)\\nwhile True: pass"])
HTTPServer(("127.0.0.1", int(sys.argv[1])), SimpleHTTPRequestHandler).serve_forever()
"""


def test_time_and_memory_count_with_descendants_and_all_end(tmp_path: Path) -> None:
    port = free_port()
    server = ServerProcess("s", [sys.executable, "-c", SERVER, str(port)], os.environ, tmp_path / "log")
    try:
        server.wait_ready(f"http://127.0.0.1:{port}/")
        assert server.ready_s > 0
        deadline = time.monotonic() + 30
        while (server.cpu_s() < 0.5 or server.memory_mib() < 64) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert server.cpu_s() >= 0.5
        assert server.memory_mib() >= 64
        below = descendants(server.pid)
        assert len(below) == 1
    finally:
        server.stop()
    assert not answers(f"http://127.0.0.1:{port}/")
    assert all(has_ended(pid) for pid in below)


def test_a_program_that_does_not_exist_is_one_line(tmp_path: Path) -> None:
    # The wrapper that ends the child with its parent starts; the program itself does not.
    with pytest.raises(CommandError, match="s ended before it was ready: "):
        ServerProcess("s", ["/none"], os.environ, tmp_path / "log").wait_ready("http://127.0.0.1:1/")


# --- rounds -----------------------------------------------------------------------------------------------------------
# The order of the servers and the seeds of the rounds.


SIDES = [Side(name, None) for name in "abc"]


def test_each_server_is_first_and_last_equally_often() -> None:
    orders = [[side.name for side in rotated(SIDES, index)] for index in range(6)]
    assert orders[:4] == [["a", "b", "c"], ["c", "b", "a"], ["b", "c", "a"], ["a", "c", "b"]]
    assert Counter(order[0] for order in orders) == Counter(order[-1] for order in orders) == {"a": 2, "b": 2, "c": 2}


def test_each_case_and_round_has_a_seed_of_its_own() -> None:
    seeds = {case_seed(7, case, index) for case in CASES.values() for index in range(4)}
    assert len(seeds) == 4 * len(CASES)
    assert case_seed(7, CASES["c1"], 0) in seeds
    assert case_seed(8, CASES["c1"], 0) not in seeds


# --- results ----------------------------------------------------------------------------------------------------------
# The file of a comparison.


@pytest.mark.parametrize("text", ["", "[]", '{"schema": "quire-bench/1"}', '{"schema": "quire-peers/1"}'])
def test_another_file_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(CommandError, match=r"r\.json is no result of a comparison"):
        results.read(tmp_path / "r.json")


def test_a_file_that_cannot_be_written_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CommandError, match="give another --json file"):
        results.write(tmp_path / "file" / "r.json", [])


# --- tables -----------------------------------------------------------------------------------------------------------
# The tables of a comparison, from figures that are known.


MACHINE = {"processor": "CPU", "cores": 2, "flags": ["avx2", "avx512_bf16", "amx_int8"]}


def one(label: str, case: str, rates: dict[str, list[float]], flags: str = "run") -> dict[str, Any]:
    """A measurement of a case. rates: output tokens/s of each round, by server."""
    runs = [
        {
            "server": name,
            "round": index,
            "output_tokens_per_s": rate,
            "ttft_ms": 1000 / rate,
            "tpot_ms": 100 / rate,
            "others_cores": 0.02,
        }
        for name, values in rates.items()
        for index, rate in enumerate(values)
    ]
    servers = [{"name": name, "version": "1", "format": "f16", "flags": flags, "memory_mib": 1200} for name in rates]
    servers[0]["ready_s"] = 2.5
    entry = {"case": case, "servers": servers, "runs": runs}
    return {"label": label, "when": "2026-11-23T00:00:00Z", "machine": MACHINE, "model": "m", "cases": [entry]}


def test_ratios_are_those_of_single_rounds_and_not_of_medians() -> None:
    text = tables([one("A", "c1", {"quire": [10, 40, 30], "llamacpp": [10, 20, 60]})])
    # The ratio of the medians is 30 / 20 = 1.5; those of the rounds are 1, 2 and 0.5.
    assert "| `c1` | 3 | output tokens/s | 30.0 (10.0 to 40.0) | 20.0 (10.0 to 60.0) | 1.00 (0.50 to 2.00) |" in text
    assert "|  |  | median TTFT, ms | 33.3 (25.0 to 100) | 50.0 (16.7 to 100) |  |" in text


# --- document ---------------------------------------------------------------------------------------------------------
# The tables of peers in docs/benchmarks.md are those of the committed results.


def test_the_tables_of_the_page_are_those_of_the_results() -> None:
    text = PAGE.read_text()
    assert with_tables(text) == text, "run python -m quire.ops.benchmarks.peers.document"


def test_the_text_around_the_tables_stays(tmp_path: Path) -> None:
    for name in "ba":
        results.write(tmp_path / f"{name}.json", [one(name, "c1", {"quire": [1.0]})])
    text = with_tables("before\n<!-- peers -->\nold\n<!-- /peers -->\nafter\n", tmp_path)
    assert text.startswith("before\n<!-- peers -->\n\n**a**\n")
    assert text.endswith("\n\n<!-- /peers -->\nafter\n")
    assert "old" not in text
    assert text.index("**a**") < text.index("**b**")
