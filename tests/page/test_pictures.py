"""Chromium decodes image files to the same pixels as Quire."""

from __future__ import annotations

import base64
from collections.abc import Iterator

from playwright.async_api import Page

from quire.shared.images.picture import picture
from tests.page.conftest import IN_BROWSER
from tests.shared.images.test_picture import CMYK, DEPTHS, FORMATS, LIMITS, TRANSPARENT, corners, wide_gif, ycck
from tests.support.pictures import exif, saved, variants

pytestmark = IN_BROWSER

# Returns width, height and RGBA pixels of an image over white.
DECODE = """async (file) => {
  const image = new Image();
  image.src = `data:;base64,${file}`;
  await image.decode();
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
  const context = canvas.getContext("2d");
  context.fillStyle = "white";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(image, 0, 0);
  return [canvas.width, canvas.height, [...context.getImageData(0, 0, canvas.width, canvas.height).data]];
}"""


def files() -> Iterator[bytes]:
    """Yields files whose pixels are defined in all browsers: these do not turn WebP files by EXIF."""
    yield from (file for file, _ in DEPTHS + TRANSPARENT)
    yield from (CMYK, ycck(), wide_gif())
    yield from (
        saved(corners(orientation), format, exif=exif(orientation))
        for format in ("PNG", "JPEG")
        for orientation in range(1, 9)
    )
    yield from (file for format in FORMATS for file in variants(format) if b"EXIF" not in file)


async def test_chromium_sees_the_same_pixels(page: Page) -> None:
    seen = 0
    for file in files():
        width, height, pixels = await page.evaluate(DECODE, base64.b64encode(file).decode())
        found = picture(file, **LIMITS)
        assert found.size == (width, height)
        ours = found.convert("RGBA").tobytes()
        # CMYK and half transparent pixels are rounded differently.
        assert max(abs(a - b) for a, b in zip(ours, pixels, strict=True)) <= 1, file[:40]
        seen += 1
    assert seen > 55
