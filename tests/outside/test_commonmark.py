"""CommonMark's own examples, as the chat page renders them: at once, and as a text that grows letter by letter."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest
from playwright.async_api import Page

from tests.outside.environments import Environments
from tests.page.conftest import browser, chat, context, page, stub  # noqa: F401
from tests.page.test_markdown import RENDER

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="session")]

PACKAGES = ["commonmark-spec@0.31.2"]
EXAMPLE = re.compile(r"^`{32} example\n(.*?)^\.\n(.*?)^`{32}$", re.MULTILINE | re.DOTALL)
# On this page markup is text, but for a line break. The numbers are of examples of other sections that have markup.
MARKUP = ("HTML blocks", "Raw HTML")
WITH_MARKUP = {21, 31, 201, 308, 309, 344, 475, 476, 477, 491, 494, 524, 536, 642, 643}
# Links of schemes that lead neither to the web nor to a mailbox stay as they are written.
OTHER_SCHEMES = {596, 598, 599, 601}
# \[\\\] is a formula here.
MATH = {12}
TAGS = {"p", "ul", "ol", "li", "blockquote", "em", "strong", "code", "hr", "br", "pre"}
WITHOUT_END = {"hr", "br", "img"}
SEVERAL = """async (texts) => {
  const render = RENDER;
  const found = [];
  for (const text of texts) found.push([await render([text]), await render([...text])]);
  return found;
}""".replace("RENDER", RENDER)


class Reader(HTMLParser):
    """Reads HTML into a list of tags and texts. Links and their addresses are left out: other tests are about them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self._hidden = 0
        self.tags: set[str] = set()
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        given = dict(attributes)
        if (tag == "div" and (given.get("class") or "").startswith("code-head")) or self._hidden:
            self._hidden += tag not in WITHOUT_END
        elif tag == "img":
            self.handle_data(f"Image: {given.get('alt') or 'no description'}")
        elif tag in TAGS or re.fullmatch(r"h\d", tag):
            self.found.append("<h>" if tag[0] == "h" and tag != "hr" else f"<{tag}>")

    def handle_endtag(self, tag: str) -> None:
        if self._hidden:
            self._hidden -= 1
        elif tag in TAGS - WITHOUT_END or re.fullmatch(r"h\d", tag):
            self.found.append("</h>" if tag[0] == "h" else f"</{tag}>")

    def handle_data(self, data: str) -> None:
        if self._hidden:
            return
        if self.found and self.found[-1][0] != "<":
            data = self.found.pop()[1:] + data
        self.found.append(f"={data}")

    def parts(self) -> list[str]:
        texts = [re.sub(r"^= | $", lambda found: found[0].strip(), re.sub(r"\s+", " ", part)) for part in self.found]
        return [text for text in texts if text != "="]


def examples_of(spec: str) -> list[tuple[int, str, str, str]]:
    """Return the number, section, Markdown and HTML of each example."""
    found = []
    section = ""
    for match in re.finditer(rf"{EXAMPLE.pattern}|^#+ ([^\n]*)$", spec, EXAMPLE.flags):
        if match[3] is not None:
            section = match[3]
        else:
            found.append((len(found) + 1, section, match[1].replace("→", "\t"), match[2].replace("→", "\t")))
    return found


async def test_examples_are_rendered_as_their_writers_say(chat: Page, environments: Environments) -> None:  # noqa: F811
    spec = (environments.node(PACKAGES) / "node_modules" / "commonmark-spec" / "spec.txt").read_text()
    examples = examples_of(spec)
    assert len(examples) > 640
    rendered: list[Any] = await chat.evaluate(SEVERAL, [text for _, _, text, _ in examples])
    different, growing = {}, []
    for (number, section, text, wanted), (found, grown) in zip(examples, rendered, strict=True):
        if found != grown:
            growing.append(number)
        if section not in MARKUP and Reader(found).parts() != Reader(wanted).parts():
            different[number] = (section, text, Reader(wanted).parts(), Reader(found).parts())
    for number, example in different.items():
        print(number, *example, sep="\n    ")
    assert growing == []
    assert different.keys() == WITH_MARKUP | OTHER_SCHEMES | MATH
