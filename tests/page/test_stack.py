"""The chat page on a whole stack with the demo model: recoveries in mid-stream, and forks of answers."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
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
        flags = ("--speculation", "off")  # a draft would end an answer in a few steps, if it was given before
        server = start("serve", "--port", "0", "--state-dir", str(tmp_path_factory.mktemp("state")), *flags)
        server.wait_ready()
        yield server


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


def pid_of(server: QuireProcess, name: str) -> int:
    [pid] = [pid for pid, command in children_of(server.pid).items() if f"-m quire {name}" in command]
    return pid


def to(server: QuireProcess, name: str, number: signal.Signals) -> None:
    """Send a signal to the stack's gateway or worker."""
    os.kill(pid_of(server, name), number)


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


async def test_the_page_kills_the_worker_of_an_answer_and_shows_where_it_was_resumed(
    page: Page, stack: QuireProcess, wanted: str
) -> None:
    await page.route(f"**{CHAT}", long_answers)
    await open_chat(page, stack.wait_ready())
    await set_field(page, temperature="0", max_tokens=str(LENGTH))
    to(stack, "worker", signal.SIGSTOP)
    before = pid_of(stack, "worker")
    try:
        await send(page, "Tell me about a heron.")
        await stop_in_mid_stream(page, stack)
        await expect(page.locator("#kill")).to_have_text("Kill the worker that writes this")
        async with page.expect_response("**/kill") as killed:
            await page.click("#kill")
        assert await (await killed.value).json() == {"worker": "worker-1"}
        await expect(page.locator("#notice")).to_contain_text("worker-1 is killed.")
    finally:
        if before in children_of(stack.pid):
            os.kill(before, signal.SIGCONT)
    await expect(page.locator("#send")).to_be_visible(timeout=LONG_MS)
    assert await text_of(page) == wanted
    assert pid_of(stack, "worker") != before
    line = page.locator(".resumed")
    await expect(line).to_contain_text("resumed after token")
    await page.evaluate("import('/autosave.js').then(({ saveChanges }) => saveChanges())")
    [conversation] = await stored(page)
    [[position, length]] = conversation["turns"][-1]["runs"][0]["answers"][0]["resumed"]
    assert 0 < position < LENGTH
    assert 0 < length < len(wanted)
    await expect(line).to_contain_text(f"resumed after token {position} at “")
    marked = "[...CSS.highlights.get('resumed')].map(String)"
    await page.wait_for_function(f"{marked}.length === 1")
    [word] = await page.evaluate(marked)
    await expect(line).to_contain_text(f"“{word}”")
    after = next(found for found in re.finditer(r"[^\W_]+", wanted) if found.end() > length)
    assert word == after[0]
    # It is shown after a reload, too.
    await open_chat(page, stack.wait_ready())
    await expect(line).to_contain_text(f"resumed after token {position} at “{word}”")
    await page.wait_for_function(f"{marked}.length === 1")


async def test_the_worker_of_the_next_answer_is_killed_when_that_answer_begins(
    page: Page, stack: QuireProcess, wanted: str
) -> None:
    await page.route(f"**{CHAT}", long_answers)
    await open_chat(page, stack.wait_ready())
    await set_field(page, temperature="0", max_tokens=str(LENGTH))
    kill = page.locator("#kill")
    await expect(kill).to_have_attribute("aria-pressed", "false")
    await kill.click()
    await expect(kill).to_have_attribute("aria-pressed", "true")
    async with page.expect_response("**/kill") as killed:
        await send(page, "Tell me about a heron.")
    assert await (await killed.value).json() == {"worker": "worker-1"}
    await expect(page.locator("#send")).to_be_visible(timeout=LONG_MS)
    assert await text_of(page) == wanted
    await expect(kill).to_have_attribute("aria-pressed", "false")


@asynccontextmanager
async def other_site() -> AsyncIterator[str]:
    """A page of another site at this machine."""

    async def show(request: web.Request) -> web.Response:
        return web.Response(text="<!doctype html>", content_type="text/html")

    app = web.Application()
    app.router.add_get("/", show)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://localhost:{runner.addresses[0][1]}/"
    finally:
        await runner.cleanup()


async def test_another_site_cannot_have_a_worker_killed(page: Page, stack: QuireProcess) -> None:
    url = stack.wait_ready()
    before = pid_of(stack, "worker")
    await open_chat(page, url)
    await send(page, "Tell me about an owl.")
    await expect(page.locator("#send")).to_be_visible(timeout=LONG_MS)
    [conversation] = await stored(page)
    path = f"/worker-of/{conversation['turns'][-1]['runs'][0]['id']}/kill"
    async with other_site() as site:
        await page.goto(site)
        # `no-cors` sends the call, and hides only the answer.
        async with page.expect_response(f"**{path}") as response:
            await page.evaluate("(url) => fetch(url, { method: 'POST', mode: 'no-cors' })", url + path)
        assert (await response.value).status == 404
    assert pid_of(stack, "worker") == before


async def test_an_answer_is_continued_from_a_word_by_its_very_tokens(page: Page, stack: QuireProcess) -> None:
    """A fork that changes nothing gives the rest of the answer, so its tokens are those of the answer."""
    asked: list[dict[str, object]] = []

    async def greedy(route: Route) -> None:
        body = json.loads(route.request.post_data or "")
        asked.append(body)
        await route.continue_(post_data=json.dumps({**body, "temperature": 0}))

    await page.route("**/fork", greedy)
    await open_chat(page, stack.wait_ready())
    await set_field(page, temperature="0")
    await send(page, "Tell me a story about a fox and a lighthouse.")
    await expect(page.locator("#send")).to_be_visible(timeout=LONG_MS)
    await expect(page.locator(".numbers")).to_contain_text("in the prompt")
    text = await text_of(page)
    words = len(re.findall(r"\w+", text))
    for number, back in enumerate((1, words // 2, words - 2), start=2):
        await page.click("text=Continue from a word…")
        for _ in range(back):
            await page.keyboard.press("ArrowLeft")
        await page.keyboard.press("Enter")
        await expect(page.locator(".count")).to_have_text(f"{number}/{number}")
        await expect(page.locator("#send")).to_be_visible(timeout=LONG_MS)
        await expect(page.locator(".numbers")).to_contain_text("in the prompt")
        [conversation] = await stored(page)
        assert conversation["turns"][-1]["runs"][0]["answers"][0]["text"] == text
        while await page.locator(".step.back").is_enabled():  # to the first answer
            await page.click(".step.back")
    assert len({body["at"] for body in asked}) == 3
    assert [body["continuation"] for body in asked] == ["", "", ""]


async def test_an_answer_that_is_no_longer_there_is_continued_as_a_text(page: Page, stack: QuireProcess) -> None:
    url = stack.wait_ready()

    async def forget(route: Route) -> None:
        await route.continue_(url=f"{url}{CHAT}/chatcmpl-{'0' * 32}/fork")

    await page.route("**/fork", forget)
    await open_chat(page, url)
    await send(page, "Tell me a story about a fox.")
    await expect(page.locator("#send")).to_be_visible(timeout=LONG_MS)
    await page.click("text=Continue from a word…")
    for _ in range(5):
        await page.keyboard.press("ArrowLeft")
    await page.keyboard.type("lighthouse")
    await page.keyboard.press("Enter")
    await expect(page.locator(".count")).to_have_text("2/2")
    await expect(page.locator("#send")).to_be_visible(timeout=LONG_MS)
    await expect(page.locator(".numbers")).to_contain_text("in the prompt")
    [conversation] = await stored(page)
    answer = conversation["turns"][-1]["runs"][0]["answers"][0]
    assert answer["text"][: answer["kept"]].endswith(" lighthouse")
    assert len(answer["text"]) > answer["kept"]


async def test_stop_frees_the_worker_and_regenerate_asks_again(page: Page, stack: QuireProcess) -> None:
    url = stack.wait_ready()
    await page.route(f"**{CHAT}", long_answers)
    await open_chat(page, url)
    to(stack, "worker", signal.SIGSTOP)
    try:
        await send(page, "Tell me about an owl.")
        await stop_in_mid_stream(page, stack)
        async with page.expect_response("**/cancel") as cancelled:
            await page.keyboard.press("Escape")
        assert (await (await cancelled.value).json())["cancelled"] is True
    finally:
        to(stack, "worker", signal.SIGCONT)
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
