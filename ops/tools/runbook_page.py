"""`python -m quire.ops.tools.runbook_page` writes docs/runbook.md as a page for Prometheus, to which the alerts link.

Prometheus serves the page, not a gateway: the link of the alert QuireNoGateway must work while no gateway runs. Only
the Markdown of the runbook is supported: headings, paragraphs, lists, and inline code, emphasis and links. A test
checks that the page is up to date.
"""

from __future__ import annotations

import html
import re

from quire.ops.paths import PROJECT_ROOT

SOURCE = PROJECT_ROOT / "docs" / "runbook.md"
PAGE = PROJECT_ROOT / "ops" / "deploy" / "prometheus" / "assets" / "runbook.html"

_HEAD = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Quire: runbook</title>
<style>
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem }
code { font-size: .9em }
h3 { margin-top: 2.5rem }
:target { outline: 2px solid; outline-offset: .4rem }
</style>
"""


def render(markdown: str) -> str:
    """The HTML page for a runbook in Markdown."""
    parts = [_HEAD]
    for block in re.split(r"\n{2,}", markdown.strip()):
        if heading := re.fullmatch(r"(#+) (.+)", block):
            level, title = len(heading[1]), heading[2]
            parts.append(f'<h{level} id="{anchor(title)}">{_inline(title)}</h{level}>\n')
        elif block.startswith("- "):
            items = "".join(f"<li>{_inline(item)}\n" for item in re.split(r"\n- ", block[2:]))
            parts.append(f"<ul>\n{items}</ul>\n")
        else:
            parts.append(f"<p>{_inline(block)}\n")
    return "".join(parts)


def anchor(title: str) -> str:
    """The anchor of a heading, as on GitHub."""
    return re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")


def _inline(text: str) -> str:
    """Inline Markdown as HTML. The lines of a paragraph are joined."""
    pieces = re.split(r"(`[^`]+`)", " ".join(text.split()))
    return "".join(
        f"<code>{html.escape(piece[1:-1])}</code>"
        if piece.startswith("`")
        else _marked(html.escape(piece, quote=False))
        for piece in pieces
    )


def _marked(text: str) -> str:
    text = re.sub(r"\[([^]]+)\]\((#[^)]+)\)", r'<a href="\2">\1</a>', text)
    # Prometheus does not serve other documents: name them without a link.
    text = re.sub(r"\[([^]]+)\]\([^)]+\)", r"docs/\1", text)
    text = re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", text)
    return re.sub(r"\*([^*]+)\*", r"<em>\1</em>", text)


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(render(SOURCE.read_text()))
    print(PAGE)
