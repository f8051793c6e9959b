"""Every level of instructions below that of this processor gets a thin part of the suite, which `make test-levels` runs
whole: a model in bfloat16, which plain torch computes where the kernels do not, and an engine in float32."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from quire import kernels
from quire.ops.paths import PROJECT_ROOT
from tests.support import levels

HERE = "tests/worker"
THIN = [
    f"{HERE}/models/test_transformers_backend.py::test_a_token_that_looks_at_the_one_before_it_is_found_in_few_bits_too",
    f"{HERE}/engine/test_engine_parity.py::test_greedy_outputs_equal_those_of_hugging_face[qwen3-auto]",
]
COMPUTES = """
import json, torch
from quire import kernels
ops = [kernels.select_ops("cpu", dtype) for dtype in (torch.bfloat16, torch.float32)]
levels = [one.level.name if isinstance(one, kernels.CpuOps) else one.name for one in ops]
print(json.dumps([torch.backends.cpu.get_cpu_capability(), *levels]))
"""
# By level: what ATen uses, and what computes bfloat16 and float32.
EXPECTED = {
    "amxint8": ["AVX512", "avx512bf16", "amxint8"],
    "avx512bf16": ["AVX512", "avx512bf16", "avx512vnni"],
    "avx512vnni": ["AVX512", "reference", "avx512vnni"],
    "avx512": ["AVX512", "reference", "avx512"],
    "avx2": ["AVX2", "reference", "avx2"],
    levels.NONE: ["DEFAULT", "reference", "reference"],
}


def run(level: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    if level not in below():
        pytest.skip(f"this processor has no {level}, or nothing above it: the suite itself computes so")
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=PROJECT_ROOT, env=levels.environment(level), capture_output=True, text=True, timeout=110
    )


def below() -> list[str]:
    """The levels that the suite does not run with already."""
    try:
        return levels.levels()[1:]
    except kernels.KernelsUnavailable:  # no compiler: it runs with none
        return []


@pytest.mark.soak
@pytest.mark.parametrize("level", EXPECTED)
def test_a_process_that_is_held_to_a_level_computes_with_it(level: str) -> None:
    done = run(level, "-c", COMPUTES)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == EXPECTED[level]


@pytest.mark.soak
@pytest.mark.parametrize("level", EXPECTED)
def test_models_are_right_with_lower_levels_too(level: str) -> None:
    done = run(level, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *THIN)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout.splitlines()[-1]


def test_every_level_of_the_kernels_has_its_bound_for_torch() -> None:
    assert {*levels.TORCH} == {level.name for level in kernels.cpu.levels.Level} | {levels.NONE}
