"""What an answer shows: text, reasoning, tool calls, and a context that is full."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator

import pytest
from playwright.async_api import Page, Route, expect

from quire.gateway.output.parts import AnswerPart, PartKind
from quire.gateway.settings import GatewaySettings
from quire.gateway.stream import sse
from tests.page.conftest import IN_BROWSER, open_chat, send, set_field, shared, stored
from tests.page.test_access import FAINT, MISTAKES
from tests.support.gateway.agents import ANSWER, TEMPLATE, WEATHER, saying
from tests.support.gateway.running import CONTEXT, RunningGateway, running_gateway, write_model
from tests.support.page.stub import CHAT, Script, Stub
from tests.support.redis_server import running_redis

pytestmark = IN_BROWSER

NO_TOOLS = "This page does not run tools."


@shared
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningGateway]:
    """A gateway whose model reasons and calls tools, in Qwen3's form."""
    model = write_model(tmp_path_factory.mktemp("models") / "test-model", chat_template=TEMPLATE)
    with running_redis() as redis:
        async with running_gateway(GatewaySettings(model=str(model), redis_url=redis.url, port=0)) as running:
            yield running


async def with_tools(route: Route) -> None:
    """Offer a tool, which the page itself never does."""
    function = {"name": WEATHER["name"], "parameters": WEATHER["input_schema"]}
    body = json.loads(route.request.post_data or "")
    await route.continue_(post_data=json.dumps({**body, "tools": [{"type": "function", "function": function}]}))


async def test_reasoning_and_tool_calls_of_a_gateway_are_shown(page: Page, gateway: RunningGateway) -> None:
    async with gateway.worker(saying(ANSWER)):
        await page.route(f"**{CHAT}", with_tools)
        await open_chat(page, gateway.url)
        await send(page, "How is the weather in Paris?")
        await expect(page.locator(".text")).to_have_text("I look it up.")
        thinking = page.locator(".thinking")
        await expect(thinking.locator("summary")).to_have_text(re.compile(r"^Thought for \d+\.\d s$"))
        await expect(thinking.locator("p")).to_be_hidden()
        await thinking.locator("summary").click()
        await expect(thinking.locator("p")).to_have_text("They ask for the weather.")
        await expect(page.locator(".call-name")).to_have_text("Calls the tool get_weather")
        await expect(page.locator(".call pre")).to_have_text('{ "city": "Paris" }')
        await expect(page.locator(".state")).to_have_text(NO_TOOLS)
        assert await page.evaluate(MISTAKES) == []
        for scheme in ("light", "dark"):
            await page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            assert (await page.evaluate(FAINT))["faint"] == []
        await page.reload()
        await expect(page.locator(".call-name")).to_have_text("Calls the tool get_weather")
        await expect(page.locator(".thinking p")).to_have_text("They ask for the weather.", use_inner_text=False)


async def test_a_full_context_offers_a_new_conversation(page: Page, gateway: RunningGateway) -> None:
    async with gateway.worker(saying("A long answer. " * 12)):
        await open_chat(page, gateway.url)
        trouble = page.locator(".trouble").last
        for turn in range(1, 9):
            await send(page, f"Question {turn}: {'word ' * 10}")
            await expect(page.locator("#send")).to_be_visible()
            if await trouble.is_visible():
                break
        await expect(trouble).to_contain_text("context length")
        assert turn > 1
        # The same call would be refused again.
        await expect(trouble.locator("button")).to_have_text(["Retry", "Ask in a new conversation"])
        await expect(trouble.locator("button", has_text="Retry")).to_be_hidden()
        await trouble.locator("button", has_text="new conversation").click()
        await expect(page.locator(".bubble")).to_have_text(f"Question {turn}: {'word ' * 10}".strip())
        await expect(page.locator(".text")).to_have_text("A long answer. " * 12)
        await page.click("#shelf-button")
        await expect(page.locator(".conversation")).to_have_count(2)
        # A message that is too long by itself is too long in any conversation.
        await page.click("#new")
        await send(page, "word " * CONTEXT)
        await expect(trouble).to_contain_text("context length")
        await expect(trouble.locator("button:visible")).to_have_count(0)


async def test_reasoning_is_counted_while_it_lasts_and_survives_a_reload(chat: Page, stub: Stub) -> None:
    script = Script()
    await send(chat, "Hello")
    call = await stub.call()
    await call.accept(script.request_id)
    await call.write(script.opening() + script.parts(1, AnswerPart(PartKind.REASONING, "Let me")))
    summary = chat.locator(".thinking summary")
    await expect(summary).to_have_text(re.compile(r"^Thinking for \d+\.\d s$"))
    # It is open while it is written.
    await expect(chat.locator(".thinking p")).to_be_visible()
    await expect(chat.locator(".state")).to_have_text("")
    await open_chat(chat, stub.url)
    call = await stub.call()
    assert call.last_event_id == "1"
    await call.accept(script.request_id)
    await call.write(script.parts(2, AnswerPart(PartKind.REASONING, " <b>see</b>.")) + script.text(3, "<think>Yes"))
    await expect(summary).to_have_text(re.compile(r"^Thought for \d+\.\d s$"))
    await expect(chat.locator(".thinking p")).to_be_hidden()
    await expect(chat.locator(".thinking p")).to_have_text("Let me <b>see</b>.", use_inner_text=False)
    # A mark in the text is text.
    await expect(chat.locator(".text")).to_have_text("<think>Yes")
    await call.write(script.end(3))
    await call.end()
    await expect(chat.locator("#send")).to_be_visible()
    await expect(chat.locator(".numbers")).to_contain_text("3 tokens")
    # The next turn has the text of the answer only.
    await send(chat, "More")
    call = await stub.call()
    assert call.body is not None
    assert call.body["messages"][1] == {"role": "assistant", "content": "<think>Yes"}
    await Script("02" * 16).play(call, ["fine"])


async def test_reasoning_stays_as_the_reader_has_left_it(chat: Page, stub: Stub) -> None:
    """Under its other name, as other servers call it. It is Markdown like the answer."""
    script = Script()

    def thought(position: int, text: str) -> str:
        chunk = {"id": script.call_id, "choices": [{"index": 0, "delta": {"reasoning": text}}]}
        return f"id: {position}\n{sse.event(json.dumps(chunk))}"

    await send(chat, "Hello")
    call = await stub.call()
    await call.accept(script.request_id)
    await call.write(script.opening() + thought(1, "First:\n\n- *one*."))
    thinking = chat.locator(".thinking")
    await expect(thinking.locator("li em")).to_be_visible()
    await thinking.locator("summary").click()
    await call.write(thought(2, "\n- two"))
    await expect(thinking.locator("li")).to_have_text(["one.", "two"], use_inner_text=False)
    await expect(thinking).not_to_have_attribute("open", "")
    await thinking.locator("summary").click()
    await call.write(script.text(3, "Done.") + script.end(3))
    await call.end()
    await expect(chat.locator(".text")).to_have_text("Done.")
    await expect(thinking).to_have_attribute("open", "")


async def test_what_is_stored_copied_and_exported_of_calls(chat: Page, stub: Stub) -> None:
    """The conversation has the reasoning and the calls; only the text is copied."""
    await chat.context.grant_permissions(["clipboard-read", "clipboard-write"])
    script = Script()
    await send(chat, "Hello")
    call = await stub.call()
    await call.accept(script.request_id)
    parts = [AnswerPart(PartKind.CALL, "weather", 0, "call_1"), AnswerPart(PartKind.ARGUMENTS, '{"city": "Paris"}', 0)]
    await call.write(
        script.opening()
        + script.parts(1, AnswerPart(PartKind.REASONING, "Hm."))
        + script.text(2, "I look *it* up.")
        + script.parts(3, *parts)
        + script.end(3, "tool_calls")
    )
    await call.end()
    await expect(chat.locator("#send")).to_be_visible()
    await stored(chat)  # reads behind the page's last write
    await open_chat(chat, stub.url)
    await expect(chat.locator(".call-name")).to_have_text("Calls the tool weather")
    await expect(chat.locator(".call-id")).to_have_text("call_1")
    await expect(chat.locator(".call pre")).to_have_text('{ "city": "Paris" }')
    await expect(chat.locator(".call .hl-string")).to_have_text('"Paris"')
    await expect(chat.locator(".result")).to_be_hidden()
    await expect(chat.locator(".thinking p")).to_have_text("Hm.", use_inner_text=False)
    await chat.click(".meter button")
    await expect(chat.locator("#status")).to_have_text("Copied.")
    assert await chat.evaluate("navigator.clipboard.readText()") == "I look *it* up."
    [conversation] = await stored(chat)
    [answer] = conversation["turns"][0]["runs"][0]["answers"]
    assert answer["reasoning"] == "Hm."
    assert answer["calls"] == [{"id": "call_1", "name": "weather", "given": '{"city": "Paris"}'}]
    await chat.click("#shelf-button")
    async with chat.expect_download() as download:
        await chat.click("#export")
    assert json.loads((await (await download.value).path()).read_text()) == conversation


async def test_results_of_tools_are_shown(chat: Page, stub: Stub) -> None:
    """This page runs no tools, but a stored conversation may have their results."""
    await chat.evaluate(
        """async (calls) => {
          const { newConversation, newTurn } = await import("/conversation.js");
          const { saveConversation } = await import("/store.js");
          const conversation = newConversation();
          const turn = newTurn(conversation, "with results", [{ model: "stub" }]);
          Object.assign(turn.runs[0], { state: "done", answers: [{ text: "Fine.", finish: "stop", calls }] });
          await saveConversation(conversation);
        }""",
        [
            {"id": "call_1", "name": "weather", "given": "{}", "result": '{"sky":["<b>clear</b>"]}'},
            {"id": "call_2", "name": "time", "given": "", "result": "``` 12 o'clock"},
        ],
    )
    await open_chat(chat, stub.url)
    await chat.click("#shelf-button")
    await chat.click("text=with results")
    await expect(chat.locator(".result pre")).to_have_text(
        ['{\n  "sky": [\n    "<b>clear</b>"\n  ]\n}', "``` 12 o'clock"], use_inner_text=True
    )
    await expect(chat.locator(".call pre")).to_have_count(3)
    await expect(chat.locator(".state")).to_have_text("")


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("stop", "The model ended its answer without a text."),
        ("length", "This answer reached its maximum length."),
        ("constructor", "The model ended its answer without a text."),
    ],
)
async def test_an_answer_without_a_text_says_so(chat: Page, stub: Stub, reason: str, said: str) -> None:
    script = Script()
    await send(chat, "Hello")
    call = await stub.call()
    await call.accept(script.request_id)
    thought = AnswerPart(PartKind.REASONING, "Hm.")
    await call.write(script.opening() + script.parts(1, thought) + script.end(1, reason))
    await call.end()
    await expect(chat.locator(".state")).to_have_text(said)
    await expect(chat.locator(".thinking summary")).to_contain_text("Thought for")
    await expect(chat.locator("#status")).to_have_text("Answer: no text")


async def test_calls_that_arrive_in_pieces_are_put_together(chat: Page, stub: Stub) -> None:
    script = Script()
    await send(chat, "Hello")
    call = await stub.call()
    await call.accept(script.request_id)
    pieces = ['{"city": "<img src=x onerror=hacked=1>', '"}']
    await call.write(script.opening() + script.parts(1, AnswerPart(PartKind.CALL, "weather", 0, "call_1")))
    await expect(chat.locator(".call-name")).to_have_text("Calls the tool weather")
    await call.write(script.parts(2, AnswerPart(PartKind.ARGUMENTS, pieces[0], 0)))
    await expect(chat.locator(".call pre")).to_have_text(pieces[0])
    await call.write(script.parts(3, AnswerPart(PartKind.ARGUMENTS, pieces[1], 0)))
    await call.write(script.parts(4, AnswerPart(PartKind.CALL, "time", 1, "call_2")) + script.end(4, "tool_calls"))
    await call.end()
    await expect(chat.locator(".call-name")).to_have_text(["Calls the tool weather", "Calls the tool time"])
    shown = await chat.locator(".call pre").first.inner_text()
    assert json.loads(shown) == {"city": "<img src=x onerror=hacked=1>"}
    await expect(chat.locator(".state")).to_have_text(NO_TOOLS)
    assert await chat.evaluate("typeof hacked") == "undefined"
    assert await chat.locator(".answer img").count() == 0


async def test_reasoning_fits_a_narrow_page_and_answers_side_by_side(chat: Page, stub: Stub) -> None:
    await chat.set_viewport_size({"width": 320, "height": 640})
    await set_field(chat, n="2")
    script = Script(n=2)
    await send(chat, "Hello")
    call = await stub.call()
    await call.accept(script.request_id)
    long = "unbreakable" * 20
    parts = [AnswerPart(PartKind.REASONING, long), AnswerPart(PartKind.CALL, long, 0, "call_1")]
    await call.write(script.opening() + script.parts(1, *parts) + script.text(2, "fine", choice=1) + script.end(2))
    await call.end()
    await expect(chat.locator("#send")).to_be_visible()
    await chat.click(".thinking summary >> visible=true")
    await expect(chat.locator(".thinking p >> visible=true")).to_have_text(long)
    assert await chat.evaluate("document.getElementById('log').scrollWidth") <= 320


# --- The events of a stream ------------------------------------------------------------------------------------------


PARSE = """async (pieces) => {
  const { SseParser } = await import("/sse.js");
  const parser = new SseParser();
  return pieces.flatMap((piece) => parser.push(piece)).map(({ id, data }) => [id, data]);
}"""


async def test_events_are_the_same_wherever_they_are_cut(chat: Page) -> None:
    lines = [": a comment", "id: 1", "data: one", "", "id:2.1", "data:  two", "data: more", "event: x", "", "data", ""]
    expected = [["1", "one"], ["2.1", " two\nmore"], ["2.1", ""]]
    for end in ("\n", "\r\n", "\r"):
        text = end.join(lines) + end + "data: never completed"
        assert await chat.evaluate(PARSE, [text]) == expected
        assert await chat.evaluate(PARSE, list(text)) == expected
        for at in range(len(text)):
            assert await chat.evaluate(PARSE, [text[:at], text[at:]]) == expected


async def test_ids_are_compared_as_numbers(chat: Page) -> None:
    compare = '(pairs) => import("/sse.js").then(({ isAfter }) => pairs.map(([a, b]) => isAfter(a, b)))'
    pairs = [["10", "9"], ["9", "10"], ["9", "9"], ["9.1", "9"], ["9.10", "9.9"], ["10", "9.9"], ["0", ""]]
    assert await chat.evaluate(compare, pairs) == [True, False, False, True, True, True, True]
