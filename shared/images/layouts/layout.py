"""The layout of a model's images in a prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class LayoutError(ValueError):
    """The processor of a model refuses an image, or a prompt has another number of images. The text is one line."""


class NoLayout(Exception):
    """A model has images, and no rule tells their tokens. The text is the reason, without a full stop."""


class Expansion(NamedTuple):
    """text: in place of the placeholder. num_tokens: the number of image tokens in it."""

    text: str
    num_tokens: int


@dataclass(frozen=True)
class Layout:
    """The tokens of images in the prompts of a model.

    placeholder: what the chat template writes for an image. image_token: the token that an embedding replaces; the
    model knows it as image_token_id. write: returns the text for an image of (width, height) pixels; it raises
    LayoutError with the reason alone. grid: returns the rows and columns of an image's tokens in the same way; None
    for models whose image tokens are not one grid.
    """

    placeholder: str
    image_token: str
    image_token_id: int
    write: Callable[[int, int], str]
    grid: Callable[[int, int], tuple[int, int]] | None = None

    def expand(self, width: int, height: int) -> Expansion:
        """Return the text for an upright image of (width, height) pixels. Raise LayoutError."""
        try:
            text = self.write(width, height)
            if not (num_tokens := text.count(self.image_token)):
                raise LayoutError("it has no tokens")
        except LayoutError as error:
            raise LayoutError(f"the model cannot read an image of {width} x {height} pixels: {error}") from None
        return Expansion(text, num_tokens)

    def apply(self, text: str, sizes: Sequence[tuple[int, int]]) -> str:
        """Return a rendered prompt with the images of (width, height) pixels in place of its placeholders, in order.

        Raise LayoutError for an image that the model cannot read, and if the numbers differ.
        """
        first, *others = text.split(self.placeholder)
        if len(others) != len(sizes):
            raise LayoutError(f"the prompt has {len(others)} placeholders for images, and {len(sizes)} images")
        return first + "".join(self.expand(*size).text + other for size, other in zip(sizes, others, strict=True))
