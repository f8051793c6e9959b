"""The images of calls: URLs with the image itself, which become files that have a picture."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from quire.gateway.errors.api_errors import ServerBusy, invalid, refused
from quire.gateway.features.images.picture_check import CheckLost, PictureChecks
from quire.shared.images.layouts.layout import Layout, LayoutError
from quire.shared.images.picture_error import PictureError
from quire.shared.protocol.messages import ImageRef
from quire.shared.text.chat_template import Message

# Images that wait for a check or are checked. Until then a call holds nothing besides its body.
MAX_WAITING = 256
# Largest ratio of the sides: processors resize the shorter side to hundreds of pixels first.
MAX_RATIO = 200
_MAX_HEADER = 256
_DATA_URL = "a data URL, such as data:image/png;base64,..."
RETRY_S = 1


@dataclass(frozen=True, slots=True)
class Image:
    """data: the file as the client sent it. digest: its SHA-256 in hex. width, height: of its upright picture."""

    data: bytes
    digest: str
    width: int
    height: int


def take_urls(messages: Sequence[Message]) -> tuple[Sequence[Message], list[tuple[str, str]]]:
    """Return the messages with images as chat templates take them, and the URL of each image with its place."""
    urls: list[tuple[str, str]] = []
    taken = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list) and any("url" in part for part in content):
            urls += [(part["url"], part["where"]) for part in content if "url" in part]
            message = {**message, "content": [{"type": "image"} if "url" in part else part for part in content]}
        taken.append(message)
    return (taken if urls else messages), urls


def with_placeholders(messages: Sequence[Message], layout: Layout | None) -> Sequence[Message]:
    """Return the messages with the placeholder as the text of each image, for contents that become one text."""
    if layout is None:
        return messages

    def shown(part: dict[str, str]) -> dict[str, str]:
        return {**part, "text": layout.placeholder} if part["type"] == "image" else part

    return [
        {**message, "content": list(map(shown, content))}
        if isinstance(content := message.get("content"), list)
        else message
        for message in messages
    ]


class Images:
    """Reads the images of all calls of a gateway process. Checks run in processes of their own.

    max_images: in one call. max_bytes, max_pixels: of one image. processes: of checks.
    """

    def __init__(self, *, max_images: int, max_bytes: int, max_pixels: int, processes: int) -> None:
        self._max_images = max_images
        self._max_bytes = max_bytes
        self._checks = PictureChecks(processes, max_bytes, max_pixels)
        self._waiting = 0

    def close(self) -> None:
        self._checks.close()

    async def read_all(self, urls: Sequence[tuple[str, str]]) -> list[Image]:
        """Return the images of a call, given as (url, where), one after the other. Raises as `read` does."""
        if len(urls) > self._max_images:
            raise refused(
                urls[self._max_images][1],
                f"The call has {len(urls)} images; this server allows at most {self._max_images} (--max-images).",
            )
        return [await self.read(url, where) for url, where in urls]

    async def read(self, url: str, where: str) -> Image:
        """Return the image of a data URL. `where` names the part of the call that has it.

        The bytes decide on the format. The media type of the URL may be another one or missing, as in the OpenAI API.
        Raises InvalidRequest, ServerBusy.
        """
        start = self._start_of_base64(url, where)
        if self._waiting >= MAX_WAITING:
            raise _busy("Too many images wait to be checked.")
        self._waiting += 1
        try:
            data, width, height = await self._checks.check(url, start)
        except PictureError as error:
            raise refused(where, f"{where} is an image that cannot be used: {error}.") from error
        except CheckLost:
            raise _busy(f"The check of the image {where} was interrupted.") from None
        finally:
            self._waiting -= 1
        if max(width, height) > MAX_RATIO * min(width, height):
            raise refused(where, f"{where} is {width} x {height} pixels: one side is over {MAX_RATIO} times the other.")
        return Image(data, hashlib.sha256(data).hexdigest(), width, height)

    def _start_of_base64(self, url: str, where: str) -> int:
        header, comma, _ = url[:_MAX_HEADER].partition(",")
        if header[:5].lower() != "data:":
            if header.lower().startswith(("http:", "https:")):
                raise refused(
                    where, f"{where} is the address of an image, which this server does not fetch; give {_DATA_URL}."
                )
            raise invalid(where, _DATA_URL, url[:_MAX_HEADER])
        if not comma or not header.lower().endswith(";base64") or not url.isascii():
            raise invalid(where, f"{_DATA_URL}, with the image in base64", url[:_MAX_HEADER])
        start = len(header) + 1
        size = (len(url) - start) // 4 * 3 - url.count("=", -2)
        if size > self._max_bytes:
            raise refused(
                where,
                f"{where} is an image of {size:,} bytes; this server allows at most {self._max_bytes:,} "
                "(--max-image-bytes).",
            )
        return start


def _busy(reason: str) -> ServerBusy:
    return ServerBusy(f"{reason} Try again later.", headers={"Retry-After": str(RETRY_S)})


def place_images(layout: Layout | None, text: str, images: Sequence[Image]) -> str:
    """Return a rendered prompt with its images in place of the placeholders. Raises InvalidRequest.

    layout: None only without images.
    """
    if layout is None:
        return text
    try:
        return layout.apply(text, [(image.width, image.height) for image in images])
    except LayoutError as error:
        raise refused("messages", f"The images of these messages cannot be placed: {error}.") from error


def find_images(layout: Layout | None, token_ids: Sequence[int], images: Sequence[Image]) -> tuple[ImageRef, ...]:
    """Return where the images are in the tokens of a prompt; `layout` as in `place_images`. Raises InvalidRequest."""
    if layout is None:
        return ()
    places = [index for index, token in enumerate(token_ids) if token == layout.image_token_id]
    counts = [layout.expand(image.width, image.height).num_tokens for image in images]
    if sum(counts) != len(places):
        raise refused("messages", f"The prompt has {len(places)} tokens of images, and the images have {sum(counts)}.")
    found, at = [], 0
    for image, count in zip(images, counts, strict=True):
        start, end = places[at], places[at + count - 1] + 1
        found.append(ImageRef(image.digest, start, end - start))
        at += count
    return tuple(found)
