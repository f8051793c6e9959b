"""Asynchronous copies from global to shared memory: each is delivered by the last wait that allows it to be late."""

from collections.abc import Callable

from tests.kernels.ptx.fault import PtxFault


class Copies:
    """The copies under way, in groups."""

    def __init__(self) -> None:
        self._open: list[Callable[[], None]] = []
        self._groups: list[list[Callable[[], None]]] = []

    def clear(self) -> None:
        self._open, self._groups = [], []

    def begin(self, deliver: Callable[[], None]) -> None:
        self._open.append(deliver)

    def commit(self) -> None:
        self._groups.append(self._open)
        self._open = []

    def wait(self, pending: int) -> None:
        """Deliver all committed groups but the last `pending`."""
        while len(self._groups) > pending:
            for deliver in self._groups.pop(0):
                deliver()

    def check_complete(self) -> None:
        if self._open or any(self._groups):
            raise PtxFault("the program ends while a copy is in flight")
