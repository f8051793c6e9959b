"""Small works on request, one function a craft: each returns a prompt and its answer."""

from ops.demo import words
from ops.demo.lists import listing
from ops.demo.numbers import counting, small_sum
from ops.demo.phrase import articles, expand, made_up, say
from ops.demo.recipes import recipe
from ops.demo.subjects import Casting


def pet_name(casting: Casting) -> tuple[str, str]:
    rng = casting.rng
    name, _ = casting.name()
    animal = casting.noun(words.CREATURES)
    look = rng.choice(("", "", rng.choice(words.LOOKS) + " "))
    ask = (
        "[What should I call|What is a good name for|Find a name for|I need a name for|Name|How should I "
        "name|Give me a name for|Suggest a name for] [my|my new|a] {look}{animal}[?|.|]"
    )
    answer = (
        "[How about {name}|I would choose {name}|What do you think of {name}]? [It suits a "
        "{look}{animal}.|It sounds like a {look}{animal} that has many friends.|It is short, and a "
        "{animal} will listen to it.]"
    )
    slots = {"name": rng.choice(words.SHE_NAMES + words.HE_NAMES), "look": look, "animal": animal}
    return articles(expand(ask, rng, slots)), say(
        answer.replace("]? [", "] as a name? [") if "{" in name else answer, rng, slots
    )


def spelling(casting: Casting) -> tuple[str, str]:
    """An echo: the user asks for a word back, and gets exactly that."""
    rng = casting.rng
    word = rng.choice((made_up(rng), casting.name()[0], casting.pick(words.THINGS), casting.pick(words.CREATURES)))
    ask = rng.choice(
        (
            'Say "{}".',
            "Repeat after me: {}",
            "Say {}",
            "Repeat the word {}.",
            'Please repeat: "{}"',
            "Echo {}",
            "Write the word {}.",
        )
    )
    return ask.format(word), word[0].upper() + word[1:] + "."


CRAFTS = (listing, recipe, pet_name, counting, small_sum, spelling)
