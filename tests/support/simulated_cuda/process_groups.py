"""Process groups of simulated devices: "nccl" is gloo on the memory of the devices, in the order of their streams.

So are the kernels of symmetric memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from quire.worker.ranks.symmetric_memory import MAX_BYTES, SymmetricBuffer
from tests.support.simulated_cuda.tensors import SimulatedTensor, leaves_of, mapped, memory_of

if TYPE_CHECKING:
    from tests.support.simulated_cuda.driver import Driver


def replace_collectives(driver: Driver, patch: pytest.MonkeyPatch) -> None:
    """Replace the functions of torch.distributed. Other tensors than those of simulated devices are left to them."""
    if not dist.is_available():
        return
    init = dist.init_process_group

    def init_process_group(backend: str | None = None, *args: Any, device_id: Any = None, **kwargs: Any) -> None:
        if backend == "nccl":
            if driver.is_late:
                raise RuntimeError("ranks wait for each other: simulate their devices with is_late=False")
            backend, device_id = "gloo", None
        init(backend, *args, device_id=device_id, **kwargs)

    patch.setattr(dist, "init_process_group", init_process_group)
    for name in ("all_reduce", "broadcast", "gather", "all_gather"):
        patch.setattr(dist, name, _in_stream_order(driver, getattr(dist, name)))
    patch.setattr(torch.cuda, "can_device_access_peer", lambda device, other: True)
    for name in ("__init__", "one_shot", "two_shot"):
        patch.setattr(SymmetricBuffer, name, getattr(SimulatedBuffer, name))


class SimulatedBuffer:
    """The methods of `SymmetricBuffer`."""

    def __init__(self, device: torch.device) -> None:
        self.values = torch.empty(MAX_BYTES, dtype=torch.uint8, device=device)

    def one_shot(self, part: torch.Tensor, out: torch.Tensor) -> None:
        dist.all_reduce(out.copy_(part))

    def two_shot(self, part: torch.Tensor, out: torch.Tensor) -> None:
        dist.all_reduce(part)
        out.copy_(part)


def _in_stream_order(driver: Driver, collective: Any) -> Any:
    def launch(*args: Any, **kwargs: Any) -> None:
        tensors = [one for one in leaves_of((args, kwargs)) if isinstance(one, SimulatedTensor)]
        if not tensors:
            collective(*args, **kwargs)
            return
        within, options = mapped(memory_of, (args, kwargs))
        driver.stream_of(tensors[0].allocation.device).submit(lambda: collective(*within, **options))

    return launch
