"""Pictures with shapes, numbers, nothing, or something else, drawn from a seed, and what is in them."""

import colorsys
import math
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

EDGE = 96  # pixels of a side, as the vision tower gets them
SHAPES = ("circle", "square", "triangle", "star")
DIGITS = tuple("0123456789")
SIGNS = (*SHAPES, *DIGITS)  # what a mark may be
# Name to the hues in degrees; black has none.
HUES = {
    "red": (-10, 8),
    "yellow": (48, 61),
    "green": (88, 160),
    "blue": (195, 245),
    "purple": (265, 305),
}
COLOURS = (*HUES, "black")
MOST_OBJECTS = 5
MOST_OF_A_KIND = 3

Point = tuple[float, float]
Place = tuple[float, float, float]  # x, y, radius in pixels
# Digits as strokes in a square of side 2 around the origin, y downwards.
STROKES: dict[str, list[list[Point]]] = {
    "1": [[(-0.35, -0.6), (0.1, -1), (0.1, 1)]],
    "4": [[(0.3, -1), (-0.6, 0.3), (0.7, 0.3)], [(0.3, -0.4), (0.3, 1)]],
    "7": [[(-0.6, -0.95), (0.6, -0.95), (-0.1, 1)]],
}


def _arc(x: float, y: float, rx: float, ry: float, start: int, end: int) -> list[Point]:
    """Return points of an ellipse around (x, y) between two angles in degrees, clockwise from the right."""
    angles = [math.radians(start + (end - start) * step / 12) for step in range(13)]
    return [(x + rx * math.cos(a), y + ry * math.sin(a)) for a in angles]


STROKES |= {
    "0": [_arc(0, 0, 0.6, 1, -90, 270)],
    "2": [[*_arc(0, -0.45, 0.55, 0.55, -170, 40), (-0.6, 0.95), (0.65, 0.95)]],
    "3": [[*_arc(0, -0.5, 0.5, 0.5, -150, 90), *_arc(0, 0.45, 0.58, 0.52, -90, 150)]],
    "5": [[(0.5, -0.95), (-0.4, -0.95), (-0.5, -0.1), *_arc(0, 0.35, 0.58, 0.6, -120, 140)]],
    "6": [[(0.35, -1), *_arc(0, 0.4, 0.55, 0.55, -170, 190)]],
    "8": [[*_arc(0, -0.5, 0.45, 0.48, 90, 450), *_arc(0, 0.48, 0.55, 0.5, -90, 270)]],
    "9": [[*_arc(0, -0.42, 0.53, 0.55, 10, 370), (0.4, 1)]],
}


class Mark(NamedTuple):
    """A shape or a digit. x, y, radius: shares of the picture's longer side, after padding to a square."""

    sign: str
    colour: str
    x: float
    y: float
    radius: float


class Drawing(NamedTuple):
    """A picture. kind: shapes, number, empty or other. marks: in any order; those of a number from left to right."""

    image: Image.Image
    kind: str
    marks: tuple[Mark, ...] = ()


def draw(rng: Random, longest: int = 2 * EDGE) -> Drawing:
    """Return a drawing whose longer side has `longest` pixels: mostly shapes."""
    kind = rng.choices(("shapes", "number", "other", "empty"), (76, 10, 11, 3))[0]
    short = longest if rng.random() < 0.4 else round(longest * rng.uniform(0.65, 1))
    width, height = (longest, short) if rng.random() < 0.7 else (short, longest)
    paper, is_dark = _paper(rng)
    image = Image.new("RGB", (width, height), paper)
    if kind == "shapes":
        return Drawing(image, kind, _draw_shapes(image, rng, is_dark))
    if kind == "number":
        return Drawing(image, kind, _draw_number(image, rng, is_dark))
    return Drawing(_other(image, rng) if kind == "other" else image, kind)


def pixels(image: Image.Image) -> np.ndarray:
    """Return what the image processor of the model returns, float32 [3, EDGE, EDGE]: 0 is white, -2 is black."""
    longest = max(image.size)
    square = Image.new("RGB", (longest, longest), "white")
    square.paste(image, ((longest - image.width) // 2, (longest - image.height) // 2))
    small = square.resize((EDGE, EDGE), Image.Resampling.BICUBIC)
    return (np.asarray(small, np.float32) / 127.5 - 2).transpose(2, 0, 1)


def _paper(rng: Random) -> tuple[tuple[int, int, int], bool]:
    """Return the colour of the background, and whether it is dark: mostly white."""
    chance = rng.random()
    if chance < 0.65:
        return (255, 255, 255), False
    if chance < 0.9:
        base = rng.randint(222, 255)
        return tuple(min(255, base + rng.randint(-8, 8)) for _ in range(3)), False
    base = rng.randint(8, 48)
    return tuple(base + rng.randint(-8, 8) for _ in range(3)), True


def _ink(rng: Random, colour: str) -> tuple[int, int, int]:
    if colour == "black":
        base = rng.randint(0, 45)
        return tuple(max(0, base + rng.randint(-6, 6)) for _ in range(3))
    hue = rng.uniform(*HUES[colour]) % 360 / 360
    darkest = 0.5 if colour in ("green", "blue", "purple") else 0.72 if colour == "red" else 0.88
    red, green, blue = colorsys.hsv_to_rgb(hue, rng.uniform(0.68, 1), rng.uniform(darkest, 1))
    return round(255 * red), round(255 * green), round(255 * blue)


def _colours(rng: Random, is_dark: bool) -> Sequence[str]:
    return COLOURS[:-1] if is_dark else COLOURS


# --- shapes ----------------------------------------------------------------------------------------------------------


def _draw_shapes(image: Image.Image, rng: Random, is_dark: bool) -> tuple[Mark, ...]:
    kinds: Counter[tuple[str, str]] = Counter()
    for _ in range(rng.choices((1, 2, 3), (30, 38, 32))[0]):
        count = rng.choices(range(1, MOST_OF_A_KIND + 1), (48, 32, 20))[0]
        kinds[rng.choice(SHAPES), rng.choice(_colours(rng, is_dark))] = count
    signs = [kind for kind, count in kinds.items() for _ in range(count)][:MOST_OBJECTS]
    rng.shuffle(signs)
    longest, style = max(image.size), _Style.choose(rng)
    most = longest * (0.33 if len(signs) == 1 else 0.26 if len(signs) < 4 else 0.2)
    radius = rng.uniform(0.13 * longest, most)
    placed: list[Place] = []
    marks = []
    for sign, colour in signs:
        found = None
        while found is None:
            found = _place(image.size, rng, radius * rng.uniform(0.85, 1.1), placed)
            radius *= 1 if found else 0.97
        placed.append(found)
        _draw_shape(image, rng, sign, found, _ink(rng, colour), style if rng.random() < 0.8 else _Style.choose(rng))
        marks.append(_mark(image, sign, colour, found))
    return tuple(marks)


def _mark(image: Image.Image, sign: str, colour: str, place: Place) -> Mark:
    (x, y, radius), longest = place, max(image.size)
    return Mark(
        sign,
        colour,
        (x + (longest - image.width) / 2) / longest,
        (y + (longest - image.height) / 2) / longest,
        radius / longest,
    )


def _place(size: tuple[int, int], rng: Random, radius: float, placed: list[Place]) -> Place | None:
    """Return a free circle (x, y, radius), or None if 40 tries find none."""
    gap = max(size) * 0.025
    for _ in range(40):
        x, y = (rng.uniform(radius + gap / 2, side - radius - gap / 2) for side in size)
        if all(math.hypot(x - px, y - py) > radius + pr + gap for px, py, pr in placed):
            return x, y, radius
    return None


class _Style(NamedTuple):
    """How shapes of a picture are drawn. stroke: the width of the outline as a share of the radius; 0: filled."""

    stroke: float
    has_border: bool
    wobble: float
    turn: float

    @classmethod
    def choose(cls, rng: Random) -> "_Style":
        stroke = rng.uniform(0.14, 0.35) if rng.random() < 0.22 else 0
        wobble = rng.choice((0, 0, rng.uniform(0.01, 0.05)))
        return cls(stroke, not stroke and rng.random() < 0.2, wobble, rng.choice((0, 0.1, 0.4)))


def _draw_shape(
    image: Image.Image, rng: Random, sign: str, place: Place, ink: tuple[int, int, int], style: _Style
) -> None:
    x, y, r = place
    turn = rng.uniform(-style.turn, style.turn) if sign != "circle" else rng.uniform(0, 6)
    stretch = rng.uniform(0.88, 1)
    points = []
    for px, py in _outline(sign, rng):
        px, py = px * stretch + rng.gauss(0, style.wobble), py + rng.gauss(0, style.wobble)
        points.append(
            (x + r * (px * math.cos(turn) - py * math.sin(turn)), y + r * (px * math.sin(turn) + py * math.cos(turn)))
        )
    pen = ImageDraw.Draw(image)
    longest = max(image.size)
    if style.stroke:
        width = max(round(r * style.stroke), round(longest * 0.02))
        pen.line([*points, *points[:2]], fill=ink, width=width, joint="curve")
        return
    pen.polygon(points, fill=ink)
    if style.has_border:
        edge = (20, 20, 20) if sum(ink) > 150 else ink
        pen.line([*points, *points[:2]], fill=edge, width=max(1, round(longest * 0.008)), joint="curve")


def _outline(sign: str, rng: Random) -> list[Point]:
    """Return the corners of a shape in the circle of radius 1."""
    if sign == "circle":
        return [(math.cos(a), math.sin(a)) for a in (math.tau * n / 28 for n in range(28))]
    if sign == "square":
        side = 0.74
        return [(-side, -side), (side, -side), (side, side), (-side, side)]
    if sign == "triangle":
        lean = rng.choice((0, 0, rng.uniform(-0.5, 0.5)))
        flip = -1 if rng.random() < 0.12 else 1
        return [(lean, -0.9 * flip), (0.9, 0.65 * flip), (-0.9, 0.65 * flip)]
    inner, count = rng.uniform(0.36, 0.46), 5
    angles = [math.tau * n / (2 * count) - math.pi / 2 for n in range(2 * count)]
    return [
        ((inner if n % 2 else 1) * math.cos(a), (inner if n % 2 else 1) * math.sin(a)) for n, a in enumerate(angles)
    ]


# --- numbers ---------------------------------------------------------------------------------------------------------


def _draw_number(image: Image.Image, rng: Random, is_dark: bool) -> tuple[Mark, ...]:
    """Draw one to three digits in a colour, printed or by hand."""
    digits = [rng.choice(DIGITS) for _ in range(rng.choices((1, 2, 3), (85, 12, 3))[0])]
    if len(digits) > 1 and digits[0] == "0":
        digits[0] = rng.choice(DIGITS[1:])
    colour = rng.choice(_colours(rng, is_dark))
    ink = _ink(rng, colour)
    wide, high = image.size
    half = min(0.42 * high, 0.5 * wide / len(digits)) * rng.uniform(0.5, 0.95)
    is_printed = rng.random() < 0.5
    step = half * (rng.uniform(1.05, 1.3) if is_printed else rng.uniform(1.35, 1.65))
    across = step * (len(digits) - 1) / 2 + half
    x0 = rng.uniform(min(across, wide / 2), max(wide - across, wide / 2)) - step * (len(digits) - 1) / 2
    y0 = rng.uniform(half * 1.1, high - half * 1.1)
    width = half * rng.uniform(0.14, 0.34)
    font = ImageFont.load_default(half * 2.4) if is_printed else None
    pen = ImageDraw.Draw(image)
    marks = []
    for at, digit in enumerate(digits):
        x, y = x0 + at * step, y0 + rng.uniform(-0.06, 0.06) * half
        if font:
            pen.text((x, y), digit, fill=ink, font=font, anchor="mm", stroke_width=rng.choice((0, 0, half * 0.05)))
        else:
            _draw_strokes(pen, rng, digit, (x, y, half), ink, width)
        marks.append(_mark(image, digit, colour, (x, y, 0.8 * half)))
    return tuple(marks)


def _draw_strokes(
    pen: ImageDraw.ImageDraw, rng: Random, digit: str, place: Place, ink: tuple[int, int, int], width: float
) -> None:
    x, y, r = place
    slant, turn, thin = rng.uniform(-0.05, 0.3), rng.uniform(-0.12, 0.12), rng.uniform(0.8, 1.1)
    for stroke in STROKES[digit]:
        points = []
        for px, py in stroke:
            px, py = (px - slant * py) * thin + rng.gauss(0, 0.03), py + rng.gauss(0, 0.03)
            points.append((x + r * (px - turn * py), y + r * (py + turn * px)))
        pen.line(points, fill=ink, width=round(width), joint="curve")
        for px, py in (points[0], points[-1]):
            pen.circle((px, py), width / 2, fill=ink)


# --- other pictures ---------------------------------------------------------------------------------------------------


def _other(image: Image.Image, rng: Random) -> Image.Image:
    """Return a picture that is none of the above: text, a window, a photograph's blur, scribble, letters, bars."""
    return rng.choice((_text, _text, _window, _window, _blur, _blur, _scribble, _letters, _bars))(image, rng)


def _grey(rng: Random, low: int, high: int) -> tuple[int, int, int]:
    base = rng.randint(low, high)
    return base, min(255, base + rng.randint(0, 12)), min(255, base + rng.randint(0, 20))


def _words(rng: Random, count: int) -> str:
    return " ".join("".join(rng.choices("abcdefghilmnoprstuvwAEST", k=rng.randint(2, 9))) for _ in range(count))


def _text(image: Image.Image, rng: Random) -> Image.Image:
    pen, size = ImageDraw.Draw(image), max(image.size) * rng.uniform(0.035, 0.1)
    font = ImageFont.load_default(size)
    is_dark = sum(image.getpixel((0, 0))) < 300
    ink = _grey(rng, 170, 240) if is_dark else _grey(rng, 0, 90)
    y = rng.uniform(0, image.height / 4)
    while y < image.height * rng.uniform(0.5, 1.1):
        pen.text((rng.choice((4, 4, 20)), y), _words(rng, rng.randint(1, 8)), fill=ink, font=font)
        y += size * rng.choice((1.3, 1.3, 2.4))
    return image


def _window(image: Image.Image, rng: Random) -> Image.Image:
    wide, high = image.size
    pen = ImageDraw.Draw(image)
    is_dark = rng.random() < 0.4
    tones = (15, 70) if is_dark else (205, 255)
    pen.rectangle((0, 0, wide, high), fill=_grey(rng, *tones))
    pen.rectangle((0, 0, wide, high * rng.uniform(0.05, 0.14)), fill=_grey(rng, *tones))
    pen.rectangle((0, 0, wide * rng.uniform(0, 0.3), high), fill=_grey(rng, *tones))
    font = ImageFont.load_default(max(image.size) * 0.04)
    for _ in range(rng.randint(5, 16)):
        x, y = rng.uniform(0, wide), rng.uniform(0, high)
        pen.text(
            (x, y),
            _words(rng, rng.randint(1, 5)),
            fill=_grey(rng, 150, 230) if is_dark else _grey(rng, 0, 120),
            font=font,
        )
    for _ in range(rng.randint(0, 5)):
        x, y = rng.uniform(0, wide), rng.uniform(0, high)
        box = (x, y, x + wide * rng.uniform(0.05, 0.5), y + high * rng.uniform(0.03, 0.3))
        pen.rectangle(box, fill=rng.choice((None, _ink(rng, "blue"), _grey(rng, *tones))), outline=_grey(rng, 90, 200))
    return image


def _blur(image: Image.Image, rng: Random) -> Image.Image:
    cells = rng.choice((3, 4, 6, 9, 16))
    noise = np.random.default_rng(rng.randrange(1 << 30))
    values = noise.normal(rng.uniform(70, 190), rng.uniform(20, 60), (cells, cells, 1)) + noise.normal(
        0, 22, (cells, cells, 3)
    )
    grain = rng.choice((Image.Resampling.BICUBIC, Image.Resampling.BILINEAR, Image.Resampling.NEAREST))
    return Image.fromarray(values.clip(0, 255).astype(np.uint8)).resize(image.size, grain)


def _scribble(image: Image.Image, rng: Random) -> Image.Image:
    pen, longest = ImageDraw.Draw(image), max(image.size)
    for _ in range(rng.randint(1, 4)):
        x, y, angle = rng.uniform(0, image.width), rng.uniform(0, image.height), rng.uniform(0, 6)
        points = []
        for _ in range(rng.randint(12, 50)):
            angle += rng.gauss(0, 0.9)
            x += longest * 0.06 * math.cos(angle)
            y += longest * 0.06 * math.sin(angle)
            points.append((x, y))
        pen.line(
            points, fill=_ink(rng, rng.choice(COLOURS)), width=round(longest * rng.uniform(0.01, 0.03)), joint="curve"
        )
    return image


def _letters(image: Image.Image, rng: Random) -> Image.Image:
    size = min(image.size) * rng.uniform(0.3, 0.7)
    text = "".join(rng.choices("ABDEFGHJKMNPQRTUVWXYabdefghkmnpqrty", k=rng.randint(1, 3)))
    where = image.width * rng.uniform(0.35, 0.65), image.height * rng.uniform(0.4, 0.6)
    pen = ImageDraw.Draw(image)
    pen.text(where, text, fill=_ink(rng, rng.choice(COLOURS)), font=ImageFont.load_default(size), anchor="mm")
    return image


def _bars(image: Image.Image, rng: Random) -> Image.Image:
    pen, count = ImageDraw.Draw(image), rng.randint(4, 12)
    step, colour = image.width / (count + 1), rng.choice(COLOURS)
    for at in range(count):
        box = (step * (at + 0.6), image.height * rng.uniform(0.1, 0.85), step * (at + 1.3), image.height * 0.92)
        pen.rectangle(box, fill=_ink(rng, colour if rng.random() < 0.8 else rng.choice(COLOURS)))
    return image
