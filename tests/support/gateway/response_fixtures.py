"""A gateway with the chat template, tools and reasoning of the tests of Responses, and an openai client of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest

from tests.gateway.api.test_conversation import TEMPLATE
from tests.gateway.conftest import Start
from tests.support.gateway.running import RunningGateway, write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("responses") / "test-model", chat_template=TEMPLATE)


@pytest.fixture
async def gateway(start_gateway: Start, folder: Path) -> RunningGateway:
    return await start_gateway(model=str(folder), tool_call_format="hermes", reasoning_format="think")


@pytest.fixture
async def client(gateway: RunningGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with gateway.openai() as client:
        yield client
