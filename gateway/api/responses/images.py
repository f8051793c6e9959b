"""The images of a conversation: read once, stored by their digests, and shown again.

A stored image has `file`, the digest, size and picture of its file, which Redis keeps with the request of the response.
An item has the beginning of a data URL up to its base64.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quire.gateway.api.responses.items import IMAGE, WHERE, Item
from quire.gateway.errors.api_errors import refused
from quire.gateway.features.images.images import PREVIOUS, Image
from quire.gateway.model.renderer import Renderer

FILE = "file"
_DATA = "data:"
# Different images of a stored conversation. Redis takes time for each, and Lua no more than some 8000 arguments.
MAX_STORED_IMAGES = 2000


def image_parts(items: Iterable[Item]) -> list[dict[str, Any]]:
    """Return the parts of items that are images."""
    contents = (item.get("content") or item.get("output") for item in items)
    lists = (content for content in contents if isinstance(content, list))
    return [part for content in lists for part in content if part["type"] == "input_image"]


async def read_images(items: Sequence[Item], before: Sequence[Item], renderer: Renderer) -> None:
    """Read the images of items, whose parts have them afterwards, and hold memory for stored ones. Raises ApiError.

    before: stored items. Their images without a file, as earlier versions stored them, are read as those of the items.
    """
    parts = [part for part in image_parts([*before, *items]) if FILE not in part]
    given = [
        {WHERE: part.get(WHERE, PREVIOUS), "detail": part["detail"]}
        | ({"file_id": part["file_id"]} if part["file_id"] else {"url": part["image_url"]})
        for part in parts
    ]
    for part, image in zip(parts, await renderer.read_images(given, stored_bytes(before)), strict=True):
        part[IMAGE] = image


def files_of(items: Iterable[Item]) -> dict[str, bytes]:
    """Return the files of the images of items by digest."""
    return {part[IMAGE].digest: part[IMAGE].data for part in image_parts(items)}


def digests_of(items: Iterable[Item]) -> list[str]:
    """Return the digests of the files of stored items."""
    return [part[FILE]["digest"] for part in image_parts(items) if FILE in part]


def check_stored(name: str, items: Iterable[Item]) -> None:
    """Raise InvalidRequest if stored items have too many images. name: of the parameter."""
    count = len(set(digests_of(items)))
    if count > MAX_STORED_IMAGES:
        raise refused(
            name,
            f"{name} makes a conversation of {count} images; at most {MAX_STORED_IMAGES} are stored. Send store: "
            "false, or begin a new conversation.",
        )


def stored_bytes(items: Iterable[Item]) -> int:
    """Return the size of all files of stored items, each counted once."""
    return sum({part[FILE]["digest"]: part[FILE]["bytes"] for part in image_parts(items) if FILE in part}.values())


def shown_bytes(items: Iterable[Item]) -> int:
    """Return the size of the URLs of stored items as the API shows them, each image as often as it is in the items."""
    return sum(
        (part[FILE]["bytes"] + 2) // 3 * 4 if _has_data(part) else len(part["image_url"] or "")
        for part in image_parts(items)
    )


def shown_digests(items: Iterable[Item]) -> list[str]:
    """Return the digests of the files whose base64 the URLs of stored items have."""
    return [part[FILE]["digest"] for part in image_parts(items) if _has_data(part)]


def _has_data(part: dict[str, Any]) -> bool:
    return FILE in part and (part["image_url"] or "").startswith(_DATA)


def set_images(items: Iterable[Item], files: Mapping[str, bytes]) -> None:
    """Give the images of stored items their files."""
    for part in image_parts(items):
        if (file := part.pop(FILE, None)) is not None:
            part[IMAGE] = Image(files[file["digest"]], file["digest"], file["width"], file["height"])


def stored_items(items: Sequence[Item]) -> list[Item]:
    """Return the items as they are stored."""
    return [_changed(item, _stored) for item in items]


def shown_items(items: Sequence[Item], files: Mapping[str, bytes] | None) -> list[Item]:
    """Return stored items as the API shows them. files: of images, by digest; None leaves out the URLs of images."""

    def shown(part: dict[str, Any]) -> dict[str, Any]:
        url = part["image_url"] if files is not None else None
        if files is not None and _has_data(part):
            url = part["image_url"] + base64.b64encode(files[part[FILE]["digest"]]).decode()
        return {key: value for key, value in part.items() if key != FILE} | {"image_url": url}

    return [_changed(item, shown) for item in items]


def given_items(items: Sequence[Item]) -> list[Item]:
    """Return items, whose images were read, as a client can send them in another call."""

    def given(part: dict[str, Any]) -> dict[str, Any]:
        image, url = part[IMAGE], part["image_url"]
        if url and url[: len(_DATA)].lower() == _DATA:
            url = f"{_DATA}{image.media_type};base64,{base64.b64encode(image.data).decode()}"
        return {key: value for key, value in part.items() if key not in (WHERE, IMAGE)} | {"image_url": url}

    return [_changed(item, given) for item in items]


def _stored(part: dict[str, Any]) -> dict[str, Any]:
    image, url = part[IMAGE], part["image_url"]
    if url and url[: len(_DATA)].lower() == _DATA:
        # The file may be another one than that of the URL: see `detail`.
        url = f"{_DATA}{image.media_type};base64,"
    file = {"digest": image.digest, "bytes": len(image.data), "width": image.width, "height": image.height}
    return {key: value for key, value in part.items() if key not in (WHERE, IMAGE)} | {"image_url": url, FILE: file}


def _changed(item: Item, change: Any) -> Item:
    """Return an item with a change of each of its images."""
    changed = dict(item)
    for key in ("content", "output"):
        if isinstance(content := item.get(key), list):
            changed[key] = [change(part) if part["type"] == "input_image" else part for part in content]
    return changed
