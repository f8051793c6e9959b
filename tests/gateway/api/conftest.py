"""A gateway whose queue must stay untouched."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.gateway.running import RunningGateway


@pytest.fixture
async def server(start_gateway: Any) -> AsyncIterator[RunningGateway]:
    """A gateway whose queue must still be untouched when the test is over."""
    gateway = await start_gateway(max_body_bytes=100_000, body_timeout_s=0.2, max_n=4, max_prompts=8, max_choices=16)
    yield gateway
    assert await gateway.accepted() == 0
