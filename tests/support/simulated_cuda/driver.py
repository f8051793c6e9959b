"""The driver: replaces `torch.cuda`, and the functions of torch that create tensors on a device."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.cuda.graphs
from torch.overrides import TorchFunctionMode

from quire.worker.lean_torch import complete_torch

# Imports Triton so that it interprets kernels, and corrects the interpreter, if no device was simulated before.
from tests.support.kernels.implementations import HAS_TRITON
from tests.support.simulated_cuda.devices import SimulatedDevice, cuda_error
from tests.support.simulated_cuda.graphs import Capture, SimulatedGraph, pool_handle
from tests.support.simulated_cuda.process_groups import replace_collectives
from tests.support.simulated_cuda.streams import Operation, SimulatedEvent, SimulatedStream
from tests.support.simulated_cuda.tensors import SimulatedTensor, fill, leaves_of, mapped, memory_of

# --- triton launches --------------------------------------------------------------------------------------------------
# Launches of Triton kernels on simulated devices: Triton's interpreter computes them, in the order of the stream.


def replace_launches(driver: Driver, patch: pytest.MonkeyPatch) -> None:
    """Let the interpreter run kernels on simulated tensors when their stream reaches them."""
    if not HAS_TRITON:
        return
    from triton.runtime.interpreter import GridExecutor

    patch.setenv("TRITON_INTERPRET", "1")  # Triton reads it again at a launch
    call = GridExecutor.__call__

    def launch(executor: Any, *args: Any, **kwargs: Any) -> None:
        tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, SimulatedTensor)]
        if not tensors:
            call(executor, *args, **kwargs)
            return
        within, options = [memory_of(one) for one in args], {name: memory_of(one) for name, one in kwargs.items()}
        driver.stream_of(tensors[0].allocation.device).submit(lambda: call(executor, *within, **options))

    patch.setattr(GridExecutor, "__call__", launch)


GIB = 1 << 30
CUDA = torch.device("cuda", 0)


class PinnedBytes(bytearray):
    """Pinned host memory. The driver knows it until it is freed."""

    forget: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.forget is not None:
            self.forget()


class Driver(TorchFunctionMode):
    """The simulated devices of this process.

    num_devices, total: devices and the bytes of each. is_late: operations run when the host waits; otherwise at their
    launch, which ranks that wait for each other need. draw: if given, some operations run at random times before that.
    num_waits: how often the host waited for a device. num_replays: number of graphs replayed.
    """

    def __init__(
        self, num_devices: int = 1, total: int = GIB, is_late: bool = True, draw: random.Random | None = None
    ) -> None:
        super().__init__()
        self.lock = threading.RLock()
        self.is_late, self.draw = is_late, draw
        self.devices = [SimulatedDevice(index, total) for index in range(num_devices)]
        self.streams: list[list[SimulatedStream]] = [[] for _ in self.devices]
        # The classes of one driver refer to it.
        own = {"driver": self}
        self.Stream = type("Stream", (SimulatedStream,), own)
        self.Event = type("Event", (SimulatedEvent,), own)
        self.Graph = type("CUDAGraph", (SimulatedGraph,), own)
        self.Tensor = SimulatedTensor
        self._of_thread = threading.local()
        self.default_streams = [self.Stream(index) for index in range(num_devices)]
        self.captures: list[Capture] = []
        self.dead_pools: set[object] = set()
        self.pinned: dict[int, int] = {}  # address and size
        self.sync_debug_mode: Any = 0
        self.num_waits = self.num_replays = 0

    # --- current device and stream ------------------------------------------------------------------------------------

    def device_of(self, device: Any = None) -> SimulatedDevice:
        """Return the device that an argument of torch.cuda names: a number, a name, a torch.device, or none."""
        if isinstance(device, SimulatedDevice):
            return device
        if isinstance(device, str):
            device = torch.device(device)
        index = device.index if isinstance(device, torch.device) else device
        index = self.current_device() if index is None else index
        if index >= len(self.devices):
            raise cuda_error("invalid device ordinal")
        return self.devices[index]

    def current_device(self) -> int:
        return getattr(self._of_thread, "device", 0)

    def set_device(self, device: Any) -> None:
        self._of_thread.device = self.device_of(device).index

    def stream_of(self, device: SimulatedDevice) -> SimulatedStream:
        chosen: dict[int, SimulatedStream] = getattr(self._of_thread, "streams", {})
        return chosen.get(device.index, self.default_streams[device.index])

    def current_stream(self, device: Any = None) -> SimulatedStream:
        return self.stream_of(self.device_of(device))

    @contextmanager
    def use_stream(self, stream: SimulatedStream | None) -> Iterator[None]:
        """Stands in for torch.cuda.stream. An error inside does not restore the stream if it ends a capture."""
        if stream is None:
            yield
            return
        before = getattr(self._of_thread, "streams", {})
        self._of_thread.streams = before | {stream.of_device.index: stream}
        try:
            yield
        finally:
            self._of_thread.streams = before

    @contextmanager
    def use_device(self, device: Any) -> Iterator[None]:
        before = self.current_device()
        self.set_device(device)
        try:
            yield
        finally:
            self._of_thread.device = before

    # --- waiting, and what a capture forbids --------------------------------------------------------------------------

    def check_allowed(self, call: str) -> None:
        """Raise if a capture forbids a call, and let the capture fail."""
        for capture in self.captures:
            if capture.forbids():
                capture.failures.append(call)
                raise cuda_error(f"operation not permitted when stream is capturing ({call})")

    def fail_capture(self, call: str) -> None:
        for capture in self.captures:
            capture.failures.append(call)

    def wait(self, call: str, stream: SimulatedStream, until: int) -> None:
        """Run the operations of a stream as the host waits for them."""
        self.check_allowed(call)
        stream.of_device.check()
        if self.sync_debug_mode in ("error", 2):
            raise RuntimeError(f"called a synchronizing CUDA operation ({call})")
        self.num_waits += 1
        stream.run(until)
        stream.of_device.check()

    def synchronize(self, device: Any = None) -> None:
        of_device = self.device_of(device)
        self.check_allowed("cudaDeviceSynchronize")
        of_device.check()
        if self.sync_debug_mode in ("error", 2):
            raise RuntimeError("called a synchronizing CUDA operation (cudaDeviceSynchronize)")
        self.num_waits += 1
        for stream in self.streams[of_device.index]:
            stream.run(stream.num_submitted)
        of_device.check()

    def submit(self, operation: Operation) -> None:
        """Launch an operation on the current stream."""
        self.current_stream().submit(operation)

    # --- memory -------------------------------------------------------------------------------------------------------

    def poisoned(self, device: SimulatedDevice, like: torch.Tensor) -> SimulatedTensor:
        """Allocate a tensor of the size, strides and type of another."""
        recorded = self.stream_of(device).recorded is not None
        capture = next((one for one in self.captures if one.stream is self.stream_of(device)), None)
        pool_id = capture.pool_id if recorded and capture else None
        with torch._C.DisableTorchFunction():
            places = [(size - 1) * stride for size, stride in zip(like.size(), like.stride(), strict=True)]
            count = 0 if 0 in like.size() else 1 + sum(places)
            allocation = device.allocate(count * like.dtype.itemsize, pool_id)
            memory = allocation.buffer[: count * like.dtype.itemsize].view(like.dtype)
            if like.dtype is torch.bool:
                memory.fill_(True)
            return SimulatedTensor(memory.as_strided(like.size(), like.stride()), allocation)

    def empty(self, *size: int, dtype: torch.dtype = torch.float32, device: Any = None) -> SimulatedTensor:
        return self.poisoned(self.device_of(device), torch.empty(size, dtype=dtype, device="meta"))

    def on_device(self, device: SimulatedDevice, values: torch.Tensor) -> SimulatedTensor:
        """Allocate a tensor, and launch what writes these values."""
        made = self.poisoned(device, values)
        memory = made.memory
        self.stream_of(device).submit(lambda: fill(memory, values))
        return made

    def to_host(self, tensor: SimulatedTensor) -> torch.Tensor:
        """Wait for the device, and return a copy of a tensor."""
        self.stream_of(tensor.allocation.device).synchronize()
        with torch._C.DisableTorchFunction():
            return tensor.memory.clone()

    def pinned_like(self, values: torch.Tensor) -> torch.Tensor:
        """Return a pinned copy of host memory."""
        if not values.numel():
            return values
        buffer = PinnedBytes(values.numel() * values.dtype.itemsize)
        with torch._C.DisableTorchFunction():
            data = torch.frombuffer(buffer, dtype=torch.uint8)
            address = data.data_ptr()
            self.pinned[address] = len(buffer)
            buffer.forget = lambda: self.pinned.pop(address, None)
            return data.view(values.dtype).view(values.shape).copy_(values)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return torch._C.TensorBase.untyped_storage(tensor).data_ptr() in self.pinned

    def _register_host(self, address: int, size: int, flags: int) -> int:
        self.check_allowed("cudaHostRegister")
        self.pinned[address] = size
        return 0

    def _unregister_host(self, address: int) -> int:
        return 0 if self.pinned.pop(address, None) else 1

    def empty_cache(self) -> None:
        for device in self.devices:
            device.empty_cache()

    # --- pools of graphs ----------------------------------------------------------------------------------------------

    def release_pool(self, device: SimulatedDevice, pool_id: object) -> None:
        pool = device.pools.get(pool_id)
        if pool is None or not pool.num_users:
            raise RuntimeError("the pool is not in use")
        pool.num_users -= 1
        if not pool.num_users:
            self.dead_pools.add(pool_id)

    def end_allocations(self, device: int, pool_id: object) -> None:
        """Stands in for torch._C._cuda_endAllocateToPool, after a capture that failed."""
        if pool_id not in self.devices[device].capturing:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.devices[device].capturing.remove(pool_id)
        self.dead_pools.add(pool_id)

    # --- functions of torch -------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Intercept the functions that create tensors on a device or in pinned memory, and those that move tensors."""
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.pin_memory:
            return self.pinned_like(args[0])
        if func is torch.Tensor.is_pinned:
            return not isinstance(args[0], SimulatedTensor) and self.is_pinned(args[0])
        if func in (torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.cpu):
            return self._to(func, *args, **kwargs)
        device = kwargs.get("device")
        if device is None and not kwargs.get("pin_memory"):
            return func(*args, **kwargs)
        is_there = any(isinstance(one, SimulatedTensor) for one in leaves_of((args, kwargs)))
        if isinstance(device, int | str):
            device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if device is not None and device.type == "cuda":
            self.device_of(device).check()
            if is_there and device == self._device_in(args, kwargs):
                del kwargs["device"]
                return func(*args, **kwargs)
            return self._made_on(device, func, args, kwargs)
        if device is not None and is_there and func is not torch.Tensor.device.__get__:  # type: ignore[attr-defined]
            # Like a tensor on a device, but in host memory.
            args, kwargs = mapped(
                lambda one: torch.empty_like(one.memory) if isinstance(one, SimulatedTensor) else one, (args, kwargs)
            )
            return func(*args, **kwargs)
        if kwargs.get("pin_memory") and not is_there:
            return self.pinned_like(func(*args, **kwargs | {"pin_memory": False}))
        return func(*args, **kwargs)

    def _device_in(self, args: Any, kwargs: Any) -> torch.device:
        return next(one for one in leaves_of((args, kwargs)) if isinstance(one, SimulatedTensor)).device

    def _made_on(self, device: torch.device, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        """Call a function that makes a tensor, and put the tensor on a device."""
        of_device = self.device_of(device)
        if generator := kwargs.get("generator"):
            kwargs["generator"] = getattr(generator, "on_host", generator)
        made = func(*args, **kwargs | {"device": "cpu"})
        if func in (torch.tensor, torch.as_tensor, torch.asarray) and self.stream_of(of_device).recorded is not None:
            self.fail_capture(func.__name__)
            raise cuda_error("operation not permitted when stream is capturing: the host memory is not pinned")
        if func in (torch.empty, torch.empty_strided):
            return self.poisoned(of_device, made)
        return self.on_device(of_device, made)

    def _to(self, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Move a tensor, or change its type: Tensor.to, cuda and cpu."""
        copies, non_blocking = kwargs.get("copy", False), kwargs.get("non_blocking", False)
        dtype = kwargs.get("dtype")
        device: Any = kwargs.get("device", {torch.Tensor.cuda: "cuda", torch.Tensor.cpu: "cpu"}.get(func))
        for one in args:
            if isinstance(one, torch.Tensor):
                device, dtype = one.device, one.dtype
            elif isinstance(one, torch.dtype):
                dtype = one
            elif isinstance(one, bool):
                non_blocking = one
            elif one is not None:
                device = one
        if isinstance(device, int):
            device = torch.device("cuda", device)
        device = torch.device(device) if device is not None else tensor.device
        if device.type not in ("cpu", "cuda") or (device.type == "cpu" and not isinstance(tensor, SimulatedTensor)):
            return func(tensor, *args, **kwargs)
        if device.type == "cpu":
            return self._to_host_as(tensor, dtype, non_blocking)  # type: ignore[arg-type]
        target = self.device_of(device)
        dtype = dtype or tensor.dtype
        if isinstance(tensor, SimulatedTensor) and tensor.allocation.device is target:
            return torch.Tensor.to(tensor, dtype, copy=copies) if dtype is not tensor.dtype or copies else tensor
        like = torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device="meta")
        return self.poisoned(target, like).copy_(tensor, non_blocking=non_blocking)

    def _to_host_as(self, tensor: SimulatedTensor, dtype: Any, non_blocking: bool) -> torch.Tensor:
        if not non_blocking:
            return self.to_host(tensor).to(dtype or tensor.dtype)
        host = self.pinned_like(torch.zeros(tensor.shape, dtype=dtype or tensor.dtype))
        host.copy_(tensor, non_blocking=True)
        return host

    def call(self, result: SimulatedTensor, compute: Callable[..., torch.Tensor], *inputs: Any) -> SimulatedTensor:
        """Launch one kernel, which computes `result` from the memory of its inputs."""
        memory, target = [memory_of(one) for one in inputs], result.memory
        self.submit(lambda: fill(target, compute(*memory)))
        return result


def _memory_functions(driver: Driver) -> dict[str, Callable[..., Any]]:
    """Return the functions of torch.cuda about memory and devices."""

    def of(name: str) -> Callable[..., int]:
        return lambda device=None: getattr(driver.device_of(device), name)

    def reset_peak(device: Any = None) -> None:
        found = driver.device_of(device)
        found.peak = found.allocated

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        found = driver.device_of(device)
        found.check()
        return found.free, found.total

    def properties(device: Any = None) -> SimpleNamespace:
        return driver.device_of(device).properties

    return {
        "memory_allocated": of("allocated"),
        "max_memory_allocated": of("peak"),
        "memory_reserved": of("reserved"),
        "reset_peak_memory_stats": reset_peak,
        "mem_get_info": mem_get_info,
        "empty_cache": driver.empty_cache,
        "get_device_properties": properties,
        "get_device_name": lambda device=None: properties(device).name,
        "get_device_capability": lambda device=None: (properties(device).major, properties(device).minor),
    }


def _replacements(driver: Driver) -> dict[str, Any]:
    """Return what replaces the names of torch.cuda."""

    def set_sync_debug_mode(mode: Any) -> None:
        driver.sync_debug_mode = mode

    runtime = SimpleNamespace(cudaHostRegister=driver._register_host, cudaHostUnregister=driver._unregister_host)
    return _memory_functions(driver) | {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "device_count": lambda: len(driver.devices),
        "current_device": driver.current_device,
        "set_device": driver.set_device,
        "device": driver.use_device,
        "synchronize": driver.synchronize,
        "current_stream": driver.current_stream,
        "default_stream": lambda device=None: driver.default_streams[driver.device_of(device).index],
        "stream": driver.use_stream,
        "Stream": driver.Stream,
        "Event": driver.Event,
        "CUDAGraph": driver.Graph,
        "graph_pool_handle": pool_handle,
        "is_current_stream_capturing": lambda: driver.current_stream().recorded is not None,
        "set_sync_debug_mode": set_sync_debug_mode,
        "get_sync_debug_mode": lambda: driver.sync_debug_mode,
        "cudart": lambda: runtime,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "manual_seed": lambda seed: None,  # torch.manual_seed has seeded the host, which draws for all devices
        "manual_seed_all": lambda seed: None,
        "is_bf16_supported": lambda *_: True,
    }


def install(driver: Driver, patch: pytest.MonkeyPatch) -> None:
    """Replace torch.cuda in this process, and in all of its threads that start from now on."""
    complete_torch()  # shapes of results come from torch's meta registrations, which a worker does not import
    for name, value in _replacements(driver).items():
        patch.setattr(torch.cuda, name, value, raising=False)
    patch.setattr(torch.version, "cuda", "13.0")
    patch.setattr(torch.cuda.graphs.graph, "default_capture_stream", None)
    for name, function in {
        "_cuda_endAllocateToPool": driver.end_allocations,
        "_cuda_releasePool": lambda device, pool_id: driver.release_pool(driver.devices[device], pool_id),
        "_host_emptyCache": lambda: None,
    }.items():
        patch.setattr(torch._C, name, function, raising=False)
    patch.setattr(SimulatedTensor, "driver", driver, raising=False)
    begin = threading.Thread._bootstrap_inner  # subclasses replace `run`

    def begin_with_driver(thread: threading.Thread) -> None:
        with driver:  # modes are of one thread
            begin(thread)

    patch.setattr(threading.Thread, "_bootstrap_inner", begin_with_driver)
    replace_collectives(driver, patch)
    replace_launches(driver, patch)


@contextmanager
def simulated_cuda(
    num_devices: int = 1, total: int = GIB, is_late: bool = True, draw: random.Random | None = None
) -> Iterator[Driver]:
    """Create a driver, and put all CUDA tensors of torch on its devices inside this context (see `Driver`)."""
    driver = Driver(num_devices, total, is_late, draw)
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        install(driver, patch)
        stack.enter_context(driver)
        yield driver
