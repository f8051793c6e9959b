"""The table at the end of the check."""

from __future__ import annotations

from quire.ops.benchmarks.gpu.table import table


def test_the_table_has_a_line_for_each_finding_and_each_failure() -> None:
    step = {"model": "m", "sequences": 1, "context": 32, "step_ms": 2.0}
    row = {
        "model": "m",
        "what": "load",
        "rate": 50.0,
        "unit": "tok/s",
        "least": 40,
        "floor": 100,
        "wasted_percent": 1.25,
    }
    kernel = {"name": "copy", "ms": 0.5, "gb_per_s": 2000.0, "tflop_per_s": 0.0, "share": 0.75}
    case = {"case": "c1", "output_tokens_per_s": 7.0, "ttft_ms": 3.0, "itl_ms": 1.5, "itl_p99_ms": 2.5}
    parts = {
        "self-test": {
            "status": "failed",
            "self_test": [{"model": "m", "cache": "fp8", "cases": 30, "faults": ["fold is wrong"], "seconds": 0.51}],
        },
        "kernels": {"status": "failed", "tests": "1 failed"},
        "small": {
            "status": "failed",
            "why": "RuntimeError: no luck",
            "rows": [row],
            "steps": [
                step | {"busy_ms": 1.5, "wait_ms": 0.5, "mixed_launch_ms": 9.0},
                step | {"busy_ms": None, "wait_ms": None, "mixed_launch_ms": None},
            ],
            "graphs": [{"model": "m", "count": 70, "seconds": 3.25, "gib": 1.5}],
        },
        "bandwidth": {
            "status": "failed",
            "card": {"copy_bytes_per_s": 3.04e12},
            "kernels": [kernel, {"name": "draw", "error": "RuntimeError: no"}],
        },
        "stack": {"status": "passed", "written_s": 9.0, "ready_s": 30.0, "cases": [case]},
        "peers": {"status": "passed", "what": "load", "quire": 900.0, "generate": 100.0, "generate_batch": None},
        "tiles": {
            "status": "passed",
            "tiles": [
                {"case": "decode", "tiles": "16 x 64", "ms": 1.5, "share": 0.8},
                {"case": "decode", "tiles": "16 x 128", "ms": None, "error": "OutOfResources: shared"},
            ],
            "suggestions": ["decode_tiles: keep the table's tiles"],
        },
        "invariance": {"status": "passed", "invariance": [{"what": "m, 4 x 32", "ratio": 1.25}]},
        "parity": {"status": "skipped", "why": "no time"},
    }
    text = table({"environment": {"GPU": "NVIDIA H100, 79 GiB"}, "parts": parts})
    assert "are of an H200" not in table({"environment": {"GPU": "NVIDIA H200, 140 GiB"}, "parts": parts})
    for wanted in (
        "are of an H200 with copies of 4.3 TB/s. This is NVIDIA H100, 79 GiB, with copies of 3.0 TB/s.",
        "1 failed",
        "m, cache in fp8: 30 cases in 0.5 s, 1 kernels wrong\n    fold is wrong\n",
        "50.0 tok/s   asked for 40, floor 100 (50 %), 1.2 % of the cache in use wasted",
        "2.00 ms, device 1.50, waits for the host 0.500, launching one with a prompt takes 9.00",
        "2.00 ms, no graph",
        "m 70 CUDA graphs: captured in 3.2 s, 1.50 GiB",
        "RuntimeError: no luck",
        "2000.0 GB/s       75 %",
        "failed: RuntimeError: no",
        "ready after 30.0 s",
        "c1: 7 tok/s",
        "Quire 900 tok/s, generate 100 (9.0 times slower, asked for 8)",
        "1.500 ms     80 %",
        "failed: OutOfResources: shared",
        "decode_tiles: keep the table's tiles",
        "batch-invariant, m, 4 x 32: 1.25 times as long",
        "no time",
    ):
        assert wanted in text
