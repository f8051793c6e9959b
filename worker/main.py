"""Start of a worker process: a running service, or one line that says what is wrong, where, and the remedy."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
import time
from pathlib import Path

from shared.logs import setup_logging
from shared.naming import InvalidModelName, served_name
from shared.redis_clients import BrokerUnavailable, check_redis
from shared.tokenizer import ModelError, load_tokenizer, read_json, read_special_tokens
from worker.settings import WorkerSettings

log = logging.getLogger(__name__)

GIB = 1024**3
# On a CPU the cache shares the memory with everything else on the machine.
CPU_CACHE_LIMIT = 2 * GIB
CPU_CACHE_SHARE = 0.3
SWITCH_INTERVAL_S = 0.0005


class StartError(RuntimeError):
    """The worker cannot start: one line for people."""


def run(settings: WorkerSettings) -> int:
    """Serve until told to stop. Returns the exit code."""
    setup_logging(f"worker {settings.name}", settings.log_level)
    from worker.models.errors import CheckpointError  # what follows imports torch: only when a worker really starts

    try:
        serve(settings)
        return 0
    except (StartError, CheckpointError, ModelError, BrokerUnavailable, InvalidModelName) as error:
        print(f"quire worker: {error}", file=sys.stderr)
        return 1
    except RuntimeError as error:
        # The traceback is in the log; the last line says what it was.
        log.debug("why the worker ended", exc_info=error)
        print(f"quire worker: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0


def serve(settings: WorkerSettings) -> None:
    """Load the model, build the engine and run the service."""
    import uvloop

    from worker.service import WorkerService

    started = time.perf_counter()
    name = served_name(settings.model, settings.served_model_name)
    asyncio.run(check_redis(settings.redis_url))  # before minutes may go into loading
    engine = build_engine(settings)
    log.info("model and engine are ready after %.1f s", time.perf_counter() - started)
    service = WorkerService(engine, model_name=name, worker_id=settings.name, redis_url=settings.redis_url)
    # The event loop needs the interpreter between the engine's calls; by default it would wait up to 5 ms for it.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    # What exists now lives as long as the process: the collector need not look at it in every step.
    gc.collect()
    gc.freeze()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(service.run(settings.drain_s))


def build_engine(settings: WorkerSettings):  # type: ignore[no-untyped-def]
    """The engine that the settings ask for, warmed up."""
    import torch

    import kernels
    from worker.engine.engine import Engine
    from worker.engine.scheduler import EngineLimits
    from worker.models.decoder import Decoder
    from worker.models.loader import resolve

    if settings.device == "cuda":
        raise StartError("--device cuda: this version runs on the CPU only; use --device auto or cpu")
    if settings.max_num_batched_tokens < settings.max_num_seqs:
        raise StartError(
            f"--max-num-batched-tokens {settings.max_num_batched_tokens} is below --max-num-seqs "
            f"{settings.max_num_seqs}: each running sequence needs one token of every step; raise the first"
        )
    threads = settings.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    path = resolve(settings.model)
    dtype = choose_dtype(settings.dtype)
    try:
        ops = kernels.select_ops("cpu", dtype, settings.kernels)
    except kernels.Unavailable as error:
        raise StartError(f"--kernels {settings.kernels}: {error}; --kernels reference computes with torch") from error
    if isinstance(ops, kernels.CpuOps):
        kernels.set_num_threads(threads)
    log.info("loading %s as %s with %s kernels on %d threads", path, str(dtype)[6:], ops.name, threads)
    model = Decoder.load(path, ops, dtype, "cpu", settings.max_model_len, LoadingLog())
    if isinstance(ops, kernels.CpuOps):
        # What is left for torch is small, and its idle threads would spin against those of the kernels.
        torch.set_num_threads(1)
    max_model_len = settings.max_model_len or model.config.max_position_embeddings
    limits = EngineLimits(
        num_blocks=choose_num_blocks(settings, model.kv_bytes_per_block(settings.block_size), max_model_len),
        block_size=settings.block_size,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=max_model_len,
    )
    log.info(
        "%.0f MiB of weights; KV cache of %d blocks of %d tokens, %.0f MiB; context %d tokens",
        model.weight_bytes / 2**20,
        limits.num_blocks,
        limits.block_size,
        limits.num_blocks * model.kv_bytes_per_block(limits.block_size) / 2**20,
        max_model_len,
    )
    tokenizer = load_tokenizer(path, read_special_tokens(path, read_json(path / "tokenizer_config.json")))
    engine = Engine(model, limits, model.config.eos_token_ids, tokenizer)
    warm_up(engine)
    return engine


class LoadingLog:
    """Says how far the loading of a large checkpoint is, every two seconds."""

    def __init__(self) -> None:
        self._said = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() - self._said >= 2:
            self._said = time.monotonic()
            log.info("loaded %d of %d MiB (%d %%)", done >> 20, total >> 20, 100 * done // max(total, 1))


def choose_dtype(name: str):  # type: ignore[no-untyped-def]
    """The torch dtype of a setting; `auto` is bfloat16 on processors that compute with it, else float32."""
    import torch

    import kernels

    if name == "auto":
        try:
            kernels.CpuOps(torch.bfloat16)
            return torch.bfloat16
        except kernels.Unavailable:
            return torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def choose_num_blocks(settings: WorkerSettings, bytes_per_block: int, max_model_len: int) -> int:
    """Blocks of the cache: as set, else what all sequences need at their longest, within a share of the free memory.

    Raises StartError where not even one sequence of the maximum length fits.
    """
    longest = -(-max_model_len // settings.block_size)
    if settings.num_blocks:
        blocks = settings.num_blocks
    elif settings.kv_cache_gb:
        blocks = int(settings.kv_cache_gb * GIB) // bytes_per_block
    else:
        budget = min(CPU_CACHE_LIMIT, int(CPU_CACHE_SHARE * available_memory()))
        blocks = min(budget // bytes_per_block, settings.max_num_seqs * longest)
    if blocks < longest:
        need = longest * bytes_per_block / GIB
        raise StartError(
            f"a KV cache of {blocks} blocks is too small for one sequence of {max_model_len} tokens, which needs "
            f"{longest} blocks ({need:.2f} GiB): raise --kv-cache-gb to {need:.2f} or lower --max-model-len to "
            f"{max(blocks, 1) * settings.block_size}"
        )
    return blocks


def available_memory() -> int:
    """Bytes that can be used without swapping (Linux: MemAvailable)."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def warm_up(engine) -> None:  # type: ignore[no-untyped-def]
    """Run a chunk and a decode step once, greedy and drawn, so that the first request pays for no first use."""
    from shared.messages import SamplingParams

    prompt = (0,) * max(1, min(8, engine.limits.max_model_len - 2))
    for temperature in (0.0, 1.0) if engine.limits.max_model_len > 2 else ():
        engine.generate([prompt] * 2, SamplingParams(max_tokens=2, temperature=temperature, ignore_eos=True))
