"""The rehearsal of `make gpu-check`: every part on a simulated device in host memory, with tiny shapes.

A rehearsal measures nothing. It shows that the check and the host's part of the GPU code run to their end.
The simulated device belongs to the tests (tests/support/simulated_cuda).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from quire.ops.benchmarks.gpu import packages

NOTICE = (
    "rehearsal: on a simulated device in host memory, with tiny shapes. No figure is a measurement, and no result says "
    "anything about a card."
)
STATUS = "rehearsed"  # of a part that passes
DEVICE_BYTES = 400 << 20
# A worker that computes in Triton's interpreter can only do small steps in reasonable time.
SEQUENCES, TOKENS, STEPS = 4, 32, 3
# Nor is the self-test for it: the simulated device lacks some of torch's operations that the cases use.
WORKER_ARGUMENTS = (
    *("--max-num-seqs", f"{SEQUENCES}", "--max-num-batched-tokens", f"{TOKENS}", "--block-size", "16"),
    *("--self-test", "off"),
)
SIMULATION = packages.ROOT / "tests" / "support" / "simulated_cuda" / "site"  # has a sitecustomize.py


@contextmanager
def simulated_device() -> Iterator[None]:
    """Replace torch.cuda in this process."""
    from tests.support.simulated_cuda.driver import simulated_cuda

    with simulated_cuda(total=DEVICE_BYTES):
        yield


@contextmanager
def simulated_device_of_children() -> Iterator[None]:
    """Replace torch.cuda in the processes that this one starts."""
    paths = [str(SIMULATION), str(packages.ROOT), os.environ.get("PYTHONPATH", "")]
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "SIMULATED_CUDA_BYTES": str(DEVICE_BYTES)}
    with mock.patch.dict(os.environ, variables):
        yield


def kernel_cases() -> list[Any]:
    """Return the cases of the kernel benchmark with tiny shapes."""
    from quire.ops.benchmarks.kernels.gpu import (
        CASES,
        AddRmsNorm,
        AttentionCase,
        Heads,
        Logits,
        Moves,
        RopeAndCache,
        SiluMul,
    )

    heads = Heads(4, 2, 16, 16)
    found: list[Any] = []
    for case in CASES:
        if isinstance(case, AttentionCase):
            queries = case.queries and min(case.queries, 4)
            found.append(replace(case, lengths=(12, 5), queries=queries, heads=heads))
        elif isinstance(case, Moves):
            found.append(replace(case, blocks=2, layers=2, heads=heads))
        elif isinstance(case, Logits):
            found.append(replace(case, rows=2, vocabulary=64))
        elif isinstance(case, RopeAndCache):
            found.append(replace(case, tokens=3, heads=heads))
        elif isinstance(case, AddRmsNorm):
            found.append(replace(case, tokens=3, hidden=64))
        else:
            assert isinstance(case, SiluMul)
            found.append(replace(case, tokens=3, inner=64))
    return found
