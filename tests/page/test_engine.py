"""The engine page with everything behind it: what a newcomer presses, and what is then to be seen."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, Locator, Page, expect

from tests.conftest import QuireProcess, quire_processes
from tests.page.conftest import IN_BROWSER

pytestmark = IN_BROWSER

POSITIVE = re.compile(r"^[1-9]\d*$")
LONG_MS = 60_000


class Stack:
    """A running `quire serve` of the demo model."""

    def __init__(self, process: QuireProcess, url: str, state: Path) -> None:
        self.process = process
        self.url = url
        self._state = state

    def usage(self) -> dict[str, Any]:
        """What the worker tells its operator."""
        [log] = self._state.glob("logs/worker*.log")
        found = re.search(r"for operators: (\S+)/metrics", log.read_text())
        assert found
        with urllib.request.urlopen(f"{found[1]}/debug/blocks", timeout=10) as response:
            usage: dict[str, Any] = json.load(response)["usage"]
            return usage


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    state = tmp_path_factory.mktemp("state")
    with quire_processes() as start:
        process = start("serve", "--port", "0", "--state-dir", str(state))
        yield Stack(process, process.wait_ready(), state)


def figure(page: Page, name: str) -> Locator:
    return page.locator(f"[data-figure={name}]")


async def open_engine(page: Page, stack: Stack) -> None:
    await page.goto(f"{stack.url}/engine")
    await expect(figure(page, "blocks_used")).not_to_have_text("–", timeout=LONG_MS)


async def done(page: Page) -> None:
    await expect(page.locator("#try-status")).to_contain_text("Done", timeout=LONG_MS)
    await expect(figure(page, "sequences")).to_have_text("0", timeout=LONG_MS)


async def test_four_answers_share_the_blocks_of_their_prompt_and_copy_what_they_write_into(
    page: Page, stack: Stack
) -> None:
    await open_engine(page, stack)
    await page.click("#as-table summary")
    await page.click("[data-demo=four]")
    await expect(figure(page, "blocks_shared")).to_have_text(POSITIVE, timeout=LONG_MS)
    await expect(figure(page, "copies")).to_have_text(POSITIVE, timeout=LONG_MS)
    await expect(page.locator("#sequences button")).to_have_count(4)
    await page.click("#pause")
    await expect(page.locator("#when")).to_contain_text("s ago")
    shared = page.locator("#block-list tbody tr", has_text="shared").first
    await expect(shared).to_contain_text("16 of 16")
    await expect(shared).to_contain_text(re.compile(r"/0 block \d+, \S+/1 block \d+, \S+/2 block \d+, \S+/3 block \d+"))
    await page.locator("#sequences button").nth(2).click()
    await expect(page.locator("#table tbody tr").first).to_contain_text("×4")
    await expect(page.locator("#sequence")).to_contain_text("/2: ")
    await expect(page.locator("#step")).to_contain_text("tokens of the budget")
    await page.click("#pause")
    await done(page)
    told = stack.usage()
    for name in ("blocks_used", "blocks_shared", "blocks_cached", "blocks_pinned", "copies"):
        await expect(figure(page, name)).to_have_text(str(told[name]))


async def test_beams_fork_and_requests_find_the_beginning_that_they_share(page: Page, stack: Stack) -> None:
    await open_engine(page, stack)
    before = stack.usage()
    await page.click("[data-demo=beam]")
    await done(page)
    assert stack.usage()["forks"] > before["forks"] + 3
    await page.click("[data-demo=prefix]")
    await expect(figure(page, "blocks_shared")).to_have_text(POSITIVE, timeout=LONG_MS)
    await done(page)
    assert stack.usage()["prefix_hit_tokens"] > before["prefix_hit_tokens"]


async def test_keys_go_from_block_to_block(page: Page, stack: Stack) -> None:
    await open_engine(page, stack)
    await page.focus("#map")
    await page.keyboard.press("ArrowDown")
    await expect(page.locator("#block")).to_contain_text(re.compile(r"^Block \d+"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_it_fits_a_phone(browser: Browser, stack: Stack, scheme: Any) -> None:
    page = await browser.new_page(viewport={"width": 360, "height": 780}, color_scheme=scheme)
    try:
        await open_engine(page, stack)
        assert await page.evaluate("document.documentElement.scrollWidth") <= 360
    finally:
        await page.close()
