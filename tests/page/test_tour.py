"""The tour as a file: it is what its script builds, and plays from disk."""

from __future__ import annotations

import re

from playwright.async_api import Page, expect

from quire.ops.tools import tour_page
from tests.page.conftest import IN_BROWSER, each
from tests.page.test_access import FAINT, MISTAKES
from tests.page.test_engine import LOOK, PHONE, SCHEMES

pytestmark = IN_BROWSER


@each
async def tour(page: Page) -> Page:
    await page.emulate_media(reduced_motion="reduce")
    await page.goto(tour_page.FILE.as_uri())
    return page


async def at(page: Page, chapter: str, step: int) -> dict[str, str]:
    await page.click(f"[data-chapter={chapter}]")
    shown: dict[str, str] = await page.evaluate(LOOK, [step, True])
    return shown


async def test_it_plays_from_disk(page: Page) -> None:
    await page.goto(tour_page.FILE.as_uri())
    await page.select_option("#speed", "20")
    for chapter in ("pages", "share", "full"):
        await expect(page.locator(f"[data-chapter={chapter}]")).to_have_attribute("aria-pressed", "true")


async def test_reserved_memory_is_nearly_empty_and_refuses_requests_that_pages_hold(tour: Page) -> None:
    await at(tour, "reserve", 11)
    reserved, paged = [int((await tour.inner_text(f"#{name}")).split(" ")[0]) for name in ("reserved", "paged")]
    # Three of six requests of 16, 21 and 14 tokens reserve 256 each.
    assert reserved == round(100 * (1 - (16 + 21 + 14) / (3 * 256)))
    assert paged < 25
    await expect(tour.locator("#maps .head")).to_contain_text(["3 run, 3 have no room", "6 run"])
    await expect(tour.locator("#sequences li")).to_have_count(6)


async def test_copies_swaps_and_drafts_are_in_their_steps(tour: Page) -> None:
    arcs = [(await at(tour, "share", step))["hasArc"] for step in (1, 2, 3)]
    assert arcs == [False, True, False]
    assert "3 shared blocks save 9" in (await at(tour, "share", 2))["sharing"]
    assert "swapped out" in (await at(tour, "full", 14))["read"]
    assert "swapped out" not in (await at(tour, "full", 23))["read"]
    assert re.search(r"11 drafted, 5 accepted", (await at(tour, "draft", 4))["read"])


async def test_a_killed_worker_is_empty_and_the_other_one_has_its_requests(tour: Page) -> None:
    before = await at(tour, "kill", 16)
    assert all(name in before["read"] for name in ("fox/0", "poem/0", "light/0"))
    dead = await at(tour, "kill", 17)
    await expect(tour.locator("#maps .head").first).to_contain_text("killed")
    assert "fox/0" not in dead["read"]
    after = await at(tour, "kill", 30)
    assert all(name in after["read"] for name in ("fox/0", "poem/0", "light/0"))


async def test_it_is_for_everybody(tour: Page) -> None:
    for size in ({"width": 1200, "height": 800}, PHONE):
        await tour.set_viewport_size(size)
        await at(tour, "draft", 4)
        assert await tour.evaluate(MISTAKES) == []
        assert await tour.evaluate("document.documentElement.scrollWidth") <= size["width"]
        for scheme in SCHEMES:
            await tour.emulate_media(color_scheme=scheme)
            assert (await tour.evaluate(FAINT))["faint"] == []
