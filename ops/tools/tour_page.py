"""Builds docs/tour/index.html, the tour as one file: `python -m quire.ops.tools.tour_page`.

A page that is opened from disk can load no modules. So the modules of the engine page become one script of it, with the
recording and the styles beside it; its policy names their hashes, and allows nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys

from quire.gateway.features.pages import static_files
from quire.ops.paths import PROJECT_ROOT

FILE = PROJECT_ROOT / "docs" / "tour" / "index.html"
STATIC = PROJECT_ROOT / "gateway" / "features" / "pages" / "static"
ENTRY = PROJECT_ROOT / "ops" / "tools" / "tour_page.js"
# Begin and end of the parts of engine.html that the tour has too, in turn.
PARTS = (
    ("<!-- The static page of the tour has this part too. -->", "<!-- Here it ends. -->"),
    ("<!-- And this part. -->", "<!-- Up to here. -->"),
)
IMPORT = re.compile(r'^import .* from "/(.+)";$', re.MULTILINE)
# A name that a module declares at its top.
DECLARED = re.compile(r"^(?:const|let|class|(?:async )?function\*?) (\w+)", re.MULTILINE)


def _add(name: str, text: str, found: dict[str, str]) -> dict[str, str]:
    """Add a module to `found` after those that it imports, without imports and exports."""
    for needed in IMPORT.findall(text):
        if needed not in found:
            _add(needed, static_files.content(needed).decode(), found)
    found[name] = re.sub(r"\n{2,}", "\n", re.sub(r"^export ", "", IMPORT.sub("", text), flags=re.MULTILINE))
    return found


def script(entry: str) -> str:
    """Return a module and those that it imports as one script. Raise ValueError if two declare the same name."""
    modules = _add("", entry, {})
    names = [name for text in modules.values() for name in DECLARED.findall(text)]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two modules of the tour declare {', '.join(twice)}")
    return '"use strict";\n{' + "".join(modules.values()) + "}\n"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def build() -> str:
    """Return the page."""
    code, theme = script(ENTRY.read_text()), static_files.content("theme.js").decode()
    style = (STATIC / "base.css").read_text() + (STATIC / "engine.css").read_text()
    page = (STATIC / "engine.html").read_text()
    parts = [page.split(begin)[1].split(end)[0].strip("\n") for begin, end in PARTS]
    button = page[page.index('<button id="theme"') : page.index("</header>")].strip()
    recording = json.dumps(json.loads((STATIC / "tour.json").read_text()), separators=(",", ":"), ensure_ascii=False)
    policy = (
        f"default-src 'none'; script-src {_hash(theme)} {_hash(code)}; style-src {_hash(style)}; base-uri 'none'; "
        "form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>PagedAttention in one minute · Quire</title>
<style>{style}</style>
<script>{theme}</script>
</head>
<body>
<header class="top">
  <a class="skip" href="#stage">Skip to the tour</a>
  <a class="brand" href="../../README.md">Quire</a>
  <span class="quiet">recorded from a running engine</span>
  <span class="space"></span>
  {button}
</header>
<main>
{parts[0]}
{parts[1]}
</main>
<script type="application/json" id="recording">{recording.replace("<", chr(92) + "u003c")}</script>
<script>{code}</script>
</body>
</html>
"""


def main() -> int:
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(build())
    print(f"{FILE.relative_to(PROJECT_ROOT)}: {FILE.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
