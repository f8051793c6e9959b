"""Tensors of simulated devices. Each of torch's operations on them is one launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from tests.support.simulated_cuda.devices import Allocation, cuda_error

if TYPE_CHECKING:
    from tests.support.simulated_cuda.driver import Driver

aten = torch.ops.aten
# Operations that torch has for CUDA only, computed on the host.
ON_HOST = {
    aten.mm.dtype: lambda a, b, dtype: a.to(dtype) @ b.to(dtype),
    aten.mm.dtype_out: lambda a, b, dtype, out: out.copy_(a.to(dtype) @ b.to(dtype)),
}


class SimulatedTensor(torch.Tensor):
    """A tensor on a device. memory: holds the values once the operation has run. allocation: the bytes below it."""

    driver: Driver
    memory: torch.Tensor
    allocation: Allocation

    @staticmethod
    def __new__(cls, memory: torch.Tensor, allocation: Allocation, requires_grad: bool = False) -> SimulatedTensor:
        tensor: SimulatedTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            memory.size(),
            strides=memory.stride(),
            storage_offset=memory.storage_offset(),
            dtype=memory.dtype,
            device="meta",  # torch built without CUDA creates no CUDA tensor
            requires_grad=requires_grad,
        )
        tensor.memory, tensor.allocation = memory, allocation
        return tensor

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", self.allocation.device.index)

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return False

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    def get_device(self) -> int:
        return self.allocation.device.index

    def __repr__(self, **_: Any) -> str:
        return f"SimulatedTensor({tuple(self.shape)}, {self.dtype})"

    def __format__(self, spec: str) -> str:
        return repr(self) if self.dim() else format(self.item(), spec)

    def data_ptr(self) -> int:
        return self.memory.data_ptr()

    def untyped_storage(self) -> Any:
        return self.memory.untyped_storage()

    def is_pinned(self, *_: Any) -> bool:
        return False

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert cuda device type tensor to numpy: use Tensor.cpu() first")

    def tolist(self) -> Any:
        return self.driver.to_host(self).tolist()

    def cpu(self, *_: Any, **__: Any) -> torch.Tensor:
        return self.driver.to_host(self)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch.inference_mode(False):  # views of tensors that were created outside of it are allowed
            return launch(cls.driver, func, args, kwargs or {})


# Operations whose results have a shape that depends on values, so that they wait for the device.
SHAPED_BY_VALUES = (
    aten.nonzero.default,
    aten.nonzero_numpy.default,
    aten.where.default,
    aten.masked_select.default,
    aten._unique2.default,
)


def is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype is torch.bool


def leaves_of(value: Any) -> Iterator[Any]:
    """Yield what is in tuples, lists and dicts, as torch's tree_leaves does, which takes most of a launch."""
    if isinstance(value, tuple | list | dict):
        for one in value.values() if isinstance(value, dict) else value:
            yield from leaves_of(one)
    else:
        yield value


def mapped(change: Callable[..., Any], value: Any, *others: Any) -> Any:
    """Change each leaf, given those at the same place of the other trees."""
    if isinstance(value, dict):
        return {name: mapped(change, one, *(other[name] for other in others)) for name, one in value.items()}
    if isinstance(value, tuple | list):
        found = (mapped(change, *of) for of in zip(value, *others, strict=True))
        return list(found) if isinstance(value, list) else tuple(found)
    return change(value, *others)


def memory_of(value: Any) -> Any:
    return value.memory if isinstance(value, SimulatedTensor) else value


def launch(driver: Driver, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Launch one of torch's own operations."""
    kwargs = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
    tensors = [one for one in leaves_of((args, kwargs)) if isinstance(one, torch.Tensor)]
    first = next(one for one in tensors if isinstance(one, SimulatedTensor))
    if func is aten.copy_.default:
        return copy(driver, *args, **kwargs)
    if func in (aten._local_scalar_dense.default, aten.item.default):
        return driver.to_host(first).item()
    if func in (aten.equal.default, aten.is_nonzero.default):
        driver.synchronize(first.device)
        return func(*mapped(memory_of, args))
    if func in SHAPED_BY_VALUES or (func is aten.index.Tensor and any(is_mask(one) for one in args[1])):
        driver.synchronize(first.device)
        results = func(*mapped(memory_of, args), **mapped(memory_of, kwargs))
        return mapped(lambda one: driver.on_device(first.allocation.device, one), results)
    for one in tensors:
        if not isinstance(one, SimulatedTensor) and one.dim():
            raise RuntimeError(f"{func}: expected all tensors to be on the same device, but found cuda:0 and cpu")
        if isinstance(one, SimulatedTensor) and one.device != first.device:
            raise RuntimeError(f"{func}: expected all tensors to be on the same device, but found two GPUs")
    within, options = mapped(memory_of, (args, kwargs))
    device, schema, compute = first.allocation.device, func._schema, ON_HOST.get(func, func)
    stream = driver.stream_of(device)
    changed = [one.name for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write]
    if changed:
        stream.submit(lambda: compute(*within, **options))
        given = {one.name: value for one, value in zip(schema.arguments, args, strict=False)} | kwargs
        found = [given[name] for name in changed if name in given]
        return found[0] if len(schema.returns) == 1 else tuple(found[: len(schema.returns)])
    if any(one.alias_info is not None for one in schema.returns):
        found = func(*within, **options)
        # A view reads no values. An operation that may return a view but did not, such as `to`, runs later.
        if not isinstance(found, torch.Tensor) or share_memory(found, first.memory):
            return mapped(lambda one: SimulatedTensor(one, first.allocation), found)
    shapes = func(*mapped(as_meta, args), **mapped(as_meta, kwargs))
    results = mapped(lambda one: driver.poisoned(device, one) if isinstance(one, torch.Tensor) else one, shapes)
    # Operations hold the memory of tensors, but not its allocation: it is free when the program drops the tensor.
    targets = mapped(memory_of, results)
    stream.submit(lambda: mapped(fill, targets, compute(*within, **options)))
    return results


def copy(driver: Driver, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copy between devices and host memory. A copy of memory that is not pinned waits for the device."""
    to, of = memory_of(target), memory_of(source)
    device = next(one for one in (target, source) if isinstance(one, SimulatedTensor)).allocation.device
    stream = driver.stream_of(device)
    hosts = [one for one in (target, source) if not isinstance(one, SimulatedTensor)]
    pageable = [one for one in hosts if not driver.is_pinned(one) and one.numel() and one.dim()]
    if pageable and stream.recorded is not None:
        driver.fail_capture("a copy of memory that is not pinned")
        raise cuda_error("operation not permitted when stream is capturing: the host memory is not pinned")
    if hosts and not hosts[0].dim():
        of = of.clone()  # the launch carries the value
    if isinstance(target, SimulatedTensor) and isinstance(source, SimulatedTensor) and source.device != target.device:
        driver.synchronize(source.device)
    stream.submit(lambda: to.copy_(of))
    if pageable or (hosts and not non_blocking and hosts[0].dim()):
        stream.synchronize()
    return target


def fill(memory: Any, values: Any) -> None:
    if isinstance(memory, torch.Tensor):
        memory.copy_(values)


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def as_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and (value.dim() or isinstance(value, SimulatedTensor)):
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
    return value
