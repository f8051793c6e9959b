"""Makes docs/images/tour.webp, a moving picture of docs/tour/index.html: `python -m quire.ops.tools.tour_picture`.

Needs Chromium and the packages `playwright` and `pillow`.
"""

from __future__ import annotations

import io
import os
import shutil
import sys

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from quire.ops.paths import PROJECT_ROOT

PAGE = PROJECT_ROOT / "docs" / "tour" / "index.html"
FILE = PROJECT_ROOT / "docs" / "images" / "tour.webp"
WIDTH = 860
# The part of the page below its header, down to the player.
TOP, HEIGHT = 56, 610
MAX_BYTES = 500_000
# Of each chapter, the first step in the picture, the distance to the next ones, and steps that stay longer: those with
# the first copy, with the two swaps, and with the death. The last step of a chapter stays too.
STEPS = {
    "reserve": (0, 2, ()),
    "pages": (0, 3, ()),
    "share": (0, 2, (2,)),
    "full": (1, 2, (13, 21)),
    "kill": (2, 3, (17,)),
    "draft": (0, 1, ()),
}
STEP_MS = 330
STAY_MS = 1600

GO_TO = """(step) => {
  const slider = document.getElementById("time");
  slider.value = step;
  slider.dispatchEvent(new Event("input"));
  return new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)));
}"""


def take(page: Page) -> tuple[list[Image.Image], list[int]]:
    """Return the pictures, and the milliseconds for which each is shown."""
    pictures, times = [], []
    page.goto(PAGE.as_uri())
    for chapter, (begin, every, stays) in STEPS.items():
        page.click(f"[data-chapter={chapter}]")
        page.click("#play")
        last = int(page.locator("#time").get_attribute("max") or 0)
        for step in [*range(begin, last - 1, every), last - 1]:
            page.evaluate(GO_TO, step)
            shot = page.screenshot(clip={"x": 8, "y": TOP, "width": WIDTH - 16, "height": HEIGHT})
            pictures.append(Image.open(io.BytesIO(shot)).convert("RGB"))
            times.append(STAY_MS if step in stays or step == last - 1 else STEP_MS)
    return pictures, times


def main() -> int:
    with sync_playwright() as playwright:
        # Chromium's sandbox does not work for root.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=arguments)
        # With reduced motion the page moves only when it is told to.
        page = browser.new_page(viewport={"width": WIDTH, "height": 760}, reduced_motion="reduce")
        pictures, times = take(page)
        browser.close()
    first, *others = pictures
    first.save(FILE, save_all=True, append_images=others, duration=times, loop=0, lossless=True, quality=90, method=4)
    size = FILE.stat().st_size
    print(f"{FILE.relative_to(PROJECT_ROOT)}: {len(pictures)} pictures, {size} bytes")
    return 0 if size <= MAX_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
