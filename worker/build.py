"""From settings to an engine that is warmed up: device, model, memory, limits, pinned prefixes."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from quire import kernels
from quire.shared.messages import SamplingParams
from quire.shared.text.chat_template import load_chat_template
from quire.shared.text.tokenizer import load_tokenizer, read_json, read_special_tokens
from quire.worker.device import backend, devices, graph_capture, memory_plan
from quire.worker.device.device_runner import DeviceRunner
from quire.worker.device.graphs import GraphBucket
from quire.worker.device.memory import available_memory
from quire.worker.device.runner import Runner
from quire.worker.engine.engine import Engine
from quire.worker.engine.grammars import Grammars
from quire.worker.engine.limits import EngineLimits, RequestRefused
from quire.worker.engine.offline import generate
from quire.worker.engine.pacing import PrefillPacer
from quire.worker.errors import WorkerStartError
from quire.worker.inspect import fingerprint
from quire.worker.models.choice import choose_model
from quire.worker.models.config import ModelConfig
from quire.worker.models.decoder import Decoder
from quire.worker.models.loader import resolve
from quire.worker.models.paged import CheckpointConfig, PagedModel
from quire.worker.models.transformers_backend import TransformersModel
from quire.worker.models.transformers_config import TransformersConfig
from quire.worker.progress import progress
from quire.worker.queue.pinned_prefixes import PrefixError, load_prefixes, pin_prefixes
from quire.worker.ranks.leader import Followers, LeadingDecoder, reason, recorder
from quire.worker.settings import WorkerSettings

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from quire.worker.queue.pinned_prefixes import PinnedPrompt

log = logging.getLogger(__name__)

GIB = 1024**3
# On a CPU the cache shares the memory with everything else on the machine.
CPU_CACHE_LIMIT = 2 * GIB
CPU_CACHE_SHARE = 0.3
# Of what is free beside that, for blocks that are swapped out.
CPU_SWAP_SHARE = 0.2


def build_engine(settings: WorkerSettings, name: str) -> Engine:
    """Build and warm up the engine, and pin its prefixes. Raises WorkerStartError, CheckpointError."""
    device = devices.choose_device(settings.device)
    check(settings, device)
    if not Path(settings.model).is_dir():
        progress.phase(f"looking for {settings.model} in the cache and on the Hugging Face Hub")
    path = resolve(settings.model)
    progress.phase("reading the configuration")
    config = choose_model(path, settings.model_impl)
    devices.check_ranks(settings, device, config)
    texts = read_texts(settings, path)
    dtype = devices.choose_dtype(settings.dtype, device)
    ops = backend.make_ops(settings, device, dtype)
    threads, ranks = backend.set_threads(settings, ops), settings.tensor_parallel_size
    where = f"{threads} threads" if device.type == "cpu" else devices.describe(device)
    where += f", as {ranks} ranks" if ranks > 1 else ""
    log.info("loading %s as %s with %s kernels on %s", path, str(dtype)[6:], backend.kernels_name(ops), where)
    check_weights(path, config, dtype, device, ranks)
    progress.phase("loading weights")
    try:
        model = load_model(settings, path, config, ops, device)
        model.weights_digest = fingerprint.of_weights(path)
        return make_engine(settings, name, model, texts, device)
    except Exception as error:
        raise_in_one_line(error)
        if isinstance(failed := reason(error), kernels.PinningFailed):
            raise WorkerStartError(
                f"--swap-gb {settings.swap_gb:g}: {failed}; lower it, or take --preemption recompute, which needs none"
            ) from error
        if not isinstance(failed, torch.OutOfMemoryError):
            raise
        raise WorkerStartError(
            f"out of the GPU's memory at start, where {memory_plan.free_memory(device) / GIB:.2f} GiB of it are free: "
            f"end what else uses it, lower --gpu-memory-utilization (now {settings.gpu_memory_utilization:g}) or "
            "--max-num-batched-tokens, or take a smaller model"
        ) from error


def raise_in_one_line(error: Exception) -> None:
    """Raise WorkerStartError if the error is one of Triton's, on any rank: kernel, cause and remedy. Else return."""
    if failure := kernels.triton_failure(reason(error)):
        raise WorkerStartError(f"{failure}; or take --kernels reference, which computes with torch") from error


def load_model(
    settings: WorkerSettings,
    path: Path,
    config: ModelConfig | TransformersConfig,
    ops: kernels.Ops,
    device: torch.device,
) -> PagedModel:
    """The model, or this rank's part of it and the processes that have the others."""
    if isinstance(config, TransformersConfig):
        logs = LoadingLog(), LoadingLog("packed", "packing weights")
        return TransformersModel.load(config, ops, device, settings.max_model_len, *logs)
    checkpoint = path, ops, ops.dtype, device, settings.max_model_len, LoadingLog()
    if settings.tensor_parallel_size == 1:
        return Decoder.load(*checkpoint)
    followers = Followers(settings, path, ops)
    return LeadingDecoder.lead(followers, *checkpoint)


def make_engine(
    settings: WorkerSettings, name: str, model: PagedModel, texts: ModelTexts, device: torch.device
) -> Engine:
    """An engine over a loaded model, warmed up."""
    if isinstance(model.ops, kernels.CpuOps) and not model.multiplies_in_torch:
        # What is left for torch is small, and its idle threads would spin against those of the kernels.
        torch.set_num_threads(1)
    progress.phase("sizing the KV cache")
    limits = choose_limits(settings, model, device)
    log_limits(model, limits, settings.tensor_parallel_size)
    runner = (
        Runner
        if device.type == "cpu"
        else partial(DeviceRunner, graph_buckets=graph_buckets(settings, limits), record=recorder(model))
    )
    # As the gateway does: where the configuration names no end token, it is the tokenizer's.
    eos_token_ids = model.config.eos_token_ids or tuple(eos for eos in texts.eos_token_ids if eos < model.vocab_size)
    grammars = Grammars(texts.tokenizer, model.vocab_size, eos_token_ids)
    engine = Engine(model, limits, eos_token_ids, texts.tokenizer, name, runner=runner, grammars=grammars)
    progress.phase("warming up")
    warm_up(engine)
    graph_capture.capture_graphs(engine)
    if settings.itl_target_ms:
        limit = min(settings.max_prefill_tokens or limits.max_num_batched_tokens, limits.max_num_batched_tokens)
        engine.pacer = PrefillPacer(settings.itl_target_ms / 1000, limits.block_size, limit)
    pin(engine, texts.prefixes)
    return engine


def check(settings: WorkerSettings, device: torch.device) -> None:
    """Raise WorkerStartError for settings that contradict each other."""
    tokens, sequences = memory_plan.max_num_batched_tokens(settings, device), memory_plan.max_num_seqs(settings, device)
    if tokens < sequences:
        raise WorkerStartError(
            f"--max-num-batched-tokens {tokens} is below --max-num-seqs {sequences}: each running sequence needs one "
            "token of every step; raise the first"
        )
    if settings.beat_s > settings.lease_s / 2:
        raise WorkerStartError(
            f"--beat-s {settings.beat_s:g} is more than half of --lease-s {settings.lease_s:g}: a worker would "
            "lose its requests by one late beat; lower the first or raise the second"
        )
    if settings.preemption == "swap" and not settings.swap_gb:
        raise WorkerStartError(
            "--preemption swap needs host memory, and --swap-gb is 0: raise it, or take --preemption recompute"
        )


def check_weights(
    path: Path, config: CheckpointConfig, dtype: torch.dtype, device: torch.device, ranks: int = 1
) -> None:
    """Raise WorkerStartError, before minutes go into loading them, for weights that do not fit."""
    needed, free = config.least_weight_bytes(dtype), memory_plan.free_memory(device)
    if device.type == "cuda":  # each has its own memory
        needed //= ranks
    if needed > free:
        where = "GPU" if device.type == "cuda" else "machine"
        narrower = ", take --dtype bfloat16 or float16" if dtype.itemsize > 2 else ""
        raise WorkerStartError(
            f"{path}: its weights take {needed / GIB:.2f} GiB as {str(dtype)[6:]}, and {free / GIB:.2f} GiB of the "
            f"{where}'s memory are free: end what else uses it{narrower}, or take a smaller model or a larger {where}"
        )


def choose_limits(settings: WorkerSettings, model: PagedModel, device: torch.device) -> EngineLimits:
    """What the engine may hold. Raises WorkerStartError where not even one sequence of the maximum length fits."""
    max_model_len = model.max_model_len
    # Of one rank; on a CPU they share the machine's memory, and that of the host they share everywhere.
    bytes_per_block = model.kv_bytes_per_block(settings.block_size)
    bytes_of_all = bytes_per_block * settings.tensor_parallel_size
    if device.type == "cpu":
        bytes_per_block = bytes_of_all
    sequences, tokens = memory_plan.max_num_seqs(settings, device), memory_plan.max_num_batched_tokens(settings, device)
    if device.type == "cuda":
        room, most, tokens = memory_plan.plan_cuda_memory(settings, model, max_model_len, recorder(model))
        narrower = (
            "take --kv-cache-dtype fp8, " if settings.kv_cache_dtype == "auto" and devices.has_fp8(device) else ""
        )
        remedy = f"raise --gpu-memory-utilization, {narrower}lower --max-num-batched-tokens (now {tokens})"
    else:
        longest = -(-max_model_len // settings.block_size)
        most = available_memory()
        room = min(CPU_CACHE_LIMIT, int(CPU_CACHE_SHARE * most), sequences * longest * bytes_per_block)
        remedy = "raise --kv-cache-gb"
    num_blocks = choose_num_blocks(settings, bytes_per_block, max_model_len, room, remedy)
    if num_blocks * bytes_per_block > most:
        asked = f"--num-blocks {num_blocks}" if settings.num_blocks else f"--kv-cache-gb {settings.kv_cache_gb:g}"
        raise WorkerStartError(
            f"{asked}: that takes {num_blocks * bytes_per_block / GIB:.2f} GiB, and {most / GIB:.2f} GiB are free; "
            "lower it, or leave it out, and it is chosen"
        )
    num_device_bytes = num_blocks * bytes_per_block if device.type == "cpu" else 0
    return EngineLimits(
        num_blocks=num_blocks,
        num_host_blocks=choose_num_host_blocks(settings, bytes_of_all, num_device_bytes, sequences, max_model_len),
        block_size=settings.block_size,
        max_num_seqs=sequences,
        max_num_batched_tokens=tokens,
        max_model_len=max_model_len,
        prefix_caching=settings.prefix_caching,
        max_prefill_tokens=settings.max_prefill_tokens,
        preemption=settings.preemption,
    )


def log_limits(model: PagedModel, limits: EngineLimits, ranks: int = 1) -> None:
    bytes_per_block = model.kv_bytes_per_block(limits.block_size)
    log.info(
        "%s%.0f MiB of weights; KV cache of %d blocks of %d tokens, %.0f MiB; host memory for %d blocks, %.0f MiB; "
        "context %d tokens; %d sequences and %d tokens in a step at most",
        f"on each of {ranks} ranks " if ranks > 1 else "",
        model.weight_bytes / 2**20,
        limits.num_blocks,
        limits.block_size,
        limits.num_blocks * bytes_per_block / 2**20,
        limits.num_host_blocks,
        limits.num_host_blocks * bytes_per_block / 2**20,
        limits.max_model_len,
        limits.max_num_seqs,
        limits.max_num_batched_tokens,
    )


def graph_buckets(settings: WorkerSettings, limits: EngineLimits) -> list[GraphBucket]:
    if not memory_plan.uses_graphs(settings):
        log.info("steps are launched kernel by kernel, without CUDA graphs")
        return []
    return graph_capture.graph_buckets(limits.max_num_seqs, limits.max_num_batched_tokens)


@dataclass(frozen=True)
class ModelTexts:
    """What turns text into tokens, the end token that it names, and the prefixes that are to be pinned."""

    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]
    prefixes: list[PinnedPrompt]


def read_texts(settings: WorkerSettings, path: Path) -> ModelTexts:
    """Read the tokenizer of a model folder and the pinned prefixes. Raises WorkerStartError, ModelError."""
    config = read_json(path / "tokenizer_config.json")
    special_tokens = read_special_tokens(path, config)
    tokenizer = load_tokenizer(path, special_tokens)
    eos = tokenizer.token_to_id(special_tokens["eos_token"]) if "eos_token" in special_tokens else None
    eos_token_ids = () if eos is None else (eos,)
    if not settings.pinned_prefixes:
        return ModelTexts(tokenizer, eos_token_ids, [])
    template = load_chat_template(path, config, special_tokens)
    declared = read_json(path / "config.json", required=True).get("vocab_size")
    vocab_size = declared if type(declared) is int else tokenizer.get_vocab_size()
    try:
        file = Path(settings.pinned_prefixes).expanduser()
        return ModelTexts(tokenizer, eos_token_ids, load_prefixes(file, tokenizer, template, vocab_size))
    except PrefixError as error:
        raise WorkerStartError(str(error)) from error


def pin(engine: Engine, prefixes: list[PinnedPrompt]) -> None:
    """Compute the pinned prefixes. Raises WorkerStartError for one that does not fit."""
    try:
        pin_prefixes(engine, prefixes)
    except PrefixError as error:
        raise WorkerStartError(str(error)) from error


class LoadingLog:
    """Says how far the loading of a checkpoint is: as progress of the start, and every two seconds in the log.

    phase: a phase of the start that begins with the first call; without it the present one goes on.
    """

    def __init__(self, what: str = "loaded", phase: str = "") -> None:
        self._what = what
        self._phase = phase
        self._said = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if self._phase:
            progress.phase(self._phase)
            self._phase = ""
        progress.share(done, total)
        if time.monotonic() - self._said >= 2:
            self._said = time.monotonic()
            log.info("%s %d of %d MiB (%d %%)", self._what, done >> 20, total >> 20, 100 * done // max(total, 1))


def choose_num_blocks(
    settings: WorkerSettings, bytes_per_block: int, max_model_len: int, room: int, remedy: str
) -> int:
    """Blocks of the cache: as set, else what fits into `room` bytes.

    Raises WorkerStartError where not even one sequence of the maximum length fits.
    """
    longest = -(-max_model_len // settings.block_size)
    if settings.num_blocks:
        blocks, remedy = settings.num_blocks, "raise --num-blocks"
    elif settings.kv_cache_gb:
        blocks = int(settings.kv_cache_gb * GIB) // bytes_per_block
    else:
        blocks = room // bytes_per_block
    if blocks < longest:
        need = longest * bytes_per_block / GIB
        raise WorkerStartError(
            f"a KV cache of {blocks} blocks is too small for one sequence of {max_model_len} tokens, which needs "
            f"{longest} blocks ({need:.2f} GiB): {remedy}"
            + (f", or lower --max-model-len to {blocks * settings.block_size}" if blocks else "")
        )
    return blocks


def choose_num_host_blocks(
    settings: WorkerSettings, bytes_per_block: int, taken: int, sequences: int, max_model_len: int
) -> int:
    """Blocks of host memory for swapping: within --swap-gb, a share of the memory that is free but for the `taken`
    bytes, and what all sequences need at their longest. 0 where nothing is ever swapped."""
    if settings.preemption == "recompute" or not settings.swap_gb:
        return 0
    asked = int(settings.swap_gb * GIB) // bytes_per_block
    free = int(CPU_SWAP_SHARE * max(0, available_memory() - taken)) // bytes_per_block
    longest = -(-max_model_len // settings.block_size)
    if free < min(asked, sequences * longest):
        log.warning("--swap-gb %g is more than memory allows: %.2f GiB", settings.swap_gb, free * bytes_per_block / GIB)
    return min(asked, free, sequences * longest)


def warm_up(engine: Engine) -> None:
    """Run a chunk and a decode step once, greedy and drawn, so that the first request pays for no first use.

    On a GPU also what few requests ask for: a kernel is compiled at its first launch, while all others wait.
    """
    prompt = (0,) * max(1, min(7, engine.limits.max_model_len - 2))  # no whole block: its fork is copied
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0}]
    if engine.runner.looks_ahead:
        kinds.append({"n": 2, "presence_penalty": 1.0, "logprobs": True, "top_logprobs": 1})
    for kind in kinds if engine.limits.max_model_len > 2 else ():
        with suppress(RequestRefused):  # a cache or a batch of one sequence
            generate(engine, [prompt] * 2, SamplingParams(max_tokens=2, ignore_eos=True, **kind))
