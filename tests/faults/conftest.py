"""A stack for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.faults.stack import FaultStack


@pytest.fixture(scope="session")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint with room for long answers."""
    return make_checkpoint(tmp_path_factory.mktemp("models") / "long", "llama", max_position_embeddings=2048)


@pytest.fixture
def stack(tmp_path: Path, long_model: Path) -> Iterator[FaultStack]:
    stack = FaultStack(tmp_path, long_model)
    try:
        yield stack
    finally:
        stack.close()
