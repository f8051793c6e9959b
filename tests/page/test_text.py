"""The page renders a stream whose events are cut anywhere, whose Markdown grows, and whose markup stays text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from playwright.async_api import Page, expect

from tests.page.conftest import IN_BROWSER, open_chat, send
from tests.support.page.stub import CHAT, Script, Stub

pytestmark = IN_BROWSER

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
