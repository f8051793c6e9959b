from __future__ import annotations

import pytest

from quire.shared.text.panics import faults_as, is_panic
from tests.support.panicking import PANICS, panicking


def test_a_panic_of_a_library_becomes_an_error() -> None:
    with pytest.raises(BaseException, match="retry-limit") as panic:
        panicking().encode(PANICS)
    assert is_panic(panic.value)
    assert not isinstance(panic.value, Exception)
    with pytest.raises(ValueError, match="retry-limit"), faults_as(ValueError):
        panicking().encode(PANICS)


def test_an_interrupt_is_no_fault_of_a_library() -> None:
    assert not is_panic(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt), faults_as(ValueError):
        raise KeyboardInterrupt
