"""Start of a worker process: a running service, or one line that says what is wrong, where, and the remedy."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shared.logs import setup_logging
from shared.naming import InvalidModelName, served_name
from shared.redis_clients import BrokerUnavailable, check_redis
from shared.templates import load_chat_template
from shared.tokenizer import ModelError, load_tokenizer, read_json, read_special_tokens
from worker.settings import WorkerSettings

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from worker.prefixes import Prefix

log = logging.getLogger(__name__)

GIB = 1024**3
# On a CPU the cache shares the memory with everything else on the machine.
CPU_CACHE_LIMIT = 2 * GIB
CPU_CACHE_SHARE = 0.3
# Of what is free beside that, for blocks that are swapped out.
CPU_SWAP_SHARE = 0.2
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

    from worker.internal import PortError, bind
    from worker.service import WorkerService

    started = time.perf_counter()
    name = served_name(settings.model, settings.served_model_name)
    # What may be wrong is found before minutes may go into loading.
    asyncio.run(check_redis(settings.redis_url))
    try:
        listener = bind(settings.internal_host, settings.internal_port)
    except PortError as error:
        raise StartError(str(error)) from error
    engine = build_engine(settings, name)
    log.info("model and engine are ready after %.1f s", time.perf_counter() - started)
    service = WorkerService(
        engine, model_name=name, worker_id=settings.name, redis_url=settings.redis_url, listener=listener
    )
    # The event loop needs the interpreter between the engine's calls; by default it would wait up to 5 ms for it.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    # What exists now lives as long as the process: the collector need not look at it in every step.
    gc.collect()
    gc.freeze()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(service.run(settings.drain_s))


def build_engine(settings: WorkerSettings, name: str):  # type: ignore[no-untyped-def]
    """The engine that the settings ask for, warmed up, with its pinned prefixes."""
    import torch

    import kernels
    from worker.engine.engine import Engine
    from worker.engine.limits import EngineLimits
    from worker.engine.pacing import PrefillPacer
    from worker.models.decoder import Decoder
    from worker.models.loader import resolve

    check(settings)
    threads = settings.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    path = resolve(settings.model)
    texts = read_texts(settings, path)
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
    bytes_per_block = model.kv_bytes_per_block(settings.block_size)
    num_blocks = choose_num_blocks(settings, bytes_per_block, max_model_len)
    limits = EngineLimits(
        num_blocks=num_blocks,
        num_host_blocks=choose_num_host_blocks(settings, bytes_per_block, num_blocks, max_model_len),
        block_size=settings.block_size,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=max_model_len,
        prefix_caching=settings.prefix_caching,
        max_prefill_tokens=settings.max_prefill_tokens,
        preemption=settings.preemption,
    )
    log.info(
        "%.0f MiB of weights; KV cache of %d blocks of %d tokens, %.0f MiB; host memory for %d blocks, %.0f MiB; "
        "context %d tokens",
        model.weight_bytes / 2**20,
        limits.num_blocks,
        limits.block_size,
        limits.num_blocks * bytes_per_block / 2**20,
        limits.num_host_blocks,
        limits.num_host_blocks * bytes_per_block / 2**20,
        max_model_len,
    )
    engine = Engine(model, limits, model.config.eos_token_ids, texts.tokenizer, name)
    warm_up(engine)
    if settings.itl_target_ms:
        limit = min(settings.max_prefill_tokens or limits.max_num_batched_tokens, limits.max_num_batched_tokens)
        engine.pacer = PrefillPacer(settings.itl_target_ms / 1000, limits.block_size, limit)
    pin(engine, texts.prefixes)
    return engine


def check(settings: WorkerSettings) -> None:
    """Raise StartError for settings that contradict each other, or this version."""
    if settings.device == "cuda":
        raise StartError("--device cuda: this version runs on the CPU only; use --device auto or cpu")
    if settings.max_num_batched_tokens < settings.max_num_seqs:
        raise StartError(
            f"--max-num-batched-tokens {settings.max_num_batched_tokens} is below --max-num-seqs "
            f"{settings.max_num_seqs}: each running sequence needs one token of every step; raise the first"
        )
    if settings.preemption == "swap" and not settings.swap_gb:
        raise StartError(
            "--preemption swap needs host memory, and --swap-gb is 0: raise it, or take --preemption recompute"
        )


@dataclass(frozen=True)
class ModelTexts:
    """What turns text into tokens, and the prefixes that are to be pinned."""

    tokenizer: Tokenizer
    prefixes: list[Prefix]


def read_texts(settings: WorkerSettings, path: Path) -> ModelTexts:
    """The tokenizer of a model folder, and the pinned prefixes in its tokens. Raises StartError and ModelError."""
    from worker.prefixes import PrefixError, load_prefixes

    config = read_json(path / "tokenizer_config.json")
    special_tokens = read_special_tokens(path, config)
    tokenizer = load_tokenizer(path, special_tokens)
    if not settings.pinned_prefixes:
        return ModelTexts(tokenizer, [])
    template = load_chat_template(path, config, special_tokens)
    declared = read_json(path / "config.json", required=True).get("vocab_size")
    vocab_size = declared if type(declared) is int else tokenizer.get_vocab_size()
    try:
        file = Path(settings.pinned_prefixes).expanduser()
        return ModelTexts(tokenizer, load_prefixes(file, tokenizer, template, vocab_size))
    except PrefixError as error:
        raise StartError(str(error)) from error


def pin(engine, prefixes: list[Prefix]) -> None:  # type: ignore[no-untyped-def]
    """Compute the pinned prefixes. Raises StartError for one that does not fit."""
    from worker.prefixes import PrefixError, pin_prefixes

    try:
        pin_prefixes(engine, prefixes)
    except PrefixError as error:
        raise StartError(str(error)) from error


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


def choose_num_host_blocks(settings: WorkerSettings, bytes_per_block: int, num_blocks: int, max_model_len: int) -> int:
    """Blocks of host memory for swapping: within --swap-gb, a share of the memory that the cache leaves free, and what
    all sequences need at their longest. 0 where nothing is ever swapped."""
    if settings.preemption == "recompute" or not settings.swap_gb:
        return 0
    asked = int(settings.swap_gb * GIB) // bytes_per_block
    free = int(CPU_SWAP_SHARE * max(0, available_memory() - num_blocks * bytes_per_block)) // bytes_per_block
    longest = -(-max_model_len // settings.block_size)
    if free < min(asked, settings.max_num_seqs * longest):
        log.warning("--swap-gb %g is more than memory allows: %.2f GiB", settings.swap_gb, free * bytes_per_block / GIB)
    return min(asked, free, settings.max_num_seqs * longest)


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
