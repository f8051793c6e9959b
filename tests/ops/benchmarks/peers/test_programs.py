"""The programs of the peers and their flags."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire.ops.benchmarks.peers.programs import LLAMACPP_FLAGS, LlamaCpp, Quire, find_program, vllm_dtype
from quire.ops.benchmarks.stack.load import CASES
from quire.shared.command_line import CommandError


def test_every_case_has_its_flags_and_fits_into_a_slot() -> None:
    assert LLAMACPP_FLAGS.keys() == CASES.keys()
    for name, case in CASES.items():
        command = LlamaCpp("llama-server", Path("m.gguf"), None).command(name, 1)
        slots, context = (int(command[command.index(flag) + 1]) for flag in ("-np", "-c"))
        assert context // slots >= case.shared_prefix + case.input_tokens + case.output_tokens


def test_given_flags_replace_those_of_the_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LLAMACPP_FLAGS, "c1", "--best")
    assert LlamaCpp("x", Path("m"), None).command("c1", 1)[-1] == "--best"
    assert "--best" not in LlamaCpp("x", Path("m"), ["--mine"]).command("c1", 1)


def test_vllm_gets_the_type_that_suits_the_processor() -> None:
    assert vllm_dtype(["avx2", "avx512f"]) == "float32"
    assert vllm_dtype(["avx2", "avx512_bf16"]) == "bfloat16"


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
