"""Workers stop, die or are missing. The tests check the chat's notice, its delay, and the final answer."""

from __future__ import annotations

import asyncio
import json
import signal
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from playwright.async_api import Page, expect

from tests.conftest import QuireProcess, quire_processes
from tests.page.conftest import IN_BROWSER, open_chat, send, set_field
from tests.page.test_stack import long_answers, text_of
from tests.support.page.stub import CHAT
from tests.support.redis_server import running_redis

pytestmark = [*IN_BROWSER, pytest.mark.alone]

LENGTH = 300
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


class Stack:
    """A gateway, and the worker that a test has started last."""

    def __init__(self, url: str, start_worker: Any) -> None:
        self.url = url
        self._start_worker = start_worker
        self.worker: QuireProcess | None = None

    def start_worker(self) -> None:
        self.worker = self._start_worker()

    def running_worker(self) -> QuireProcess:
        """Return a worker that takes calls."""
        if self.worker is None:
            self.start_worker()
        assert self.worker is not None
        self.answer()
        return self.worker

    def answer(self) -> str:
        """Return the text that a client without faults receives for the same request."""
        body = {"model": "demo", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
        data = json.dumps({**body, "max_tokens": LENGTH, "ignore_eos": True}).encode()
        request = urllib.request.Request(self.url + CHAT, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as reply:
            text: str = json.load(reply)["choices"][0]["message"]["content"]
        return text


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with running_redis() as redis, quire_processes() as start:
        gateway = start("gateway", "--redis-url", redis.url, "--port", "0")
        url = gateway.wait_for(r"(http://127\.0\.0\.1:\d+)")[1]
        # A draft would end an answer in a few steps, if it was given before.
        yield Stack(url, lambda: start("worker", "--redis-url", redis.url, "--speculation", "off"))


@asynccontextmanager
async def waiting_chat(page: Page, stack: Stack, what: str) -> AsyncIterator[None]:
    """Check that within three seconds the page says that no worker is available, and what happens to the request.

    At the end, check that the notice goes when tokens arrive, and that the answer equals one without faults.
    """
    await page.evaluate(NOTE)
    state = page.locator(".state").last
    await expect(state).to_contain_text("No worker is available.")
    await expect(state).to_contain_text(what)
    took: Any = await page.evaluate("window.noticed")
    assert took < SOON_MS
    yield
    await expect(page.locator("#send")).to_be_visible(timeout=LONG_MS)
    await expect(state).to_have_text("This answer reached its maximum length.")
    assert await page.evaluate("window.later"), "no token came without the notice"
    assert await text_of(page) == await asyncio.to_thread(stack.answer)


async def open_long(page: Page, url: str) -> None:
    await page.route(f"**{CHAT}", long_answers)
    await open_chat(page, url)
    await set_field(page, temperature="0", max_tokens=str(LENGTH))


async def test_before_any_worker_is_started(page: Page, stack: Stack) -> None:
    assert stack.worker is None
    await open_long(page, stack.url)
    await send(page, QUESTION)
    async with waiting_chat(page, stack, "Your message is queued and will be answered."):
        stack.start_worker()


async def test_before_the_first_token(page: Page, stack: Stack) -> None:
    """The worker hangs, and goes on later."""
    worker = await asyncio.to_thread(stack.running_worker)
    await open_long(page, stack.url)
    worker.send(signal.SIGSTOP)
    await send(page, QUESTION)
    async with waiting_chat(page, stack, "Your message is queued and will be answered."):
        await expect(page.locator(".text")).to_have_text("")
        worker.send(signal.SIGCONT)


async def test_in_mid_stream(page: Page, stack: Stack) -> None:
    """The worker dies, and another one takes its request over."""
    worker = await asyncio.to_thread(stack.running_worker)
    await open_long(page, stack.url)
    worker.send(signal.SIGSTOP)
    await send(page, QUESTION)
    # A fast machine generates the whole answer in less time than a test needs to see its beginning, so the worker
    # computes for 20 ms at a time until the page shows text.
    async with asyncio.timeout(LONG_MS / 1000):
        while not await page.locator(".live .text > *").count():
            worker.send(signal.SIGCONT)
            await asyncio.sleep(0.02)
            worker.send(signal.SIGSTOP)
            await asyncio.sleep(0.2)  # for the way of the tokens to the page, on a busy machine, too
    worker.kill()
    async with waiting_chat(page, stack, "The answer waits for one and will resume."):
        stack.start_worker()
