"""How the page renders Markdown: each element, texts that grow, markup that stays text, and what is loaded when."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.base import AXE_FILE_PATH
from playwright.async_api import Page, expect

from quire.gateway.output.parts import AnswerPart, PartKind
from tests.page.conftest import IN_BROWSER, open_chat, send
from tests.page.test_access import FAINT, MISTAKES
from tests.support.page.stub import CHAT, Script, Stub

pytestmark = IN_BROWSER

HERE = Path(__file__).parent
CORPUS = (HERE / "xss.txt").read_text().splitlines()
MARKDOWN_CORPUS = (HERE / "xss-markdown.txt").read_text().splitlines()

# Renders a text that arrives in pieces. Colours of code come later, and are left out.
RENDER = """async (pieces) => {
  const { MarkdownView } = await import("/markdown-view.js");
  const root = document.createElement("div");
  const view = new MarkdownView(root);
  let text = "";
  for (const piece of pieces) view.draw((text += piece), false);
  view.draw(text, true);
  for (const code of root.querySelectorAll("pre code")) code.textContent = code.textContent;
  return root.innerHTML;
}"""

NEW_TAB = 'target="_blank" rel="noopener noreferrer"'


def refer(number: int, which: int) -> str:
    label = f'aria-label="Footnote {number}" data-refers="{number - 1} {which}"'
    return f'<button type="button" class="plain" {label}>{number}</button>'


def back(number: int, which: int) -> str:
    label = f'aria-label="Back to the text of footnote {number}" data-returns="{number - 1} {which}"'
    return f'<button type="button" class="plain" {label}>↩</button>'


ELEMENTS = [
    (
        "**bold *both*** and *more*, 2 * 3 * 4",
        "<p><strong>bold <em>both</em></strong> and <em>more</em>, 2 * 3 * 4</p>",
    ),
    ("__bold__ _em_ snake_case_word", "<p><strong>bold</strong> <em>em</em> snake_case_word</p>"),
    ("`a **b` and ``c`d``", "<p><code>a **b</code> and <code>c`d</code></p>"),
    ("~~gone~~", "<p><s>gone</s></p>"),
    ("one\ntwo  \nthree<br>four", "<p>one\ntwo<br>three<br>four</p>"),
    ("# A #\n## B\n#### C\nD\n===", "<h3>A</h3><h4>B</h4><h5>C</h5><h3>D</h3>"),
    ("- a\n  - b\n    1. c\n- d", "<ul><li>a<ul><li>b<ol><li>c</li></ol></li></ul></li><li>d</li></ul>"),
    ("3. a\n\n   b\n4. c", '<ol start="3"><li><p>a</p><p>b</p></li><li><p>c</p></li></ol>'),
    (
        "- [x] a\n- [ ] *b*\n- [y] c",
        '<ul><li class="task"><span role="img" class="box" aria-label="done:">☑</span>a</li>'
        '<li class="task"><span role="img" class="box" aria-label="to do:">☐</span><em>b</em></li><li>[y] c</li></ul>',
    ),
    ("> a\n> > b\n>\n> - c", "<blockquote><p>a</p><blockquote><p>b</p></blockquote><ul><li>c</li></ul></blockquote>"),
    ("a\n\n---\n\nb", "<p>a</p><hr><p>b</p>"),
    (
        "|a|b|\n|:-:|-:|\n|`1`|<br>|",
        '<div class="table" tabindex="0"><table><thead><tr><th class="center" scope="col">a</th>'
        '<th class="right" scope="col">b</th></tr></thead><tbody><tr><td class="center"><code>1</code></td>'
        '<td class="right"><br></td></tr></tbody></table></div>',
    ),
    ("||\n|-|\n|a|", None),
    (
        '```python extra words\nif x:\n    "<b>"\n\n```',
        '<div class="code" dir="ltr"><div class="code-head quiet"><span>python</span>'
        '<button type="button" class="plain" aria-label="Copy code">Copy</button></div>'
        '<pre tabindex="0"><code>if x:\n    "&lt;b&gt;"\n</code></pre></div>',
    ),
    (
        "- a\n\n      b",
        '<ul><li><p>a</p><div class="code" dir="ltr"><div class="code-head quiet"><span></span>'
        '<button type="button" class="plain" aria-label="Copy code">Copy</button></div>'
        '<pre tabindex="0"><code>b</code></pre></div></li></ul>',
    ),
    (
        '[a *b*](https://example.org/c?d=e "title")',
        f'<p><a href="https://example.org/c?d=e" title="title" {NEW_TAB}>a <em>b</em></a></p>',
    ),
    (
        "https://example.org/a, <mailto:a@example.org>, a.py, b@example.org",
        f'<p><a href="https://example.org/a" {NEW_TAB}>https://example.org/a</a>, '
        f'<a href="mailto:a@example.org" {NEW_TAB}>mailto:a@example.org</a>, '
        "a.py, b@example.org</p>",
    ),
    (
        "[a][b]\n\n[b]: https://example.org",
        f'<p><a href="https://example.org" {NEW_TAB}>a</a></p>',
    ),
    ("[a](docs/a.md)", '<p><span class="path" title="docs/a.md">a</span></p>'),
    (
        "![a heron](https://example.org/a.png)",
        f'<p><a href="https://example.org/a.png" {NEW_TAB}>Image: a heron</a></p>',
    ),
    ("![](a.png)", '<p><span class="path" title="a.png">Image: no description</span></p>'),
    ("<b>a</b> &amp; &lt;i&gt;", "<p>&lt;b&gt;a&lt;/b&gt; &amp; &lt;i&gt;</p>"),
    (
        "a[^x] b^[c] d[^x]\n\n[^x]: e\n\n    f\n\n[^y]: not used",
        f"<p>a<sup>{refer(1, 0)}</sup> b<sup>{refer(2, 0)}</sup> d<sup>{refer(1, 1)}</sup></p>"
        f'<ol class="footnotes"><li tabindex="-1" data-footnote="0"><p>e</p><p>f {back(1, 0)} {back(1, 1)}</p></li>'
        f'<li tabindex="-1" data-footnote="1"><p>c {back(2, 0)}</p></li></ol>',
    ),
    ("****, **open, `open\n####### seven", "<p>****, **open, `open\n####### seven</p>"),
    ("it costs $5 and $10, or $5-$10, and \\$x\\$", "<p>it costs $5 and $10, or $5-$10, and $x$</p>"),
    ("$\\badly{$ and $ x$", '<p><span class="math"><code>\\badly{</code></span> and $ x$</p>'),
]
DOCUMENT = (
    "\n\n".join(text for text, _ in ELEMENTS)
    + """
$$
\\int_0^1 x^2\\,dx
= \\frac{1}{3}

$$

\\[
\\begin{pmatrix} a & b \\\\ c & d \\end{pmatrix}
\\]

1. first
   $$
   a
   $$
   ```js
   const x = 1;

   ```
2. second \\(x\\) \\[ y \\] $$z$$

```
still open `here`
"""
)


async def render(page: Page, pieces: list[str]) -> str:
    found: str = await page.evaluate(RENDER, pieces)
    return found.replace(' dir="auto"', "")


async def answer(chat: Page, stub: Stub, text: str, number: int = 1) -> None:
    await send(chat, "Hello")
    await Script(f"{number:032x}").play(await stub.call(), [text[at : at + 5] for at in range(0, len(text), 5)])
    await expect(chat.locator("#send")).to_be_visible()
    await expect(chat.locator(".live")).to_have_count(0)


# --- Elements ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "wanted"), [pair for pair in ELEMENTS if pair[1]], ids=lambda text: text[:20])
async def test_an_element(chat: Page, text: str, wanted: str) -> None:
    # Loaded before, so that a formula that is none is there at once.
    await chat.evaluate('import("/math.js").then(({ loadMath }) => loadMath())')
    assert await render(chat, [text]) == wanted


async def test_math_is_mathml(chat: Page, stub: Stub) -> None:
    await answer(chat, stub, DOCUMENT + "\n```\n\n$E = mc^2$")
    await expect(chat.locator("math >> text=E").last).to_be_visible()
    shown = await chat.evaluate("""() => [...document.querySelectorAll(".text .math")].map((one) => [
      one.className, one.firstChild.localName, one.textContent.replace(/\\s/g, "")])""")
    assert shown == [
        ["math", "code", "\\badly{"],
        ["math display", "math", "∫01x2dx=13"],
        ["math display", "math", "(abcd)"],
        ["math display", "math", "a"],
        ["math", "math", "x"],
        ["math display", "math", "y"],
        ["math display", "math", "z"],
        ["math", "math", "E=mc2"],
    ]
    # Its parts are where they belong.
    above = await chat.evaluate("""() => {
      const [base, power] = [...[...document.querySelectorAll("msup")].at(-1).children];
      return base.getBoundingClientRect().top - power.getBoundingClientRect().top;
    }""")
    assert above > 0


async def test_a_formula_that_is_too_large_is_shown_as_its_source(chat: Page, stub: Stub) -> None:
    deep, long = "\\sqrt{" * 150 + "x" + "}" * 150, "+".join("x" * 3000)
    await answer(chat, stub, f"$${deep}$$\n\n$$\n{long}\n$$\n\n$y$")
    await expect(chat.locator(".text math")).to_have_text("y")
    await expect(chat.locator(".text .math code")).to_have_text([deep, long])


async def test_code_has_its_colours_and_can_be_copied(chat: Page, stub: Stub) -> None:
    await chat.context.grant_permissions(["clipboard-read", "clipboard-write"])
    text = '```python\ndef f(x):\n    return "<b>" + x  # why\n```\n\n```docker\nFROM x\n```\n\n```nothing\nif x\n```'
    await answer(chat, stub, text)
    await expect(chat.locator(".hl-keyword")).to_have_text(["def", "return", "FROM"])
    await expect(chat.locator(".hl-string")).to_have_text('"<b>"')
    await expect(chat.locator(".hl-comment")).to_have_text("# why")
    await expect(chat.locator(".code-head span")).to_have_text(["python", "docker", "nothing"])
    colours = await chat.evaluate(
        '[...document.querySelectorAll(".code")].map((one) => new Set([...one.querySelectorAll("code *")]'
        ".map((part) => getComputedStyle(part).color)).size)"
    )
    assert colours[0] >= 4
    button = chat.locator(".code-head button").first
    await button.click()
    await expect(button).to_have_text("Copied")
    await expect(chat.locator("#status")).to_have_text("Copied.")
    assert await chat.evaluate("navigator.clipboard.readText()") == 'def f(x):\n    return "<b>" + x  # why'
    await expect(button).to_have_text("Copy")


async def test_long_code_is_coloured_to_its_end(chat: Page, stub: Stub) -> None:
    code = "\n".join(f"def f{number}():\n    return {number}\n" for number in range(600))
    await answer(chat, stub, f"```python\n{code}```")
    await expect(chat.locator(".hl-keyword")).to_have_count(1200)
    assert await chat.locator("pre").inner_text() == code.rstrip("\n")


async def test_a_footnote_is_reached_and_left_by_keys(chat: Page, stub: Stub) -> None:
    await answer(chat, stub, "Here[^1].\n\n[^1]: There.")
    before = chat.url
    await chat.locator(".text sup button").press("Enter")
    await expect(chat.locator(".footnotes li")).to_be_focused()
    await chat.locator(".footnotes button").press("Enter")
    await expect(chat.locator(".text sup button")).to_be_focused()
    assert chat.url == before


# --- Texts that grow --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "document",
    [DOCUMENT, DOCUMENT.replace("\n", "\r\n"), "\n\n".join(CORPUS + MARKDOWN_CORPUS), "\n".join(MARKDOWN_CORPUS)],
    ids=["elements", "CRLF", "hostile paragraphs", "hostile lines"],
)
async def test_markdown_that_grows_is_markdown_that_came_at_once(chat: Page, document: str) -> None:
    await chat.evaluate('import("/math.js").then(({ loadMath }) => loadMath())')
    whole = await render(chat, [document])
    for size in (1, 7, 100):
        assert await render(chat, [document[at : at + size] for at in range(0, len(document), size)]) == whole


async def test_what_is_settled_is_not_touched_again(chat: Page) -> None:
    """Also in the block that still grows, an element that stays the same keeps what the reader has done with it."""
    touched = await chat.evaluate("""async () => {
      const { MarkdownView } = await import("/markdown-view.js");
      const root = document.body.appendChild(document.createElement("div"));
      const view = new MarkdownView(root);
      let text = "# Title\\n\\nOne *two* three.\\n\\n- item\\n- code\\n\\n  ```python\\n  x = 1\\n";
      view.draw(text, false);
      root.querySelector("button").focus();
      const changed = new Set();
      new MutationObserver((records) => {
        for (const { target, type } of records) changed.add(`${type} in ${target.nodeName}`);
      }).observe(root, { subtree: true, childList: true, characterData: true, attributes: true });
      for (const piece of ["  y", " = 2\\n", "  z = 3\\n"]) {
        view.draw((text += piece), false);
        await new Promise(requestAnimationFrame);
      }
      const isFocused = document.activeElement === root.querySelector("button");
      const shown = root.querySelector("pre").textContent;
      root.remove();
      return [[...changed].filter((one) => !one.endsWith("SPAN") && one !== "childList in CODE"), isFocused, shown];
    }""")
    assert touched == [["characterData in #text"], True, "x = 1\ny = 2\nz = 3"]


async def test_marks_that_may_change_their_meaning_wait(chat: Page) -> None:
    """A line of a list is no heading for the moment in which only its mark has arrived."""
    seen = await chat.evaluate(
        """async (text) => {
      const { MarkdownView } = await import("/markdown-view.js");
      const root = document.createElement("div");
      const view = new MarkdownView(root);
      const names = new Set();
      for (let end = 1; end <= text.length; end += 1) {
        view.draw(text.slice(0, end), false);
        for (const { localName } of root.querySelectorAll("*")) names.add(localName);
      }
      return [...names].sort();
    }""",
        "Items:\n- one\n- two\n\n**So:**\n```py\nx\n```\nEnd\n\n1. a\n",
    )
    assert seen == ["button", "code", "div", "li", "ol", "p", "pre", "span", "strong", "ul"]


async def test_an_answer_that_is_resumed_goes_on(chat: Page) -> None:
    grown = await chat.evaluate("""async () => {
      const { MarkdownView } = await import("/markdown-view.js");
      const root = document.createElement("div");
      const view = new MarkdownView(root);
      view.draw("a[^1]\\n\\n[^1]: note\\n\\n**b", true);
      view.draw("a[^1]\\n\\n[^1]: note\\n\\n**b** c", false);
      view.draw("a[^1]\\n\\n[^1]: note\\n\\n**b** c\\n\\nd", true);
      return [...root.children].map((one) => one.textContent);
    }""")
    assert grown == ["a1", "b c", "d", "note ↩"]


@pytest.mark.alone
async def test_no_text_takes_long_to_render(chat: Page) -> None:
    """Each text renders in far less than a second; with quadratic time it would take minutes."""
    size = 200_000
    pieces = ["**a ", "*a", "`a", "** ", "*", "`", "- ", "```\n", "\n", "# a\n", "a ", "*a**b***c", "***", "\r"]
    pieces += ["[", "[a](b", "![", "> ", "~~a ", "^[a", "[^1]", "$a", "$$a ", "\\(a ", "\\[", "http://a ", "<a", "&"]
    pieces += ["[^1]: a\n", "[a]: b\n", "$$\n", "|a|\n"]
    for piece in [*pieces, "# " + " " * 999, "`" * 999 + "a"]:
        measure = f"async (text) => {{ const began = performance.now(); await ({RENDER})([text]); " + (
            "return performance.now() - began; }"
        )
        assert await chat.evaluate(measure, piece * (size // len(piece))) < 1500, piece


# --- Markup from anywhere ---------------------------------------------------------------------------------------------

HARM = """() => {
  const names = "P H3 H4 H5 H6 UL OL LI PRE CODE STRONG EM S DIV SPAN A BLOCKQUOTE HR BR TABLE THEAD TBODY TR TH TD " +
    "SUP BUTTON math mrow mi mn mo ms mtext mspace mstyle mfrac msqrt mroot msub msup msubsup munder mover " +
    "munderover mmultiscripts mprescripts none mtable mtr mtd mpadded mphantom menclose";
  const elements = new Set(names.split(" "));
  const attributes = new Set(("class tabindex start dir href title target rel type role aria-label scope " +
    "data-footnote data-refers data-returns").split(" "));
  const inside = [...document.querySelectorAll(".text, .text *, .bubble, .trouble span")];
  const isMath = (node) => node.namespaceURI.endsWith("MathML");
  return {
    hacked: typeof hacked,
    elements: inside.map((node) => node.tagName).filter((name) => !elements.has(name)),
    attributes: inside.filter((node) => !isMath(node)).flatMap((node) => node.getAttributeNames())
      .filter((name) => !attributes.has(name)),
    math: inside.filter(isMath).flatMap((node) => node.getAttributeNames())
      .filter((name) => /^(on|href|xlink|src|id|action|mathcolor|mathbackground)/.test(name)),
    styles: inside.map((node) => node.getAttribute("style") ?? "")
      .filter((style) => /url|position|color|back/.test(style)),
    links: inside.filter((node) => node.href).map((node) => node.href).filter((url) => !/^(https?|mailto):/.test(url)),
    scripts: [...document.scripts].map((script) => script.getAttribute("src")),
  };
}"""


async def check_harmless(page: Page) -> None:
    found: dict[str, Any] = await page.evaluate(HARM)
    scripts = ["/theme.js", "/chat.js"]
    empty: dict[str, Any] = {name: [] for name in ("elements", "attributes", "math", "styles", "links")}
    assert found == {"hacked": "undefined", "scripts": scripts, **empty}


def bare(text: str) -> str:
    """Remove spaces, and the marks that Markdown removes."""
    return re.sub(r"[*`#\s]", "", html.unescape(text))


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
    assert from_elsewhere(stub, requests) == {"/", "/v1/models", "/worker-of", CHAT}


def from_elsewhere(stub: Stub, requests: list[str]) -> set[str]:
    """Return the requests for other things than files of the page."""
    ours = [url.removeprefix(stub.url) for url in requests]
    return {url for url in ours if not re.fullmatch(r"/(vendor/)?[\w./-]+\.(js|mjs|css|svg)", url)}


async def test_markup_in_links_images_footnotes_and_math_is_harmless(chat: Page, stub: Stub) -> None:
    """In one text, and each alone. Whatever can be pressed is pressed, and leads nowhere but to the web."""
    requests: list[str] = []
    chat.on("request", lambda request: requests.append(request.url))
    await answer(chat, stub, "$x$\n\n" + "\n\n".join(MARKDOWN_CORPUS))
    await answer(chat, stub, "\n".join(MARKDOWN_CORPUS), 2)
    await expect(chat.locator(".text math >> text=x").first).to_be_attached()
    await check_harmless(chat)
    await chat.evaluate(
        """(corpus) => import("/markdown-view.js").then(({ MarkdownView }) => {
      const root = document.querySelector(".text");
      for (const line of corpus) {
        const one = root.appendChild(document.createElement("div"));
        new MarkdownView(one).draw(line, true);
      }
    })""",
        MARKDOWN_CORPUS,
    )
    await check_harmless(chat)
    await chat.evaluate("""() => {
      document.addEventListener("click", (event) => event.target.closest("a") && event.preventDefault(), true);
      for (const part of document.querySelectorAll(".text *")) {
        for (const kind of ["mouseover", "click", "focus"]) {
          part.dispatchEvent(new Event(kind, { bubbles: true, cancelable: true }));
        }
      }
    }""")
    await check_harmless(chat)
    assert await chat.evaluate("document.getElementById('log').scrollWidth") <= 1200
    assert from_elsewhere(stub, requests) == {CHAT}
    assert re.fullmatch(re.escape(stub.url) + r"/#/c/[0-9a-f]{32}", chat.url)  # the address of the conversation


# --- What is loaded when ----------------------------------------------------------------------------------------------


async def test_a_library_is_loaded_when_a_text_needs_it(page: Page, stub: Stub) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url.removeprefix(stub.url)))

    def libraries() -> set[str]:
        names = [re.match(r"/vendor/([a-z.-]+)-[\d.]+/", url) for url in asked]
        return {name[1] for name in names if name}

    await open_chat(page, stub.url)
    await page.wait_for_load_state("networkidle")
    assert libraries() == set()
    first = await page.evaluate("performance.getEntries().reduce((sum, one) => sum + (one.encodedBodySize ?? 0), 0)")
    print(f"the page before the first message: {first} bytes, compressed")
    assert first < 100_000
    await answer(page, stub, "A *text*.")
    await expect(page.locator(".text em")).to_have_text("text")
    assert libraries() == {"markdown-it", "markdown-it-footnote"}
    await answer(page, stub, "```\nno language\n```\n\n$5", 2)
    assert libraries() == {"markdown-it", "markdown-it-footnote"}
    await answer(page, stub, "```sql\nselect 1\n```", 3)
    await expect(page.locator(".hl-keyword")).to_have_text("select")
    assert libraries() == {"markdown-it", "markdown-it-footnote", "highlight.js"}
    assert not any("/languages/" in url for url in asked)
    await answer(page, stub, "$x$", 4)
    await expect(page.locator("math")).to_have_text("x")
    assert libraries() == {"markdown-it", "markdown-it-footnote", "highlight.js", "temml"}


async def test_without_the_libraries_the_text_is_there(page: Page, stub: Stub) -> None:
    await page.route("**/vendor/markdown-it-1*/**", lambda route: route.abort())
    await open_chat(page, stub.url)
    await answer(page, stub, "A *text* <b>.\n\n- and more")
    await expect(page.locator(".text")).to_have_text("A *text* <b>.\n\n- and more", use_inner_text=True)
    # The next answer finds them, and the texts before it become better too.
    await page.unroute_all()
    await answer(page, stub, "A *text*.", 2)
    await expect(page.locator(".text em")).to_have_text(["text", "text"])


async def test_without_its_library_a_formula_and_code_are_their_source(page: Page, stub: Stub) -> None:
    for name in ("temml", "highlight.js"):
        await page.route(f"**/vendor/{name}*/**", lambda route: route.abort())
    await open_chat(page, stub.url)
    await answer(page, stub, "$x^2$\n\n```python\ndef f\n```")
    await expect(page.locator(".math code")).to_have_text("x^2")
    await expect(page.locator("pre")).to_have_text("def f")


# --- Everybody can read it --------------------------------------------------------------------------------------------


async def test_axe_finds_no_violation(chat: Page, stub: Stub) -> None:
    """With every element, reasoning and a call of a tool, in both themes, on a wide page and on a narrow one."""
    script = Script()
    await send(chat, "Hello")
    call = await stub.call()
    await call.accept(script.request_id)
    text = re.sub(r"\$\\badly.*", "", DOCUMENT) + "\n```\n\n```python\n@a\nclass B(C): # d\n    e = 'f' + 1\n```"
    await call.write(
        script.opening()
        + script.parts(1, AnswerPart(PartKind.REASONING, "So *this*."))
        + script.text(2, text)
        + script.parts(3, AnswerPart(PartKind.CALL, "weather", 0, "call_1"), AnswerPart(PartKind.ARGUMENTS, "{}", 0))
        + script.end(3, "tool_calls")
    )
    await call.end()
    await expect(chat.locator(".hl-meta")).to_have_text("@a")
    await expect(chat.locator(".text math").first).to_be_visible()
    await chat.click(".thinking summary")
    assert await chat.evaluate(MISTAKES) == []
    await chat.evaluate(AXE_FILE_PATH.read_text())
    for scheme in ("light", "dark"):
        await chat.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        assert (await chat.evaluate(FAINT))["faint"] == []
        for width in (1200, 390):
            await chat.set_viewport_size({"width": width, "height": 800})
            found = await chat.evaluate("axe.run().then(({ violations }) => violations)")
            assert [(one["id"], [node["html"][:90] for node in one["nodes"]]) for one in found] == []
            assert await chat.evaluate("document.getElementById('log').scrollWidth") <= width
