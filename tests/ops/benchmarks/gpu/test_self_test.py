"""The first part of `make gpu-check`: the self-test of workers, with the shapes of published models."""

from __future__ import annotations

from argparse import Namespace

import torch

from quire import kernels
from quire.ops.benchmarks.gpu import __main__ as main
from quire.ops.benchmarks.gpu import self_test
from quire.ops.benchmarks.stack.random_model import CONFIGS

CPU = torch.device("cpu")


def test_the_self_test_is_the_first_part() -> None:
    assert next(iter(main.PARTS)) == "self-test"
    assert set(self_test.MODELS) <= CONFIGS.keys()


def test_right_kernels_pass_in_a_rehearsal() -> None:
    saved: list[dict] = []
    found = main.PARTS["self-test"].run(Namespace(rehearse=True), saved.append)
    (row,) = found["self_test"]
    assert (found["status"], row["model"], row["cache"], row["faults"]) == ("passed", "small", "float32", [])
    assert found["tests"] == f"{row['cases']} cases, 0 wrong kernels"
    assert saved


def test_a_wrong_kernel_fails_the_part_with_its_line(monkeypatch) -> None:
    ops = kernels.select_ops("cpu", torch.float32)
    right = ops.argmax
    monkeypatch.setattr(ops, "argmax", lambda logits: right(logits) + 1, raising=False)
    monkeypatch.setattr(kernels, "select_ops", lambda *_: ops)
    found = self_test.run(CPU, True, lambda found: None)
    assert found["status"] == "failed"
    assert found["self_test"][0]["faults"][0].startswith(
        "argmax (4 x 512 logits) is wrong here: 100% of its values differ"
    )
