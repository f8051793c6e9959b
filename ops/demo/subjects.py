"""What a story is about: a subject as the user names it and as the story takes it up.

A `Subject` keeps the user's words: the adjective, the name and the noun that were asked for are the ones that the story
uses. Nouns and names come from the pools or are made up on the spot; a held-out slice of the pools is never drawn for
training, so that perplexity is measured on subjects that the model has not met.
"""

from dataclasses import dataclass
from random import Random
from zlib import crc32

from ops.demo import words
from ops.demo.phrase import made_up, made_up_name

HELD_OUT_ONE_IN = 20  # 5 % of every pool


@dataclass(frozen=True)
class Subject:
    role: str  # "hero", "thing", "place" or "idea"
    asked: str  # in the user's words: "a tiny fox named Tib", "my dog", "dragons"
    first: str  # at the first mention in a story: "a tiny fox named Tib"
    head: str  # ever after: "fox"; with "the" unless it is bare
    name: str = ""  # a hero's name, drawn if the user gave none
    female: bool = False
    bare: bool = False  # takes no article: "Paris", "winter", "the sea"
    wish: str = ""
    fear: str = ""

    @property
    def the(self) -> str:
        return self.head if self.bare else f"the {self.head}"


def is_held_out(text: str) -> bool:
    return crc32(text.encode()) % HELD_OUT_ONE_IN == 0


class Casting:
    """Draws subjects from one side of the split: `held_out` decides which slice of every pool is open."""

    def __init__(self, rng: Random, held_out: bool = False) -> None:
        self.rng = rng
        self.held_out = held_out

    def pick(self, pool: tuple[str, ...]) -> str:
        """A word from this side of the split, or from all of the pool where this side is empty."""
        return self.rng.choice([word for word in pool if is_held_out(word) == self.held_out] or pool)

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def name(self) -> tuple[str, bool]:
        """A name and whether it is a woman's; two in five are made up."""
        if self.chance(0.4):
            name = made_up_name(self.rng)
            return name, name[-1] in "aeiy" or self.chance(0.4)
        female = self.chance(0.5)
        return self.rng.choice(words.SHE_NAMES if female else words.HE_NAMES), female

    def subject(self) -> Subject:
        draw = self.rng.choices((self.hero, self.thing, self.place, self.idea), (50, 24, 14, 12))[0]
        return draw()

    def noun(self, pool: tuple[str, ...], made_up_share: float = 0.3) -> str:
        """A noun from a pool or a made-up one."""
        return made_up(self.rng) if self.chance(made_up_share) else self.pick(pool)

    def adorned(self, adjectives: tuple[str, ...], head: str, share: float) -> str:
        """The noun, at times with an adjective that it does not begin with."""
        adjective = self.rng.choice(adjectives)
        clash = {*adjective.split()} & {*head.split()}
        return f"{adjective} {head}" if self.chance(share) and not clash else head

    def hero(self) -> Subject:
        rng = self.rng
        name, female = self.name()
        if self.chance(0.2):
            return self.named_hero(name, female)
        if self.chance(0.7):
            head = self.noun(words.CREATURES)
            female = self.chance(0.5)
        else:
            head = self.noun(words.PERSONS, 0.1)
            if head.split()[-1] in _FEMALE or head.split()[-1] in _MALE:
                female = head.split()[-1] in _FEMALE
        if not self.chance(0.4):
            name = rng.choice(words.SHE_NAMES if female else words.HE_NAMES)
        noun = self.adorned(words.LOOKS, head, 0.3)
        who = "who" if self.chance(0.8) else "that"
        shape = rng.random()
        if shape < 0.53:
            asked = f"a {noun}" if not self.chance(0.06) else noun
        elif shape < 0.68:
            asked = f"a {noun} {rng.choice(('named', 'called', 'named'))} {name}"
        elif shape < 0.73:
            asked = f"my {noun} {name}"
        elif shape < 0.77:
            asked = f"my {noun}"
        elif shape < 0.82:
            asked = f"{name} the {noun}"
        elif shape < 0.90:
            asked = plural(noun)
        elif shape < 0.95:
            wish = self.wish()
            asked = f"a {noun} {who} {rng.choice(('wanted', 'wants', 'wanted'))} to {wish}"
            return Subject("hero", asked, f"a {noun}", head, name, female, wish=wish)
        else:
            fear = self.pick(words.FEARS)
            asked = f"a {noun} {who} {rng.choice(('was', 'is', 'was'))} afraid of {fear}"
            return Subject("hero", asked, f"a {noun}", head, name, female, fear=fear)
        return Subject("hero", asked, f"a {noun}", head, name, female)

    def wish(self) -> str:
        """What a hero wants to do, as the verb after "to"."""
        if self.chance(0.5):
            return self.pick(words.WISHES)
        return f"learn to {made_up(self.rng) if self.chance(0.4) else self.pick(words.SKILLS)}"

    def named_hero(self, name: str, female: bool) -> Subject:
        head = self.rng.choice(("girl", "young woman", "girl") if female else ("boy", "young man", "boy"))
        asked = f"{self.rng.choice(('a girl', 'a woman') if female else ('a boy', 'a man'))} named {name}"
        return Subject("hero", asked if self.chance(0.25) else name, f"a {head}", head.split()[-1], name, female)

    def thing(self) -> Subject:
        head = self.noun(words.THINGS)
        noun = self.adorned(words.SHAPES, head, 0.35)
        shape = self.rng.random()
        if shape < 0.74:
            asked = f"a {noun}"
        elif shape < 0.86:
            asked = f"the {noun}"
        elif shape < 0.92:
            asked = f"my {noun}"
        else:
            asked = noun if self.chance(0.5) else plural(noun)
        return Subject("thing", asked, f"a {noun}", head)

    def place(self) -> Subject:
        if self.chance(0.25):
            world = made_up(self.rng).capitalize() if self.chance(0.5) else self.pick(words.WORLD)
            return Subject("place", world, world, world, bare=True)
        head = self.noun(words.PLACES, 0.15)
        noun = self.adorned(words.SHAPES, head, 0.25)
        return Subject("place", f"{'the' if self.chance(0.2) else 'a'} {noun}", f"a {noun}", noun)

    def idea(self) -> Subject:
        idea = self.noun(words.IDEAS, 0.15)
        head = f"the {idea[2:]}" if idea.startswith("a ") else f"the {idea[3:]}" if idea.startswith("an ") else idea
        return Subject("idea", idea, idea, head, bare=True)


_FEMALE = {"queen", "princess", "witch", "girl", "grandmother", "mother", "woman"}
_MALE = {"king", "prince", "wizard", "boy", "grandfather", "father", "man", "monk", "postman", "fisherman", "cowboy"}
_IRREGULAR = {
    "mouse": "mice",
    "goose": "geese",
    "wolf": "wolves",
    "man": "men",
    "woman": "women",
    "child": "children",
    "sheep": "sheep",
    "fish": "fish",
    "deer": "deer",
    "goldfish": "goldfish",
    "leaf": "leaves",
    "elf": "elves",
    "dwarf": "dwarves",
    "thief": "thieves",
    "calf": "calves",
    "moose": "moose",
    "salmon": "salmon",
}


def plural(noun: str) -> str:
    """Several of them: "two mice" never, "mice" always."""
    *before, last = noun.split()
    if last in _IRREGULAR:
        last = _IRREGULAR[last]
    elif last.endswith(("s", "x", "z", "ch", "sh")):
        last += "es"
    elif last.endswith("y") and last[-2:-1] not in "aeiou":
        last = last[:-1] + "ies"
    else:
        last += "s"
    return " ".join((*before, last))
