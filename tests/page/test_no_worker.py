"""Workers stop, die or are missing. The tests check the chat's notice, its delay, and the final answer."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from playwright.async_api import Page, expect

from tests.conftest import QuireProcess, children_of, quire_processes
from tests.page.conftest import IN_BROWSER, open_chat, send, set_field
from tests.page.test_stack import long_answers, text_of
from tests.support.page.stub import CHAT

pytestmark = [*IN_BROWSER, pytest.mark.alone]

LENGTH = 700
LONG_MS = 60_000
SOON_MS = 3_000
QUESTION = "Tell me about a heron."

# Records in the page itself the first time of the notice, and the time at which the notice has gone and the answer
# continues. The delay of a slow test runner then does not count.
NOTE = """() => {
  const began = performance.now();
  window.noticed = window.later = null;
  const look = () => {
    const isThere = (document.querySelector(".state")?.textContent ?? "").includes("No worker is available.");
    if (isThere) window.noticed ??= performance.now() - began;
    else if (window.noticed && document.querySelector(".live .text > *")) window.later ??= performance.now() - began;
  };
  const all = { subtree: true, childList: true, characterData: true, attributes: true };
  new MutationObserver(look).observe(document.getElementById("turns"), all);
  look();
}"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[QuireProcess]:
    """A gateway and two workers."""
    with quire_processes() as start:
        state = tmp_path_factory.mktemp("state")
        server = start("serve", "--workers", "2", "--port", "0", "--state-dir", str(state))
        server.wait_ready()
        yield server


@pytest.fixture(scope="module")
def wanted(pair: QuireProcess) -> str:
    """The text that a client without faults receives for the same request."""
    body = {"model": "demo", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    url = pair.wait_ready() + CHAT
    data = json.dumps({**body, "max_tokens": LENGTH, "ignore_eos": True}).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, {"Content-Type": "application/json"})) as reply:
        text: str = json.load(reply)["choices"][0]["message"]["content"]
    return text


def workers_of(server: QuireProcess) -> list[int]:
    return [pid for pid, command in children_of(server.pid).items() if "-m quire worker" in command]


def to_workers(server: QuireProcess, number: signal.Signals) -> None:
    pids = workers_of(server)
    assert len(pids) == 2
    for pid in pids:
        os.kill(pid, number)


@asynccontextmanager
async def without_workers(server: QuireProcess, number: signal.Signals) -> AsyncIterator[None]:
    """Send this signal to the workers, and stop each worker that is started after it, until the block ends.

    A worker that replaces a killed one can be ready before the gateway has noticed the death of the first. The page
    then shows no notice, and that is right.
    """

    async def stop_successors() -> None:
        while True:
            for pid in workers_of(server):
                os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(0.02)

    to_workers(server, number)
    task = asyncio.create_task(stop_successors())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        for pid in workers_of(server):
            os.kill(pid, signal.SIGCONT)


async def stop_in_mid_stream(page: Page, server: QuireProcess) -> None:
    """Let the workers compute for 20 ms at a time until the page shows text, and leave them stopped.

    A fast machine generates the whole answer in less time than a test needs to see its beginning.
    """
    async with asyncio.timeout(LONG_MS / 1000):
        while not await page.locator(".live .text > *").count():
            to_workers(server, signal.SIGCONT)
            await asyncio.sleep(0.02)
            to_workers(server, signal.SIGSTOP)
            await asyncio.sleep(0.2)  # for the way of the tokens to the page, on a busy machine, too


async def open_long(page: Page, url: str) -> None:
    await page.route(f"**{CHAT}", long_answers)
    await open_chat(page, url)
    await set_field(page, temperature="0", max_tokens=str(LENGTH))


async def noticed(page: Page, what: str) -> None:
    """Check that within three seconds the page says that no worker is available, and what happens to the request."""
    state = page.locator(".state").last
    await expect(state).to_contain_text("No worker is available.")
    await expect(state).to_contain_text(what)
    took: Any = await page.evaluate("window.noticed")
    assert took < SOON_MS


async def completed(page: Page, wanted: str) -> None:
    """Check that the notice goes when tokens arrive again, and that the answer equals one of workers without faults."""
    await expect(page.locator("#send")).to_be_visible(timeout=LONG_MS)
    await expect(page.locator(".state").last).to_have_text("This answer reached its maximum length.")
    assert await page.evaluate("window.later"), "no token came without the notice"
    assert await text_of(page) == wanted


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
async def test_in_mid_stream(page: Page, pair: QuireProcess, wanted: str, number: signal.Signals) -> None:
    await open_long(page, pair.wait_ready())
    to_workers(pair, signal.SIGSTOP)
    await send(page, QUESTION)
    await stop_in_mid_stream(page, pair)
    await page.evaluate(NOTE)
    async with without_workers(pair, number):
        await noticed(page, "The answer waits for one and will resume.")
    await completed(page, wanted)


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
async def test_before_the_first_token(page: Page, pair: QuireProcess, wanted: str, number: signal.Signals) -> None:
    await open_long(page, pair.wait_ready())
    async with without_workers(pair, number):
        await send(page, QUESTION)
        await page.evaluate(NOTE)
        await noticed(page, "Your message is queued and will be answered.")
        await expect(page.locator(".text")).to_have_text("")
    await completed(page, wanted)


async def test_before_any_worker_is_started(page: Page, redis_url: str, wanted: str) -> None:
    with quire_processes() as start:
        gateway = start("gateway", "--redis-url", redis_url, "--port", "0")
        url = gateway.wait_for(r"(http://127\.0\.0\.1:\d+)")[1]
        await open_long(page, url)
        await send(page, QUESTION)
        await page.evaluate(NOTE)
        await noticed(page, "Your message is queued and will be answered.")
        start("worker", "--redis-url", redis_url)
        await completed(page, wanted)
