"""The page of the API: it renders /openapi.json of a real gateway under the policy of all pages."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from playwright.async_api import BrowserContext, Page, expect

from quire.gateway.features.openapi.endpoints import ENDPOINTS
from quire.gateway.settings import GatewaySettings
from tests.page.conftest import IN_BROWSER, each, shared
from tests.page.test_access import FAINT, MISTAKES
from tests.support.gateway.running import RunningGateway, running_gateway, write_model
from tests.support.redis_server import running_redis

pytestmark = IN_BROWSER


@shared
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningGateway]:
    model: Path = write_model(tmp_path_factory.mktemp("models") / "test-model")
    with running_redis() as redis:
        settings = GatewaySettings(model=str(model), redis_url=redis.url, port=0)
        async with running_gateway(settings) as running:
            yield running


@each
async def docs(context: BrowserContext, gateway: RunningGateway) -> Page:
    page = await context.new_page()
    await page.goto(f"{gateway.url}/docs")
    await expect(page.locator("#status")).to_have_text(f"{len(ENDPOINTS)} endpoints")
    return page


async def test_every_endpoint_has_its_parameters_and_answers(docs: Page) -> None:
    await expect(docs.locator("details")).to_have_count(len(ENDPOINTS))
    chat = docs.locator("#post_v1_chat_completions")
    await chat.locator("summary").click()
    row = chat.locator("tr", has=docs.get_by_text("temperature", exact=True)).first
    await expect(row).to_contain_text("number from 0 to 2")
    await expect(chat.locator("tr", has=docs.get_by_text("model", exact=True)).first).to_contain_text("required")
    await expect(chat.locator("tr", has=docs.get_by_text("n", exact=True)).first).to_contain_text(
        "integer from 1 to 128"
    )
    await expect(chat).to_contain_text("application/json: ChatCompletion")
    await expect(chat).to_contain_text("text/event-stream: ChatCompletionChunk")
    assert "undefined" not in await docs.locator("main").inner_text()


async def test_the_filter_hides_what_does_not_match(docs: Page) -> None:
    await docs.locator("#filter").fill("Token_Strs")
    await expect(docs.locator("#status")).to_have_text("1 endpoint")
    await expect(docs.locator("details:visible")).to_have_count(1)
    await expect(docs.locator("section:visible")).to_have_count(1)
    await docs.locator("#filter").fill("")
    await expect(docs.locator("details:visible")).to_have_count(len(ENDPOINTS))


async def test_an_address_opens_its_endpoint(docs: Page, gateway: RunningGateway) -> None:
    await docs.goto("about:blank")
    await docs.goto(f"{gateway.url}/docs/#post_tokenize")
    await expect(docs.locator("#post_tokenize")).to_have_attribute("open", "")


async def test_the_page_can_be_read_by_everybody(docs: Page) -> None:
    await docs.evaluate("document.querySelectorAll('details').forEach((block) => { block.open = true; })")
    for scheme in ("light", "dark"):
        await docs.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        found = await docs.evaluate(FAINT)
        assert found["count"] > 500
        assert found["faint"] == []
    assert await docs.evaluate(MISTAKES) == []
    await docs.set_viewport_size({"width": 360, "height": 700})
    assert await docs.evaluate("document.documentElement.scrollWidth") <= 360
