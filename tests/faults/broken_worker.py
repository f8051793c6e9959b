"""`quire` with faults on order: steps that take their time, prompts that kill or hang the process, a wrong clock.

The environment says which: TEST_STEP_S seconds for each step; a prompt with the token TEST_DEADLY_TOKEN kills the
process as a defect in a kernel would; one with TEST_HANGING_TOKEN makes its step hang; the clock is TEST_CLOCK_S fast.
TEST_SAYS, token ids with commas between them, is what a greedy answer to a prompt of one token then is.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

from quire.ops.cli.main import main
from quire.worker.models.batch import ForwardBatch
from quire.worker.models.decoder import Decoder
from quire.worker.models.paged import KVCache

STEP_S = float(os.environ.get("TEST_STEP_S", "0"))
DEADLY = int(os.environ.get("TEST_DEADLY_TOKEN", "-1"))
HANGING = int(os.environ.get("TEST_HANGING_TOKEN", "-1"))
CLOCK_S = float(os.environ.get("TEST_CLOCK_S", "0"))
SAYS = [int(token) for token in os.environ.get("TEST_SAYS", "").split(",") if token]

_now = time.time

_forward = Decoder.forward


def forward(self: Decoder, batch: ForwardBatch, kv_cache: KVCache) -> torch.Tensor:
    time.sleep(STEP_S)
    if (batch.token_ids == DEADLY).any():
        os.kill(os.getpid(), signal.SIGKILL)
    if (batch.token_ids == HANGING).any():
        time.sleep(3600)
    logits = _forward(self, batch, kv_cache)
    if SAYS:
        positions = batch.positions[batch.logits_rows].tolist()
        for row, position in zip(logits, positions, strict=True):
            row[SAYS[position % len(SAYS)]] = 1e6
    return logits


def skewed() -> float:
    return _now() + CLOCK_S


if __name__ == "__main__":
    time.time = skewed
    Decoder.forward = forward  # type: ignore[method-assign]
    sys.exit(main())
