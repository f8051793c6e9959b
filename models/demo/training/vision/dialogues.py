"""Questions about drawings, and their answers. Words have one form each: an answer is right or wrong as a whole."""

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from models.demo.training.vision.drawings import COLOURS, SHAPES, Drawing, Mark

NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight")
WHAT = (
    "What is in this picture?",
    "What is in the picture?",
    "What do you see?",
    "What can you see here?",
    "Describe the picture.",
    "Describe this image.",
    "What is in this image?",
    "What is this?",
    "What's this?",
    "What's in this picture?",
    "Tell me what you see.",
    "And this one?",
    "What is shown?",
    "",
)
KNOWN = "drawn circles, squares, triangles, stars and numbers"
UNKNOWN = f"I cannot tell what this is. I know only {KNOWN}."
EMPTY = "The picture is empty."
WITHOUT = f"Send me a picture. I know {KNOWN}."
GREETING = f"Hello! Send me a picture. I know {KNOWN}."
WHO = f"I am a very small demonstration model of Quire. I know {KNOWN}."
# Questions without a picture, and the answer.
TALK = {
    GREETING: ("Hello!", "Hello", "Hi", "Hi there", "Hey", "Good morning", "Good evening", "hello there"),
    WHO: ("Who are you?", "What are you?", "What can you do?", "What is your name?", "Help", "What do you know?"),
    "You are welcome.": ("Thank you!", "Thanks", "Thank you very much", "Great, thanks", "Well done"),
    WITHOUT: (
        *WHAT[:-1],
        "How many circles are there?",
        "What colour is the square?",
        "Tell me a story about a fox",
        "What is the capital of France?",
        "How much is 3 + 4?",
        "Write a poem",
        "Tell me a joke",
        "What is the weather like?",
        "Can you help me with my homework?",
        "Draw a cat",
        "ok",
        "?",
        "Bonjour",
    ),
}
INSTRUCTIONS = ("You are a helpful assistant.", "Answer briefly.", "Be kind.", "You look at pictures.")
LETTERS = "abcdefghijklmnopqrstuvwxyz" * 3 + "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789    .,;:!?-'äöüéß"


class PictureTurn(NamedTuple):
    """A message of the user, with the pictures that it brings, and the answer."""

    said: str
    answer: str
    pictures: tuple[Drawing, ...] = ()


def describe(drawing: Drawing) -> str:
    """Return what is in a drawing: kinds in the order of SHAPES, then of COLOURS."""
    if drawing.kind == "empty":
        return EMPTY
    if drawing.kind == "other":
        return UNKNOWN
    return _sentence(_content(drawing)) + "."


def _content(drawing: Drawing) -> str:
    if drawing.kind == "number":
        number, colour = _number(drawing), drawing.marks[0].colour
        return f"the number {number} in {colour}"
    found = Counter((SHAPES.index(mark.sign), COLOURS.index(mark.colour)) for mark in drawing.marks)
    parts = [_some(count, f"{COLOURS[colour]} {SHAPES[shape]}") for (shape, colour), count in sorted(found.items())]
    return _list(parts)


def ask(drawing: Drawing, rng: Random, is_first: bool) -> tuple[str, str]:
    """Return a question about a drawing, and its answer. is_first: about this drawing."""
    if rng.random() < (0.5 if is_first else 0.15):
        return rng.choice(WHAT), describe(drawing)
    if rng.random() < 0.08:
        return _any_text(rng), describe(drawing)
    if drawing.kind in ("empty", "other"):
        question, _ = ask_shapes((), rng) if rng.random() < 0.7 else ask_number("7", "red", rng)
        return question, describe(drawing)
    if drawing.kind == "number":
        return ask_number(_number(drawing), drawing.marks[0].colour, rng)
    return ask_shapes(drawing.marks, rng)


def _number(drawing: Drawing) -> str:
    return "".join(mark.sign for mark in drawing.marks)


def ask_number(number: str, colour: str, rng: Random) -> tuple[str, str]:
    if rng.random() < 0.3:
        return f"What {_color(rng)} is {rng.choice(('it', 'the number'))}?", f"The number is {colour}."
    question = rng.choice(
        ("What number is this?", "Which number is it?", "Which digit is this?", "What does it say?", "Read the number.")
    )
    return question, f"It is the number {number}."


def ask_shapes(marks: Sequence[Mark], rng: Random) -> tuple[str, str]:
    present = [(mark.sign, mark.colour) for mark in marks]
    shape, colour = (
        rng.choice(present) if present and rng.random() < 0.65 else (rng.choice(SHAPES), rng.choice(COLOURS))
    )
    same_shape = [c for s, c in present if s == shape]
    same_colour = sum(c == colour for _, c in present)
    both = sum(pair == (shape, colour) for pair in present)
    match rng.randrange(6):
        case 0:
            return f"How many {shape}s {_are(rng)}?", _there(len(same_shape), shape)
        case 1:
            what = rng.choice(("shapes", "objects", "things"))
            return f"How many {what} {_are(rng)}?", _there(len(present), "shape")
        case 2:
            name = f"{colour} {shape}"
            if rng.random() < 0.5:
                return f"How many {colour} shapes {_are(rng)}?", _there(same_colour, f"{colour} shape")
            return f"How many {name}s {_are(rng)}?", _there(both, name)
        case 3 | 4:
            found = sorted(set(same_shape), key=COLOURS.index)
            word = _color(rng)
            question = rng.choice((f"What {word} is the {shape}?", f"Which {word} has the {shape}?"))
            if len(same_shape) > 1 or (not same_shape and rng.random() < 0.3):
                question = rng.choice((f"What {word} are the {shape}s?", f"Which {word} are the {shape}s?"))
            if not found:
                return question, _there(0, shape)
            subject = f"The {shape} is" if len(same_shape) == 1 else f"The {shape}s are"
            return question, f"{subject} {_list(found)}."
        case _:
            name, count = (f"{colour} {shape}", both) if rng.random() < 0.6 else (shape, len(same_shape))
            question = rng.choice((f"Is there {_article(name)} {name}?", f"Do you see {_article(name)} {name}?"))
            return question, f"{'Yes' if count else 'No'}, there {_is(count, name)}."


def _are(rng: Random) -> str:
    return rng.choice(("are there", "are in the picture", "do you see", "can you see"))


def _color(rng: Random) -> str:
    return rng.choice(("colour", "color"))


def _there(count: int, name: str) -> str:
    return f"There {_is(count, name)}."


def _is(count: int, name: str) -> str:
    return f"{'is' if count == 1 else 'are'} {NUMBERS[count]} {name}{'' if count == 1 else 's'}"


def _article(name: str) -> str:
    return "an" if name[0] in "aeiou" else "a"


def _some(count: int, name: str) -> str:
    return f"{_article(name)} {name}" if count == 1 else f"{NUMBERS[count]} {name}s"


def _list(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _any_text(rng: Random) -> str:
    return "".join(rng.choices(LETTERS, k=rng.randint(1, 40))).strip()


def talk(rng: Random) -> PictureTurn:
    """Return a turn without a picture, in a conversation that had none."""
    if rng.random() < 0.15:
        return PictureTurn(_any_text(rng), WITHOUT)
    answer = rng.choice(tuple(TALK))
    said = rng.choice(TALK[answer])
    return PictureTurn(said.lower() if rng.random() < 0.2 else said, answer)


def dialogue(rng: Random, drawings: Sequence[Drawing], questions: int) -> list[PictureTurn]:
    """Return a conversation about these drawings, with `questions` questions about each.

    A question is about the last picture that was sent. Two that come together are described one by one.
    """
    turns = [talk(rng)] if rng.random() < 0.05 else []
    if len(drawings) > 1 and rng.random() < 0.3:
        contents = [describe(drawing).rstrip(".") for drawing in drawings]
        numbered = " ".join(f"Picture {at}: {text}." for at, text in enumerate(contents, 1))
        said = rng.choice((*WHAT, "Describe both pictures.", "Compare the pictures.", "What is in these pictures?"))
        return [*turns, PictureTurn(said, numbered, tuple(drawings))]
    for drawing in drawings:
        for at in range(questions):
            said, answer = ask(drawing, rng, at == 0)
            said = said.lower() if rng.random() < 0.12 else said.rstrip("?.") if rng.random() < 0.1 else said
            turns.append(PictureTurn(said, answer, (drawing,) if at == 0 else ()))
    return turns
