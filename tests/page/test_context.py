"""What surrounds an answer: how full the context is, models, presets, the usage of a key, first questions."""

from __future__ import annotations

from playwright.async_api import Page, expect

from tests.page.conftest import IN_BROWSER, open_chat, send, set_field
from tests.page.test_access import FAINT, MISTAKES
from tests.support.page.stub import Call, Script, Stub

pytestmark = IN_BROWSER

USED = "#used-text"


async def answered(chat: Page, stub: Stub, said: str, *pieces: str, number: int = 1) -> Call:
    await send(chat, said)
    call = await stub.call()
    await Script(f"{number:032x}").play(call, pieces)
    await expect(chat.locator("#send")).to_be_visible()
    return call


async def test_the_gauge_tells_how_full_the_context_is(page: Page, stub: Stub) -> None:
    stub.card = {"max_model_len": 20}
    stub.more_models = [{"id": "large", "max_model_len": 100_000}]
    await open_chat(page, stub.url)
    gauge, offer = page.locator("#gauge"), page.locator("#summarise")
    await expect(gauge).to_be_hidden()
    # The stub's prompts have 5 tokens.
    await answered(page, stub, "Hello", "a", "b", "c")
    await expect(page.locator(USED)).to_have_text("8 of 20 tokens")
    await expect(page.locator("#used")).to_have_attribute("aria-valuenow", "40")
    await expect(offer).to_be_hidden()
    await page.select_option("#model", "large")
    await expect(page.locator(USED)).to_have_text("8 of 100,000 tokens")
    await page.select_option("#model", "stub")
    await answered(page, stub, "More", *("abcdefghijklm"), number=2)
    await expect(page.locator(USED)).to_have_text("18 of 20 tokens")
    await expect(offer).to_be_visible()
    assert await page.evaluate(MISTAKES) == []
    assert (await page.evaluate(FAINT))["faint"] == []
    # Another version has a gauge of its own, and a reload changes nothing.
    await page.locator("text=Regenerate").last.click()
    await Script("03" * 16).play(await stub.call(), ["x"])
    await expect(page.locator(USED)).to_have_text("6 of 20 tokens")
    await page.click(".step.back")
    await expect(page.locator(USED)).to_have_text("18 of 20 tokens")
    await open_chat(page, stub.url)
    await expect(page.locator(USED)).to_have_text("18 of 20 tokens")
    # The summary is stored before anything is said after it, and has an address.
    await offer.click()
    (await stub.call()).answer({"choices": [{"message": {"content": "So far."}}]})
    before = page.locator("#before p")
    await expect(before).to_have_text("So far.", use_inner_text=False)
    await page.click("#new")
    await page.go_back()
    await expect(before).to_have_text("So far.", use_inner_text=False)
    await open_chat(page, stub.url)
    await expect(before).to_have_text("So far.", use_inner_text=False)


async def test_a_full_context_goes_on_in_a_new_conversation_with_a_summary(page: Page, stub: Stub) -> None:
    stub.card = {"max_model_len": 200}
    await open_chat(page, stub.url)
    await answered(page, stub, "My name is Ada", *("a" * 180))
    await send(page, "Who am I?")
    (await stub.call()).refuse(400, "The context length is 200 tokens.", "context_length_exceeded")
    await expect(page.locator(".trouble button:visible")).to_have_text(["Ask in a new conversation"])
    await page.click("#summarise")
    call = await stub.call()
    assert call.body is not None
    assert call.body["messages"][-1]["content"].startswith("Sum up our conversation")
    call.refuse(400, "The context length is 200 tokens.", "context_length_exceeded")
    shorter = await stub.call()
    assert shorter.body is not None
    size = [sum(len(message["content"]) for message in body["messages"]) for body in (call.body, shorter.body)]
    assert size[1] < size[0]
    shorter.answer({"choices": [{"message": {"content": " She is Ada. "}}]})
    # The question that had no answer is asked again.
    call = await stub.call()
    assert call.body is not None
    assert call.body["messages"] == [
        {"role": "system", "content": "Summary of the conversation so far: She is Ada."},
        {"role": "user", "content": "Who am I?"},
    ]
    await Script("05" * 16).play(call, ["Ada."])
    await expect(page.locator(".text")).to_have_text(["Ada."])
    before = page.locator("#before")
    await expect(before.locator("summary")).to_have_text("Summary of the conversation before")
    await expect(before.locator("p")).to_have_text("She is Ada.", use_inner_text=False)
    assert await page.evaluate(MISTAKES) == []
    await expect(page).to_have_title("My name is Ada, continued · Quire")
    await open_chat(page, stub.url)
    await expect(before).to_be_visible()
    await page.click("#shelf-button")
    await expect(page.locator("#conversations .title")).to_have_text(["My name is Ada, continued", "My name is Ada"])


async def test_without_a_summary_the_conversation_stays(page: Page, stub: Stub) -> None:
    stub.card = {"max_model_len": 20}
    await open_chat(page, stub.url)
    await answered(page, stub, "Hello", *"abcdefghijklm")
    await page.click("#summarise")
    (await stub.call()).refuse(503, "No worker is there.", "no_workers")
    await expect(page.locator("#notice")).to_have_text("There is no summary. No worker is there.")
    await expect(page.locator(".bubble")).to_have_text("Hello")
    await expect(page.locator("#summarise")).to_be_enabled()


async def test_one_model_is_a_name_and_several_are_a_choice(page: Page, stub: Stub) -> None:
    await open_chat(page, stub.url)
    await expect(page.locator("#model-name")).to_have_text("stub")
    await expect(page.locator("#model")).to_be_hidden()
    stub.more_models = [{"id": "poet", "max_model_len": 512, "parent": "stub"}, {"id": "b", "max_model_len": 64}]
    await open_chat(page, stub.url)
    await expect(page.locator("#model-name")).to_be_hidden()
    await expect(page.locator("#model option")).to_have_text(["stub", "poet (adapter of stub)", "b"])
    await page.select_option("#model", "poet")
    call = await answered(page, stub, "Hello", "one")
    assert call.body is not None
    assert call.body["model"] == "poet"
    await open_chat(page, stub.url)
    await expect(page.locator("#model")).to_have_value("poet")
    for width in (320, 390):
        await page.set_viewport_size({"width": width, "height": 700})
        assert await page.evaluate("document.documentElement.scrollWidth") <= width
        await expect(page.locator("#model")).to_be_visible()


async def test_presets_keep_instructions_and_settings_under_a_name(chat: Page, stub: Stub) -> None:
    async def keep(name: str) -> None:
        await chat.fill("#preset-name", name)
        await chat.press("#preset-name", "Enter")
        await expect(chat.locator("#preset")).to_have_value(name)

    await chat.click("#settings-button")
    await expect(chat.locator("#preset")).to_be_disabled()
    await chat.fill("#system", "Answer in rhyme.")
    await chat.fill("#temperature", "1.5")
    await keep("Poet")
    await chat.click("#defaults")
    await chat.fill("#temperature", "0")
    await keep("Clerk")
    await chat.select_option("#preset", "Poet")
    await expect(chat.locator("#system")).to_have_value("Answer in rhyme.")
    await expect(chat.locator("#temperature")).to_have_value("1.5")
    call = await answered(chat, stub, "Hello", "one")
    assert call.body is not None
    assert (call.body["temperature"], call.body["messages"][0]["content"]) == (1.5, "Answer in rhyme.")
    await open_chat(chat, stub.url)
    await chat.click("#settings-button")
    await expect(chat.locator("#system")).to_have_value("Answer in rhyme.")
    await chat.select_option("#preset", "Clerk")
    await expect(chat.locator("#system")).to_have_value("")
    await expect(chat.locator("#temperature")).to_have_value("0")
    await chat.click("#preset-remove")
    await expect(chat.locator("#preset option")).to_have_text(["Choose a preset", "Poet"])
    await chat.click("#notice button")
    await expect(chat.locator("#preset option")).to_have_text(["Choose a preset", "Clerk", "Poet"])
    assert await chat.evaluate(MISTAKES) == []


async def test_the_usage_of_the_key_is_shown(page: Page, stub: Stub) -> None:
    today = await page.evaluate("new Date().toISOString().slice(0, 10)")
    row = {"key": "k", "model": "stub", "requests": 2, "prompt_tokens": 1000, "completion_tokens": 234, "cost": "0"}
    stub.usage = [{**row, "date": "2020-01-01"}, {**row, "date": today, "requests": 1}]
    await open_chat(page, stub.url)
    await expect(page.locator("#usage")).to_be_hidden()  # the page has no key
    await open_chat(page, f"{stub.url}/?again#key=sk-test")
    await page.click("#settings-button")
    await expect(page.locator("#usage")).to_have_text(
        "This key: 1,234 tokens in 1 request today, 2,468 tokens in 3 requests in 31 days (UTC)."
    )


async def test_a_question_to_begin_with_is_asked_with_one_press(chat: Page, stub: Stub) -> None:
    starters = chat.locator("#starters button")
    await expect(starters).to_have_count(4)
    text = await starters.first.text_content() or ""
    await starters.first.click()
    await expect(chat.locator("#input")).to_be_focused()
    call = await stub.call()
    assert call.body is not None
    assert call.body["messages"] == [{"role": "user", "content": text}]
    await Script().play(call, ["Once"])
    await expect(starters.first).to_be_hidden()
    await chat.click("#new")
    await expect(starters.first).to_be_visible()


async def test_settings_of_a_preset_that_are_wrong_are_said(chat: Page) -> None:
    await set_field(chat, temperature="9")
    await chat.click("#settings-button")
    await chat.fill("#preset-name", "Wrong")
    await chat.press("#preset-name", "Enter")
    await chat.click("#defaults")
    await expect(chat.locator("#temperature")).to_have_value("")
    await chat.select_option("#preset", "Wrong")
    await expect(chat.locator("#temperature")).to_have_attribute("aria-invalid", "true")
