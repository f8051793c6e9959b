"""Takes pictures of the engine page for docs/images, from a running `quire serve`: light, dark and on a phone.

python -m quire.ops.tools.screenshots_engine http://127.0.0.1:8000
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from typing import Literal

from playwright.sync_api import Page, expect, sync_playwright

from quire.ops.paths import PROJECT_ROOT

FOLDER = PROJECT_ROOT / "docs" / "images"
PICTURES: tuple[tuple[str, Literal["light", "dark"], int, int], ...] = (
    ("engine-light", "light", 1280, 1060),
    ("engine-dark", "dark", 1280, 1060),
    ("engine-phone", "light", 390, 844),
)
MAX_BYTES = 200_000
# Number of earlier views to look at: at least as many as arrive while the requests run.
LOOK_BACK = 80


def take(page: Page, url: str, name: str) -> None:
    """Take one picture, shortly after one prompt has forked into four answers while eight requests share a prefix."""
    page.goto(f"{url}/engine")
    expect(page.locator("[data-figure=blocks_used]")).not_to_have_text("–")
    page.click("[data-demo=prefix]")
    page.click("[data-demo=four]")
    expect(page.locator("#try-status")).to_contain_text("Done", timeout=60_000)
    page.click("#pause")
    # Go back to the view with the most running sequences.
    chips = page.locator("#sequences button")
    slider = page.locator("#time")
    newest = int(slider.input_value())
    counts = {}
    for at in range(newest - 1, max(0, newest - LOOK_BACK), -1):
        slider.fill(str(at))
        page.wait_for_timeout(60)
        counts[at] = chips.count() if chips.filter(has_text="/2").count() else 0
    best = max(counts, key=lambda at: counts[at])
    slider.fill(str(best))
    expect(chips).to_have_count(counts[best])
    chips.filter(has_text="/2").click()
    if name.endswith("phone"):
        page.locator("#map-panel").scroll_into_view_if_needed()
        page.evaluate("document.getElementById('map-panel').scrollIntoView()")
    path = FOLDER / f"{name}.png"
    page.screenshot(path=path)
    if path.stat().st_size > MAX_BYTES:
        raise SystemExit(f"{path.name} has {path.stat().st_size} bytes, more than {MAX_BYTES}")
    print(f"{path.name}: {path.stat().st_size} bytes")


def main(url: str) -> None:
    FOLDER.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        # Chromium's sandbox does not work for root.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=arguments)
        for name, scheme, width, height in PICTURES:
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            take(page, url.rstrip("/"), name)
            page.close()
        browser.close()


if __name__ == "__main__":
    if len(sys.argv) != 2 or not re.match("https?://", sys.argv[1]):
        raise SystemExit("usage: python -m quire.ops.tools.screenshots_engine URL")
    main(sys.argv[1])
