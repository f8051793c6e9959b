"""Builds an engine from settings: device, model, capacity, warm-up, pinned prefixes."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from quire import kernels
from quire.shared.process.errors import StartError
from quire.shared.protocol.messages import SamplingParams
from quire.worker.capacity import GIB, choose_limits, log_limits
from quire.worker.device import backend, cuda, devices
from quire.worker.device.cache_range import warn_of_saturation
from quire.worker.device.out_of_step import reason
from quire.worker.device.self_test import OFF, check_kernels, level_of, warn_of_assembler
from quire.worker.device.slow_choices import slow_choices
from quire.worker.engine.engine import Engine
from quire.worker.engine.features.drafts.start import start_drafts
from quire.worker.engine.features.grammars import Grammars
from quire.worker.engine.features.images import make_embedder
from quire.worker.engine.features.spill.start import SpillingBlockManager, start_spill
from quire.worker.engine.limits import EngineLimits, RequestRefused
from quire.worker.engine.offline import generate
from quire.worker.engine.pacing import PrefillPacer
from quire.worker.engine.paged_model import PagedModel
from quire.worker.engine.runner import Runner
from quire.worker.image_examination import examine_images
from quire.worker.inspect import fingerprint
from quire.worker.model_texts import ModelTexts, read_texts
from quire.worker.models import choice
from quire.worker.models.choice import Checkpoint, choose_model
from quire.worker.models.files.loader import resolve
from quire.worker.models.native.config import ModelConfig
from quire.worker.preflight import check_settings, check_weights
from quire.worker.progress import LoadingLog, progress
from quire.worker.queue.adapter_loader import load_adapters
from quire.worker.ranks.leader import Followers, lead
from quire.worker.ranks.number import check_ranks, choose_ranks
from quire.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

# Requests of the warm-up.
GREEDY = SamplingParams(max_tokens=2, ignore_eos=True, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=2, ignore_eos=True, temperature=1.0)
# With operations that few requests need.
RARE = SamplingParams(max_tokens=2, ignore_eos=True, n=2, presence_penalty=1.0, logprobs=True, top_logprobs=1)


def build_engine(settings: WorkerSettings, name: str) -> Engine:
    """Build and warm up the engine, and pin its prefixes. Raises StartError, CheckpointError."""
    device = devices.choose_device(settings.device)
    check_settings(settings, device)
    if not Path(settings.model).exists():
        progress.phase(f"looking for {settings.model} in the cache and on the Hugging Face Hub")
    path = resolve(settings.model)
    progress.phase("reading the configuration")
    config = choose_model(path, settings.model_impl)
    settings = choose_ranks(settings, device, config)
    check_ranks(settings, device, config)
    texts = read_texts(settings, path)
    devices.check_quantization(settings, device, config)
    has_integers = devices.has_integers(settings, device, config)
    dtype = devices.choose_dtype(settings.dtype, device, has_integers)
    if isinstance(config, ModelConfig):
        settings = backend.choose_kernels(settings, device, dtype, config.largest_head_dim)
    stored = config.dtype if isinstance(config, ModelConfig) else None
    ops = backend.make_ops(settings, device, dtype, stored)
    warn_of_assembler(device, settings)
    for line in slow_choices(settings, ops, stored, has_integers):
        log.warning(line)
    ranks = settings.num_ranks
    cpus = os.sched_getaffinity(0)  # of all ranks
    placement = backend.place_threads(settings, ops)
    where = str(placement) if device.type == "cpu" else devices.describe(device)
    where += f", as {ranks} ranks" if ranks > 1 else ""
    where += f", with a KV cache in {str(ops.kv_dtype)[6:]}" if ops.kv_dtype is not dtype else ""
    types = str(dtype)[6:] + ("" if settings.quantization == "none" else f" with {settings.quantization} weights")
    log.info("loading %s as %s with %s kernels on %s", path, types, backend.kernels_name(ops), where)
    check_weights(path, config, dtype, device, ranks, devices.quantized_bits(settings))
    progress.phase("loading weights")
    try:
        model = load_model(settings, path, config, ops, device, cpus)
        if config.is_wrapped:
            progress.phase("examining images")
            examine_images(path, settings.model_impl, model)
        if level_of(settings, device) != OFF:
            progress.phase("testing the kernels")
        has_graphs = device.type == "cuda" and devices.uses_graphs(settings)
        settings = check_kernels(settings, model, device, cuda.record_on_cuda if has_graphs else None)
        if device.type == "cuda":
            cuda.release()
        warn_of_saturation(model, settings.block_size)
        adapters = load_adapters(settings, name, model)
        model.weights_digest = fingerprint.of_weights(path, settings.quantization)
        engine = make_engine(settings, name, model, texts, device)
        engine.adapters.limit = max(settings.max_loras, len(adapters))
        engine.adapters.max_bytes = int(settings.max_lora_gb * GIB)
        for adapter in adapters:
            engine.adapters.add(adapter)
        if settings.spills:
            spill(settings, engine, path)
        return engine
    except Exception as error:
        raise_in_one_line(error)
        if isinstance(failed := reason(error), kernels.PinningFailed):
            raise StartError(
                f"--swap-gb {settings.swap_gb:g}: {failed}; lower it, or take --preemption recompute, which needs none"
            ) from error
        if not isinstance(failed, torch.OutOfMemoryError):
            raise
        raise StartError(
            f"out of the GPU's memory at start, with {devices.free_memory(device) / GIB:.2f} GiB of it free: end "
            f"what else uses it, lower --gpu-memory-utilization (now {settings.gpu_memory_utilization:g}) or "
            "--max-num-batched-tokens, or take a smaller model"
        ) from error


def raise_in_one_line(error: Exception) -> None:
    """Raise StartError if the error is one of Triton's, on any rank: kernel, cause and remedy. Else return."""
    if failure := kernels.triton_failure(reason(error)):
        raise StartError(f"{failure}; or take --kernels reference, which computes with torch") from error


def load_model(
    settings: WorkerSettings,
    path: Path,
    config: Checkpoint,
    ops: kernels.Ops,
    device: torch.device,
    cpus: Collection[int] = (),
) -> PagedModel:
    """Load the model; with tensor parallelism this rank's part of it, and start the processes of the other ranks.

    cpus: those that all ranks together may use; by default the CPUs of this process.
    """
    if isinstance(config, ModelConfig):
        limit_torch_threads(ops)
    read, packed, bits = LoadingLog(), LoadingLog("packed", "packing weights"), devices.quantized_bits(settings)
    if settings.num_ranks == 1:
        return choice.load_model(path, config, ops, device, settings.max_model_len, read, packed, bits=bits)
    followers = Followers(settings, path, ops, cuda.record_on_cuda, cpus=cpus)
    return lead(followers, path, config, ops, device, settings.max_model_len, read, packed, bits)


def limit_torch_threads(ops: kernels.Ops) -> None:
    """Leave the processors to the threads of the C++ kernels, if these compute.

    Torch has little to do then. The threads of torch wait for each other actively and would compete with the kernels.
    """
    if isinstance(ops, kernels.CpuOps):
        torch.set_num_threads(1)


def make_engine(
    settings: WorkerSettings, name: str, model: PagedModel, texts: ModelTexts, device: torch.device
) -> Engine:
    """Make an engine for a loaded model, warmed up."""
    if not model.multiplies_in_torch:
        limit_torch_threads(model.ops)
    progress.phase("sizing the KV cache")
    memory = None
    if device.type == "cuda":
        memory = cuda.plan_cuda_memory(settings, model, model.max_model_len, cuda.recorder(model))
    limits = choose_limits(settings, model, device, memory)
    log_limits(model, limits, settings.num_ranks)
    runner = (
        Runner
        if device.type == "cpu"
        else partial(cuda.DeviceRunner, graph_buckets=graph_buckets(settings, limits), record=cuda.recorder(model))
    )
    eos_token_ids = model.config.eos_token_ids
    if texts.eos_token_id is not None and texts.eos_token_id < model.vocab_size:
        eos_token_ids = tuple(dict.fromkeys([*eos_token_ids, texts.eos_token_id]))  # as in the gateway
    grammars = Grammars(texts.tokenizer, model.vocab_size, eos_token_ids)
    blocks = SpillingBlockManager.of(limits) if settings.spills else None
    engine = Engine(model, limits, eos_token_ids, texts.tokenizer, name, blocks, runner=runner, grammars=grammars)
    engine.images = make_embedder(model, limits)
    if engine.images is None and model.config.is_wrapped:
        engine.no_images = model.why_no_images
    progress.phase("warming up")
    warm_up(engine)
    cuda.capture_graphs(engine)
    engine.drafts = start_drafts(settings.speculation, engine)
    if settings.itl_target_ms:
        limit = min(settings.max_prefill_tokens or limits.max_num_batched_tokens, limits.max_num_batched_tokens)
        engine.pacer = PrefillPacer(settings.itl_target_ms / 1000, limits.block_size, limit)
    texts.pin_prefixes(engine)
    return engine


def spill(settings: WorkerSettings, engine: Engine, path: Path) -> None:
    """Have the engine keep evicted blocks as the settings say. path: of the checkpoint. Raises StartError."""
    progress.phase("reading the checkpoint for the fingerprint of blocks")
    model, folder = engine.runner.model, Path(settings.kv_spill_dir) if settings.kv_spill_dir else None
    parts = backend.arithmetic_labels(model) | {"quantization": settings.quantization}
    parts |= {"results": fingerprint.of_results(engine) or model.self_test_report.digest}
    start_spill(engine, settings.kv_host_gb, folder, settings.kv_spill_gb, path, parts)


def warm_up(engine: Engine) -> None:
    """Run a prefill chunk and a decode step, greedy and sampled, so that no request pays for first uses.

    On a GPU also with rare operations: a kernel is compiled at its first launch, during which all requests would wait.
    """
    if engine.limits.max_model_len <= 2:
        return
    prompt = (0,) * max(1, min(7, engine.limits.max_model_len - 2))  # not a whole block, so that a fork copies it
    for params in (GREEDY, SAMPLED, RARE) if engine.runner.looks_ahead else (GREEDY, SAMPLED):
        with suppress(RequestRefused):  # the engine holds one sequence only
            generate(engine, [prompt] * 2, params)


def graph_buckets(settings: WorkerSettings, limits: EngineLimits) -> list[cuda.GraphBucket]:
    """The CUDA graphs to capture; none if they are switched off."""
    if not devices.uses_graphs(settings):
        log.info("steps are launched kernel by kernel, without CUDA graphs")
        return []
    return cuda.graph_buckets(limits.max_num_seqs, limits.max_num_batched_tokens)
