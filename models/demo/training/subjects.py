"""The subjects of stories: how the user names them, and how a story refers to them.

A `Subject` keeps the user's words: the story uses the adjective, the name and the noun of the request. Nouns and names
come from the pools or are made up. Training never draws the held-out slice of a pool, so that perplexity can be
measured on subjects that the model has not seen.
"""

from dataclasses import dataclass
from random import Random
from typing import Any
from zlib import crc32

from models.demo.training.data_files import DATA
from models.demo.training.phrase import expand, made_up, made_up_name, plural

WORDS = DATA.words
HELD_OUT_ONE_IN = 20  # 5 % of every pool


@dataclass(frozen=True)
class Subject:
    """A hero, thing, place or idea."""

    role: str  # "hero", "thing", "place" or "idea"
    asked: str  # in the user's words: "a tiny fox named Tib", "my dog", "dragons"
    first: str  # at the first mention in a story: "a tiny fox"
    head: str  # at later mentions: "fox"; with "the" unless it is bare
    name: str = ""  # a hero's name, drawn if the user gave none
    female: bool = False
    bare: bool = False  # takes no article: "Paris", "winter", "the sea"
    wish: str = ""
    fear: str = ""

    @property
    def the(self) -> str:
        """The subject at later mentions, with its article."""
        return self.head if self.bare else f"the {self.head}"


def is_held_out(text: str) -> bool:
    """Return whether training never draws a word."""
    return crc32(text.encode()) % HELD_OUT_ONE_IN == 0


class Casting:
    """Draws subjects. `held_out`: from the held-out slice of every pool, instead of the rest."""

    def __init__(self, rng: Random, held_out: bool = False) -> None:
        self.rng = rng
        self.held_out = held_out

    def chance(self, probability: float) -> bool:
        """Return True with this probability."""
        return self.rng.random() < probability

    def pick(self, pool: tuple[str, ...]) -> str:
        """Return a word of this slice, or of the whole pool if the slice is empty."""
        return self.rng.choice([word for word in pool if is_held_out(word) == self.held_out] or pool)

    def noun(self, pool: tuple[str, ...], made_up_share: float = 0.3) -> str:
        """Return a noun from a pool, or a made-up noun."""
        return made_up(self.rng) if self.chance(made_up_share) else self.pick(pool)

    def name(self) -> tuple[str, bool]:
        """Return a name and whether it is a woman's; two in five are made up."""
        if self.chance(0.4):
            name = made_up_name(self.rng)
            return name, name[-1] in "aeiy" or self.chance(0.4)
        female = self.chance(0.5)
        return self.known_name(female), female

    def known_name(self, female: bool) -> str:
        """Return an ordinary name."""
        return self.rng.choice(WORDS.she_names if female else WORDS.he_names)

    def adorned(self, adjectives: tuple[str, ...], head: str, share: float) -> str:
        """Return the noun, with an adjective in a `share` of the cases, unless both have a word in common."""
        adjective = self.rng.choice(adjectives)
        clash = {*adjective.split()} & {*head.split()}
        return f"{adjective} {head}" if self.chance(share) and not clash else head

    def asked(self, entries: Any) -> str:
        """Return a template of subjects.toml, drawn by weight."""
        draw, total = self.rng.random(), 0
        for entry in entries:
            total += entry.weight
            if draw < total / sum(each.weight for each in entries):
                break
        return entry.instead if entry.instead and self.chance(entry.instead_percent / 100) else entry.asked

    def subject(self) -> Subject:
        """Return a subject of a random role."""
        return self.rng.choices((self.hero, self.thing, self.place, self.idea), (50, 24, 14, 12))[0]()

    def hero(self) -> Subject:
        """Return a creature or person, which may have a wish or a fear."""
        name, female = self.name()
        if self.chance(0.2):
            return self.named_hero(name, female)
        if self.chance(0.7):
            head = self.noun(WORDS.creatures)
            female = self.chance(0.5)
        else:
            head = self.noun(WORDS.persons, 0.1)
            if head.split()[-1] in WORDS.women + WORDS.men:
                female = head.split()[-1] in WORDS.women
        if not self.chance(0.4):
            name = self.known_name(female)
        noun = self.adorned(WORDS.looks, head, 0.3)
        who = "who" if self.chance(0.8) else "that"
        template = self.asked(DATA.subjects.hero)
        wish = self.wish() if "{wish}" in template else ""
        fear = self.pick(WORDS.fears) if "{fear}" in template else ""
        slots = {"noun": noun, "nouns": plural(noun), "name": name, "who": who, "wish": wish, "fear": fear}
        asked = expand(template, self.rng, slots)
        return Subject("hero", asked, f"a {noun}", head, name, female, wish=wish, fear=fear)

    def named_hero(self, name: str, female: bool) -> Subject:
        """Return a girl, woman, boy or man whom the user mentions by name."""
        head = self.rng.choice(("girl", "young woman", "girl") if female else ("boy", "young man", "boy"))
        asked = f"{self.rng.choice(('a girl', 'a woman') if female else ('a boy', 'a man'))} named {name}"
        return Subject("hero", asked if self.chance(0.25) else name, f"a {head}", head.split()[-1], name, female)

    def wish(self) -> str:
        """Return a verb that follows "to"."""
        if self.chance(0.5):
            return self.pick(WORDS.wishes)
        return f"learn to {self.noun(WORDS.skills, 0.4)}"

    def thing(self) -> Subject:
        """Return an object."""
        head = self.noun(WORDS.things)
        noun = self.adorned(WORDS.shapes, head, 0.35)
        asked = expand(self.asked(DATA.subjects.thing), self.rng, {"noun": noun, "nouns": plural(noun)})
        return Subject("thing", asked, f"a {noun}", head)

    def place(self) -> Subject:
        """Return a place, such as "Paris" or "an old mill"."""
        if self.chance(0.25):
            world = made_up(self.rng).capitalize() if self.chance(0.5) else self.pick(WORDS.world)
            return Subject("place", world, world, world, bare=True)
        head = self.noun(WORDS.places, 0.15)
        noun = self.adorned(WORDS.shapes, head, 0.25)
        return Subject("place", f"{'the' if self.chance(0.2) else 'a'} {noun}", f"a {noun}", noun)

    def idea(self) -> Subject:
        """Return an abstract subject, such as "winter"."""
        idea = self.noun(WORDS.ideas, 0.15)
        article, _, rest = idea.partition(" ")
        return Subject("idea", idea, idea, f"the {rest}" if article in ("a", "an") else idea, bare=True)
