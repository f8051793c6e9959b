"""Stories: a plot, its cast, and the facts that a user can ask for afterwards."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from models.demo.training.data_files import DATA
from models.demo.training.phrase import say
from models.demo.training.subjects import Casting, Subject


@dataclass(frozen=True)
class Story:
    """A story, a short version of it, its ending, and its cast."""

    text: str
    short: str
    end: str
    slots: dict[str, str]  # the cast: "n" is the hero's name, "fn" the friend's
    has_friend: bool


WORDS = DATA.words
Plot = Any  # an entry of plots.toml: the texts `text`, `short` and `end`


def mentions(plot: Plot, slot: str) -> bool:
    """Return whether the text of the plot has this slot."""
    return f"{{{slot}}}" in plot.text


def _fits(plot: Plot, subjects: list[Subject]) -> bool:
    """Return whether the plot has a part for every subject and tells of the hero's wish or fear."""
    heroes = [subject for subject in subjects if subject.role == "hero"]
    if len(heroes) == 2 and not mentions(plot, "fintro"):
        return False
    if any(subject.role != "hero" and not mentions(plot, subject.role[0]) for subject in subjects):
        return False
    wish, fear = any(hero.wish for hero in heroes), any(hero.fear for hero in heroes)
    return mentions(plot, "wish") if wish else mentions(plot, "fear") if fear else True


def choose_plot(subjects: list[Subject], rng: Random) -> Plot:
    """Return a plot with a part for every subject; a thing or a place leads if there is no hero."""
    roles = [subject.role for subject in subjects]
    lead = next((role for role in roles if role in ("thing", "place")), "hero")
    plots = DATA.plots.hero
    if lead != "hero" and "hero" not in roles and roles[0] != "idea":
        plots = DATA.plots.thing if lead == "thing" else DATA.plots.place
    if len(subjects) == 1 and lead != "hero" and rng.random() < 0.3:
        plots = DATA.plots.hero
    fitting = [plot for plot in plots if _fits(plot, subjects)]
    fitting = fitting or [plot for plot in DATA.plots.hero if _fits(plot, subjects)]
    if roles == ["hero"] and not (subjects[0].wish or subjects[0].fear):
        fitting = [plot for plot in fitting if not mentions(plot, "i")]
    return rng.choice(fitting)


def cast(subjects: list[Subject], casting: Casting) -> dict[str, str]:
    """Return the slots of all parts. The user's subjects take the main parts, drawn characters and things the rest."""
    rng = casting.rng
    by_role = {subject.role: subject for subject in reversed(subjects)}
    heroes = [subject for subject in subjects if subject.role == "hero"]
    hero = heroes[0] if heroes else _supporting(casting, avoid="")
    friend = heroes[1] if len(heroes) > 1 else _supporting(casting, avoid=hero.head)
    while friend.name == hero.name:
        friend = _supporting(casting, avoid=hero.head)
    thing = by_role.get("thing") or _plain("thing", casting.pick, WORDS.solid)
    place = by_role.get("place") or _plain("place", casting.pick, WORDS.places)
    idea = by_role.get("idea") or _plain("idea", rng.choice, WORDS.ideas)
    slots = {"at": thing.first, "t": thing.the, "p": place.the, "i": idea.head}
    for prefix, who in (("", hero), ("f", friend)):
        slots |= {
            f"{prefix}n": who.name,
            f"{prefix}k": who.the if hero.head != friend.head else who.name,
            f"{prefix}intro": f"{who.first} {rng.choice(('named', 'called', 'named'))} {who.name}",
            f"{prefix}he": "she" if who.female else "he",
            f"{prefix}him": "her" if who.female else "him",
            f"{prefix}his": "her" if who.female else "his",
        }
    return slots | {
        "where": rng.choice(WORDS.settings),
        "wish": hero.wish or friend.wish or rng.choice(WORDS.wishes),
        "fear": hero.fear or friend.fear or rng.choice(WORDS.fears),
        "head": hero.head,
        "fhead": friend.head,
    }


def _supporting(casting: Casting, avoid: str) -> Subject:
    """Return a supporting character: a creature or person other than `avoid`, with an ordinary name."""
    rng = casting.rng
    female = casting.chance(0.5)
    head = avoid
    while head == avoid:
        head = rng.choice(WORDS.supporting)
    if head in WORDS.supporting_women + WORDS.supporting_men:
        female = head in WORDS.supporting_women
    name = casting.known_name(female)
    first = f"a {rng.choice(WORDS.supporting_looks)} {head}" if casting.chance(0.5) and " " not in head else f"a {head}"
    return Subject("hero", first, first, head, name, female)


def _plain(role: str, pick: Callable[[tuple[str, ...]], str], pool: tuple[str, ...]) -> Subject:
    head = pick(pool)
    return Subject(role, head, f"a {head}", head, bare=role == "idea")


def tell(subjects: list[Subject], casting: Casting) -> Story:
    """Return a whole story about the subjects."""
    plot = choose_plot(subjects, casting.rng)
    slots = cast(subjects, casting)
    text = say(plot.text, casting.rng, slots)
    if casting.chance(0.12):
        text = text.replace("\n\n", " ")
    short, end = say(plot.short, casting.rng, slots), say(plot.end, casting.rng, slots)
    return Story(text, short, end, slots, mentions(plot, "fn"))
