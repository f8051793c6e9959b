"""Accessibility: keyboard only, screen readers, both themes, narrow pages, and a fast first paint."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.async_api import BrowserContext, Page, expect

from tests.page.conftest import IN_BROWSER, begin, open_chat, send, set_field
from tests.support.page.stub import Script, Stub

pytestmark = IN_BROWSER

ANSWER = "A paragraph with `code` and **weight**.\n\n- a list\n\n```\n" + "a long line " * 30 + "\n```\n"

# Returns each piece of visible text whose contrast with its background is lower than WCAG AA requires.
FAINT = """() => {
  const parse = (text) => {
    const parts = text.match(/[\\d.]+/g).map(Number);
    return { rgb: parts.slice(0, 3), alpha: parts[3] ?? 1 };
  };
  const luminance = (rgb) => {
    const linear = (part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = rgb.map((part) => linear(part / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const { rgb, alpha } = parse(getComputedStyle(at).backgroundColor);
      if (alpha === 1) return rgb;
      if (alpha !== 0) throw new Error(`half transparent: ${at.outerHTML.slice(0, 80)}`);
    }
    throw new Error("nothing is behind it");
  };
  const faint = [];
  let count = 0;
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.checkVisibility() || element.closest(":disabled, option")) continue;
    const colours = [parse(getComputedStyle(element).color).rgb, ground(element)];
    const [low, high] = colours.map(luminance).sort((a, b) => a - b);
    count += 1;
    if ((high + 0.05) / (low + 0.05) < 4.5) faint.push([element.tagName, walker.currentNode.data.trim().slice(0, 40)]);
  }
  return { count, faint };
}"""

# Returns controls without a name, duplicate ids, references to missing ids, and missing headings or landmarks.
MISTAKES = """() => {
  const found = [];
  for (const control of document.querySelectorAll("button, a, input, select, textarea")) {
    const labels = [...(control.labels ?? [])].map((label) => label.textContent);
    const own = control.matches("button, a") ? control.innerText : "";
    const name = control.getAttribute("aria-label") || [own, ...labels].join("").trim();
    if (!name) found.push(`no name: ${control.outerHTML.slice(0, 80)}`);
  }
  const ids = [...document.querySelectorAll("[id]")].map((element) => element.id);
  if (new Set(ids).size !== ids.length) found.push("an id is there twice");
  for (const attribute of ["aria-labelledby", "aria-describedby", "aria-controls", "for"]) {
    for (const element of document.querySelectorAll(`[${attribute}]`)) {
      const lost = element.getAttribute(attribute).split(" ").filter((id) => !document.getElementById(id));
      found.push(...lost.map((id) => `no ${id}`));
    }
  }
  const pictures = document.querySelectorAll("img:not([alt]), svg:not([aria-hidden]):not([role=img])");
  found.push(...[...pictures].map((picture) => picture.outerHTML.slice(0, 80)));
  for (const one of ["main", "h1", "html[lang]", "[role=status]"]) {
    if (document.querySelectorAll(one).length !== 1) found.push(`not one ${one}`);
  }
  // Keys can move everything that scrolls.
  const scrolls = (overflow, size, room) => ["auto", "scroll"].includes(overflow) && size > room;
  for (const element of document.querySelectorAll("body *")) {
    const { overflowX, overflowY } = getComputedStyle(element);
    const isWider = scrolls(overflowX, element.scrollWidth, element.clientWidth);
    if (!isWider && !scrolls(overflowY, element.scrollHeight, element.clientHeight)) continue;
    const isReached = element.tabIndex >= 0 || element.querySelector("button, a, input, select, textarea, [tabindex]");
    if (element.checkVisibility() && !isReached) found.push(`no keys scroll ${element.className}`);
  }
  // All content is in a landmark, but for the way past them and what only screen readers hear.
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.checkVisibility()) continue;
    if (!element.closest("header, nav, main, aside, .skip, [role=status]")) found.push(`in no landmark: ${element.id}`);
  }
  for (const control of document.querySelectorAll("button, input, select, textarea")) {
    if (!control.closest("header, nav, main, aside")) found.push(`in no landmark: ${control.id}`);
  }
  // No heading is more than one level below the one before it.
  const levels = [...document.querySelectorAll("h1, h2, h3, h4, h5, h6")]
    .filter((heading) => heading.checkVisibility()).map((heading) => Number(heading.tagName[1]));
  if (levels[0] !== 1) found.push("the first heading is no h1");
  levels.forEach((level, at) => at && level > levels[at - 1] + 1 && found.push(`h${level} after h${levels[at - 1]}`));
  for (const live of document.querySelectorAll("[aria-live], [role=log], [role=alert]")) found.push(`live: ${live.id}`);
  return found;
}"""


async def answered(chat: Page, stub: Stub, text: str = ANSWER) -> None:
    await send(chat, "Hello")
    await Script().play(await stub.call(), list(text))
    await expect(chat.locator("#send")).to_be_visible()


async def test_everything_can_be_read_in_both_themes(chat: Page, stub: Stub) -> None:
    await set_field(chat, n="2")
    await send(chat, "Hello")
    await Script(n=2).play(await stub.call(), [ANSWER])
    await expect(chat.locator("#send")).to_be_visible()
    await send(chat, "Again")
    (await stub.call()).refuse(400, "It broke.", "broken")
    await expect(chat.locator(".trouble").last).to_be_visible()
    schemes: Any = {"light": "rgb(251, 250, 247)", "dark": "rgb(22, 23, 26)"}
    for button in ("#settings-button", "#shelf-button"):
        await chat.click(button)
        assert await chat.evaluate(MISTAKES) == []
        for scheme, background in schemes.items():
            await chat.emulate_media(color_scheme=scheme)
            state = await chat.evaluate(FAINT)
            assert state["faint"] == []
            assert state["count"] > 30
            assert await chat.evaluate("getComputedStyle(document.body).backgroundColor") == background


async def test_headings_and_landmarks_are_there_in_every_state(chat: Page, stub: Stub) -> None:
    """The states are empty, streaming, held, answered, failed, compared, and a narrow page under an overlay."""
    title = chat.locator("h1")
    await expect(title).to_have_text("New conversation")
    assert await chat.evaluate(MISTAKES) == []
    call, script = await begin(chat, stub)
    await expect(title).to_have_text("Hello")
    assert await chat.evaluate(MISTAKES) == []
    stub.status |= {"workers": 0, "responding": 0}
    await expect(chat.locator(".state")).to_contain_text("No worker is available.")
    assert await chat.evaluate(MISTAKES) == []
    assert (await chat.evaluate(FAINT))["faint"] == []
    # The headings of an answer are below those of the page, whatever level the answer begins with.
    await call.write(script.text(2, "\n### deep\n\n###### deeper\n\n# high\n\nend\n") + script.end(2))
    await call.end()
    await expect(chat.locator(".text h3")).to_have_text(["deep", "high"])
    await expect(chat.locator(".text h4")).to_have_text("deeper")
    assert await chat.evaluate(MISTAKES) == []
    await send(chat, "Again")
    (await stub.call()).refuse(400, "It broke.", "broken")
    await expect(chat.locator(".trouble").last).to_be_visible()
    assert await chat.evaluate(MISTAKES) == []
    await set_field(chat, n="3")
    await send(chat, "Compare")
    await Script("03" * 16, n=3).play(await stub.call(), [ANSWER])
    await expect(chat.locator("#send")).to_be_visible()
    assert await chat.evaluate(MISTAKES) == []
    await chat.set_viewport_size({"width": 390, "height": 800})
    for button in ("#settings-button", "#shelf-button"):
        await chat.click(button)
        assert await chat.evaluate(MISTAKES) == []


async def test_the_theme_is_chosen_and_kept(chat: Page, stub: Stub) -> None:
    await chat.emulate_media(color_scheme="light")
    await chat.click("#theme")
    await expect(chat.locator("html")).to_have_attribute("data-theme", "dark")
    await expect(chat.locator("#theme")).to_have_attribute("aria-label", "Use light colours")
    await open_chat(chat, stub.url)
    await expect(chat.locator("html")).to_have_attribute("data-theme", "dark")
    assert (await chat.evaluate(FAINT))["faint"] == []


async def test_without_a_mouse(chat: Page, stub: Stub) -> None:
    """All actions work with the keyboard, and the focused element is visibly marked."""
    await expect(chat.locator("#input")).to_be_focused()
    await chat.keyboard.type("one")
    await chat.keyboard.press("Shift+Enter")
    await chat.keyboard.type("two")
    await chat.keyboard.press("Enter")
    call = await stub.call()
    assert call.body is not None
    assert call.body["messages"][-1]["content"] == "one\ntwo"
    script = Script()
    await call.accept(script.request_id)
    await call.write(script.opening() + script.text(1, "begun"))
    await expect(chat.locator(".text")).to_have_text("begun")
    await chat.keyboard.press("Escape")
    await expect(chat.locator(".state")).to_have_text("Stopped.")
    await expect(chat.locator("#send")).to_be_visible()
    # The skip link at the top of the page leads back to the message field.
    await chat.evaluate("document.activeElement.blur()")
    await chat.focus(".skip")
    await chat.keyboard.press("Enter")
    await expect(chat.locator("#input")).to_be_focused()
    await chat.focus("#settings-button")
    await chat.keyboard.press("Enter")
    await expect(chat.locator("#settings-title")).to_be_focused()
    seen = set()
    for _ in range(60):
        await chat.keyboard.press("Tab")
        focus = await chat.evaluate("""() => {
          const element = document.activeElement;
          const style = getComputedStyle(element);
          const shows = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2;
          return element === document.body ? null : [element.id || element.textContent.trim(), shows];
        }""")
        if focus is None:
            break
        name, shows = focus
        assert shows, name
        seen.add(name)
    assert {"preset-name", "system", "temperature", "top_p", "max_tokens", "seed", "n", "priority", "sweep"} <= seen
    await chat.focus("#sweep")
    await chat.keyboard.press("Escape")
    await expect(chat.locator("#settings")).to_be_hidden()
    await expect(chat.locator("#settings-button")).to_be_focused()


async def test_a_narrow_page_does_not_scroll_sideways(chat: Page, stub: Stub) -> None:
    await chat.set_viewport_size({"width": 320, "height": 640})
    await set_field(chat, n="2")
    await send(chat, "unbreakable" * 20)
    await Script(n=2).play(await stub.call(), [ANSWER + "unbreakable" * 20])
    await expect(chat.locator("#send")).to_be_visible()
    measure = "[document.documentElement.scrollWidth, document.getElementById('log').scrollWidth]"
    for width in (320, 390, 768):
        await chat.set_viewport_size({"width": width, "height": 640})
        for button in (None, "#settings-button", "#shelf-button"):
            if button:
                await chat.click(button)
            assert max(await chat.evaluate(measure)) <= width
        # The keyboard cannot reach the covered elements either.
        await expect(chat.locator("#chat")).to_have_js_property("inert", True)
        await chat.click("#shelf .close")
        await expect(chat.locator("#chat")).to_have_js_property("inert", False)
        sizes = await chat.evaluate(
            "[...document.querySelectorAll('button')].filter((button) => button.checkVisibility())"
            ".map((button) => button.getBoundingClientRect()).map(({ width, height }) => Math.min(width, height))"
        )
        assert min(sizes) >= 24  # WCAG 2.2, 2.5.8


async def test_what_is_written_from_right_to_left_begins_at_the_right(chat: Page, stub: Stub) -> None:
    await send(chat, "שלום, עולם!")
    await Script().play(await stub.call(), ["שלום, עולם!\n\n- אחד!\n- שתיים!\n\nHello, world!"])
    await expect(chat.locator(".text li")).to_have_count(2)
    await chat.fill("#input", "שלום, עולם!")
    # The side of the punctuation mark at the end of a line: left in right-to-left text.
    sides = await chat.evaluate("""() => [...document.querySelectorAll(".bubble, .text p, .text li")].map((element) => {
      const range = document.createRange();
      const at = (first, last) => {
        range.setStart(element.firstChild, first);
        range.setEnd(element.firstChild, last);
        return range.getBoundingClientRect().left;
      };
      const length = element.textContent.length;
      return at(length - 1, length) < at(0, 1) ? "right" : "left";
    })""")
    assert sides == ["right", "right", "right", "right", "left"]
    # The lines of a right-to-left answer begin at the right side of the page.
    lefts = await chat.evaluate("""() => [...document.querySelectorAll(".text p")].map((element) => {
      const range = document.createRange();
      range.selectNodeContents(element);
      return range.getBoundingClientRect().left - element.getBoundingClientRect().left;
    })""")
    assert lefts[0] > 100
    assert lefts[1] == 0
    assert await chat.evaluate("getComputedStyle(document.getElementById('input')).direction") == "rtl"


async def test_less_motion_means_none(chat: Page, stub: Stub) -> None:
    await chat.emulate_media(reduced_motion="reduce")
    await begin(chat, stub)
    assert await chat.evaluate("document.getAnimations({ subtree: true }).length") == 0


@pytest.mark.alone
async def test_the_first_paint_does_not_wait(context: BrowserContext, stub: Stub) -> None:
    """The page loads without a cache, in a new browser. The limit has room for a busy machine."""
    page = await context.new_page()
    await page.goto(stub.url, wait_until="load")
    paint = await page.evaluate("""() => new Promise((resolve) => {
      const observer = new PerformanceObserver((list) => resolve(list.getEntries()[0].startTime));
      observer.observe({ type: "paint", buffered: true });
    })""")
    print(f"first paint after {paint:.0f} ms")
    assert paint < 1000
