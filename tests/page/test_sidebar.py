"""The sidebar: finding, naming, removing and moving conversations, and the address of each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.base import AXE_FILE_PATH
from playwright.async_api import BrowserContext, Page, expect

from tests.page.conftest import IN_BROWSER, begin, open_chat, send, stored
from tests.page.test_access import FAINT, MISTAKES
from tests.support.page.stub import Script, Stub

pytestmark = IN_BROWSER

TITLES = "#conversations .title"


async def answered(chat: Page, stub: Stub, said: str, text: str = "one", number: int = 1) -> None:
    await send(chat, said)
    await Script(f"{number:032x}").play(await stub.call(), [text])
    await expect(chat.locator("#send")).to_be_visible()
    await expect(chat.locator(".text").last).to_have_text(text)


async def three(chat: Page, stub: Stub) -> None:
    """Make three conversations, the newest last, with the sidebar open."""
    await chat.click("#shelf-button")
    for number, (said, text) in enumerate(
        (("About boats", "They float."), ("About Owls", "They hoot."), ("About tea", "It is hot.")), start=1
    ):
        await chat.click("#new")
        await answered(chat, stub, said, text, number)
    await expect(chat.locator(TITLES)).to_have_text(["About tea", "About Owls", "About boats"])


async def test_the_search_finds_titles_messages_and_answers(chat: Page, stub: Stub) -> None:
    await three(chat, stub)
    titles = chat.locator(TITLES)
    for text, found in (
        ("hoot", ["About Owls"]),
        ("OWL", ["About Owls"]),
        ("they", ["About Owls", "About boats"]),
        ("", ["About tea", "About Owls", "About boats"]),
        (".*", []),
    ):
        await chat.fill("#search", text)
        await expect(titles).to_have_text(found)
    await expect(chat.locator("#no-conversations")).to_have_text("No conversation has these words.")
    assert await chat.evaluate(MISTAKES) == []
    await chat.focus("#search")
    await chat.keyboard.press("Escape")  # the first one empties the field
    await expect(titles).to_have_count(3)
    await chat.keyboard.press("Escape")
    await expect(chat.locator("#shelf")).to_be_hidden()
    await expect(chat.locator("#shelf-button")).to_be_focused()


async def test_the_keyboard_goes_through_the_list_and_names_and_removes(chat: Page, stub: Stub) -> None:
    await three(chat, stub)
    await chat.focus("#search")
    titles = chat.locator(TITLES)

    async def focused() -> str:
        text: str = await chat.evaluate("document.activeElement.querySelector('.title')?.textContent ?? ''")
        return text

    for key, name in (
        ("ArrowDown", "About tea"),
        ("ArrowDown", "About Owls"),
        ("End", "About boats"),
        ("ArrowDown", "About boats"),
        ("Home", "About tea"),
        ("ArrowDown", "About Owls"),
    ):
        await chat.keyboard.press(key)
        assert await focused() == name
    await chat.keyboard.press("F2")
    await expect(chat.locator("#conversations input")).to_be_focused()
    await chat.keyboard.type("Night birds")
    await chat.keyboard.press("Enter")
    await expect(titles).to_have_text(["Night birds", "About tea", "About boats"])  # it has changed last
    assert await focused() == "Night birds"
    await chat.keyboard.press("F2")
    await chat.keyboard.type("never")
    await chat.keyboard.press("Escape")
    await expect(titles).to_have_text(["Night birds", "About tea", "About boats"])
    await expect(chat.locator("#shelf")).to_be_visible()
    await chat.keyboard.press("Delete")
    await expect(titles).to_have_text(["About tea", "About boats"])
    assert await focused() == "About tea"
    await chat.keyboard.press("Home")
    await chat.keyboard.press("ArrowUp")
    await expect(chat.locator("#search")).to_be_focused()


async def test_the_name_of_the_conversation_that_is_shown_is_its_title(chat: Page, stub: Stub) -> None:
    call, script = await begin(chat, stub)
    await chat.click("#shelf-button")
    await chat.click("[aria-label='Rename “Hello”']")
    await chat.keyboard.type("Greetings")
    await chat.keyboard.press("Enter")
    await expect(chat).to_have_title("Greetings · Quire")
    # The answer that is being written does not undo it.
    await call.write(script.text(2, " two") + script.end(2))
    await call.end()
    await expect(chat.locator("#send")).to_be_visible()
    assert [one["title"] for one in await stored(chat)] == ["Greetings"]


async def test_a_removal_can_be_undone(chat: Page, stub: Stub) -> None:
    await three(chat, stub)
    before = await stored(chat)
    await chat.click("[aria-label='Forget “About tea”']")
    await expect(chat.locator("#notice")).to_contain_text("“About tea” is removed.")
    await expect(chat.locator(".turn")).to_have_count(0)  # it was shown
    assert len(await stored(chat)) == 2
    for scheme in ("light", "dark"):
        await chat.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        assert (await chat.evaluate(FAINT))["faint"] == []
    await chat.click("#notice button")
    await expect(chat.locator(".text")).to_have_text("It is hot.")
    await expect(chat.locator(TITLES)).to_have_count(3)
    await expect(chat.locator("#notice")).to_be_hidden()
    assert await stored(chat) == before


async def test_a_removal_on_a_phone_is_said_where_one_looks(chat: Page, stub: Stub) -> None:
    await chat.set_viewport_size({"width": 390, "height": 700})
    await answered(chat, stub, "Hello")
    await chat.click("#shelf-button")
    await chat.click("[aria-label='Forget “Hello”']")
    notice = chat.locator("#shelf #notice")
    await expect(notice).to_contain_text("“Hello” is removed.")
    assert await chat.evaluate(MISTAKES) == []
    await notice.locator("button").click()
    await expect(chat.locator("#shelf")).to_be_hidden()
    await expect(chat.locator(".text")).to_have_text("one")
    # A notice of the chat is above the message field again.
    await send(chat, "More")
    (await stub.call()).refuse(400, "enough", "enough")
    await expect(chat.locator("#form #notice, #shelf #notice")).to_have_count(1)


async def test_on_a_phone_a_new_conversation_and_back_close_the_sidebar(chat: Page, stub: Stub) -> None:
    await chat.set_viewport_size({"width": 375, "height": 667})
    await answered(chat, stub, "Hello")
    await chat.click("#shelf-button")
    await chat.click("#new")
    await expect(chat.locator("#shelf")).to_be_hidden()
    await expect(chat.locator("#input")).to_be_focused()
    await chat.click("#settings-button")
    await chat.go_back()
    await expect(chat.locator("#settings")).to_be_hidden()
    await expect(chat.locator(".text")).to_have_text("one")


async def test_every_conversation_has_an_address(context: BrowserContext, chat: Page, stub: Stub) -> None:
    assert await chat.evaluate("location.hash") == ""
    await three(chat, stub)
    tea, owls, _ = [one["id"] for one in await stored(chat)]
    assert await chat.evaluate("location.hash") == f"#/c/{tea}"
    await chat.locator(".conversation").nth(1).click()
    await expect(chat.locator(".text")).to_have_text("They hoot.")
    assert await chat.evaluate("location.hash") == f"#/c/{owls}"
    await chat.go_back()
    await expect(chat.locator(".text")).to_have_text("It is hot.")
    await chat.go_forward()
    await expect(chat.locator(".text")).to_have_text("They hoot.")
    # A tab of its own, by the address alone.
    other = await context.new_page()
    await open_chat(other, f"{stub.url}/#/c/{tea}")
    await expect(other.locator(".text")).to_have_text("It is hot.")
    await other.focus(".skip")
    await other.keyboard.press("Enter")
    assert await other.evaluate("location.hash") == f"#/c/{tea}"
    await other.close()
    # One that was removed: the address is that of what is shown.
    await chat.click("[aria-label='Forget “About tea”']")
    await expect(chat.locator("#notice")).to_contain_text("“About tea” is removed.")
    await chat.go_back()
    await expect(chat.locator("#notice")).to_have_text("This browser has no conversation with this address.")
    await expect(chat.locator(".text")).to_have_text("They hoot.")
    assert await chat.evaluate("location.hash") == f"#/c/{owls}"
    await open_chat(chat, f"{stub.url}/?x#/c/{'0' * 32}")
    await expect(chat.locator("#notice")).to_have_text("This browser has no conversation with this address.")
    await expect(chat.locator(".turn")).to_have_count(0)


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_axe_finds_nothing_in_any_state(chat: Page, stub: Stub, scheme: str) -> None:
    """The sidebar with a name that is written, the bar of a fork, versions, a notice with Undo, and the settings."""

    async def check() -> None:
        for width in (1200, 390):
            await chat.set_viewport_size({"width": width, "height": 800})
            # On a narrow page the open panel covers the main part, which is inert then: no landmark to go to.
            rules = "{ rules: { 'landmark-one-main': { enabled: !document.getElementById('chat').inert } } }"
            found = await chat.evaluate(f"axe.run({rules}).then(({{ violations }}) => violations)")
            assert [(one["id"], [node["html"][:90] for node in one["nodes"]]) for one in found] == []

    await chat.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    await chat.evaluate(AXE_FILE_PATH.read_text())
    await check()
    await answered(chat, stub, "Hello", "one two")
    await chat.click("text=Regenerate")
    await Script("02" * 16).play(await stub.call(), ["three four"])
    await expect(chat.locator(".text")).to_have_text("three four")
    await chat.click("text=Continue from a word…")
    await check()
    await chat.keyboard.press("Escape")
    await chat.click("#shelf-button")
    await check()
    await chat.click("[aria-label='Rename “Hello”']")
    await check()
    await chat.keyboard.press("Escape")
    await chat.click("[aria-label='Forget “Hello”']")
    await check()
    await chat.click("#shelf .close")
    await chat.click("#settings-button")
    await check()


# --- files ------------------------------------------------------------------------------------------------------------


async def exported(chat: Page) -> Any:
    async with chat.expect_download() as download:
        await chat.click("#export-all")
    return json.loads((await (await download.value).path()).read_text())


async def import_file(chat: Page, folder: Path, value: Any) -> None:
    path = folder / "some.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    async with chat.expect_file_chooser() as chooser:
        await chat.click("#import")
    await (await chooser.value).set_files(path)


async def test_what_is_exported_can_be_imported_by_another_browser(chat: Page, stub: Stub, tmp_path: Path) -> None:
    await three(chat, stub)
    await chat.locator("text=Regenerate").click()
    await Script("09" * 16).play(await stub.call(), ["It is cold."])
    await expect(chat.locator("#send")).to_be_visible()
    everything = await exported(chat)
    for _ in range(3):
        await chat.locator("#conversations .icon >> nth=1").click()
        await chat.wait_for_timeout(100)
    await expect(chat.locator(TITLES)).to_have_count(0)
    await import_file(chat, tmp_path, everything)
    await expect(chat.locator("#notice")).to_have_text("3 conversations imported.")
    await expect(chat.locator(TITLES)).to_have_text(["About tea", "About Owls", "About boats"])
    assert sorted(await stored(chat), key=lambda one: one["changed"]) == everything
    await chat.locator(".conversation").first.click()
    await expect(chat.locator(".text")).to_have_text("It is cold.")
    await chat.click(".step.back")
    await expect(chat.locator(".text")).to_have_text("It is hot.")
    # What is here already, and later, stays; one alone can be imported, too.
    await import_file(chat, tmp_path, everything[-1])
    await expect(chat.locator("#notice")).to_have_text("0 conversations imported, 1 was here already.")


WRONG: list[Any] = [
    None,
    [],
    {"version": 2},
    {"id": "../x"},
    {"turns": [{"said": 1}]},
    {"shown": 5},
    {"shown": 0, "turns": "both circular"},
    {"summary": {}},
    {"title": ["x"]},
    {"changed": 1e300},
    {"changed": -1},
    {"run": {"trouble": "x"}},
    {"run": {"usage": {"prompt_tokens": {"toString": 1, "valueOf": 1}}}},
    {"run": {"options": {"temperature": {"toString": 1, "valueOf": 1}}}},
]


@pytest.mark.parametrize("number", range(len(WRONG)))
async def test_what_is_no_conversation_is_not_imported(chat: Page, stub: Stub, tmp_path: Path, number: int) -> None:
    await answered(chat, stub, "Hello")
    await chat.click("#shelf-button")
    [whole] = await exported(chat)
    changes = WRONG[number]
    if isinstance(changes, dict):
        turn = whole["turns"][0]
        if changes.get("turns") == "both circular":
            changes = {"turns": [{**turn, "parent": 1, "shown": 1}, {**turn, "parent": 0, "shown": 0}]}
        elif "run" in changes:
            changes = {"turns": [{**turn, "runs": [{**turn["runs"][0], **changes["run"]}]}]}
        wrong: Any = {"version": 2} if changes == {"version": 2} else {**whole, "id": "a" * 32, **changes}
    else:
        wrong = changes
    await import_file(chat, tmp_path, [wrong, {**whole, "id": "b" * 32, "title": "whole"}])
    await expect(chat.locator("#notice")).to_have_text(
        "1 conversation imported. 1 in “some.json” cannot be read by this page."
    )
    await expect(chat.locator(TITLES)).to_have_count(2)


async def test_an_import_into_the_conversation_that_is_shown_stays(chat: Page, stub: Stub, tmp_path: Path) -> None:
    await answered(chat, stub, "Hello")
    await chat.click("#shelf-button")
    [whole] = await exported(chat)
    await answered(chat, stub, "More", "two", 2)
    [later] = await exported(chat)
    await chat.click("[aria-label='Forget “Hello”']")
    await import_file(chat, tmp_path, whole)
    await chat.click(".conversation")
    await import_file(chat, tmp_path, later)
    await expect(chat.locator(".text")).to_have_text(["one", "two"])
    await send(chat, "Still more")
    call = await stub.call()
    # While it is being answered, too.
    [turn, *_] = later["turns"]
    added = {**turn, "id": "new", "shown": -1, "said": "of another computer"}
    await import_file(chat, tmp_path, {**later, "changed": 8e15, "turns": [*later["turns"], added]})
    await expect(chat.locator("#notice")).to_have_text("1 conversation imported.")
    await Script("03" * 16).play(call, ["three"])
    await expect(chat.locator(".count")).to_have_text("1/2")
    await expect(chat.locator(".text")).to_have_text(["one", "two", "three"])
    [conversation] = await stored(chat)
    assert "of another computer" in [turn["said"] for turn in conversation["turns"]]


async def test_an_imported_conversation_sends_nothing(chat: Page, stub: Stub, tmp_path: Path) -> None:
    await begin(chat, stub)
    await chat.click("#shelf-button")
    [whole] = await exported(chat)
    assert whole["turns"][0]["runs"][0]["state"] in ("waiting", "running")
    await import_file(chat, tmp_path, {**whole, "id": "b" * 32, "title": "imported"})
    await chat.locator(TITLES, has_text="imported").click()
    await expect(chat.locator(".state")).to_have_text("Stopped.")
    await expect(chat.locator("#send")).to_be_visible()
    assert stub.calls.empty()


async def test_a_file_that_is_no_json_is_said(chat: Page, tmp_path: Path) -> None:
    await chat.click("#shelf-button")
    await import_file(chat, tmp_path, "no {")
    await expect(chat.locator("#notice")).to_have_text("“some.json” is no JSON file, so nothing was imported.")
