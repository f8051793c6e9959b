"""The LoRA adapters of an engine by name, and those of the tokens of a step.

A running request keeps its adapter, even if that is unloaded meanwhile.
"""

from __future__ import annotations

from typing import cast

import numpy as np

from quire.kernels.ops import NO_ADAPTER, AdapterBatch, PackedAdapter
from quire.worker.engine.input_batch import InputBatch
from quire.worker.engine.limits import RequestRefused
from quire.worker.engine.sequence import Adapter

GIB = 1 << 30


class Adapters:
    """At most `limit` loaded adapters of `max_bytes`. Used by the engine's thread; other threads may read `held`."""

    def __init__(self, limit: int = 0, max_bytes: int = 1 << 62) -> None:
        self.limit, self.max_bytes = limit, max_bytes
        self._by_name: dict[str, Adapter] = {}
        # Pairs of name and digest; replaced as a whole, so that other threads can read it.
        self.held: tuple[tuple[str, str], ...] = ()

    def add(self, adapter: Adapter) -> None:
        """Add an adapter, or replace the adapter of the same name.

        Raises RequestRefused if there would be too many, or if they would have too many bytes.
        """
        if adapter.name not in self._by_name and len(self._by_name) >= self.limit:
            raise RequestRefused(
                f"the adapter {adapter.name!r} would be number {self.limit + 1}, and --max-loras is {self.limit}: "
                "unload one, or raise it"
            )
        others = sum(other.nbytes for name, other in self._by_name.items() if name != adapter.name)
        if others + adapter.nbytes > self.max_bytes:
            raise RequestRefused(
                f"the adapter {adapter.name!r} has {adapter.nbytes} bytes, the others have {others}, and --max-lora-gb "
                f"is {self.max_bytes / GIB:g}: unload one, or raise it"
            )
        self._by_name[adapter.name] = adapter
        self._publish()

    def remove(self, name: str) -> None:
        """Remove an adapter. Requests that use it go on."""
        self._by_name.pop(name, None)
        self._publish()

    def find(self, name: str, digest: str = "") -> Adapter:
        """Return an adapter. digest: of its files, as it must be; empty allows any. Raises RequestRefused."""
        adapter = self._by_name.get(name)
        if adapter is None:
            raise RequestRefused(f"this worker does not hold the adapter {name!r}; give all workers the same adapters")
        if digest and digest != adapter.digest:
            raise RequestRefused(
                f"the adapter {name!r} of this worker has the digest {adapter.digest}, and the request was accepted "
                f"for {digest}; give all workers the same files, and repeat the request"
            )
        return adapter

    @property
    def nbytes(self) -> int:
        return sum(adapter.nbytes for adapter in self._by_name.values())

    def _publish(self) -> None:
        self.held = tuple((name, adapter.digest) for name, adapter in sorted(self._by_name.items()))


def adapter_batch(batch: InputBatch, rows: np.ndarray, starts: np.ndarray, wanted: np.ndarray) -> AdapterBatch | None:
    """Return the adapters of a step, or None if no token uses one.

    rows int64 [S]: of the input batch. starts int32 [S + 1]: the first token of each sequence, and the end. wanted: the
    tokens whose output is wanted.
    """
    if not batch.num_adapted:
        return None
    numbers: dict[Adapter, int] = {}
    index = [
        NO_ADAPTER if adapter is None else numbers.setdefault(adapter, len(numbers))
        for adapter in map(batch.adapters.__getitem__, rows.tolist())
    ]
    if not numbers:
        return None
    tokens = np.repeat(np.array(index, dtype=np.int32), np.diff(starts))
    return AdapterBatch([cast(PackedAdapter, adapter.packed) for adapter in numbers], tokens, tokens[wanted])
