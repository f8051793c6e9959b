"""`python -m quire.gateway.features.images.picture_trial MAX_BYTES MAX_PIXELS` checks images in a process with limits.

Decoders of images are large programs in C that read hostile files, and a small file can ask for much time and memory.
Here such a file ends only one small process. The process checks one image after another, because its start takes longer
than most checks.
"""

from __future__ import annotations

import binascii
import io
import resource
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from PIL import Image

from quire.gateway.features.images.picture_messages import ANSWER, HEAD, SMALL_SIDE, TRIAL_CPU_S
from quire.shared.images.picture import picture
from quire.shared.images.picture_error import PictureError

_BASE_BYTES = 96 * 1024 * 1024
# The file, its base64, and the copies that Pillow and libwebp make.
_BYTES_PER_BYTE = 5
# WebP needs most: about 20.
_BYTES_PER_PIXEL = 24


def main() -> None:
    """Answer the images on standard input until it ends."""
    max_bytes, max_pixels = int(sys.argv[1]), int(sys.argv[2])
    memory = _BASE_BYTES + _BYTES_PER_BYTE * max_bytes + _BYTES_PER_PIXEL * max_pixels
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    with suppress(OSError):  # Linux: if memory runs out, this process ends first
        Path("/proc/self/oom_score_adj").write_text("1000")
    warnings.simplefilter("ignore")
    # Pillow allocates canvases while it opens GIF and WebP files, of at most twice this number.
    Image.MAX_IMAGE_PIXELS = max_pixels
    orders, answers = sys.stdin.buffer, sys.stdout.buffer
    while head := orders.read(HEAD.size):
        _limit_cpu()
        is_base64, is_small, length = HEAD.unpack(head)
        answer(orders.read(length), answers, max_bytes, max_pixels, is_base64, is_small)
        answers.flush()


def answer(given: bytes, answers: BinaryIO, max_bytes: int, max_pixels: int, is_base64: bool, is_small: bool) -> None:
    """Write the answer for one image."""
    try:
        data = binascii.a2b_base64(given, strict_mode=True) if is_base64 else given
        image = picture(data, max_bytes=max_bytes, max_pixels=max_pixels)
        if is_small and max(image.size) > SMALL_SIDE:
            data = _small(image)
        width, height = image.size
    except (PictureError, binascii.Error) as error:
        reason = str(error) if isinstance(error, PictureError) else f"its base64 is wrong: {error}"
        width, height, data = 0, 0, reason.encode()
    answers.write(ANSWER.pack(width, height, len(data)))
    answers.write(data)


def _small(image: Image.Image) -> bytes:
    """Scale a picture down, and return it as a PNG file."""
    image.thumbnail((SMALL_SIDE, SMALL_SIDE), reducing_gap=None)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def _limit_cpu() -> None:
    """Let the kernel end this process with SIGXCPU if the next image takes too long."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + 1 + TRIAL_CPU_S, hard))


if __name__ == "__main__":
    main()
