"""The conversations that the browser stores: how many, of which versions of the page, and what is said if it cannot."""

from __future__ import annotations

import json
from typing import Any

from playwright.async_api import Page, expect

from tests.page.conftest import IN_BROWSER, open_chat, send, stored
from tests.support.page.stub import Script, Stub

pytestmark = IN_BROWSER

# Stores conversations of these sizes (characters), the first one as the oldest.
FILL = """async (sizes) => {
  const { newConversation, newTurn } = await import("/conversation.js");
  const { saveConversation } = await import("/store.js");
  for (const [index, size] of sizes.entries()) {
    const conversation = newConversation();
    conversation.changed = 1e12 + index;
    const turn = newTurn(conversation, `number ${index}`, [{ model: "stub" }]);
    Object.assign(turn.runs[0], { state: "done", answers: [{ text: "x".repeat(size), finish: "stop" }] });
    await saveConversation(conversation);
  }
}"""
# Stores a conversation as the page does while it is written.
SAVE_LARGE = """async () => {
  const { newConversation, newTurn } = await import("/conversation.js");
  const { save } = await import("/autosave.js");
  const conversation = newConversation();
  newTurn(conversation, "x".repeat(4_000_000), [{ model: "stub" }]);
  await save(conversation);
}"""
# IndexedDB of a browser that forbids storage.
FORBID = """Object.defineProperty(window, "indexedDB", {
  value: { open() { throw new DOMException("", "SecurityError"); } },
});"""
TITLES = ".conversation .title"


async def answered(chat: Page, stub: Stub, text: str, request_id: str = "01" * 16) -> None:
    await send(chat, text)
    await Script(request_id).play(await stub.call(), ["one"])
    await expect(chat.locator("#send")).to_be_visible()


async def test_five_hundred_conversations_stay_and_one_more(chat: Page, stub: Stub) -> None:
    """Together they are larger than localStorage, which has room for five million characters."""
    await chat.evaluate(FILL, [20_000] * 500)
    await answered(chat, stub, "one more")
    await chat.click("#shelf-button")
    titles = chat.locator(TITLES)
    await expect(titles).to_have_count(501)
    await expect(titles.first).to_have_text("one more")
    await expect(titles.last).to_have_text("number 0")
    await titles.last.click()
    await expect(chat.locator(".text")).to_have_text("x" * 20_000)
    async with chat.expect_download() as download:
        await chat.click("#export-all")
    exported = json.loads((await (await download.value).path()).read_text())
    assert len(exported) == 501
    assert {one["title"] for one in exported} == {"one more", *(f"number {index}" for index in range(500))}
    # The reader removes one, and only that one is gone.
    await chat.click("[aria-label='Forget “number 0”']")
    await expect(titles).to_have_count(500)
    assert len(await stored(chat)) == 500


async def test_a_long_conversation_is_stored_like_others(chat: Page) -> None:
    await chat.evaluate(FILL, [3, 4_000_000])
    assert [len(one["turns"][0]["runs"][0]["answers"][0]["text"]) for one in await stored(chat)] == [4_000_000, 3]


async def test_a_message_is_stored_when_it_is_sent(chat: Page, stub: Stub) -> None:
    """A reload at once loses nothing."""
    await send(chat, "Hello")
    await stub.call()
    await open_chat(chat, stub.url)
    again = await stub.call()
    await expect(chat.locator(".bubble")).to_have_text("Hello")
    await Script().play(again, ["Here"])
    await expect(chat.locator(".text")).to_have_text("Here")


async def test_the_conversations_of_earlier_versions_are_moved(page: Page, stub: Stub) -> None:
    """Earlier versions kept them in localStorage. An old tab may still do so; what cannot be read is not deleted."""
    await open_chat(page, stub.url)  # makes the database
    await page.goto(f"{stub.url}/icon.svg")
    await page.evaluate("""async () => {
      const { newConversation, newTurn } = await import("/conversation.js");
      const conversation = newConversation();
      const turn = newTurn(conversation, "from before", [{ model: "stub" }]);
      Object.assign(turn.runs[0], { state: "done", answers: [{ text: "one", finish: "stop" }] });
      localStorage.setItem(`quire.chat.${conversation.id}`, JSON.stringify(conversation));
      localStorage.setItem("quire.chat.other", '{"version":99}');
    }""")
    await open_chat(page, stub.url)
    await page.click("#shelf-button")
    await page.click(TITLES)
    await expect(page.locator(".bubble")).to_have_text("from before")
    await expect(page.locator(".text")).to_have_text("one")
    kept = "Object.keys(localStorage).filter((key) => key.startsWith('quire.chat.'))"
    assert await page.evaluate(kept) == ["quire.chat.other"]


async def test_a_removed_conversation_does_not_come_back(chat: Page, stub: Stub) -> None:
    """Also if it was being answered: the run ends after the conversation is gone."""
    await send(chat, "Hello")
    await stub.call()
    await chat.click("#shelf-button")
    await chat.click("[aria-label='Forget “Hello”']")
    await expect(chat.locator(".turn")).to_have_count(0)
    await open_chat(chat, stub.url)
    assert await stored(chat) == []


async def test_storage_of_another_making_does_no_harm(chat: Page, stub: Stub) -> None:
    await answered(chat, stub, "whole")
    broken: list[dict[str, Any]] = [
        {"id": "a"},
        {"id": "b", "changed": 1, "title": "b", "version": 2},
        {"id": "c", "changed": 2, "title": "c", "version": 1, "turns": [{"runs": []}]},
        {"id": "d", "changed": 1e300, "title": "d", "version": 2, "turns": [], "shown": -1},
    ]
    await chat.evaluate(
        """(records) => new Promise((resolve) => {
          indexedDB.open("quire").onsuccess = ({ target }) => {
            const transaction = target.result.transaction("conversations", "readwrite");
            for (const record of records) transaction.objectStore("conversations").put(record);
            transaction.oncomplete = () => resolve(target.result.close());
          };
        })""",
        broken,
    )
    for text in ("null", "[]", "{", '{"version":1}'):
        await chat.evaluate("(text) => localStorage.setItem(`quire.chat.${text}`, text)", text)
    await chat.evaluate("localStorage.setItem('quire.settings', '[')")
    for index in "abcdx":
        await chat.evaluate("(id) => sessionStorage.setItem('quire.current', id)", index)
        await open_chat(chat, stub.url)
        await expect(chat.locator(".turn")).to_have_count(0)
    await chat.click("#shelf-button")
    await expect(chat.locator(TITLES)).to_have_text(["d", "whole", "c", "b"])
    await chat.locator(TITLES).last.click()
    await expect(chat.locator("#notice")).to_have_text("This page cannot read that conversation.")
    await answered(chat, stub, "Hello", "02" * 16)
    await expect(chat.locator(".text")).to_have_text("one")


async def test_a_browser_that_stores_nothing_is_said(page: Page, stub: Stub) -> None:
    await page.add_init_script(FORBID)
    await open_chat(page, stub.url)
    await answered(page, stub, "Hello")
    await expect(page.locator(".text")).to_have_text("one")
    await expect(page.locator("#notice")).to_have_text(
        "This browser does not let the page store conversations: they end with this tab."
    )


async def test_a_newer_page_in_another_tab_gets_the_database(chat: Page, stub: Stub) -> None:
    await answered(chat, stub, "Hello")
    await chat.evaluate("""() => new Promise((resolve, reject) => {
      const asked = indexedDB.open("quire", 3);
      asked.onblocked = () => reject(new Error("blocked"));
      asked.onsuccess = resolve;
    })""")
    await answered(chat, stub, "More", "02" * 16)
    await expect(chat.locator("#notice")).to_contain_text("A newer version of this page is in use")


async def test_a_message_is_sent_while_an_older_page_keeps_the_database(page: Page, stub: Stub) -> None:
    older = await page.context.new_page()
    await older.goto(f"{stub.url}/icon.svg")
    await older.evaluate("new Promise((resolve) => (indexedDB.open('quire', 1).onsuccess = resolve))")
    await open_chat(page, stub.url)
    await answered(page, stub, "Hello")
    await expect(page.locator("#notice")).to_contain_text("close the other tabs of this page")
    await older.close()
    await answered(page, stub, "More", "02" * 16)
    await expect(page.locator("#notice")).to_be_hidden()
    assert len((await stored(page))[0]["turns"]) == 2


async def test_a_full_storage_is_said_and_nothing_is_removed_for_room(chat: Page, stub: Stub) -> None:
    session = await chat.context.new_cdp_session(chat)
    await session.send("Storage.overrideQuotaForOrigin", {"origin": stub.url, "quotaSize": 1_000_000})
    await answered(chat, stub, "first")
    await chat.evaluate(SAVE_LARGE)
    notice = chat.locator("#notice")
    await expect(notice).to_contain_text("This browser has no room for this conversation: it is not stored.")
    async with chat.expect_download() as download:
        await notice.locator("button").click()
    exported = json.loads((await (await download.value).path()).read_text())
    assert [one["title"] for one in exported] == ["first"]
