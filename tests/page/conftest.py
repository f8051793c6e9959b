from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, BrowserContext, ConsoleMessage, Page, async_playwright, expect

from tests.support.page.stub import Call, Script, Stub

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


# A machine that runs other tests at the same time may be slow.
expect.set_options(timeout=60_000)

# One loop and one browser for all tests of this folder.
shared = pytest_asyncio.fixture(loop_scope="session", scope="session")
each = pytest_asyncio.fixture(loop_scope="session")
IN_BROWSER = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]


@shared
async def browser() -> AsyncIterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("needs Chromium (apt-get install chromium)")
    # Chromium's sandbox does not work for root.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        await browser.close()


# The prefix of Chromium's message about a response with an error status or a broken connection.
LOADING = "Failed to load resource: "


@each
async def context(browser: Browser) -> AsyncIterator[BrowserContext]:
    """A browser context whose pages fail the test if a script raises or the console shows an error.

    A violation of the content security policy writes such an error. Responses with an error status are allowed, because
    tests provoke them."""
    context = await browser.new_context(viewport={"width": 1200, "height": 800})
    context.set_default_timeout(60_000)
    errors: list[str] = []

    def note(message: ConsoleMessage) -> None:
        if message.type == "error" and not message.text.startswith(LOADING):
            errors.append(message.text)

    context.on("weberror", lambda error: errors.append(f"{error.error}"))
    context.on("console", note)
    yield context
    await context.close()
    assert errors == []


@each
async def page(context: BrowserContext) -> Page:
    return await context.new_page()


@each
async def stub() -> AsyncIterator[Stub]:
    async with Stub().running() as stub:
        yield stub


@each
async def chat(page: Page, stub: Stub) -> Page:
    """Open the stub's chat page, ready to send."""
    await open_chat(page, stub.url)
    return page


async def open_chat(page: Page, url: str) -> None:
    await page.goto(url)
    await page.wait_for_selector("#model option", state="attached")


async def send(page: Page, text: str) -> None:
    await page.fill("#input", text)
    await page.press("#input", "Enter")


async def set_field(page: Page, **values: str) -> None:
    """Fill in fields of the settings, and close the settings again."""
    await page.click("#settings-button")
    for name, value in values.items():
        await page.fill(f"#{name}", value)
    await page.click("#settings .close")


async def stored(page: Page) -> list[dict[str, Any]]:
    """Return the conversations that the page has stored, the newest first."""
    found: list[dict[str, Any]] = await page.evaluate("""async () => {
      const { listConversations, loadConversation } = await import("/store.js");
      return Promise.all((await listConversations()).map(({ id }) => loadConversation(id)));
    }""")
    return found


async def begin(page: Page, stub: Stub) -> tuple[Call, Script]:
    """Send a message, and begin the answer with "One"."""
    await send(page, "Hello")
    call = await stub.call()
    script = Script()
    await call.accept(script.request_id)
    await call.write(script.opening() + script.text(1, "One"))
    await expect(page.locator(".text")).to_have_text("One")
    return call, script
