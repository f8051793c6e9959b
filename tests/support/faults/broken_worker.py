"""The command `quire` with injected faults: slow steps, prompts that kill or hang the process, a wrong clock.

Environment variables select the faults. TEST_STEP_S: seconds that each step takes. TEST_DEADLY_TOKEN: a prompt with
this token kills the process as a defect in a kernel would. TEST_HANGING_TOKEN: a prompt with this token makes its step
hang. TEST_CLOCK_S: the clock is fast by this many seconds. TEST_SAYS: comma-separated token ids of the greedy answer to
a prompt of one token.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

from quire.ops.cli.main import main
from quire.worker.engine.forward_batch import ForwardBatch
from quire.worker.engine.paged_model import KVCache
from quire.worker.models.native.decoder import Decoder
from quire.worker.models.transformers.bridge import TransformersModel

STEP_S = float(os.environ.get("TEST_STEP_S", "0"))
DEADLY = int(os.environ.get("TEST_DEADLY_TOKEN", "-1"))
HANGING = int(os.environ.get("TEST_HANGING_TOKEN", "-1"))
CLOCK_S = float(os.environ.get("TEST_CLOCK_S", "0"))
SAYS = [int(token) for token in os.environ.get("TEST_SAYS", "").split(",") if token]

_now = time.time

_hidden, _forward = Decoder._hidden, Decoder.forward
_step = TransformersModel._step


def hidden(self: Decoder, batch: ForwardBatch, kv_cache: KVCache, rows: torch.Tensor) -> torch.Tensor:
    time.sleep(STEP_S)
    if (batch.token_ids == DEADLY).any():
        os.kill(os.getpid(), signal.SIGKILL)
    if (batch.token_ids == HANGING).any():
        time.sleep(3600)
    return _hidden(self, batch, kv_cache, rows)


def step(self: TransformersModel, batch: ForwardBatch, kv_cache: KVCache) -> torch.Tensor:
    time.sleep(STEP_S)
    return _step(self, batch, kv_cache)


def forward(self: Decoder, batch: ForwardBatch, kv_cache: KVCache) -> torch.Tensor:
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
    Decoder._hidden, Decoder.forward = hidden, forward  # type: ignore[method-assign]
    TransformersModel._step = step  # type: ignore[method-assign]
    sys.exit(main())
