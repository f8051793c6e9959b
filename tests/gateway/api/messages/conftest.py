"""A gateway whose model has a chat template with tools, reasoning and levels of effort."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from tests.support.gateway.agents import TEMPLATE
from tests.support.gateway.running import RunningGateway, write_model


@pytest.fixture(scope="session")
def agent_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "test-model", chat_template=TEMPLATE)


@pytest.fixture
async def agent_gateway(start_gateway: Any, agent_model: Path) -> RunningGateway:
    gateway: RunningGateway = await start_gateway(model=str(agent_model))
    return gateway


@pytest.fixture
async def client(agent_gateway: RunningGateway) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(
        base_url=agent_gateway.url, api_key="unused", max_retries=0, timeout=60
    ) as client:
        yield client
