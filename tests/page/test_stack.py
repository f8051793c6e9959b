"""The chat page on a whole stack with the demo model. Tests kill the gateway, Redis or the worker in mid-stream."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
import urllib.request
from collections.abc import Iterator

import pytest
from playwright.async_api import Page, Route, expect

from tests.conftest import QuireProcess, children_of, quire_processes
from tests.page.conftest import IN_BROWSER, open_chat, send, set_field, stored
from tests.support.page.stub import CHAT

pytestmark = IN_BROWSER

LENGTH = 700
LONG_MS = 60_000
PULSE_S = 0.03


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[QuireProcess]:
    with quire_processes() as start:
        server = start("serve", "--port", "0", "--state-dir", str(tmp_path_factory.mktemp("state")))
        server.wait_ready()
        yield server


# Presses Escape in the first frame with text. A fast worker may end the answer before a press from outside.
ESCAPE_AT_FIRST_TEXT = """() => {
  const look = () => {
    if (!document.querySelector(".live .text p")) return requestAnimationFrame(look);
    document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape", bubbles: true }));
  };
  look();
}"""


async def long_answers(route: Route) -> None:
    """Make the model generate to its longest length, so that tests can inject faults in mid-stream."""
    if route.request.method != "POST" or route.request.url.endswith("/cancel"):
        return await route.continue_()
    body = json.loads(route.request.post_data or "")
    return await route.continue_(post_data=json.dumps({**body, "ignore_eos": True}))


@pytest.fixture(scope="module")
def wanted(stack: QuireProcess) -> str:
    """The text that a client without faults receives for the same request."""
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": "Tell me about a heron."}],
        "temperature": 0,
        "max_tokens": LENGTH,
        "ignore_eos": True,
    }
    url = stack.wait_ready() + CHAT
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        text: str = json.load(reply)["choices"][0]["message"]["content"]
    return text


def to(server: QuireProcess, name: str, number: signal.Signals) -> None:
    """Send a signal to the stack's gateway or worker."""
    [pid] = [pid for pid, command in children_of(server.pid).items() if f"-m quire {name}" in command]
    os.kill(pid, number)


async def stop_in_mid_stream(page: Page, stack: QuireProcess) -> None:
    """Run the worker in short pulses until the page shows two paragraphs of an answer, and leave it stopped.

    A worker that runs freely may end the answer before the page looks for it.
    """
    two_paragraphs = page.locator(".live .text p:nth-child(2)")
    end = time.monotonic() + LONG_MS / 1000
    while await two_paragraphs.count() == 0:
        assert time.monotonic() < end, "the page shows no answer in mid-stream"
        to(stack, "worker", signal.SIGCONT)
        await asyncio.sleep(PULSE_S)
        to(stack, "worker", signal.SIGSTOP)
        await asyncio.sleep(PULSE_S)  # the page receives what the worker has sent


async def text_of(page: Page) -> str:
    """Return the text of the answer as the page received it."""
    [conversation] = await stored(page)
    text: str = conversation["turns"][-1]["runs"][0]["answers"][0]["text"]
    return text


@pytest.mark.parametrize("what", ["gateway", "worker", "page"])
async def test_an_answer_survives(page: Page, stack: QuireProcess, wanted: str, what: str) -> None:
    """The text stays the same, token for token, after a SIGKILL or a reload of the page in mid-stream."""
    url = stack.wait_ready()
    await page.route(f"**{CHAT}", long_answers)
    await open_chat(page, url)
    await set_field(page, temperature="0", max_tokens=str(LENGTH))
    to(stack, "worker", signal.SIGSTOP)
    try:
        await send(page, "Tell me about a heron.")
        await stop_in_mid_stream(page, stack)
        if what == "page":
            await open_chat(page, url)
        else:
            to(stack, what, signal.SIGKILL)
        await expect(page.locator(".answer.live")).to_be_visible()
    finally:
        if what != "worker":
            to(stack, "worker", signal.SIGCONT)
    await expect(page.locator("#send")).to_be_visible(timeout=LONG_MS)
    assert await text_of(page) == wanted
    await expect(page.locator(".numbers")).to_contain_text(f"{LENGTH} tokens")


async def test_stop_frees_the_worker_and_regenerate_asks_again(page: Page, stack: QuireProcess) -> None:
    url = stack.wait_ready()
    await page.route(f"**{CHAT}", long_answers)
    await open_chat(page, url)
    async with page.expect_response("**/cancel") as cancelled:
        await page.evaluate(ESCAPE_AT_FIRST_TEXT)
        await send(page, "Tell me about an owl.")
    assert (await (await cancelled.value).json())["cancelled"] is True
    await expect(page.locator(".state")).to_have_text("Stopped.")
    await page.unroute(f"**{CHAT}")
    await page.click("text=Regenerate")
    await expect(page.locator(".meter .numbers")).to_contain_text("in the prompt", timeout=LONG_MS)
    await expect(page.locator(".state")).to_have_text("")


async def test_several_answers_side_by_side(page: Page, stack: QuireProcess) -> None:
    await open_chat(page, stack.wait_ready())
    await set_field(page, n="4", sweep="0.2, 1")
    await send(page, "Tell me a story about a clockmaker.")
    await expect(page.locator(".answer")).to_have_count(8)
    await expect(page.locator(".meter .numbers", has_text="in the prompt")).to_have_count(8, timeout=LONG_MS)
    boxes = [await card.bounding_box() for card in await page.locator(".answer").all()]
    assert len({box["x"] for box in boxes if box}) > 1
    await expect(page.locator("#status")).to_have_text("All answers are complete.")
