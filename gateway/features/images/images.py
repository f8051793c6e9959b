"""The images of calls: files in data URLs, uploaded files and addresses, which become files that have a picture.

A part of a message with an image has `where`, its name for errors, and one of: `url`, `file_id`, and `image`, an Image
that was read before. `media_type`, if there is one, must be that of the file. `detail` low makes the picture small.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from quire.gateway.errors.api_errors import ImageTimeout, NotFound, ServerBusy, invalid, refused
from quire.gateway.features.images.image_fetch import FetchesFull, FetchTimeout, ImageFetcher, ImageHosts
from quire.gateway.features.images.picture_check import CheckLost, PictureChecks
from quire.shared.images.layouts.layout import Layout, LayoutError
from quire.shared.images.picture_error import PictureError
from quire.shared.protocol.messages import ImageRef
from quire.shared.text.chat_template import Message

# Images that wait for a check or are checked.
MAX_WAITING = 256
# Largest ratio of the sides: processors resize the shorter side to hundreds of pixels first.
MAX_RATIO = 200
_MAX_HEADER = 256
_DATA_URL = "a data URL, such as data:image/png;base64,..."
RETRY_S = 1
# First bytes of the files of each media type; those of WebP are those of a container.
_STARTS = {"image/png": b"\x89PNG", "image/jpeg": b"\xff\xd8", "image/gif": b"GIF8"}

# The name for errors of the images of the conversation that a call continues.
PREVIOUS = "previous_response_id"

# Returns the size of the file with an id and an owner, and what reads it. Both raise NotFound with the reason.
FileFinder = Callable[[str, str], Awaitable[tuple[int, Callable[[], Awaitable[bytes]]]]]
Part = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Image:
    """data: the file as the client sent it. digest: its SHA-256 in hex. width, height: of its upright picture."""

    data: bytes
    digest: str
    width: int
    height: int

    @property
    def media_type(self) -> str:
        """The media type of the file."""
        return next((name for name, start in _STARTS.items() if self.data.startswith(start)), "image/webp")

    @classmethod
    def of(cls, data: bytes, width: int, height: int) -> Image:
        """Return the image of a file."""
        return cls(data, hashlib.sha256(data).hexdigest(), width, height)


async def _hold_nothing(size: int, where: str) -> None:
    return


@dataclass(frozen=True, slots=True)
class _File:
    """A file that is not in the body of its call. By default that of an address, whose size is not known."""

    size: int = 0
    read: Callable[[], Awaitable[bytes]] | None = None


@dataclass(frozen=True, slots=True)
class ImageSender:
    """The sender of a call with images. owner: of the files that the call may name. refusal: of all images now.

    hold: waits until there is memory for further bytes of the call, or gives bytes back if the number is negative. It
    gets the name of the images for errors too. has_body: there is memory for the body of the call, with its data URLs.
    """

    owner: str = ""
    refusal: str = ""
    hold: Callable[[int, str], Awaitable[None]] = _hold_nothing
    has_body: bool = True


def take_images(messages: Sequence[Message]) -> tuple[Sequence[Message], list[Part]]:
    """Return the messages with images as chat templates take them, and the parts with the images."""
    parts: list[Part] = []
    taken = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list) and (own := [part for part in content if "where" in part]):
            parts += own
            message = {**message, "content": [{"type": "image"} if "where" in part else part for part in content]}
        taken.append(message)
    return (taken if parts else messages), parts


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

    max_images: in one call. max_bytes, max_pixels: of one image. max_call_bytes: of the images of a call that are not
    in its body. processes: of checks. hosts: from which images are fetched. wait_s: until others are fetched.
    find_file: set by the feature that has files; None without one.
    """

    def __init__(
        self,
        *,
        max_images: int,
        max_bytes: int,
        max_pixels: int,
        processes: int,
        max_call_bytes: int = 2**25,
        hosts: str = "",
        wait_s: float = 30.0,
    ) -> None:
        """Raise StartError for wrong hosts."""
        self._max_images = max_images
        self._max_bytes = max_bytes
        self._max_call_bytes = max_call_bytes
        self._checks = PictureChecks(processes, max_bytes, max_pixels)
        self._waiting = 0
        self.fetcher = ImageFetcher(ImageHosts.parse(hosts), wait_s=wait_s)
        self.find_file: FileFinder | None = None

    def close(self) -> None:
        self._checks.close()

    async def read_all(
        self, parts: Sequence[Part], sender: ImageSender = ImageSender(), stored_bytes: int = 0
    ) -> list[Image]:
        """Return the images of a call, one after the other. Raises InvalidRequest, ServerBusy.

        stored_bytes: of stored images of its conversation, which are read afterwards. The memory of all images is held
        before the first is read: no call waits for memory while it holds images.
        """
        if len(parts) > self._max_images:
            raise refused(
                parts[self._max_images]["where"],
                f"The call has {len(parts)} images; this server allows at most {self._max_images} (--max-images).",
            )
        # 1) Find the sizes. Those of addresses are not known.
        left, files, addresses = self._max_call_bytes, [], 0
        for part in parts:
            file = None if "image" in part else await self._find(part, sender, left)
            files.append(file)
            left -= file.size if file is not None else 0
            addresses += file is not None and file.read is None
        spare = min(addresses * self._max_bytes, left)
        # 2) Hold the memory.
        held, used, images = self._max_call_bytes - left + spare, 0, []
        if not sender.has_body:
            used = sum(len(part["url"]) for part, file in zip(parts, files, strict=True) if _is_in_body(part, file))
            held += used
        await self._hold(stored_bytes, held, parts[0]["where"] if parts else PREVIOUS, sender)
        # 3) Read and check.
        try:
            for part, file in zip(parts, files, strict=True):
                image = part.get("image")
                if image is None:
                    image, size = await self._read(part, file, sender, spare)
                    used += size
                    spare -= size if file is not None and file.read is None else 0
                images.append(image)
        finally:
            await sender.hold(used - held, "")
        return images

    async def _hold(self, stored: int, size: int, where: str, sender: ImageSender) -> None:
        """Wait until there is memory for the images of a call. Raises InvalidRequest, ServerBusy."""
        if stored > self._max_call_bytes:
            raise refused(
                PREVIOUS,
                f"{PREVIOUS} has images of {stored:,} bytes; this server allows at most {self._max_call_bytes:,} in a "
                "call (--max-body-bytes).",
            )
        await sender.hold(stored + size, where)

    async def _find(self, part: Part, sender: ImageSender, left: int) -> _File | None:
        """Return the file of a part that is not in the body of its call, else None. Raises InvalidRequest, ServerBusy.

        left: bytes of files that the call may still have.
        """
        url, where = part.get("url"), part["where"]
        if url is not None and not url[:6].lower().startswith(("http:", "https:")):
            return None
        if url is not None and not self.fetcher.is_on:
            raise refused(
                where,
                f"{where} is the address of an image, which this server does not fetch; give {_DATA_URL}, or have the "
                "operator name the host in --image-hosts.",
            )
        if url is not None:
            return _File()
        with _naming(where):
            if self.find_file is None:
                raise PictureError("this server stores no files; send the image as a data URL")
            try:
                size, read = await self.find_file(part["file_id"], sender.owner)
            except NotFound as error:
                raise PictureError(error.message.rstrip(".")) from None
            if size > (most := min(self._max_bytes, left)):
                raise self._too_large(most)
        return _File(size, read)

    async def _read(self, part: Part, file: _File | None, sender: ImageSender, spare: int) -> tuple[Image, int]:
        """Return the image of a part, and the size of its file if that is not in the body of the call, else 0.

        spare: bytes that the images of addresses may still have. Raises InvalidRequest, ServerBusy.
        """
        where, start, size = part["where"], 0, 0
        given: str | bytes | None
        with _naming(where):
            if file is None:
                given, start = part["url"], self._start_of_base64(part["url"], where)
            elif file.read is None:
                given = await self.fetcher.fetch(part["url"], most := min(self._max_bytes, spare), sender.owner)
                if given is None:
                    raise self._too_large(most)
                size = len(given)
            else:
                try:
                    given, size = await file.read(), file.size
                except NotFound as error:  # deleted meanwhile
                    raise PictureError(error.message.rstrip(".")) from None
            image = await self._checked(given, start, is_small=part.get("detail") == "low")
        if (stated := part.get("media_type", image.media_type)) != image.media_type:
            raise refused(where, f"{where} is an image of the type {image.media_type}, but media_type is {stated}.")
        return image, size

    async def _checked(self, given: str | bytes, start: int = 0, *, is_small: bool = False) -> Image:
        """Return an image that was checked. Raises PictureError, CheckLost, ServerBusy."""
        if self._waiting >= MAX_WAITING:
            raise _busy("Too many images wait to be checked.")
        self._waiting += 1
        try:
            data, width, height = await self._checks.check(given, start, is_small=is_small)
        finally:
            self._waiting -= 1
        if max(width, height) > MAX_RATIO * min(width, height):
            raise PictureError(f"it is {width} x {height} pixels: one side is over {MAX_RATIO} times the other")
        return Image.of(data, width, height)

    def _too_large(self, most: int) -> PictureError:
        setting = "--max-image-bytes" if most == self._max_bytes else "--max-body-bytes, with the other images"
        return PictureError(f"it has more than {most:,} bytes; this server allows no more ({setting})")

    async def check_file(self, size: int, content: AsyncIterator[bytes]) -> None:
        """Check that an upload is an image. Raises InvalidRequest, ServerBusy, and what `content` raises."""
        try:
            self._check_size(size)
            await self._checked(b"".join([piece async for piece in content]))
        except PictureError as error:
            raise refused("file", f"file is no image that can be used: {error}.") from error
        except CheckLost:
            raise _busy("The check of the image was interrupted.") from None

    def _check_size(self, size: int) -> None:
        if size > self._max_bytes:
            raise PictureError(
                f"it has {size:,} bytes; this server allows at most {self._max_bytes:,} (--max-image-bytes)"
            )

    def _start_of_base64(self, url: str, where: str) -> int:
        header, comma, _ = url[:_MAX_HEADER].partition(",")
        if header[:5].lower() != "data:":
            raise invalid(where, _DATA_URL, url[:_MAX_HEADER])
        if not comma or not header.lower().endswith(";base64") or not url.isascii():
            raise invalid(where, f"{_DATA_URL}, with the image in base64", url[:_MAX_HEADER])
        start = len(header) + 1
        self._check_size((len(url) - start) // 4 * 3 - url.count("=", -2))
        return start


@contextmanager
def _naming(where: str) -> Iterator[None]:
    """Turn errors of an image into those of the API, with the place of the image."""
    try:
        yield
    except FetchTimeout as error:
        raise ImageTimeout(f"{where} is an image that cannot be used: {error}.", param=where) from error
    except FetchesFull:
        raise _busy(f"The image {where} was not fetched, because other images are fetched for too long.") from None
    except PictureError as error:
        raise refused(where, f"{where} is an image that cannot be used: {error}.") from error
    except CheckLost:
        raise _busy(f"The check of the image {where} was interrupted.") from None


def _is_in_body(part: Part, file: _File | None) -> bool:
    return file is None and "image" not in part


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
