"""The pages of a gateway that needs API keys: they ask for one, keep it for their tab, and say what a refusal means."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from playwright.async_api import BrowserContext, Page, expect

from quire.shared.accounts.limits import AccountLimits
from quire.shared.accounts.store import AccountStore
from quire.shared.protocol.keys import ACCOUNTS_TAG
from quire.shared.redis.clients import command_client
from tests.conftest import quire_processes
from tests.page.conftest import IN_BROWSER, open_chat, send, set_field, shared
from tests.page.test_access import FAINT, MISTAKES
from tests.support.gateway.running import until
from tests.support.page.stub import Script, Stub
from tests.support.redis_server import running_redis

pytestmark = IN_BROWSER

LONG_MS = 60_000
NEEDS = "This server needs an API key. Ask whoever runs it for one."


class Secured:
    """A gateway with --require-keys, a worker of the demo model, and the store of its keys."""

    def __init__(self, url: str, store: AccountStore) -> None:
        self.url = url
        self.store = store

    async def key(self, **limits: Any) -> str:
        """Make a key; return its secret."""
        return (await self.store.create("acme", "web", "test", AccountLimits.of(limits)))[1]


@shared
async def secured() -> AsyncIterator[Secured]:
    with running_redis() as redis, quire_processes() as start:
        client = command_client(redis.url, ACCOUNTS_TAG, connections=1)
        store = AccountStore(client, "test")
        await Secured("", store).key()  # a gateway that needs keys does not start while there is none
        start("worker", "--redis-url", redis.url)
        arguments = ("--port", "0", "--require-keys", "--engine-view", "on")
        gateway = start("gateway", "--redis-url", redis.url, *arguments)
        yield Secured(gateway.wait_for(r"(http://127\.0\.0\.1:\d+)")[1], store)
        await client.aclose()


async def use(page: Page, key: str) -> None:
    """Enter a key in the panel."""
    await page.fill("#key", key)
    await page.press("#key", "Enter")


async def ask(page: Page) -> None:
    """Send a message, and wait for the whole answer."""
    await send(page, "Tell me a story about a fox.")
    await answered(page)


async def answered(page: Page) -> None:
    await expect(page.locator(".numbers").last).to_contain_text("in the prompt", timeout=LONG_MS)
    assert await page.locator(".text").last.inner_text()


async def test_the_chat_asks_for_a_key_and_keeps_it_for_its_tab(page: Page, secured: Secured) -> None:
    await page.goto(secured.url)
    panel = page.locator(".key-panel")
    await expect(panel).to_contain_text(NEEDS)
    await expect(page.locator("#key")).to_be_focused()
    assert await page.evaluate(MISTAKES) == []
    assert (await page.evaluate(FAINT))["faint"] == []
    # A message that cannot be sent stays in its field, and the page says why.
    await page.click("#key-note")
    await page.click(".key-panel button[aria-label=Close]")
    await send(page, "Tell me a story about a fox.")
    await expect(panel).to_contain_text(NEEDS)
    await expect(page.locator("#input")).to_have_value("Tell me a story about a fox.")
    await use(page, "sk-quire-0123456789abcdef-" + "0" * 64)
    await expect(panel).to_contain_text("The server refuses this tab’s API key: The API key is not valid.")
    await use(page, await secured.key())
    await expect(panel).to_be_hidden()
    await expect(page.locator("#model-name")).to_have_text("demo")
    await page.press("#input", "Enter")
    await answered(page)
    # A reload keeps the key; another tab has none.
    await open_chat(page, secured.url)
    await expect(panel).to_have_count(0)
    other = await page.context.new_page()
    await other.goto(secured.url)
    await expect(other.locator(".key-panel")).to_contain_text(NEEDS)
    # The settings forget it.
    await page.click("#settings-button")
    await page.click("#key-button")
    await page.click("text=Forget the key")
    await expect(panel).to_contain_text(NEEDS)


async def test_a_key_in_the_address_is_taken_and_removed(context: BrowserContext, secured: Secured) -> None:
    """Each page takes the key, and all pages of the tab use it."""
    key = await secured.key()
    for path in ("/", "/engine", "/docs"):
        page = await context.new_page()
        await page.goto(f"{secured.url}{path}#key={key}")
        await page.wait_for_function("() => !location.hash")
        assert page.url == secured.url + path
        assert await page.evaluate("Object.values(localStorage).concat(document.cookie).join()") == ""
        await page.click("nav >> text=Chat")
        await expect(page.locator("#model-name")).to_have_text("demo")
        assert key not in await page.content()
    await page.click("nav >> text=Engine")
    await page.click("#four button")
    await expect(page.locator("#try-status")).to_contain_text("Done", timeout=LONG_MS)
    await expect(page.locator(".key-panel")).to_have_count(0)


async def test_the_engine_page_asks_for_a_key(page: Page, secured: Secured) -> None:
    await page.goto(f"{secured.url}/engine")
    await expect(page.locator(".key-panel")).to_contain_text(NEEDS)
    await expect(page.locator("#try-status")).to_have_text("The server needs an API key.")
    assert await page.evaluate(MISTAKES) == ["not one [role=status]"]
    await use(page, await secured.key())
    await expect(page.locator("#try-status")).to_have_text("")
    await page.click("#live")
    await expect(page.locator("#maps h2")).to_have_text(re.compile(r"^\S+$"), timeout=LONG_MS)


async def test_what_the_key_does_not_allow_is_said(page: Page, secured: Secured) -> None:
    await open_chat(page, f"{secured.url}#key={await secured.key(priority='standard')}")
    await page.click("#settings-button")
    await page.select_option("#priority", "interactive")
    await send(page, "Hello")
    await expect(page.locator(".trouble span")).to_have_text(
        "priority: your API key allows the class standard at most. "
        "Send that class, or ask the operator for a higher limit `priority` of the key."
    )


async def test_a_limit_says_how_long_to_wait(page: Page, secured: Secured) -> None:
    await open_chat(page, f"{secured.url}#key={await secured.key(requests_per_minute=1)}")
    await set_field(page, max_tokens="4")
    await ask(page)
    await send(page, "Again")
    state = page.locator(".state").last
    pattern = r"^The limit requests_per_minute of the key \w+ is reached\. Again in (\d+) s…$"
    await expect(state).to_have_text(re.compile(pattern))
    found = re.match(pattern, await state.inner_text())
    assert found
    assert 30 <= int(found[1]) <= 60
    # The rest of the wait is counted down.
    await expect(state).to_contain_text(f"Again in {int(found[1]) - 2} s…")
    await page.keyboard.press("Escape")


async def test_a_message_that_a_revoked_key_cannot_send_is_sent_with_another_one(page: Page, secured: Secured) -> None:
    key = await secured.key()
    await open_chat(page, f"{secured.url}#key={key}")
    await ask(page)
    await secured.store.revoke(key.split("-")[2])
    await expect(page.locator("#send")).to_be_visible()
    # A gateway knows of the revocation within a second.
    models = f"fetch('/v1/models', {{headers: {{'x-api-key': '{key}'}}}}).then((reply) => reply.status)"

    async def is_refused() -> bool:
        return bool(await page.evaluate(models) == 401)

    await until(is_refused)
    await send(page, "Tell me a story about an owl.")
    refused = re.compile("^The server refuses this tab’s API key: The API key .* has expired or was revoked")
    await expect(page.locator(".trouble span").last).to_have_text(refused)
    await expect(page.locator("#key-note")).to_have_text(refused)
    await use(page, await secured.key())
    await expect(page.locator(".trouble").last).to_be_hidden()
    await expect(page.locator(".bubble")).to_have_count(2)
    await answered(page)


# --- refusals of proxies ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "words"),
    [(403, "The server does not allow this call."), (429, "The server gets more calls than it allows. Again in ")],
)
async def test_a_refusal_without_words_is_explained(
    context: BrowserContext, stub: Stub, status: int, words: str
) -> None:
    page = await context.new_page()
    await open_chat(page, stub.url)
    await page.route("**/v1/chat/completions", lambda route: route.fulfill(status=status, body="<h1>no</h1>"))
    await send(page, "Hello")
    await expect(page.locator(".answer")).to_contain_text(words)


async def test_a_call_that_would_be_refused_again_is_not_repeated(chat: Page, stub: Stub) -> None:
    await send(chat, "Hello")
    (await stub.call()).refuse(429, "The call alone exceeds the limit.", "rate_limit_exceeded", X_Should_Retry="false")
    await expect(chat.locator(".trouble span")).to_have_text("The call alone exceeds the limit.")
    await send(chat, "Hello")
    (await stub.call()).refuse(429, "Tomorrow.", "rate_limit_exceeded", Retry_After="40000")
    await expect(chat.locator(".trouble span").last).to_have_text("Tomorrow.")
    await send(chat, "Hello")
    await Script().play(await stub.call(), ["fine"])
    await expect(chat.locator(".text").last).to_have_text("fine")


async def test_a_server_that_is_away_is_said_where_everybody_sees_it(page: Page, stub: Stub) -> None:
    """Also on a phone, where the header does not show the model."""
    await page.set_viewport_size({"width": 390, "height": 844})
    await page.clock.install()
    await page.route("**/v1/models", lambda route: route.abort())
    await page.goto(stub.url)
    notice = page.locator("#notice")
    await expect(notice).to_have_text("The server cannot be reached. The page asks it again every few seconds.")
    await send(page, "Hello")
    await expect(page.locator("#input")).to_have_value("Hello")
    assert (await page.evaluate(FAINT))["faint"] == []
    await page.unroute("**/v1/models")
    await page.clock.fast_forward(10_000)
    await expect(notice).to_be_hidden()
    await page.press("#input", "Enter")
    await Script().play(await stub.call(), ["fine"])
    await expect(page.locator(".text")).to_have_text("fine")
