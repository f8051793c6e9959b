"""The self-test of the kernels when a worker starts, with the shapes of its model, on every rank."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import torch

from quire import kernels
from quire.kernels.self_test.inputs import QUICK
from quire.shared.process.errors import StartError
from quire.worker.device.out_of_step import reason
from quire.worker.engine.paged_model import PagedModel
from quire.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

AUTO, OFF = "auto", "off"  # of --self-test, besides the levels of the self-test


def level_of(settings: WorkerSettings, device: torch.device) -> str:
    """Return the level of the self-test on a device, or OFF."""
    if settings.self_test == AUTO:
        return QUICK if device.type == "cuda" else OFF
    return settings.self_test


def warn_of_assembler(device: torch.device, settings: WorkerSettings) -> None:
    """Log a warning if Triton compiles for this GPU with an assembler that may compile wrongly."""
    if device.type != "cuda" or settings.kernels == "reference":
        return
    if fault := kernels.outdated_assembler(torch.cuda.get_device_capability(device)):
        log.warning("%s", fault)


def check_kernels(
    settings: WorkerSettings, model: PagedModel, device: torch.device, record: kernels.RecordGraph | None = None
) -> WorkerSettings:
    """Test the kernels that a model uses, and let the model report the result.

    record: records the graph that is tested; None if the worker has no graphs. Returns the settings, without CUDA
    graphs if a kernel was replaced that they need. Raises StartError if a kernel is wrong and nothing can replace it.
    """
    level = level_of(settings, device)
    if level == OFF or model.ops.name == "reference":
        return settings
    started = time.perf_counter()
    try:
        report = model.self_test(level, settings.block_size, record)
    except Exception as error:
        if not isinstance(wrong := reason(error), kernels.WrongKernel):
            raise
        raise StartError(refusal(wrong)) from error
    model.self_test_report = report
    log.info(
        "self-test (%s): %d cases of the kernels in %.2f s, %s",
        level,
        report.num_cases,
        time.perf_counter() - started,
        f"{len(report.faults)} kernels replaced" if report.faults else "all right",
    )
    if getattr(model.ops, "can_capture", True) or not settings.cuda_graphs:
        return settings
    log.error("self-test: steps are launched kernel by kernel, without CUDA graphs, because of the kernels replaced")
    return replace(settings, cuda_graphs=False)


def refusal(error: BaseException) -> str:
    """Return the line with which a worker refuses to start because of a WrongKernel."""
    return (
        f"self-test: {error}. Take --kernels reference, which computes with torch; --self-test off serves with wrong "
        "results"
    )
