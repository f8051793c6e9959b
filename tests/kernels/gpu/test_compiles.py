"""Every Triton kernel compiles to machine code for Hopper and fits it, in each specialisation; no GPU is needed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.kernels.implementations import HAS_TRITON

ROOT = Path(__file__).parents[3]
SHARED_BYTES = 227 << 10  # the limit per program on compute capability 9.0
KERNELS = {
    *(
        "argmax_kernel",
        "best_of_segment_kernel",
        "parts_kernel",
        "count_kernel",
        "mass_kernel",
        "kept_kernel",
        "draw_kernel",
        "matmul_kernel",
        "one_row_kernel",
        "few_rows_kernel",
        "grouped_matmul_kernel",
        "quantize_rows_kernel",
        "penalties_kernel",
        "normaliser_kernel",
        "keys_kernel",
        "pick_kernel",
    ),
    *("rms_norm_kernel", "silu_mul_kernel", "embed_kernel", "move_kernel", "rope_and_cache_kernel"),
    *("route_kernel", "grouped_kernel", "combine_kernel", "shrink_kernel", "expand_kernel"),
    *("plan_rows_kernel", "plan_items_kernel", "decode_kernel", "reduce_kernel"),
    *("plan_sequences_kernel", "plan_tiles_kernel", "plan_chunks_kernel", "plan_chunk_items_kernel", "prefill_kernel"),
}

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")


def compiled(*arguments: str) -> list[dict]:
    environ = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.support.kernels.compile_for_cuda", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert not [line for line in lines if "error" in line]
    return lines


def check(lines: list[dict]) -> None:
    for line in lines:
        assert line["shared"] <= SHARED_BYTES, line
        # "spilled": bytes per thread of registers that did not fit. float32 serves comparisons only, not production.
        assert line["spilled"] <= (2048 if "fp32" in line["for"] else 128), line
        if line["kernel"] in ("decode_kernel", "prefill_kernel"):
            assert line["async_copies"], f"tiles are not fetched ahead: {line}"


@pytest.mark.soak
def test_every_kernel_compiles_and_fits():
    lines = compiled()
    assert {line["kernel"] for line in lines} == KERNELS
    check(lines)
    # A row has the same bits in a prompt and in a decode step only if the same instructions multiply it in both.
    multiplied = [line["shapes"] for line in lines if "invariant" in line["for"] and line["shapes"]]
    assert multiplied == [multiplied[0]] * 2
    # 16-bit prefill uses Hopper's wgmma instructions; a decode tile is too small for wgmma and uses mma.
    for line in lines:
        if line["kernel"] == "prefill_kernel" or (line["kernel"] == "decode_kernel" and "invariant" in line["for"]):
            assert line["wgmma"], line
            # Masked and whole tiles both use fused multiply-adds. Otherwise a row's bits depend on the rows around it.
            assert line["fused"] >= line["exponentials"], f"some weights are rounded twice on the way: {line}"
        elif line["kernel"] == "decode_kernel":
            assert line["mma"], line
        if line["kernel"] in ("rms_norm_kernel", "silu_mul_kernel", "move_kernel", "rope_and_cache_kernel"):
            assert line["wide_loads"], f"memory is read in single values: {line}"


@pytest.mark.soak
def test_tiles_fit_a_device_with_less_shared_memory():
    lines = compiled("--capability", "89")
    assert {line["kernel"] for line in lines} >= {"decode_kernel", "prefill_kernel", "matmul_kernel"}
    for line in lines:
        assert line["shared"] <= 99 << 10, line


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(8))
def test_every_specialisation_compiles_and_fits(part):
    check(compiled("--part", f"{part}/8"))
