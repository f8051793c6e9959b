"""Image files: PNG files of single chunks, and small files of each format in many variants."""

from __future__ import annotations

import io
import random
import struct
import zlib
from collections.abc import Sequence
from typing import Any

from PIL import Image

SIGNATURE = b"\x89PNG\r\n\x1a\n"
ORIENTATION = 274


def chunk(kind: bytes, data: bytes) -> bytes:
    """Return a chunk of a PNG file."""
    return struct.pack("!I", len(data)) + kind + data + struct.pack("!I", zlib.crc32(kind + data))


def png(
    width: int,
    height: int,
    depth: int,
    colour: int,
    rows: Sequence[bytes],
    *chunks: bytes,
    behind: Sequence[bytes] = (),
) -> bytes:
    """Return a PNG file of rows of packed samples. chunks: before the pixels. behind: after them."""
    header = chunk(b"IHDR", struct.pack("!IIBBBBB", width, height, depth, colour, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress(b"".join(b"\0" + row for row in rows)))
    return b"".join([SIGNATURE, header, *chunks, pixels, *behind, chunk(b"IEND", b"")])


def saved(image: Image.Image, format: str, **options: Any) -> bytes:
    """Return the file that Pillow writes."""
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def exif(orientation: int) -> Image.Exif:
    found = Image.Exif()
    found[ORIENTATION] = orientation
    return found


def noise(mode: str, width: int, height: int, seed: int = 0) -> Image.Image:
    """Return an image with a random part, so that its file does not become tiny."""
    image = Image.linear_gradient("L").resize((width, height)).convert(mode)
    size = width // 2, height // 2
    image.paste(Image.frombytes(mode, size, random.Random(seed).randbytes(size[0] * size[1] * len(mode))), (3, 3))
    return image


def variants(format: str) -> list[bytes]:
    """Return files of a format that take different ways through its decoder."""
    rgb, rgba, gray = (noise(mode, 40, 24) for mode in ("RGB", "RGBA", "L"))
    frames: dict[str, Any] = {"save_all": True, "append_images": [noise("RGB", 40, 24, 1), rgb], "duration": 50}
    gray_16 = png(4, 1, 16, 0, [bytes(range(8))], chunk(b"tRNS", b"\0\1"), chunk(b"gAMA", struct.pack("!I", 45455)))
    files: dict[str, list[bytes]] = {
        "PNG": [
            saved(rgb, "PNG", exif=exif(6), icc_profile=b"profile" * 20),
            saved(rgba, "PNG"),
            saved(rgb.quantize(16), "PNG", transparency=3),
            saved(rgb, "PNG", **frames),
            gray_16,
        ],
        "JPEG": [
            saved(rgb, "JPEG", exif=exif(8)),
            saved(rgb, "JPEG", progressive=True, subsampling=0, comment=b"a comment"),
            saved(gray, "JPEG", restart_marker_blocks=2),
            saved(Image.merge("CMYK", rgba.split()), "JPEG", progressive=True),
            saved(rgb, "MPO", save_all=True, append_images=[gray]),
        ],
        "WEBP": [
            saved(rgb, "WEBP", quality=60),
            saved(rgba, "WEBP", quality=60, exif=exif(3)),
            saved(rgba, "WEBP", lossless=True),
            saved(rgb, "WEBP", **frames),
        ],
        "GIF": [
            saved(rgb.quantize(64), "GIF", interlace=1, comment=b"a comment"),
            saved(gray, "GIF", interlace=0),
            saved(rgb.quantize(8), "GIF", transparency=2, disposal=2, **frames),
        ],
    }
    return files[format]


def mutated(file: bytes, rng: random.Random) -> bytes:
    """Return the file with random faults: flipped bytes, most often in its head; cuts, copies and insertions."""
    data = bytearray(file)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        at = rng.randrange(len(data)) if rng.random() < 0.5 else rng.randrange(min(64, len(data)))
        kind = rng.random()
        if kind < 0.55:
            data[at] ^= 1 << rng.randrange(8)
        elif kind < 0.75:
            data[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
        elif kind < 0.8:
            del data[max(at, 1) :]
        elif kind < 0.9:
            data[at:at] = data[at : at + rng.randrange(1, 64)]
        else:
            del data[at : at + rng.randrange(1, 16)]
        data = data or bytearray(b"\0")
    # With its old checksums, nearly every PNG file would fail at the first of them.
    return _with_checksums(bytes(data)) if data.startswith(SIGNATURE) and rng.random() < 0.8 else bytes(data)


def _with_checksums(file: bytes) -> bytes:
    """Return a PNG file whose chunks have the right checksums, as far as their lengths make sense."""
    parts, at = [file[:8]], 8
    while at + 12 <= len(file):
        end = at + 8 + int.from_bytes(file[at : at + 4], "big")
        if end + 4 > len(file):
            break
        parts.append(file[at:end] + struct.pack("!I", zlib.crc32(file[at + 4 : end])))
        at = end + 4
    return b"".join([*parts, file[at:]])
