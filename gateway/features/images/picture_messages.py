"""The messages between a gateway and the processes that check images. Imports no Pillow, which takes memory."""

from __future__ import annotations

import struct

# Processor time for one image. The slowest files, progressive JPEG and WebP, take 0.05 s per million pixels.
TRIAL_CPU_S = 10
# An image: whether it comes in base64, whether it is to be made small (SMALL_SIDE), and the length of what follows. An
# answer: width and height, 0 without a picture, and the length of what follows: the bytes of the file, or the reason.
HEAD = struct.Struct("!??Q")
ANSWER = struct.Struct("!IIQ")
# The longest side of an image whose `detail` is low, in pixels, as in OpenAI's API.
SMALL_SIDE = 512
