"""A flag with which one thread ends the computation of another one between two layers of a decoder."""

from ctypes import addressof, c_int32


class StepInterrupted(Exception):
    """`Ops.decoder_layers` ended early, because it was asked to. The caches have the tokens of only some layers."""


class Interrupt:
    """A flag in memory that the C++ kernels read. Any thread may set it."""

    def __init__(self) -> None:
        self._flag = c_int32(0)

    @property
    def address(self) -> int:
        return addressof(self._flag)

    @property
    def is_requested(self) -> bool:
        return bool(self._flag.value)

    def request(self) -> None:
        self._flag.value = 1

    def clear(self) -> None:
        self._flag.value = 0

    def check(self) -> None:
        """Raise StepInterrupted if the flag is set."""
        if self._flag.value:
            raise StepInterrupted
