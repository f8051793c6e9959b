"""The pixels of an image file. Gateway and worker call the same function, so both see the same pixels.

The formats are PNG, JPEG, WebP and GIF. Pixels are 8-bit RGB, taken as sRGB:

- Upright: the EXIF orientation is applied, or without one that of XMP. Broken EXIF data are ignored, and those that
  follow the pixels of a PNG file.
- Of an animation, the first frame. Parts of a GIF's screen that its first frame leaves out are white.
- Transparent pixels are blended over white, by the 8-bit value of their alpha.
- Of 16-bit samples, the high byte. The transparent colour of a 16-bit PNG is compared by high bytes.
- Gray is repeated in the three channels; palettes are looked up.
- CMYK and YCCK JPEG files are inverted, as Adobe writes them, and become RGB as (255 - C) * (255 - K) / 255.
- Colour profiles and gamma are ignored.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager

# Image.open would import all formats of Pillow in order to find that of WebP.
from PIL import (
    ExifTags,
    GifImagePlugin,
    Image,
    ImageFile,
    JpegImagePlugin,
    PngImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,
)

from quire.shared.images.picture_error import PictureError

_FILES = (
    PngImagePlugin.PngImageFile,
    JpegImagePlugin.JpegImageFile,
    WebPImagePlugin.WebPImageFile,
    GifImagePlugin.GifImageFile,
)
FORMATS = [file.format for file in _FILES]
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# Orientations that exchange width and height.
_ON_ITS_SIDE = (5, 6, 7, 8)
_HIGH_BYTES = [value >> 8 for value in range(65536)]
_MAX_REASON = 160
# Pillow would fill the rest of a truncated file with gray.
ImageFile.LOAD_TRUNCATED_IMAGES = False


def picture(data: bytes, *, max_bytes: int, max_pixels: int) -> Image.Image:
    """Return the upright picture of a file, 8-bit RGB. Raises PictureError.

    The limits are checked before pixels are decoded. Hostile files can still take much time: see
    `quire.gateway.features.images`.
    """
    with _one_kind_of_error(max_pixels):
        image, orientation = _open(data, max_bytes, max_pixels)
        # GIF: the part of the screen that the frame covers. Pillow drops it when it decodes.
        box = image.tile[0].extents if image.tile else None
        image.load()
        rgb = _rgb(image, data, box)
        return rgb.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else rgb


def size(data: bytes, *, max_bytes: int, max_pixels: int) -> tuple[int, int]:
    """Return width and height of the upright picture of a file, from its header. Raises PictureError."""
    with _one_kind_of_error(max_pixels):
        image, orientation = _open(data, max_bytes, max_pixels)
        width, height = image.size
        return (height, width) if orientation in _ON_ITS_SIDE else (width, height)


def _open(data: bytes, max_bytes: int, max_pixels: int) -> tuple[ImageFile.ImageFile, int]:
    """Return a file whose pixels are not decoded yet, and its EXIF orientation, 1 to 8."""
    if len(data) > max_bytes:
        raise PictureError(f"its file has {len(data):,} bytes; at most {max_bytes:,} are allowed")
    image = Image.open(io.BytesIO(data), formats=FORMATS)
    width, height = image.size
    if width * height > max_pixels:
        raise PictureError(f"it has {width:,} x {height:,} pixels; at most {max_pixels:,} are allowed")
    try:
        # The method of a PNG file itself would decode it.
        orientation = Image.Image.getexif(image).get(ExifTags.Base.Orientation)
        return image, orientation if orientation in _UPRIGHT else 1
    except Exception:
        return image, 1


def _rgb(image: Image.Image, data: bytes, box: tuple[int, int, int, int] | None) -> Image.Image:
    """Return the pixels in the box, 8-bit RGB, over white. data: the file."""
    key = image.info.get("transparency")
    if image.format == "PNG" and image.mode != "P" and key is not None:
        # Pillow compares 8-bit pixels with samples of the file's own depth, the 25th byte of a PNG file.
        image.info["transparency"] = _to_8_bits(key, data[24])
    if image.mode == "I;16":
        image = image.convert("I").point(_HIGH_BYTES, "L")
    is_whole = box in (None, (0, 0, *image.size))
    if image.has_transparency_data:
        image = image.convert("RGBA")
    elif is_whole:
        image = image.convert("RGB")
    if image.mode != "RGB" or not is_whole:
        white = Image.new("RGB", image.size, "white")
        part = image if is_whole else image.crop(box)
        white.paste(part, box, part if part.mode == "RGBA" else None)
        image = white
    # The caller applies the orientation; nothing else may apply it again.
    image.info.clear()
    return image


def _to_8_bits(key: int | tuple[int, ...], depth: int) -> int | tuple[int, ...]:
    """Return a colour of a PNG file in samples of 8 bits."""
    if isinstance(key, tuple):
        return tuple(sample >> max(0, depth - 8) for sample in key)
    return key >> 8 if depth == 16 else key * 255 // (2**depth - 1)


@contextmanager
def _one_kind_of_error(max_pixels: int) -> Iterator[None]:
    try:
        yield
    except PictureError:
        raise
    except UnidentifiedImageError:
        raise PictureError("it is not a PNG, JPEG, WebP or GIF file, or its header is broken") from None
    except Image.DecompressionBombError:
        raise PictureError(f"it has more than {max_pixels:,} pixels") from None
    except MemoryError:
        raise PictureError("decoding it takes too much memory") from None
    # Broken files raise OSError, SyntaxError, ValueError, struct.error, zlib.error and others, by where they break.
    except Exception as error:
        reason = " ".join(str(error).split())[:_MAX_REASON] or type(error).__name__
        raise PictureError(f"it cannot be decoded: {reason}") from error
