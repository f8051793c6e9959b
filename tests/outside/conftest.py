"""One running `quire serve` of the demo model for the tests of clients, and the environments of clients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import QuireProcess, clean_environ
from tests.outside.environments import Environments


@pytest.fixture(scope="session")
def demo_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a gateway that serves the demo model, with a worker of its own."""
    state = tmp_path_factory.mktemp("state")
    arguments = ("serve", "--port", "0", "--state-dir", str(state), "--dtype", "float32", "--tokenizer-info")
    process = QuireProcess(arguments, clean_environ(), None)
    try:
        yield process.wait_ready()
        assert process.stop() == 0
    finally:
        process.close()


@pytest.fixture(scope="session")
def environments(request: pytest.FixtureRequest) -> Environments:
    """The environments of clients that cannot be installed next to Quire, kept in pytest's cache."""
    cache = request.config.cache
    assert cache is not None
    return Environments(cache.mkdir("quire-clients"))
