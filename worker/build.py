"""Builds an engine from settings: device, model, capacity, warm-up, pinned prefixes."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import torch

from quire import kernels
from quire.shared.errors import StartError
from quire.worker.capacity import GIB, choose_limits, log_limits
from quire.worker.device import backend, devices, graph_capture, memory_plan
from quire.worker.device.device_runner import DeviceRunner
from quire.worker.device.graphs import GraphBucket
from quire.worker.device.runner import Runner
from quire.worker.engine.engine import Engine
from quire.worker.engine.grammars import Grammars
from quire.worker.engine.limits import EngineLimits
from quire.worker.engine.pacing import PrefillPacer
from quire.worker.inspect import fingerprint
from quire.worker.model_texts import ModelTexts, read_texts
from quire.worker.models.choice import choose_model
from quire.worker.models.config import ModelConfig
from quire.worker.models.decoder import Decoder
from quire.worker.models.loader import resolve
from quire.worker.models.paged import PagedModel
from quire.worker.models.transformers_backend import TransformersModel
from quire.worker.models.transformers_config import TransformersConfig
from quire.worker.preflight import check_settings, check_weights
from quire.worker.progress import LoadingLog, progress
from quire.worker.queue.pinned_prefixes import PrefixError, pin_prefixes
from quire.worker.ranks.leader import Followers, LeadingDecoder, reason, recorder
from quire.worker.settings import WorkerSettings
from quire.worker.warm_up import warm_up

log = logging.getLogger(__name__)


def build_engine(settings: WorkerSettings, name: str) -> Engine:
    """Build and warm up the engine, and pin its prefixes. Raises StartError, CheckpointError."""
    device = devices.choose_device(settings.device)
    check_settings(settings, device)
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
            raise StartError(
                f"--swap-gb {settings.swap_gb:g}: {failed}; lower it, or take --preemption recompute, which needs none"
            ) from error
        if not isinstance(failed, torch.OutOfMemoryError):
            raise
        raise StartError(
            f"out of the GPU's memory at start, with {memory_plan.free_memory(device) / GIB:.2f} GiB of it free: end "
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
    config: ModelConfig | TransformersConfig,
    ops: kernels.Ops,
    device: torch.device,
) -> PagedModel:
    """Load the model; with tensor parallelism this rank's part of it, and start the processes of the other ranks."""
    if isinstance(config, TransformersConfig):
        logs = LoadingLog(), LoadingLog("packed", "packing weights")
        return TransformersModel.load(config, ops, device, settings.max_model_len, *logs)
    if settings.tensor_parallel_size == 1:
        return Decoder.load(path, ops, ops.dtype, device, settings.max_model_len, LoadingLog())
    followers = Followers(settings, path, ops)
    return LeadingDecoder.lead(followers, path, ops, ops.dtype, device, settings.max_model_len, LoadingLog())


def make_engine(
    settings: WorkerSettings, name: str, model: PagedModel, texts: ModelTexts, device: torch.device
) -> Engine:
    """Make an engine for a loaded model, warmed up."""
    if isinstance(model.ops, kernels.CpuOps) and not model.multiplies_in_torch:
        # Torch has little left to do, and its idle threads would compete with those of the kernels.
        torch.set_num_threads(1)
    progress.phase("sizing the KV cache")
    limits = choose_limits(settings, model, device)
    log_limits(model, limits, settings.tensor_parallel_size)
    runner = (
        Runner
        if device.type == "cpu"
        else partial(DeviceRunner, graph_buckets=graph_buckets(settings, limits), record=recorder(model))
    )
    eos_token_ids = model.config.eos_token_ids
    if not eos_token_ids and texts.eos_token_id is not None and texts.eos_token_id < model.vocab_size:
        eos_token_ids = (texts.eos_token_id,)  # as in the gateway
    grammars = Grammars(texts.tokenizer, model.vocab_size, eos_token_ids)
    engine = Engine(model, limits, eos_token_ids, texts.tokenizer, name, runner=runner, grammars=grammars)
    progress.phase("warming up")
    warm_up(engine)
    graph_capture.capture_graphs(engine)
    if settings.itl_target_ms:
        limit = min(settings.max_prefill_tokens or limits.max_num_batched_tokens, limits.max_num_batched_tokens)
        engine.pacer = PrefillPacer(settings.itl_target_ms / 1000, limits.block_size, limit)
    try:
        pin_prefixes(engine, texts.prefixes)
    except PrefixError as error:
        raise StartError(str(error)) from error
    return engine


def graph_buckets(settings: WorkerSettings, limits: EngineLimits) -> list[GraphBucket]:
    """The CUDA graphs to capture; none if they are switched off."""
    if not memory_plan.uses_graphs(settings):
        log.info("steps are launched kernel by kernel, without CUDA graphs")
        return []
    return graph_capture.graph_buckets(limits.max_num_seqs, limits.max_num_batched_tokens)
