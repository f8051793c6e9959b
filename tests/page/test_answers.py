"""What an answer shows: text, reasoning, tool calls, and a context that is full."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page, Route, expect

from quire.gateway.output.parts import AnswerPart, PartKind
from quire.gateway.settings import GatewaySettings
from tests.page.conftest import IN_BROWSER, open_chat, send, set_field, shared
from tests.page.test_access import FAINT, MISTAKES
from tests.support.gateway.agents import ANSWER, TEMPLATE, WEATHER, saying
from tests.support.gateway.running import CONTEXT, RunningGateway, running_gateway, write_model
from tests.support.page.stub import CHAT, Script, Stub
from tests.support.redis_server import running_redis

# --- What an answer has besides its text: reasoning, tool calls, and a context that is full ---------------------------


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
        await expect(page.locator(".call p")).to_have_text("Calls the tool get_weather")
        await expect(page.locator(".call pre")).to_have_text('{ "city": "Paris" }')
        await expect(page.locator(".state")).to_have_text(NO_TOOLS)
        assert await page.evaluate(MISTAKES) == []
        for scheme in ("light", "dark"):
            await page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            assert (await page.evaluate(FAINT))["faint"] == []
        await page.reload()
        await expect(page.locator(".call p")).to_have_text("Calls the tool get_weather")
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
    await expect(chat.locator(".state")).to_have_text("")
    await open_chat(chat, stub.url)
    call = await stub.call()
    assert call.last_event_id == "1"
    await call.accept(script.request_id)
    await call.write(script.parts(2, AnswerPart(PartKind.REASONING, " <b>see</b>.")) + script.text(3, "<think>Yes"))
    await expect(summary).to_have_text(re.compile(r"^Thought for \d+\.\d s$"))
    await expect(chat.locator(".thinking p")).to_have_text("Let me <b>see</b>.", use_inner_text=False)
    # A mark in the text is text.
    await expect(chat.locator(".text")).to_have_text("<think>Yes")
    await call.write(script.end(3))
    await call.end()
    await expect(chat.locator(".numbers")).to_contain_text("3 tokens")
    # The next turn has the text of the answer only.
    await send(chat, "More")
    call = await stub.call()
    assert call.body is not None
    assert call.body["messages"][1] == {"role": "assistant", "content": "<think>Yes"}
    await Script("02" * 16).play(call, ["fine"])


@pytest.mark.parametrize(
    ("reason", "said"),
    [("stop", "The model ended its answer without a text."), ("length", "This answer reached its maximum length.")],
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
    await expect(chat.locator(".call p")).to_have_text("Calls the tool weather")
    await call.write(script.parts(2, AnswerPart(PartKind.ARGUMENTS, pieces[0], 0)))
    await expect(chat.locator(".call pre")).to_have_text(pieces[0])
    await call.write(script.parts(3, AnswerPart(PartKind.ARGUMENTS, pieces[1], 0)))
    await call.write(script.parts(4, AnswerPart(PartKind.CALL, "time", 1, "call_2")) + script.end(4, "tool_calls"))
    await call.end()
    await expect(chat.locator(".call p")).to_have_text(["Calls the tool weather", "Calls the tool time"])
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


# --- The page renders a stream whose events are cut anywhere, whose Markdown grows, and whose markup stays text -------


CORPUS = Path(__file__).with_name("xss.txt").read_text().splitlines()

PARSE = """async (pieces) => {
  const { SseParser } = await import("/sse.js");
  const parser = new SseParser();
  return pieces.flatMap((piece) => parser.push(piece)).map(({ id, data }) => [id, data]);
}"""
RENDER = """async (pieces) => {
  const { Markdown } = await import("/markdown.js");
  const root = document.createElement("div");
  const markdown = new Markdown(root);
  for (const piece of pieces) markdown.append(piece);
  return root.innerHTML;
}"""

DOCUMENT = """Hello **bold *both* words** and *more*, 2 * 3 * 4, `a **b` and ``c`d``.
Second line

# A title #
Behind it
- one
- two **bold
  over two lines**
* three

3. third
4) fourth
```python
def f(x):
    return "<b>" * x

```
after ****, **open, `open
####### seven
```
still open `here`
"""


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


async def test_markdown(chat: Page) -> None:
    html = await chat.evaluate(RENDER, [DOCUMENT])
    assert html.replace(' dir="auto"', "") == (
        "<p>Hello <strong>bold <em>both</em> words</strong> and <em>more</em>, 2 * 3 * 4, <code>a **b</code> and "
        "<code>c`d</code>.\nSecond line</p>"
        "<h3>A title</h3><p>Behind it</p>"
        "<ul><li>one</li><li>two <strong>bold\nover two lines</strong></li><li>three</li></ul>"
        '<ol start="3"><li>third</li><li>fourth</li></ol>'
        '<pre tabindex="0"><code>def f(x):\n    return "&lt;b&gt;" * x\n</code></pre>'
        "<p>after ****, **open, `open\n####### seven</p>"
        '<pre tabindex="0"><code>still open `here`</code></pre>'
    )


async def test_markdown_that_grows_is_markdown_that_came_at_once(chat: Page) -> None:
    for document in (DOCUMENT, DOCUMENT.replace("\n", "\r\n"), "\n".join(CORPUS)):
        whole = await chat.evaluate(RENDER, [document])
        assert await chat.evaluate(RENDER, list(document)) == whole
        assert await chat.evaluate(RENDER, [document[at : at + 7] for at in range(0, len(document), 7)]) == whole


async def test_no_text_takes_long_to_render(chat: Page) -> None:
    """Each text renders in far less than a second; with quadratic time it would take minutes."""
    size = 200_000
    pieces = ["**a ", "*a", "`a", "** ", "*", "`", "- ", "```\n", "\n", "# a\n", "a ", "*a**b***c", "***", "\r"]
    for piece in [*pieces, "# " + " " * 999, "`" * 999 + "a"]:
        measure = f"async (text) => {{ const began = performance.now(); await ({RENDER})([text]); " + (
            "return performance.now() - began; }"
        )
        assert await chat.evaluate(measure, piece * (size // len(piece))) < 1500, piece


def bare(text: str) -> str:
    """Remove spaces, and the marks that Markdown removes."""
    return re.sub(r"[*`#\s]", "", text)


async def check_harmless(page: Page) -> None:
    found: dict[str, Any] = await page.evaluate("""() => {
      const allowed = new Set(["P", "H3", "H4", "H5", "H6", "UL", "OL", "LI", "PRE", "CODE", "STRONG", "EM", "DIV"]);
      const inside = [...document.querySelectorAll(".text, .text *, .bubble, .trouble span")];
      return {
        hacked: typeof hacked,
        elements: inside.map((node) => node.tagName).filter((name) => !allowed.has(name) && name !== "SPAN"),
        attributes: inside.flatMap((node) => node.getAttributeNames()).filter(
          (name) => !["class", "tabindex", "start", "dir"].includes(name)),
        scripts: [...document.scripts].map((script) => script.getAttribute("src")),
      };
    }""")
    assert found == {"hacked": "undefined", "elements": [], "attributes": [], "scripts": ["/theme.js", "/chat.js"]}


async def test_markup_from_anywhere_is_text(chat: Page, stub: Stub) -> None:
    """The page shows markup from the model, the user and error messages as text. No part of it runs or loads."""
    assert len(CORPUS) >= 40
    requests: list[str] = []
    chat.on("request", lambda request: requests.append(request.url))
    # The answer arrives in one piece, then character by character.
    whole = "\n\n".join(CORPUS)
    for number, pieces in enumerate(([whole], list(whole)), start=1):
        await send(chat, "\n".join(CORPUS))
        await Script(f"{number:032x}").play(await stub.call(), pieces)
        await expect(chat.locator(".live")).to_have_count(0)  # the page draws the last text in a later frame
        await expect(chat.locator("#send")).to_be_visible()
        shown = bare(await chat.locator(".text").last.inner_text())
        for line in CORPUS:
            assert bare(line.removeprefix("- ").removeprefix("1. ")) in shown
        await check_harmless(chat)
    assert await chat.locator(".bubble").first.inner_text() == "\n".join(CORPUS)
    for line in CORPUS[:5]:
        await send(chat, line)
        (await stub.call()).refuse(400, line, line)
        await expect(chat.locator(".trouble span").last).to_have_text(line)
        await expect(chat.locator("#send")).to_be_visible()
    await check_harmless(chat)
    # Stored conversations and their titles do not run either when the page shows them again.
    await open_chat(chat, stub.url)
    await chat.click("#shelf-button")
    await expect(chat.locator(".conversation .title")).to_have_text(" ".join(CORPUS)[:60])
    await check_harmless(chat)
    ours = [url.removeprefix(stub.url) for url in requests if not url.endswith((".js", ".css", ".svg"))]
    assert set(ours) == {"/", "/v1/models", CHAT}
