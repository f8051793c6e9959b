"""A worker whose model computes nothing and whose steps have a given length, to measure gateway and Redis alone.

python -m quire.ops.benchmarks.stack.clockwork --redis-url redis://127.0.0.1:6379/0 --step-ms 20 --log steps.msgpack

Everything else is like a worker: claims, commits, heartbeats and the settings of the interpreter. All tokens are equal.
At its end it writes a log of its steps for `pair.py`: [start, end, {request id: tokens so far}] of each step, with
times of the monotonic clock in seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import torch
import uvloop

from quire.shared.protocol.messages import GenerationRequest, StepItem
from quire.shared.telemetry.logs import setup_logging
from quire.worker.engine.engine import Engine
from quire.worker.engine.groups import DEFAULT_PRIORITY
from quire.worker.engine.limits import EngineLimits
from quire.worker.engine.sequence import ScoredPrompt
from quire.worker.engine_runtime import EngineRuntime
from quire.worker.interpreter import settle
from quire.worker.service import WorkerService

# An ordinary word of the checkpoints in ops/benchmarks/stack/checkpoint.py.
TOKEN = 7
VOCAB = 2048


class NoCache:
    """A KV cache without memory."""

    def copy_blocks(self, src: list[int], dst: list[int]) -> None: ...
    def swap_out(self, src: list[int], dst: list[int]) -> None: ...
    def swap_in(self, src: list[int], dst: list[int]) -> None: ...


class NoModel:
    """Returns the same logits and the same token for every row."""

    name = "none"
    weights_digest = ""
    state_bytes = 0
    vocab_size = VOCAB

    def __init__(self, max_num_seqs: int, token_s: float = 0.0) -> None:
        """token_s: time that a token of a step takes."""
        self._token_s = token_s
        self.ops = self
        self.device = torch.device("cpu")
        self._logits = torch.zeros(max_num_seqs, VOCAB)
        self._tokens = torch.full((max_num_seqs,), TOKEN, dtype=torch.int32)

    def alloc_kv_cache(self, num_blocks: int, block_size: int, num_host_blocks: int = 0) -> NoCache:
        return NoCache()

    def forward(self, batch: Any, kv_cache: NoCache) -> torch.Tensor:
        if self._token_s:
            time.sleep(self._token_s * len(batch.token_ids))
        return self._logits[: len(batch.logits_rows)]

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        return self._tokens[: len(logits)]


class Clockwork(Engine):
    """Begins a step at each tick, and records when the step ended."""

    def __init__(self, limits: EngineLimits, step_s: float, token_s: float = 0.0) -> None:
        # NoModel has only the methods that the engine calls.
        super().__init__(NoModel(limits.max_num_seqs, token_s), limits, (), None)  # type: ignore[arg-type]
        self._step_s = step_s
        self._due = 0.0
        self.log: list[tuple[float, float, dict[str, int]]] = []

    def add(
        self,
        request: GenerationRequest,
        earlier: tuple[StepItem, ...] = (),
        priority: int = DEFAULT_PRIORITY,
        pin_as: str | None = None,
        scores: ScoredPrompt | None = None,
        pictures: Mapping[str, bytes] | None = None,
    ) -> None:
        # There is no model that a grammar could constrain, and no tokenizer to compile one for.
        request = replace(request, sampling=replace(request.sampling, grammar=""))
        super().add(request, earlier, priority, pin_as, scores, pictures)

    def step(self) -> list[StepItem]:
        now = time.monotonic()
        if now < self._due:
            time.sleep(self._due - now)
        self._due = max(now, self._due + self._step_s)
        start = time.monotonic()
        items = super().step()
        self.log.append((start, time.monotonic(), {item.request_id: item.end for item in items}))
        return items


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--redis-url", required=True)
    parser.add_argument("--model-name", default="clockwork")
    parser.add_argument("--worker-id", default="clockwork")
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--token-us", type=float, default=0.0, help="further time for each token of a step")
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--log", type=Path)
    args = parser.parse_args()
    setup_logging("worker", "warning")
    limits = EngineLimits(
        num_blocks=args.sequences * 257,
        block_size=16,
        max_num_seqs=args.sequences,
        max_num_batched_tokens=max(4096, args.sequences),
        max_model_len=4096,
    )
    engine = Clockwork(limits, args.step_ms / 1000, args.token_us / 1e6)
    service = WorkerService(
        EngineRuntime(engine), model_name=args.model_name, worker_id=args.worker_id, redis_url=args.redis_url
    )
    settle()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(service.run(0.2))
    if args.log:
        args.log.write_bytes(msgpack.packb(engine.log))


if __name__ == "__main__":
    main()
