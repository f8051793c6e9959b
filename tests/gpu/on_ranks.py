"""Runs the asynchronous engine over a model that several ranks share. A program, because it exits as a worker does.

    python -m tests.gpu.on_ranks CHECKPOINT [--few]

On CUDA devices it uses a rank per device, at most two. A single rank also exchanges through NCCL, inside graphs too. On
a CPU it uses two ranks without graphs. Prints greedy texts and the number of captured graphs as JSON.

--few: only two prompts and four tokens, for Triton's interpreter.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import torch

from quire import kernels
from quire.shared.protocol.messages import SamplingParams
from quire.worker.device.cuda.graph_capture import graph_buckets
from quire.worker.device.cuda.graphs import record_on_cuda, recorder
from quire.worker.device.cuda.runner import DeviceRunner
from quire.worker.engine.engine import Engine
from quire.worker.engine.limits import EngineLimits
from quire.worker.engine.offline import generate
from quire.worker.interpreter import leave
from quire.worker.ranks.leader import Followers, LeadingDecoder
from quire.worker.settings import WorkerSettings
from tests.worker.engine.test_engine_parity import MAX_TOKENS, prompts


def main() -> None:
    path = Path(sys.argv[1])
    on_cuda = torch.cuda.is_available()
    size = min(2, torch.cuda.device_count()) if on_cuda else 2
    device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
    settings = WorkerSettings(model=str(path), device=device.type, tensor_parallel_size=size)
    ops = kernels.triton_ops(device, torch.float32) if on_cuda else kernels.select_ops("cpu", torch.float32)
    model = LeadingDecoder.lead(Followers(settings, path, ops, record_on_cuda), path, ops, torch.float32, device)
    few = "--few" in sys.argv
    limits = EngineLimits(*((40, 8, 2, 16) if few else (200, 8, 12, 32)), model.max_model_len)
    buckets = graph_buckets(limits.max_num_seqs, limits.max_num_batched_tokens) if on_cuda else []
    runner = partial(DeviceRunner, graph_buckets=buckets, record=recorder(model))
    engine = Engine(model, limits, model.config.eos_token_ids, None, runner=runner)
    while engine.prepare():
        pass
    asked, most = (prompts()[:2], 4) if few else (prompts(), MAX_TOKENS)
    outputs = generate(engine, asked, SamplingParams(max_tokens=most, temperature=0.0))
    captured = engine.runner.graphs.num_captured  # type: ignore[attr-defined]
    symmetric = getattr(model.followers.ranks, "has_symmetric_memory", False)
    found = {"ranks": size, "outputs": outputs, "graphs": captured, "buckets": len(buckets), "symmetric": symmetric}
    print(json.dumps(found), flush=True)
    model.close()
    leave(0)


if __name__ == "__main__":
    main()
