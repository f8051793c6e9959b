"""The engine page on a whole stack: each button that a new user presses, and the result on the page."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Locator, Page, expect

from tests.conftest import QuireProcess, quire_processes
from tests.page.conftest import IN_BROWSER
from tests.page.test_access import FAINT, MISTAKES

pytestmark = IN_BROWSER

POSITIVE = re.compile(r"^[1-9]\d*$")
LONG_MS = 60_000
PHONE: Any = {"width": 360, "height": 780}
SCHEMES: Any = ("light", "dark")
# Checks every frame of the page, because the request takes only about a second on a fast machine.
FOUR_RUN = """() => new Promise((resolve) => {
  const look = () =>
    document.querySelectorAll("#sequences button").length === 4 ? resolve() : requestAnimationFrame(look);
  look();
})"""

# Pauses in the frame in which four answers have copied a block and still share others.
PAUSE_WITH_FOUR = """() => new Promise((resolve) => {
  const look = () => {
    const positive = (name) => /^[1-9]/.test(document.querySelector(`[data-figure=${name}]`).textContent);
    const four = document.querySelectorAll("#sequences button").length === 4;
    if (!(four && positive("copies") && positive("blocks_shared"))) return requestAnimationFrame(look);
    document.getElementById("pause").click();
    resolve();
  };
  look();
})"""

# Pauses in the frame in which the table has 16 rows, more than fit next to the map. A click from outside may come late.
PAUSE_WITH_ROWS = """() => new Promise((resolve) => {
  const look = () => {
    if (document.querySelectorAll("#table tbody tr").length < 16) return requestAnimationFrame(look);
    document.getElementById("pause").click();
    resolve();
  };
  look();
})"""


# Records the largest figures and any frame in which the two lines contradict each other.
RECORD = """() => {
  const text = (selector) => document.querySelector(selector).textContent;
  const seen = (window.seen = { peak: 0, sequences: 0, chips: 0, shared: 0, contradictions: [] });
  window.recorder?.disconnect();
  window.recorder = new MutationObserver(() => {
    const used = Number(text("[data-figure=blocks_used]"));
    seen.sequences = Math.max(seen.sequences, Number(text("[data-figure=sequences]")) || 0);
    seen.shared = Math.max(seen.shared, Number(text("[data-figure=blocks_shared]")) || 0);
    seen.chips = Math.max(seen.chips, document.querySelectorAll("#sequences button").length);
    if (used > seen.peak) [seen.peak, seen.worker] = [used, document.getElementById("worker").value];
    const [status, note] = [text("#try-status"), text("#sequence")];
    if (/running|sent|queued/.test(status) && note.startsWith("Nothing runs")) seen.contradictions.push([status, note]);
    if (status.includes("shown")) seen.status = status;
  });
  window.recorder.observe(document.querySelector("main"), { subtree: true, childList: true, characterData: true });
}"""

# Selects the other worker when the page names the one that took the requests, and records what the page says then.
CHOOSE_OTHER = """() => {
  const status = document.getElementById("try-status");
  const picker = document.getElementById("worker");
  const chosen = (window.chosen = { texts: [] });
  window.chooser?.disconnect();
  window.chooser = new MutationObserver(() => {
    const text = status.textContent.replace(/^.*running\\. /, "");
    if (chosen.other) {
      if (text.includes("is shown.") && text !== chosen.texts.at(-1)) chosen.texts.push(text);
    } else if (text.includes("is shown.")) {
      chosen.owner = picker.value;
      picker.selectedIndex = 1 - picker.selectedIndex;
      chosen.other = picker.value;
      picker.dispatchEvent(new Event("change", { bubbles: true }));
    }
  });
  window.chooser.observe(status, { subtree: true, childList: true, characterData: true });
}"""

# Whether an arc is drawn; the element also has the path of a selected sequence.
DRAWN = """() => {
  const canvas = document.getElementById("arcs");
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return data.some((part) => part > 0);
}"""

# Resolves in the first frame with an arc.
ARC = f"""() => new Promise((resolve) => {{
  const drawn = {DRAWN};
  const look = () => (drawn() ? resolve() : requestAnimationFrame(look));
  look();
}})"""

# Selects the other worker, and counts the frames of the next half second with an arc.
SWITCH = f"""() => new Promise((resolve) => {{
  const drawn = {DRAWN};
  const picker = document.getElementById("worker");
  picker.selectedIndex = 1 - picker.selectedIndex;
  picker.dispatchEvent(new Event("change", {{ bubbles: true }}));
  const began = performance.now();
  let count = 0;
  const look = () => {{
    count += drawn();
    if (performance.now() - began < 500) requestAnimationFrame(look);
    else resolve(count);
  }};
  look();
}})"""

# Counts the frames with an arc although no block is in use, until the page says that the request is done.
LATE_ARCS = f"""() => new Promise((resolve) => {{
  const drawn = {DRAWN};
  const text = (selector) => document.querySelector(selector).textContent;
  let [count, hasRun] = [0, false];
  const look = () => {{
    const isIdle = text("[data-figure=blocks_used]") === "0";
    hasRun ||= !isIdle;
    if (hasRun && isIdle) count += drawn();
    if (hasRun && isIdle && text("#try-status").startsWith("Done")) resolve(count);
    else requestAnimationFrame(look);
  }};
  look();
}})"""


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


async def run_four_until(page: Page, look: str) -> None:
    """Run the demo with four answers until `look` finds the frame it waits for; run it again if the answers end first.

    `look` examines the frames from before the click. A busy browser can skip the frames of a whole request.
    """
    seen = asyncio.create_task(page.evaluate(look))
    async with asyncio.timeout(LONG_MS / 1000):
        while not seen.done():
            await page.click("[data-demo=four]")
            ended = asyncio.create_task(expect(page.locator("#try-status")).to_contain_text("Done", timeout=LONG_MS))
            await asyncio.wait({seen, ended}, return_when=asyncio.FIRST_COMPLETED)
            ended.cancel()
            await asyncio.wait({ended})
            # The page draws the last frames after the end, and a second click would undo the pause of `look`.
            await asyncio.wait({seen}, timeout=2)
    await seen


async def test_four_answers_share_the_blocks_of_their_prompt_and_copy_what_they_write_into(
    page: Page, stack: Stack
) -> None:
    await open_engine(page, stack)
    await page.click("#as-table summary")
    await run_four_until(page, PAUSE_WITH_FOUR)
    await expect(figure(page, "blocks_shared")).to_have_text(POSITIVE)
    await expect(figure(page, "copies")).to_have_text(POSITIVE)
    await expect(page.locator("#sequences button")).to_have_count(4)
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
    await page.evaluate(RECORD)
    await page.click("[data-demo=prefix]")
    await done(page)
    assert stack.usage()["prefix_hit_tokens"] > before["prefix_hit_tokens"]
    seen = await page.evaluate("window.seen")
    assert seen["sequences"] == 8, "all eight run at once"
    assert seen["chips"] == 8, "each has its own name and colour"
    assert seen["shared"] > 0


async def test_no_arc_outlives_the_blocks(page: Page, stack: Stack) -> None:
    await open_engine(page, stack)
    counted = asyncio.create_task(page.evaluate(LATE_ARCS))
    arc = asyncio.create_task(page.evaluate(ARC))
    await page.click("[data-demo=beam]")
    await arc
    assert await counted == 0


async def test_blocks_can_be_pointed_at_while_the_engine_runs(page: Page, stack: Stack) -> None:
    """The pointer moves at any time, also between a view's arrival and its drawing. No script may raise."""
    await open_engine(page, stack)
    await page.click("[data-demo=prefix]")
    await expect(figure(page, "blocks_used")).to_have_text(POSITIVE, timeout=LONG_MS)
    described = 0
    for line in range(20):
        # Texts above the map grow and shrink while the engine runs, which moves the map.
        await page.locator("#map").scroll_into_view_if_needed()
        box = await page.locator("#blocks").bounding_box()
        assert box
        y = box["y"] + 11 * line % min(60, box["height"])
        await page.mouse.move(box["x"], y)
        await page.mouse.move(box["x"] + box["width"] / 2, y, steps=10)
        described += (await page.locator("#block").text_content() or "").startswith("Block ")
    assert described > 3
    await done(page)


async def test_keys_go_from_block_to_block(page: Page, stack: Stack) -> None:
    await open_engine(page, stack)
    await page.focus("#map")
    await page.keyboard.press("ArrowDown")
    await expect(page.locator("#block")).to_contain_text(re.compile(r"^Block \d+"))


async def test_it_fits_a_phone(page: Page, stack: Stack) -> None:
    await page.set_viewport_size(PHONE)
    await open_engine(page, stack)
    assert await page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    # The first row of the map is seen without scrolling.
    box = await page.locator("#blocks").bounding_box()
    assert box
    assert box["y"] + 30 < PHONE["height"]


async def test_its_structure_and_colours_are_for_everybody(page: Page, stack: Stack) -> None:
    """The states are idle, running, pointed at, and paused with all tables, also on a phone."""

    async def check() -> None:
        # Screen readers announce two lines: that of the buttons, and that of the block under the pointer.
        assert await page.evaluate(MISTAKES) == ["not one [role=status]"]
        for scheme in SCHEMES:
            await page.emulate_media(color_scheme=scheme)
            assert (await page.evaluate(FAINT))["faint"] == []

    await open_engine(page, stack)
    await check()
    await run_four_until(page, FOUR_RUN)
    await check()
    await page.hover("#blocks", position={"x": 10, "y": 10})
    await expect(page.locator("#block")).to_contain_text("Block ")
    await check()
    await done(page)
    await run_four_until(page, PAUSE_WITH_ROWS)
    await page.click("#as-table summary")
    await page.click("#what summary")
    await check()
    await page.set_viewport_size(PHONE)
    await check()
    # A click for another run ends the pause, if it comes between the frame that was waited for and the word of it.
    if await page.get_attribute("#pause", "aria-pressed") == "true":
        await page.click("#pause")
    await done(page)


# --- two workers ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two workers behind one gateway."""
    state = tmp_path_factory.mktemp("pair")
    with quire_processes() as start:
        process = start("serve", "--workers", "2", "--port", "0", "--state-dir", str(state))
        yield Stack(process, process.wait_ready(), state)


async def test_a_press_shows_the_worker_that_takes_its_request_whichever_was_shown_before(
    page: Page, pair: Stack
) -> None:
    await open_engine(page, pair)
    await expect(page.locator("#worker option")).to_have_count(2)
    for press in range(4):
        # The test chooses each worker in turn, so that the request often goes to the worker that is not shown.
        await page.select_option("#worker", index=press % 2)
        await expect(figure(page, "blocks_used")).to_have_text("0", timeout=LONG_MS)
        await page.evaluate(RECORD)
        # A busy browser can skip the frames of a whole request.
        for _ in range(3):
            await page.click("[data-demo=four]" if press < 2 else "[data-demo=beam]")
            await done(page)
            seen = await page.evaluate("window.seen")
            if seen["peak"]:
                break
        assert seen["peak"] > 0, f"press {press + 1} showed no block"
        assert seen["contradictions"] == []
        assert seen["status"] == f"1 request running. {seen['worker']} took it and is shown."


async def test_a_worker_that_was_chosen_by_hand_stays(page: Page, pair: Stack) -> None:
    """The choice holds also when a button's request runs on the other worker. The page then names that worker."""
    await open_engine(page, pair)
    await expect(page.locator("#worker option")).to_have_count(2)
    for _ in range(3):  # a busy browser can skip the frames of a whole request
        await page.evaluate(RECORD)
        await page.evaluate(CHOOSE_OTHER)
        await page.click("[data-demo=prefix]")
        await done(page)
        chosen = await page.evaluate("window.chosen")
        if chosen["texts"]:
            break
    assert chosen["texts"], "the page named no other worker"
    for text in chosen["texts"]:
        assert re.fullmatch(f"{chosen['owner']} took (most of them|it); {chosen['other']} is shown.", text)
    await expect(page.locator("#worker")).to_have_value(chosen["other"])
    assert await page.evaluate("window.seen.contradictions") == []


async def test_most_of_eight_requests_and_their_shared_blocks_are_on_the_worker_that_is_shown(
    page: Page, pair: Stack
) -> None:
    await open_engine(page, pair)
    await expect(page.locator("#worker option")).to_have_count(2)
    for press in range(2):
        await page.select_option("#worker", index=press)
        await expect(figure(page, "blocks_used")).to_have_text("0", timeout=LONG_MS)
        await page.evaluate(RECORD)
        # A busy browser can skip the frames of all requests but the last.
        for _ in range(3):
            await page.click("[data-demo=prefix]")
            await done(page)
            seen = await page.evaluate("window.seen")
            if seen["sequences"] >= 4:
                break
        assert seen["sequences"] >= 4, f"press {press + 1}"
        assert seen["shared"] > 0, f"press {press + 1}"
        assert re.fullmatch(r"\d requests? running\. worker-\d took (most of them|it) and is shown\.", seen["status"])


async def test_the_arcs_of_a_worker_go_with_it(page: Page, pair: Stack) -> None:
    await open_engine(page, pair)
    await expect(page.locator("#worker option")).to_have_count(2)
    arc = asyncio.create_task(page.evaluate(ARC))
    await page.click("[data-demo=beam]")
    await arc
    assert await page.evaluate(SWITCH) == 0
    await done(page)
