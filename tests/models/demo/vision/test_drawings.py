"""What the demonstration model that sees learns from: drawings, and dialogues whose answers follow from them."""

from __future__ import annotations

import re
from random import Random

import numpy as np
from models.demo.training.corpus import IGNORED
from models.demo.training.vision.check import held_out
from models.demo.training.vision.dialogues import ask_shapes, describe, dialogue
from models.demo.training.vision.drawings import EDGE, MOST_OBJECTS, SHAPES, Drawing, Mark, draw, pixels
from models.demo.training.vision.train import IMAGE, PATCHES, encode, patch_labels
from models.demo.training.vocabulary import train_tokenizer
from PIL import Image

PAPER = Image.new("RGB", (40, 20), "white")


def mark(sign: str, colour: str, x: float = 0.5, y: float = 0.5) -> Mark:
    return Mark(sign, colour, x, y, 0.1)


def test_a_seed_is_a_drawing() -> None:
    one, other = draw(Random(7)), draw(Random(7))
    assert one.image.tobytes() == other.image.tobytes()
    assert one.marks == other.marks


def test_a_mark_is_where_its_colour_is() -> None:
    """A wrong place would be a wrong lesson."""
    seen = 0
    for drawing in (one for one in held_out(80) if one.kind == "shapes"):
        paper, small = np.asarray(drawing.image)[0, 0] / 127.5 - 2, pixels(drawing.image)
        for one in drawing.marks:
            ink = small[:, int(one.y * EDGE), int(one.x * EDGE)]
            is_outline = np.abs(ink - paper).max() < 0.3
            if one.colour in ("red", "green", "blue") and not is_outline:
                assert int(ink.argmax()) == ("red", "green", "blue").index(one.colour)
                seen += 1
    assert seen > 40


def test_pictures_have_few_objects_that_do_not_touch() -> None:
    for drawing in held_out(60):
        assert len(drawing.marks) <= MOST_OBJECTS
        if drawing.kind != "shapes":
            continue
        for at, one in enumerate(drawing.marks):
            for other in drawing.marks[:at]:
                assert np.hypot(one.x - other.x, one.y - other.y) > one.radius + other.radius


def test_a_description_counts_in_one_order() -> None:
    drawing = Drawing(PAPER, "shapes", (mark("square", "blue"), mark("circle", "red"), mark("circle", "red")))
    assert describe(drawing) == "Two red circles and a blue square."
    number = Drawing(PAPER, "number", (mark("4", "green"), mark("2", "green")))
    assert describe(number) == "The number 42 in green."
    assert describe(Drawing(PAPER, "empty")) == "The picture is empty."


def test_answers_follow_from_the_drawing() -> None:
    marks = [mark("circle", "red"), mark("circle", "blue"), mark("star", "red")]
    found = dict(ask_shapes(marks, Random(seed)) for seed in range(600))
    assert found["How many circles are there?"] == "There are two circles."
    assert found["How many red shapes do you see?"] == "There are two red shapes."
    assert found["What colour are the circles?"] == "The circles are red and blue."
    assert found["What color is the star?"] == "The star is red."
    assert found["Is there a triangle?"] == "No, there are no triangles."
    assert found["Is there a red star?"] == "Yes, there is one red star."
    assert all(re.fullmatch(r"[A-Z][a-z ,]+\.", answer) for answer in found.values())


def test_only_answers_are_learned_and_images_come_first() -> None:
    rng = Random(2)
    turns = dialogue(rng, [draw(rng, EDGE)], 2)
    tokenizer = train_tokenizer([turn.said + turn.answer for turn in turns], 300, (IMAGE,))
    found = encode(turns, tokenizer)
    learned = tokenizer.decode([label for label in found.labels if label != IGNORED], skip_special_tokens=True)
    assert learned == "".join(turn.answer for turn in turns if turn.answer)
    text = tokenizer.decode(found.ids, skip_special_tokens=False)
    first = next(turn for turn in turns if turn.pictures)
    assert f"<|user|>{IMAGE * PATCHES}{first.said}<|end|>" in text


def test_labels_of_patches_name_what_is_there() -> None:
    side = int(PATCHES**0.5)
    centres, covered = patch_labels([Drawing(PAPER, "shapes", (Mark("star", "blue", 0.3, 0.6, 0.2),))])
    assert int((centres.signs != 0).sum()) == 1
    assert centres.signs.view(side, side)[int(0.6 * side), int(0.3 * side)] == 1 + SHAPES.index("star")
    assert 4 < int((covered.signs != 0).sum()) < PATCHES / 2
