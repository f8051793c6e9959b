"""Pictures of the pages for the documentation: `python -m ops.screenshots URL` against a running `quire serve`.

Needs Chromium and the package `playwright`. Writes docs/images/chat-{light,dark,phone}.png.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "images"
WIDE = {"width": 1120, "height": 700}
PHONE = {"width": 390, "height": 780}
TIMEOUT_MS = 60_000


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m ops.screenshots", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("url", help="where the gateway is, like http://127.0.0.1:8000")
    url = parser.parse_args().url.rstrip("/")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        print("ops.screenshots: needs Chromium (apt-get install chromium)", file=sys.stderr)
        return 1
    from playwright.sync_api import sync_playwright

    FOLDER.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=chromium, args=arguments)
        for name, viewport, scheme, answers in (
            ("chat-light", WIDE, "light", 4),
            ("chat-dark", WIDE, "dark", 1),
            ("chat-phone", PHONE, "light", 1),
        ):
            page: Any = browser.new_page(viewport=viewport, color_scheme=scheme)  # type: ignore[arg-type]
            _chat(page, url, answers)
            path = FOLDER / f"{name}.png"
            page.screenshot(path=path)
            print(f"{path.relative_to(FOLDER.parent.parent)}: {path.stat().st_size // 1000} kB")
            page.close()
        browser.close()
    return 0


def _chat(page: Any, url: str, answers: int) -> None:
    """One question, or the same at several temperatures with the settings beside it."""
    page.set_default_timeout(TIMEOUT_MS)
    page.goto(url)
    page.wait_for_selector("#model option", state="attached")
    page.click("#settings-button")
    page.fill("#seed", "7")
    if answers > 1:
        page.fill("#n", "2")
        page.fill("#sweep", "0.3, 1")
    else:
        page.click("#settings .close")
    page.fill("#input", "Tell me a story about a fox and a lighthouse.")
    page.press("#input", "Enter")
    page.wait_for_selector("#send", state="visible")
    page.focus("#input")


if __name__ == "__main__":
    sys.exit(main())
