"""The adapters of a step follow the rows of its sequences."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from quire.worker.device.adapter_rows import adapter_batch


class Adapter(SimpleNamespace):
    __hash__ = object.__hash__


ONE, TWO = Adapter(packed="one"), Adapter(packed="two")


def batch(adapters: list[Any]) -> Any:
    return SimpleNamespace(adapters=adapters, num_adapted=sum(one is not None for one in adapters))


def test_tokens_have_the_adapter_of_their_sequence() -> None:
    rows, starts, wanted = np.array([3, 0, 1]), np.array([0, 1, 2, 6]), np.array([0, 5, 1])
    found = adapter_batch(batch([None, TWO, None, ONE]), rows, starts, wanted)
    assert found is not None
    assert list(found.adapters) == ["one", "two"]
    assert found.tokens.tolist() == [0, -1, 1, 1, 1, 1]
    assert found.wanted.tolist() == [0, 1, -1]


def test_a_step_without_adapters_has_none() -> None:
    rows, starts, wanted = np.array([0]), np.array([0, 1]), np.array([0])
    assert adapter_batch(batch([None, None]), rows, starts, wanted) is None
    assert adapter_batch(batch([None, ONE]), rows, starts, wanted) is None
