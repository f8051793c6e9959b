"""A stack for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.stack import FaultStack
from tests.worker.checkpoints import make_checkpoint


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


# Of the faults of workers, these matter most; the others run with `-m soak` too, so that the default run stays short.
BY_DEFAULT = (
    "test_a_killed_workers_streams_go_on_elsewhere_token_for_token",
    "test_a_worker_that_is_told_to_stop_hands_its_requests_over_at_once",
    "test_a_request_that_kills_its_workers_is_given_up_and_the_innocent_finish",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name == "test_worker_faults.py" and item.name not in BY_DEFAULT:
            item.add_marker(pytest.mark.soak)
