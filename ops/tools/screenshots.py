"""Screenshots for the documentation: `python -m quire.ops.tools.screenshots URL`, with a running `quire serve` at URL.

Needs Chromium and the package `playwright`. Writes docs/images/chat-{light,dark,phone}.png.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "images"
WIDE = {"width": 1060, "height": 620}
PHONE = {"width": 390, "height": 780}
TIMEOUT_MS = 60_000


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m quire.ops.tools.screenshots", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("url", help="where the gateway is, like http://127.0.0.1:8000")
    url = parser.parse_args().url.rstrip("/")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        print("quire.ops.tools.screenshots: needs Chromium (apt-get install chromium)", file=sys.stderr)
        return 1
    from playwright.sync_api import sync_playwright

    FOLDER.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=chromium, args=arguments)
        for name, viewport, scheme, is_sweep in (
            ("chat-light", WIDE, "light", True),
            ("chat-dark", WIDE, "dark", False),
            ("chat-phone", PHONE, "light", False),
        ):
            page: Any = browser.new_page(viewport=viewport, color_scheme=scheme)  # type: ignore[arg-type]
            _chat(page, url, is_sweep)
            path = FOLDER / f"{name}.png"
            page.screenshot(path=path)
            print(f"{path.relative_to(FOLDER.parent.parent)}: {path.stat().st_size // 1000} kB")
            page.close()
        browser.close()
    return 0


def _chat(page: Any, url: str, is_sweep: bool) -> None:
    """Take a picture of one question, or of one question at several temperatures next to the settings."""
    page.set_default_timeout(TIMEOUT_MS)
    page.goto(url)
    page.wait_for_selector("#model option", state="attached")
    page.click("#settings-button")
    page.fill("#seed", "9")
    if is_sweep:
        page.fill("#sweep", "0.3, 1")
    else:
        page.click("#settings .close")
    page.fill("#input", "Tell me a story about a fox.")
    page.press("#input", "Enter")
    page.wait_for_selector("#send", state="visible")
    page.focus("#input")


if __name__ == "__main__":
    sys.exit(main())
