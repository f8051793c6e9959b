"""Versions of a turn: edits, new answers, and answers that continue another one from a word on. Nothing is lost."""

from __future__ import annotations

import asyncio
import re

import pytest
from playwright.async_api import Page, expect

from tests.page.conftest import IN_BROWSER, begin, open_chat, send, set_field, stored
from tests.support.page.stub import CHAT, Call, Script, Stub

pytestmark = IN_BROWSER

STORY = ["A fox", " met", " a", " **shy**", " badger", ",\n\n", "and", " they", " sang", "."]
COUNT = ".count"


async def answered(chat: Page, stub: Stub, said: str, *pieces: str, number: int = 1) -> None:
    await send(chat, said)
    await play(chat, await stub.call(), *pieces, number=number)


async def play(chat: Page, call: Call, *pieces: str, number: int) -> None:
    await Script(f"{number:032x}").play(call, pieces)
    await expect(chat.locator("#send")).to_be_visible()


def said_to(call: Call) -> list[str]:
    assert call.body is not None
    return [message["content"] for message in call.body["messages"]]


async def test_an_edit_and_a_new_answer_are_versions_and_nothing_is_lost(chat: Page, stub: Stub) -> None:
    await answered(chat, stub, "first", "one", number=1)
    await answered(chat, stub, "second", "two", number=2)
    count, texts, bubbles = chat.locator(COUNT), chat.locator(".text"), chat.locator(".bubble")
    await expect(count).to_have_count(0)
    # Another answer to the first turn: what followed belongs to the version before.
    await chat.locator("text=Regenerate").first.click()
    await play(chat, await stub.call(), "another", number=3)
    await expect(texts).to_have_text(["another"])
    await expect(count).to_have_text("2/2")
    await expect(count).to_have_attribute("aria-label", "Version 2 of 2")
    await expect(chat.locator("#input")).to_be_focused()  # its button is gone
    # An edit is a third version.
    await chat.locator(".said button").first.click()
    await chat.fill(".editor textarea", "changed")
    await chat.press(".editor textarea", "Enter")
    call = await stub.call()
    assert said_to(call) == ["changed"]
    await expect(chat.locator("#input")).to_be_focused()
    await play(chat, call, "three", number=4)
    await expect(count).to_have_text("3/3")
    # The keyboard stays at the button, and what followed a version comes back with it.
    await chat.focus(".step.back")
    await chat.keyboard.press("Enter")
    await expect(texts).to_have_text(["another"])
    await expect(chat.locator(".step.back")).to_be_focused()
    await chat.keyboard.press("Enter")
    await expect(bubbles).to_have_text(["first", "second"])
    await expect(texts).to_have_text(["one", "two"])
    await expect(chat.locator(".step.on")).to_be_focused()
    await expect(chat.locator(".step.back")).to_be_disabled()
    # It stays after a reload, and the next turn continues what is shown.
    await open_chat(chat, stub.url)
    await expect(texts).to_have_text(["one", "two"])
    await send(chat, "third")
    call = await stub.call()
    assert said_to(call) == ["first", "one", "second", "two", "third"]
    await play(chat, call, "four", number=5)
    [conversation] = await stored(chat)
    assert len(conversation["turns"]) == 5


async def test_an_answer_that_is_being_written_ends_when_another_one_takes_its_place(chat: Page, stub: Stub) -> None:
    call, script = await begin(chat, stub)
    await chat.click("text=Regenerate")
    again = await stub.call()
    assert await stub.cancelled.get() == script.call_id
    await play(chat, again, "whole", number=2)
    await chat.click(".step.back")
    await expect(chat.locator(".text")).to_have_text("One")
    await expect(chat.locator(".state")).to_have_text("Stopped.")
    assert call.body == again.body


async def test_conversations_of_earlier_versions_of_the_page_are_shown(chat: Page, stub: Stub) -> None:
    await chat.evaluate("""async () => {
      const { newConversation, newTurn } = await import("/conversation.js");
      const { saveConversation } = await import("/store.js");
      const { turns, shown, ...rest } = newConversation();
      const texts = ["one", "two", "three"];
      const old = texts.map((text) => {
        const { parent, shown, ...turn } = newTurn(newConversation(), `say ${text}`, [{ model: "stub" }]);
        Object.assign(turn.runs[0], { state: "done", id: null });
        delete turn.runs[0].answers[0].marks;
        Object.assign(turn.runs[0].answers[0], { text, finish: "stop" });
        return turn;
      });
      await saveConversation({ ...rest, version: 1, title: "old", turns: old });
    }""")
    await chat.click("#shelf-button")
    await chat.click(".conversation")
    await expect(chat.locator(".text")).to_have_text(["one", "two", "three"])
    await chat.locator("text=Regenerate").nth(1).click()
    call = await stub.call()
    assert said_to(call) == ["say one", "one", "say two"]
    await play(chat, call, "other", number=1)
    await chat.click(".step.back")
    await expect(chat.locator(".text")).to_have_text(["one", "two", "three"])


# --- "continue differently from here" ---------------------------------------------------------------------------------


async def choose(chat: Page, word: str) -> None:
    """Select a word of an answer, as a double click does; again if the page has drawn the text anew meanwhile."""
    await expect(chat.locator(".text")).to_contain_text(word)  # the page draws the last text in a later frame
    async with asyncio.timeout(60):
        while await chat.locator(".fork-bar strong").inner_text() != word:
            await chat.evaluate(
                """(word) => {
                  const walker = document.createTreeWalker(document.querySelector(".text"), NodeFilter.SHOW_TEXT);
                  while (!walker.nextNode().data.includes(word));
                  const at = walker.currentNode.data.indexOf(word);
                  getSelection().setBaseAndExtent(walker.currentNode, at, walker.currentNode, at + word.length);
                }""",
                word,
            )
            await chat.wait_for_timeout(100)  # the bar opens with the event of the selection
    await expect(chat.locator(".fork-bar")).to_be_visible()


FORKS = [
    # The selected word, what is written instead, the last event that is kept, the text after it, and the whole of it.
    ("badger", "", "4", "", "A fox met a shy"),
    ("badger", "goose", "4", " goose", "A fox met a shy goose"),
    ("shy", "", "3", "", "A fox met a"),
    ("shy", "brave", "3", " brave", "A fox met a brave"),
    ("fox", "", "0", "A", "A"),
    ("A", "The cat", "0", "The cat", "The cat"),
    ("and", "", "6", "", "A fox met a shy badger,"),
]


@pytest.mark.parametrize(("word", "words", "at", "continuation", "kept"), FORKS)
async def test_an_answer_is_continued_from_a_selected_word(
    chat: Page, stub: Stub, word: str, words: str, at: str, continuation: str, kept: str
) -> None:
    await answered(chat, stub, "Tell", *STORY)
    await choose(chat, word)
    await chat.fill(".fork-bar input", words)
    await chat.press(".fork-bar input", "Enter")
    call = await stub.call()
    assert call.request.path == f"{CHAT}/{Script(f'{1:032x}').call_id}/fork"
    assert call.body is not None
    assert (call.body["at"], call.body["choice"], call.body["continuation"]) == (at, 0, continuation)
    assert call.body["background"] is True
    await expect(chat.locator("#input")).to_be_focused()
    await play(chat, call, " sang", number=2)
    # A new paragraph begins without a space.
    await expect(chat.locator(".text")).to_have_text(re.compile(f"^{kept}\\s*sang$"))
    await expect(chat.locator(COUNT)).to_have_text("2/2")
    await chat.click(".step.back")
    await expect(chat.locator(".text")).to_contain_text("A fox met a shy badger")


async def test_the_chosen_one_of_several_answers_is_continued(chat: Page, stub: Stub) -> None:
    """Ids of events count the tokens of all answers."""
    await set_field(chat, n="2")
    await send(chat, "Tell")
    call = await stub.call()
    script = Script("01" * 16, n=2)
    await call.accept(script.request_id)
    pieces = [("One", 0), ("Two", 1), (" owl", 0), (" cats", 1), (" sang", 1), (" sat", 0)]
    events = "".join(script.text(position, text, choice) for position, (text, choice) in enumerate(pieces, start=1))
    await call.write(script.opening() + events + script.end(len(pieces)))
    await call.end()
    await expect(chat.locator("#send")).to_be_visible()
    await chat.locator(".which input").nth(1).check()
    await chat.click("text=Continue from a word…")
    await expect(chat.locator(".fork-bar strong")).to_have_text("sang")
    await chat.keyboard.press("Enter")
    call = await stub.call()
    assert call.body is not None
    assert (call.body["at"], call.body["choice"], call.body["continuation"]) == ("4", 1, "")
    assert "n" not in call.body
    await play(chat, call, " slept", number=2)
    await expect(chat.locator(".text")).to_have_text("Two cats slept")


async def test_a_word_is_chosen_with_the_keyboard(chat: Page, stub: Stub) -> None:
    await answered(chat, stub, "Tell", *STORY)
    await chat.focus("text=Continue from a word…")
    await chat.keyboard.press("Enter")
    word = chat.locator(".fork-bar strong")
    await expect(word).to_have_text("sang")
    await expect(chat.locator(".fork-bar input")).to_be_focused()
    await chat.keyboard.press("ArrowRight")
    await expect(word).to_have_text("sang")
    for expected in ("they", "and", "badger", "shy", "a", "met", "fox", "A", "A"):
        await chat.keyboard.press("ArrowLeft")
        await expect(word).to_have_text(expected)
    await chat.keyboard.press("ArrowRight")
    await chat.keyboard.type("goose")
    await chat.keyboard.press("ArrowLeft")  # within the words that are written
    await expect(word).to_have_text("fox")
    await chat.keyboard.press("Escape")
    await expect(chat.locator(".fork-bar")).to_be_hidden()
    await expect(chat.locator("text=Continue from a word…")).to_be_focused()
    await chat.keyboard.press("Enter")
    await expect(chat.locator(".fork-bar input")).to_have_value("")
    await chat.keyboard.press("Enter")
    call = await stub.call()
    assert call.body is not None
    assert call.body["at"] == "8"
    await play(chat, call, " danced.", number=2)
    await expect(chat.locator(".text p").last).to_have_text("and they danced.")


async def test_a_fork_of_a_fork_goes_back_to_the_answer_that_has_the_tokens(chat: Page, stub: Stub) -> None:
    await answered(chat, stub, "Tell", *STORY)
    await choose(chat, "badger")
    await chat.fill(".fork-bar input", "goose")
    await chat.press(".fork-bar input", "Enter")
    await play(chat, await stub.call(), " in", " the", " rain", number=2)
    await expect(chat.locator(".text")).to_have_text("A fox met a shy goose in the rain")
    # A word of its own tokens, one that was written, and one of the first answer.
    for word, number, at, continuation in (("rain", 2, "2", ""), ("goose", 1, "4", ""), ("met", 1, "1", "")):
        await choose(chat, word)
        await chat.press(".fork-bar input", "Enter")
        call = await stub.call()
        assert call.request.path == f"{CHAT}/{Script(f'{number:032x}').call_id}/fork"
        assert call.body is not None
        assert (call.body["at"], call.body["continuation"]) == (at, continuation)
        await play(chat, call, " x", number=9)
        while not (await chat.locator(COUNT).text_content() or "").startswith("2/"):
            await chat.click(".step.back")


@pytest.mark.parametrize(
    ("code", "status"), [("not_found", 404), ("prompt_not_kept", 400), ("not_forkable", 400), ("inside_tool_call", 400)]
)
async def test_an_answer_that_the_server_has_no_longer_is_continued_as_a_text(
    chat: Page, stub: Stub, code: str, status: int
) -> None:
    await set_field(chat, system="Be kind.")
    await answered(chat, stub, "Tell", *STORY)
    await choose(chat, "badger")
    await chat.fill(".fork-bar input", "goose")
    await chat.press(".fork-bar input", "Enter")
    first = await stub.call()
    first.refuse(status, "It is gone.", code)
    call = await stub.call()
    assert call.request.path == CHAT
    assert call.key != first.key
    assert call.body is not None
    assert call.body["messages"] == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Tell"},
        {"role": "assistant", "content": "A fox met a **shy** goose"},
    ]
    assert (call.body["continue_final_message"], call.body["add_generation_prompt"]) == (True, False)
    await play(chat, call, " in", number=2)
    await expect(chat.locator(".text")).to_have_text("A fox met a shy goose in")
    await expect(chat.locator(".trouble")).to_be_hidden()


async def test_temperature_0_is_not_asked_for_the_same_words_again(chat: Page, stub: Stub) -> None:
    await set_field(chat, temperature="0", seed="7")
    await answered(chat, stub, "Tell", *STORY)
    await choose(chat, "badger")
    await chat.press(".fork-bar input", "Enter")
    call = await stub.call()
    assert call.body is not None
    assert call.body["temperature"] > 0
    assert call.body["seed"] != 7
    call.refuse(400, "enough", "enough")
    await expect(chat.locator(".trouble")).to_be_visible()
    # A retry keeps the place.
    await chat.click("text=Retry")
    again = await stub.call()
    assert again.body is not None
    assert (again.body["at"], again.key != call.key) == ("4", True)
    await play(chat, again, " end", number=2)
    await expect(chat.locator(".text")).to_have_text("A fox met a shy end")


async def test_a_fork_is_taken_up_again_after_a_reload(chat: Page, stub: Stub) -> None:
    await answered(chat, stub, "Tell", *STORY)
    await choose(chat, "badger")
    await chat.press(".fork-bar input", "Enter")
    call = await stub.call()
    script = Script("02" * 16)
    await call.accept(script.request_id)
    await call.write(script.opening() + script.text(1, " goose"))
    await expect(chat.locator(".text")).to_have_text("A fox met a shy goose")
    await open_chat(chat, stub.url)
    call = await stub.call()
    assert (call.request.method, call.last_event_id) == ("GET", "1")
    await call.accept(script.request_id)
    await call.write(script.text(2, " came") + script.end(2))
    await call.end()
    await expect(chat.locator(".text")).to_have_text("A fox met a shy goose came")


async def test_words_are_found_behind_markup(chat: Page, stub: Stub) -> None:
    """Each word that is shown has the place at which it stands in the text."""
    lines = ["# Head", "See [the docs](https://example.com/docs/the) and `code`.", "- *one* two\n- one"]
    text = "\n\n".join([*lines, "```js\nlet two;\n```"])
    await answered(chat, stub, "Hello", text)
    await expect(chat.locator(".text pre")).to_contain_text("let two;")
    found = await chat.evaluate(
        """async (text) => {
          const { wordsOf } = await import("/words.js");
          const words = wordsOf(document.querySelector(".text"), text);
          return words.map(({ word, range, at }) => [word, range.toString(), text.slice(at, at + word.length)]);
        }""",
        text,
    )
    assert [word for word, _, _ in found][:3] == ["Head", "See", "the"]
    assert [word for word, _, _ in found][-2:] == ["let", "two"]
    assert [word for word, _, _ in found].count("one") == 2
    assert all(word == shown == source for word, shown, source in found)


# --- drafts -----------------------------------------------------------------------------------------------------------


async def test_what_is_written_and_not_sent_survives_a_reload_and_a_look_elsewhere(chat: Page, stub: Stub) -> None:
    await chat.locator("#input").press_sequentially("half a")
    await open_chat(chat, stub.url)
    await expect(chat.locator("#input")).to_have_value("half a")
    await chat.locator("#input").press_sequentially(" message")
    await chat.press("#input", "Enter")
    await play(chat, await stub.call(), "one", number=1)
    await expect(chat.locator("#input")).to_have_value("")
    await chat.locator("#input").press_sequentially("more")
    await chat.click("#new")
    await expect(chat.locator("#input")).to_have_value("")
    await chat.go_back()
    await expect(chat.locator(".bubble")).to_have_text("half a message")
    await expect(chat.locator("#input")).to_have_value("more")
    await open_chat(chat, stub.url)
    await expect(chat.locator("#input")).to_have_value("more")
