"""The tables of a comparison, from figures that are known."""

from __future__ import annotations

from typing import Any

from quire.ops.benchmarks.peers.tables import tables

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


def test_rounds_of_several_measurements_with_one_label_are_put_together() -> None:
    rates = {"quire": [20.0], "vllm": [10.0]}
    text = tables([one("A", "c1", rates), one("A", "c1", {"quire": [30.0], "vllm": [10.0]}), one("B", "c32", rates)])
    assert "| `c1` | 2 | output tokens/s | 25.0 (20.0 to 30.0) | 10.0 (10.0 to 10.0) | 2.50 (2.00 to 3.00) |" in text
    assert "| `c32` | 1 | output tokens/s | 20.0 | 10.0 | 2.00 |" in text
    assert text.index("**A**") < text.index("**B**")
    assert "CPU, 2 cores (AMX, AVX-512 BF16, AVX2)" in text
    assert "at most 2.0 % of a core" in text


def test_each_set_of_flags_is_listed_with_its_cases() -> None:
    first, second = (one("A", case, {"llamacpp": [10.0]}, flags) for case, flags in (("c1", "-a"), ("c32", "-b")))
    text = tables([first, second])
    assert "| llama.cpp 1 | f16 | `c1` | `-a` | 2.5 | `c1` 1,200 |" in text
    assert "| llama.cpp 1 | f16 | `c32` | `-b` |" in text
    assert "Quire /" not in text


def test_the_first_of_several_sides_of_quire_is_compared_with_all_others() -> None:
    text = tables([one("A", "c1", {"quire int8": [30.0], "quire bfloat16": [20.0], "llamacpp": [10.0]})])
    assert "| Quire int8 | Quire bfloat16 | llama.cpp | Quire int8 / Quire bfloat16 | Quire int8 / llama.cpp |" in text
    assert "| `c1` | 1 | output tokens/s | 30.0 | 20.0 | 10.0 | 1.50 | 3.00 |" in text
    assert "| Quire int8 1 | f16 | `c1` |" in text
