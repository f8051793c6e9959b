"""Runs tests with each level of instructions that this processor has, and with no C++ kernels: `make test-levels`.

    python -m tests.support.levels [--level LEVEL]... [ARGUMENTS OF PYTEST]

Torch is held to the same level: it computes in place of kernels that a level lacks.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from quire.kernels.cpu.levels import Level
from quire.ops.paths import PROJECT_ROOT

NONE = "none"
# The tests whose results depend on the level: kernels, whole models, the engine, and all services together.
TESTS = ("tests/kernels", "tests/worker", "tests/gpu", "tests/test_end_to_end.py")
# The bounds of ATen and of oneDNN, both in torch.
TORCH: dict[str, dict[str, str]] = {
    "amx": {},
    "amxint8": {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    "avx512bf16": {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    "avx512vnni": {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"},
    "avx512": {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    NONE: {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
}


def levels() -> list[str]:
    """Return the levels of this processor, the best first, then NONE. Raises KernelsUnavailable without a compiler."""
    return [level.name for level in reversed(Level) if level.is_supported] + [NONE]


def environment(level: str) -> dict[str, str]:
    """The environment of a process that computes with no more than a level."""
    kept = {name: text for name, text in os.environ.items() if name not in TORCH[NONE]}
    return kept | {"KERNELS_CPU_ISA": level} | TORCH[level]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.levels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--level", action="append", choices=list(TORCH), help="only this one; may be repeated")
    args, rest = parser.parse_known_args()
    failed = []
    for level in args.level or levels():
        print(f"\n== {level}", flush=True)
        command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadfile", *(rest or TESTS)]
        if subprocess.run(command, cwd=PROJECT_ROOT, env=environment(level)).returncode:
            failed.append(level)
    if failed:
        print(f"\nfailed with {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
