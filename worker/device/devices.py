"""The device that the model runs on, the dtype of its weights and activations, and the sizes of a step on it."""

from __future__ import annotations

import logging

import torch

from quire import kernels
from quire.kernels.weights import FP8, FP8_DYNAMIC
from quire.shared.process.errors import StartError
from quire.worker.host_memory import available_memory
from quire.worker.models.choice import Checkpoint
from quire.worker.models.files.formats import Quantization, scale_block
from quire.worker.models.native.config import ModelConfig
from quire.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Compute capabilities from which on a GPU computes in bfloat16, and converts 8-bit floats.
BFLOAT16_SINCE, FP8_SINCE = (8, 0), (8, 9)

# Defaults: what --max-num-seqs 0 and --max-num-batched-tokens 0 mean.
CPU_NUM_SEQS, CPU_TOKENS = 64, 256
CUDA_NUM_SEQS, CUDA_TOKENS = 256, 8192


def choose_device(name: str) -> torch.device:
    """Return the device of --device. `auto` is a CUDA device if there is one. Raises StartError."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if torch.version.cuda is None:
        raise StartError(
            "--device cuda: the installed torch computes on CPUs only; install its CUDA build, or use --device cpu"
        )
    if not torch.cuda.is_available():
        raise StartError(
            "--device cuda: torch finds no CUDA device; see nvidia-smi and CUDA_VISIBLE_DEVICES, or use --device cpu"
        )
    return torch.device("cuda", torch.cuda.current_device())


def choose_dtype(name: str, device: torch.device, quantized: bool = False) -> torch.dtype:
    """Return the dtype of --dtype. `auto` is bfloat16 if the device supports it, else the next best.

    quantized: weights are quantised, so that activations are float32. Raises StartError.
    """
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        has_bfloat16 = capability >= BFLOAT16_SINCE
        if name == "bfloat16" and not has_bfloat16:
            raise StartError(
                f"--dtype bfloat16 needs compute capability 8.0, and this GPU has {capability[0]}.{capability[1]}; use "
                "--dtype float16"
            )
        return DTYPES.get(name, torch.bfloat16 if has_bfloat16 else torch.float16)
    if name == "float16":
        raise StartError("--dtype float16 is for GPUs: on a CPU use --dtype bfloat16 or float32, or auto")
    if quantized:
        if name == "bfloat16":
            raise StartError(
                "--dtype bfloat16 does not go with --quantization int8 and int4, whose activations are float32 on "
                "every processor; use --dtype auto"
            )
        return torch.float32
    if name == "float32":
        return torch.float32
    try:
        kernels.CpuOps(torch.bfloat16)
    except kernels.KernelsUnavailable as error:
        if name == "auto":
            log.info("--dtype auto: activations are float32, and 16-bit weights stay as they are stored (%s)", error)
            return torch.float32
        log.warning("--dtype bfloat16 is slow here: plain torch computes; --dtype auto is faster (%s)", error)
    return torch.bfloat16


def check_quantization(settings: WorkerSettings, device: torch.device, config: Checkpoint) -> None:
    """Raise StartError if --quantization does not go with the weights, the implementation or the device of the model.

    Weights that are quantised already are not rounded again: only the value of the stored format is accepted.
    """
    if settings.quantization == "none":
        return
    given = f"--quantization {settings.quantization}"
    quantization = config.quantization
    is_other = not isinstance(config, ModelConfig)  # then layers that are not quantised are not rounded on load
    stored_as = FP8 if settings.quantization == FP8_DYNAMIC else settings.quantization
    if quantization is not None and (is_other or quantization.stored_as != stored_as):
        raise StartError(
            f"{given}: the weights of the model are quantised already ({quantization.label}); leave it out, or give "
            "the model that this one was made from, which is not quantised"
        )
    if settings.quantization == FP8_DYNAMIC:
        _check_fp8_products(settings, device, quantization)
    elif device.type == "cuda" and settings.quantization != FP8:
        raise StartError(f"{given} is for CPUs: on a GPU take --quantization fp8, or leave it out")
    if not isinstance(config, ModelConfig) and settings.num_ranks > 1:
        raise StartError(
            f"{given}: {config.architecture} is computed by Transformers, whose layers are rounded in one process "
            "only; leave it out, or give --tensor-parallel-size 1"
        )


def _check_fp8_products(settings: WorkerSettings, device: torch.device, quantization: Quantization | None) -> None:
    """Raise StartError unless products of FP8 weights and rounded activations go with device, settings and weights."""
    given, otherwise = f"--quantization {FP8_DYNAMIC}", "take --quantization fp8, which does not round activations"
    if device.type != "cuda":
        raise StartError(f"{given} is for GPUs: on a CPU take --quantization int8, which rounds activations to 8 bits")
    if not has_fp8(device):
        major, minor = torch.cuda.get_device_capability(device)
        raise StartError(f"{given} needs compute capability 8.9, and this GPU has {major}.{minor}; {otherwise}")
    if settings.batch_invariant:
        raise StartError(f"{given} does not go with --batch-invariant: cuBLAS multiplies; {otherwise}")
    if settings.kernels == "reference":
        raise StartError(f"{given} does not go with --kernels reference; {otherwise}")
    if block := scale_block(quantization):
        rows, columns = block
        raise StartError(
            f"{given}: the weights of the model have scales per block of {rows}x{columns}, whose products do not round "
            "activations; leave it out, or take a checkpoint with a scale per channel or tensor"
        )


def has_integers(settings: WorkerSettings, device: torch.device, config: Checkpoint) -> bool:
    """Return whether weights are integers, so that activations are float32, by --quantization or the checkpoint.

    With --dtype bfloat16 such integers are codes with scales, and activations are not rounded.
    """
    of_checkpoint = config.quantization and config.quantization.rounds_activations
    by_default = device.type == "cpu" and settings.dtype != "bfloat16"
    if settings.quantization in (FP8, FP8_DYNAMIC):
        return False
    return settings.quantization != "none" or bool(of_checkpoint and by_default)


def quantized_bits(settings: WorkerSettings) -> int | str:
    """Return what weights are quantised to on load: integers of 8 or 4 bits, or FP8; 0: they are not."""
    kinds: dict[str, int | str] = {"none": 0, "int8": 8, "int4": 4, FP8: FP8, FP8_DYNAMIC: FP8}
    return kinds[settings.quantization]


def has_fp8(device: torch.device) -> bool:
    """Return whether a CUDA device converts 8-bit floats."""
    return torch.cuda.get_device_capability(device) >= FP8_SINCE


def free_memory(device: torch.device) -> int:
    """Return the bytes of memory that are free where the model runs."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()


def max_num_seqs(settings: WorkerSettings, device: torch.device) -> int:
    """Return --max-num-seqs, or its default for the device."""
    return settings.max_num_seqs or (CUDA_NUM_SEQS if device.type == "cuda" else CPU_NUM_SEQS)


def max_num_batched_tokens(settings: WorkerSettings, device: torch.device) -> int:
    """Return --max-num-batched-tokens, or its default for the device."""
    chosen = CUDA_TOKENS if device.type == "cuda" else CPU_TOKENS
    return settings.max_num_batched_tokens or max(chosen, max_num_seqs(settings, device))


def uses_graphs(settings: WorkerSettings) -> bool:
    """Return whether steps on a GPU are replayed as graphs.

    Reference kernels cannot be, since they read values on the host.
    """
    return settings.cuda_graphs and settings.kernels != "reference"


def describe(device: torch.device) -> str:
    """Return a description of the device for the log."""
    if device.type == "cpu":
        return "CPU"
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name} ({properties.total_memory / 2**30:.0f} GiB)"
