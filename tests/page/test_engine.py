"""The engine page on a whole stack: requests of the page step by step, and all workers side by side."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page, expect

from tests.conftest import QuireProcess, quire_processes
from tests.page.conftest import IN_BROWSER
from tests.page.test_access import FAINT, MISTAKES
from tests.page.test_streams import watch_frames, watched_frames
from tests.support.page.stub import Stub

pytestmark = IN_BROWSER

LONG_MS = 60_000
PHONE: Any = {"width": 360, "height": 780}
SCHEMES: Any = ("light", "dark")

# Goes to a step, waits for its drawing, and returns what the page shows of it.
# The lower edges of all maps, and the controls, in one frame: a chapter makes its maps anew.
EDGES = """() => {
  const edges = (element) => element.getBoundingClientRect();
  const maps = [...document.querySelectorAll(".map canvas:first-child")].map((canvas) => edges(canvas).bottom);
  return [maps, edges(document.querySelector(".controls")).toJSON()];
}"""
# withArc: look for an arc too, once it has grown.
LOOK = """async ([step, withArc]) => {
  const slider = document.getElementById("time");
  slider.value = step;
  slider.dispatchEvent(new Event("input"));
  await new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)));
  const text = (selector) => document.querySelector(selector).textContent;
  let data = [];
  if (withArc) {
    await new Promise((resolve) => setTimeout(resolve, 400));
    data = document.querySelector(".arcs").getContext("2d").getImageData(0, 0, 4000, 2000).data;
  }
  return {
    sharing: text("#sharing"),
    paged: text("#paged"),
    sequences: document.querySelectorAll("#sequences li").length,
    read: text("#sequences"),
    hasArc: data.some((part) => part > 0),
  };
}"""


class Stack:
    """A running `quire serve` of the demo model."""

    def __init__(self, process: QuireProcess, url: str, state: Path) -> None:
        self.process = process
        self.url = url
        self._state = state

    def usage(self) -> dict[str, Any]:
        """Return the block usage from the worker's operator endpoint `/debug/blocks`."""
        [log] = self._state.glob("logs/worker*.log")
        found = re.search(r"for operators: (\S+)/metrics", log.read_text())
        assert found
        with urllib.request.urlopen(f"{found[1]}/debug/blocks", timeout=60) as response:
            usage: dict[str, Any] = json.load(response)["usage"]
            return usage


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    state = tmp_path_factory.mktemp("state")
    with quire_processes() as start:
        flags = ("--speculation", "off")  # each step writes one token
        process = start("serve", "--port", "0", "--state-dir", str(state), *flags)
        yield Stack(process, process.wait_ready(), state)


async def open_engine(page: Page, stack: Stack) -> None:
    """Open the page, and wait until the views of the workers arrive."""
    async with page.expect_response(re.compile("/engine/stream$")):
        await page.goto(f"{stack.url}/engine")
    await expect(page.locator("[data-chapter=reserve]")).to_have_attribute("aria-pressed", "true")
    await page.wait_for_timeout(1500)


async def done(page: Page) -> int:
    """Wait for the end of the requests. Returns the number of steps that the slider has."""
    await expect(page.locator("#try-status")).to_contain_text("Done", timeout=LONG_MS)
    await page.wait_for_timeout(1500)  # the last view
    await page.focus("#time")
    if await page.locator("#play").inner_text() == "Pause":
        await page.keyboard.press("Space")
    return int(await page.get_attribute("#time", "max") or 0)


async def test_each_step_of_four_answers_can_be_looked_at_with_their_text(page: Page, stack: Stack) -> None:
    await open_engine(page, stack)
    before = stack.usage()
    await page.fill("#prompt", "Tell me a story about a heron who reads an old book of maps.")
    await page.click("#four button")
    last = await done(page)
    told = stack.usage()
    # The frame before, one for each step, and the one after.
    assert last == told["steps"] - before["steps"] + 1
    shown = [await page.evaluate(LOOK, [step, True]) for step in range(6)]
    assert [one["sequences"] for one in shown] == [0, 1, 4, 4, 4, 4]
    assert "reads" in shown[1]["read"]
    copies = [step for step in range(6) if shown[step]["hasArc"]]
    assert copies == [2], "the answers copy the block that they share when they write their first tokens"
    assert told["copies"] - before["copies"] == 3
    assert shown[2]["sharing"] == "1 shared block saves 3"
    await page.click("#as-table summary")
    row = page.locator("#block-list tbody tr", has_text="shared").first
    await expect(row).to_contain_text("16 of 16")
    await expect(row).to_contain_text(re.compile(r"/0 block 0, \S+/1 block 0, \S+/2 block 0, \S+/3 block 0"))
    await expect(row).to_contain_text("Tell me a story")
    await page.locator("#sequences button").nth(2).click()
    await expect(page.locator("#table tbody tr").first).to_contain_text("×4")
    after = await page.evaluate(LOOK, [last, False])
    assert (after["sequences"], after["paged"]) == (0, "–")


async def test_eight_requests_of_one_call_share_the_blocks_of_their_beginning(page: Page, stack: Stack) -> None:
    await open_engine(page, stack)
    before = stack.usage()
    for _ in range(3):  # on a busy machine the first answer may end before the last prompt is queued
        await page.click("#eight")
        last = await done(page)
        seen = [await page.evaluate(LOOK, [step, False]) for step in range(0, last, 3)]
        if max(one["sequences"] for one in seen) == 8:
            break
    assert stack.usage()["prefix_hit_tokens"] > before["prefix_hit_tokens"]
    assert max(one["sequences"] for one in seen) == 8, "all eight run at once"
    assert any(int(one["sharing"].split(" ")[0]) >= 6 for one in seen if one["sharing"])


async def test_an_idle_page_plays_the_tour_from_chapter_to_chapter(page: Page, stack: Stack) -> None:
    await open_engine(page, stack)
    await page.select_option("#speed", "20")
    for chapter in ("pages", "share", "full", "kill", "draft", "reserve"):
        await expect(page.locator(f"[data-chapter={chapter}]")).to_have_attribute("aria-pressed", "true")


async def test_requests_of_others_are_shown_as_they_run_and_the_tour_returns(page: Page, stack: Stack) -> None:
    await open_engine(page, stack)
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 400, "ignore_eos": True}
    await page.request.post(f"{stack.url}/v1/chat/completions", data=body)
    await expect(page.locator("#live")).to_have_attribute("aria-pressed", "true")
    await expect(page.locator("#caption")).to_contain_text("as it happens")
    await expect(page.locator("[data-chapter][aria-pressed=true]")).to_have_count(1, timeout=LONG_MS)


async def test_keys_play_and_go_from_step_to_step_and_from_block_to_block(page: Page, stack: Stack) -> None:
    await page.emulate_media(reduced_motion="reduce")
    await open_engine(page, stack)
    await expect(page.locator("#play")).to_have_text("Play")  # nothing moves by itself
    await page.click("[data-chapter=pages]")
    await page.focus("#time")
    await page.keyboard.press("Space")
    await page.keyboard.press("Home")
    await page.keyboard.press("ArrowRight")
    await page.keyboard.press("ArrowRight")
    await expect(page.locator("#when")).to_have_text(re.compile(r"^step 2 of \d+$"))
    await page.focus(".map")
    await page.keyboard.press("ArrowRight")
    await expect(page.locator("#block")).to_have_text(re.compile(r"^Block 0: 8 of 8 slots filled; of hello/0.*“Hello!"))
    await page.keyboard.press("Space")
    await expect(page.locator("#play")).to_have_text("Pause")


async def test_the_map_is_seen_first_on_a_phone(page: Page, stack: Stack) -> None:
    await page.set_viewport_size(PHONE)
    await open_engine(page, stack)
    assert await page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    for chapter in ("reserve", "share", "kill"):
        await page.click(f"[data-chapter={chapter}]")
        maps, controls = await page.evaluate(EDGES)
        assert maps
        assert max(maps) <= controls["top"] + 1, chapter
        assert controls["bottom"] <= PHONE["height"]


async def test_its_structure_and_colours_are_for_everybody(page: Page, stack: Stack) -> None:
    async def check() -> None:
        # Screen readers announce two lines: that of the buttons, and that of the block under the pointer.
        assert await page.evaluate(MISTAKES) == ["not one [role=status]"]
        for scheme in SCHEMES:
            await page.emulate_media(color_scheme=scheme)
            assert (await page.evaluate(FAINT))["faint"] == []

    await open_engine(page, stack)
    await check()
    await page.click("#what summary")
    await page.click("#as-table summary")
    await page.click("[data-chapter=draft]")
    await page.click("#play")
    await page.evaluate(LOOK, [4, True])
    await expect(page.locator(".token.bad").first).to_be_visible()
    await check()
    await page.click("#four button")
    await done(page)
    await page.set_viewport_size(PHONE)
    await check()


@pytest.mark.alone
async def test_no_frame_is_long_while_steps_arrive_and_are_played(page: Page, stack: Stack) -> None:
    await open_engine(page, stack)
    await page.select_option("#speed", "20")
    await watch_frames(page)
    await page.click("#eight")
    await page.wait_for_timeout(8000)
    frames = await watched_frames(page)
    print(f"engine page: {frames}")
    # An idle machine stays under 50 ms; this limit has room for a busy machine.
    assert sum(frame["blocking"] for frame in frames.long) / len(frames.gaps) < 20


# --- without a stack --------------------------------------------------------------------------------------------------


async def open_idle(page: Page, stub: Stub) -> None:
    """Open the page of a gateway without workers."""
    await page.emulate_media(reduced_motion="reduce")
    await page.route("**/engine/workers", lambda route: route.fulfill(json={"model": "stub", "workers": []}))
    await page.route("**/engine/stream", lambda route: None)  # no event ever
    await page.goto(f"{stub.url}/engine")
    await expect(page.locator("[data-chapter=reserve]")).to_have_attribute("aria-pressed", "true")


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ('data: {"error": {"message": "The worker is gone."}}\n\ndata: [DONE]\n\n', "It failed: The worker is gone."),
        ('data: {"id": "cmpl-1", "choices": []}\n\n', "It failed: The stream broke off."),
        ("data: [DONE]\n\n", "No worker is available."),
    ],
    ids=["error", "cut", "done"],
)
async def test_a_request_that_fails_is_not_done(page: Page, stub: Stub, events: str, said: str) -> None:
    await page.route("**/tokenize", lambda route: route.fulfill(json={"tokens": [1], "token_strs": ["a"]}))
    await page.route(
        "**/v1/completions", lambda route: route.fulfill(body=events, headers={"Content-Type": "text/event-stream"})
    )
    await open_idle(page, stub)
    await page.click("#eight")
    await expect(page.locator("#try-status")).to_have_text(said)


async def test_a_second_press_of_watch_live_returns_to_the_tour(page: Page, stub: Stub) -> None:
    await open_idle(page, stub)
    for pressed in ("true", "false"):
        await page.click("#live")
        await expect(page.locator("#live")).to_have_attribute("aria-pressed", pressed)
    await expect(page.locator("[data-chapter][aria-pressed=true]")).to_have_count(1)


# --- two workers ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two workers behind one gateway."""
    state = tmp_path_factory.mktemp("pair")
    with quire_processes() as start:
        process = start("serve", "--workers", "2", "--port", "0", "--state-dir", str(state))
        yield Stack(process, process.wait_ready(), state)


async def test_all_workers_are_side_by_side_and_their_steps_are_in_one_recording(page: Page, pair: Stack) -> None:
    await open_engine(page, pair)
    await page.click("#live")
    both = expect(page.locator("#maps h2"))
    await both.to_have_text(["worker-1", "worker-2"])
    await page.click("#eight")
    last = await done(page)
    await both.to_have_text(["worker-1", "worker-2"])
    seen = [await page.evaluate(LOOK, [step, False]) for step in range(0, last, 2)]
    assert max(one["sequences"] for one in seen) >= 4
    left, right = [await box.bounding_box() for box in await page.locator(".map").all()]
    assert left
    assert right
    assert (left["y"], left["width"]) == (right["y"], right["width"])
