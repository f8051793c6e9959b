"""The pixels of image files are those that their formats define. The files are made of known pixels."""

from __future__ import annotations

import random
import struct
from typing import Any

import pytest
from PIL import Image, ImageFile

from quire.shared.images.picture import picture, size
from quire.shared.images.picture_error import PictureError
from tests.support.pictures import ORIENTATION, chunk, exif, mutated, png, saved, variants

LIMITS = {"max_bytes": 1_000_000, "max_pixels": 100_000}
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
WHITE, BLACK, RED, GREEN, BLUE = (255, 255, 255), (0, 0, 0), (255, 0, 0), (0, 255, 0), (0, 0, 255)
CORNERS = (RED, GREEN, BLUE, WHITE)
PLTE = chunk(b"PLTE", bytes([*RED, *GREEN, *BLUE, 7, 8, 9]))


def grays(*values: int) -> list[tuple[int, int, int]]:
    return [(value, value, value) for value in values]


def pixels(file: bytes) -> list[Any]:
    found = picture(file, **LIMITS)
    assert found.mode == "RGB"
    assert found.size == size(file, **LIMITS)
    return [found.getpixel((x, y)) for y in range(found.height) for x in range(found.width)]


def words(*values: int) -> bytes:
    return struct.pack(f"!{len(values)}H", *values)


DEPTHS: list[tuple[bytes, list[Any]]] = [
    (png(4, 1, 1, 0, [b"\xa0"]), grays(255, 0, 255, 0)),
    (png(4, 1, 2, 0, [b"\x1b"]), grays(0, 85, 170, 255)),
    (png(2, 1, 4, 0, [b"\x5a"]), grays(85, 170)),
    (png(3, 1, 8, 0, [bytes([0, 7, 255])]), grays(0, 7, 255)),
    (png(4, 1, 16, 0, [words(0, 255, 0x64C8, 0xFFFF)]), grays(0, 0, 0x64, 255)),
    (png(2, 1, 8, 2, [bytes([1, 2, 3, 4, 5, 6])]), [(1, 2, 3), (4, 5, 6)]),
    (png(1, 2, 16, 2, [words(0x1234, 0xFFEE, 0), words(0, 0, 0x7F80)]), [(0x12, 0xFF, 0), (0, 0, 0x7F)]),
    (png(4, 1, 8, 3, [bytes([3, 2, 1, 0])], PLTE), [(7, 8, 9), BLUE, GREEN, RED]),
    (png(4, 1, 2, 3, [b"\x1b"], PLTE), [RED, GREEN, BLUE, (7, 8, 9)]),
]


@pytest.mark.parametrize(("file", "expected"), DEPTHS)
def test_every_depth_of_a_png_file(file: bytes, expected: list[Any]) -> None:
    assert pixels(file) == expected


TRANSPARENT: list[tuple[bytes, list[Any]]] = [
    (png(3, 1, 8, 4, [bytes([100, 255, 100, 0, 0, 128])]), grays(100, 255, 127)),
    (png(2, 1, 16, 4, [words(0x1000, 0xFFFF, 0x1000, 0)]), grays(16, 255)),
    (png(2, 1, 8, 6, [bytes([1, 2, 3, 255, 1, 2, 3, 0])]), [(1, 2, 3), WHITE]),
    (png(1, 1, 16, 6, [words(0, 0x8000, 0xFFFF, 0x3300)]), [(204, 230, 255)]),
    # Transparent colours, which PNG files have in samples of their own depth.
    (png(4, 1, 1, 0, [b"\xa0"], chunk(b"tRNS", words(0))), grays(255, 255, 255, 255)),
    (png(4, 1, 2, 0, [b"\x1b"], chunk(b"tRNS", words(1))), grays(0, 255, 170, 255)),
    (png(2, 1, 4, 0, [b"\x5a"], chunk(b"tRNS", words(10))), grays(85, 255)),
    (png(2, 1, 8, 0, [b"\x05\x06"], chunk(b"tRNS", words(5))), grays(255, 6)),
    (png(2, 1, 16, 0, [words(0x1234, 0x2234)], chunk(b"tRNS", words(0x1234))), grays(255, 0x22)),
    (png(2, 1, 8, 2, [bytes([1, 2, 3, 9, 8, 7])], chunk(b"tRNS", words(9, 8, 7))), [(1, 2, 3), WHITE]),
    (png(1, 1, 16, 2, [words(0x100, 0x200, 0x300)], chunk(b"tRNS", words(0x100, 0x200, 0x300))), [WHITE]),
    (png(3, 1, 8, 3, [b"\0\1\2"], PLTE, chunk(b"tRNS", b"\0\x80")), [WHITE, (127, 255, 127), BLUE]),
    (png(2, 1, 8, 3, [b"\1\2"], PLTE, chunk(b"tRNS", b"\xff\0")), [WHITE, BLUE]),
]


@pytest.mark.parametrize(("file", "expected"), TRANSPARENT)
def test_transparent_pixels_are_over_white(file: bytes, expected: list[Any]) -> None:
    assert pixels(file) == expected


def near(file: bytes, colour: tuple[int, int, int]) -> bool:
    return all(abs(a - b) <= 3 for found in pixels(file) for a, b in zip(found, colour, strict=True))


CMYK = saved(Image.new("CMYK", (16, 16), (55, 155, 205, 51)), "JPEG", quality=100)


def ycck() -> bytes:
    """A JPEG file with the luma and chroma of (200, 100, 50) as its first three channels, and Adobe's mark for them."""
    colour = Image.new("RGB", (1, 1), (200, 100, 50)).convert("YCbCr").getpixel((0, 0))
    assert isinstance(colour, tuple)
    file = bytearray(saved(Image.new("CMYK", (16, 16), (*(255 - value for value in colour), 0)), "JPEG", quality=100))
    file[file.index(b"Adobe") + 11] = 2
    return bytes(file)


def test_cmyk_and_ycck_jpeg_files() -> None:
    assert near(CMYK, (160, 80, 40))
    assert near(ycck(), (55, 155, 205))


def test_gray_and_progressive_jpeg_files() -> None:
    assert near(saved(Image.new("L", (9, 9), 77), "JPEG"), (77, 77, 77))
    assert near(saved(Image.new("RGB", (9, 9), (200, 100, 50)), "JPEG", progressive=True), (200, 100, 50))


def test_webp_files() -> None:
    image = Image.new("RGBA", (2, 1), (10, 20, 30, 255))
    image.putpixel((1, 0), (9, 9, 9, 0))
    assert pixels(saved(image, "WEBP", lossless=True)) == [(10, 20, 30), WHITE]
    assert near(saved(Image.new("RGB", (16, 16), (200, 100, 50)), "WEBP", quality=95), (200, 100, 50))


def corners(orientation: int) -> Image.Image:
    """The image that is CORNERS, clockwise from the left upper one, after it is made upright."""
    # By the standard: which stored corner is at the left upper, right upper, right lower and left lower corner.
    shown = {1: "0123", 2: "1032", 3: "2301", 4: "3210", 5: "0321", 6: "3012", 7: "2103", 8: "1230"}[orientation]
    stored = [CORNERS[shown.index(str(corner))] for corner in range(4)]
    image = Image.new("RGB", (32, 64) if orientation < 5 else (64, 32))
    middle, end = (image.width // 2, image.height // 2), image.size
    for colour, left, top in zip(stored, (0, middle[0], middle[0], 0), (0, 0, middle[1], middle[1]), strict=True):
        image.paste(colour, (left, top, left + end[0] - middle[0], top + end[1] - middle[1]))
    return image


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_picture_is_upright(format: str, orientation: int) -> None:
    file = saved(corners(orientation), format, exif=exif(orientation), quality=95)
    found = picture(file, **LIMITS)
    assert found.size == size(file, **LIMITS) == (32, 64)
    for place, colour in zip(((4, 4), (28, 4), (28, 60), (4, 60)), CORNERS, strict=True):
        seen = found.getpixel(place)
        assert isinstance(seen, tuple)
        assert all(abs(a - b) <= 6 for a, b in zip(seen, colour, strict=True))
    # No other program turns it once more.
    assert ORIENTATION not in found.getexif()


def test_exif_data_that_are_broken_or_behind_the_pixels_count_as_none() -> None:
    turned = chunk(b"eXIf", exif(8).tobytes().removeprefix(b"Exif\0\0"))
    assert pixels(png(3, 1, 8, 0, [b"\1\2\3"], turned)) == grays(3, 2, 1)
    assert pixels(png(3, 1, 8, 0, [b"\1\2\3"], behind=[turned])) == grays(1, 2, 3)
    assert pixels(png(3, 1, 8, 0, [b"\1\2\3"], chunk(b"eXIf", b"junk"))) == grays(1, 2, 3)


def test_the_first_frame_of_an_animation() -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in (RED, GREEN, BLUE)]
    for format in ("GIF", "PNG", "WEBP"):
        file = saved(frames[0], format, save_all=True, append_images=frames[1:], lossless=True)
        assert set(pixels(file)) == {RED}


def wide_gif() -> bytes:
    """A red frame of 2 x 2 pixels on a screen of 3 x 2."""
    file = bytearray(saved(Image.new("RGB", (2, 2), RED).quantize(2), "GIF"))
    file[6:10] = struct.pack("<HH", 3, 2)
    return bytes(file)


def test_what_the_first_frame_of_a_gif_leaves_out_is_white() -> None:
    assert pixels(wide_gif()) == [RED, RED, WHITE] * 2


@pytest.mark.parametrize("format", FORMATS)
def test_cut_files_have_no_picture(format: str) -> None:
    for file in variants(format)[:2]:
        for length in (0, 1, 11, 40, len(file) // 2):
            with pytest.raises(PictureError):
                picture(file[:length], **LIMITS)
    assert not ImageFile.LOAD_TRUNCATED_IMAGES


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        (b"", "not a PNG, JPEG, WebP or GIF file"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not a PNG"),
        (saved(Image.new("RGB", (4, 4)), "BMP"), "not a PNG"),
        (saved(Image.new("RGB", (4, 4)), "TIFF"), "not a PNG"),
        (saved(Image.new("RGB", (4, 4)), "AVIF"), "not a PNG"),
        (saved(Image.new("RGB", (317, 316)), "PNG"), "317 x 316 pixels; at most 100,000"),
        (b"x" * 1_000_001, "1,000,001 bytes; at most 1,000,000"),
    ],
)
def test_other_formats_and_large_files_are_refused(file: bytes, reason: str) -> None:
    for function in (picture, size):
        with pytest.raises(PictureError, match=reason):
            function(file, **LIMITS)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("format", FORMATS)
def test_size_agrees_with_the_picture_of_mutated_files(format: str) -> None:
    rng, files = random.Random(format), variants(format)
    pictures = 0
    for number in range(300):
        file = mutated(files[number % len(files)], rng)
        try:
            found = picture(file, **LIMITS)
        except PictureError:
            continue
        assert found.mode == "RGB"
        assert found.size == size(file, **LIMITS)
        pictures += 1
    assert pictures > 30
