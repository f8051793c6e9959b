"""Stories: a plot, a cast for it, and what can be asked about it afterwards."""

from dataclasses import dataclass
from random import Random

from ops.demo import words
from ops.demo.hero_plots import HERO_PLOTS
from ops.demo.phrase import say
from ops.demo.plots import Plot
from ops.demo.subjects import Casting, Subject
from ops.demo.world_plots import PLACE_PLOTS, THING_PLOTS


@dataclass(frozen=True)
class Story:
    text: str
    short: str  # the same in one or two sentences
    end: str  # how it ends, in one sentence
    slots: dict[str, str]  # the cast: "n" is the hero's name, "fn" the friend's
    has_friend: bool


_LEADS = {"hero": HERO_PLOTS, "thing": THING_PLOTS, "place": PLACE_PLOTS}


def _fits(plot: Plot, subjects: list[Subject]) -> bool:
    """Whether every subject has a part in the plot, and the plot leans on no wish or fear that the hero lacks."""
    roles = [subject.role for subject in subjects]
    heroes = [subject for subject in subjects if subject.role == "hero"]
    if len(heroes) == 2 and not plot.mentions("fintro"):
        return False
    if any(role not in ("hero",) and not plot.mentions(role[0]) for role in roles):
        return False
    wish, fear = any(hero.wish for hero in heroes), any(hero.fear for hero in heroes)
    return plot.mentions("wish") if wish else plot.mentions("fear") if fear else True


def choose_plot(subjects: list[Subject], rng: Random) -> Plot:
    """A plot with a part for every subject; the first subject's role leads where it can."""
    lead = next((s.role for s in subjects if s.role in ("thing", "place")), "hero")
    heroes = any(subject.role == "hero" for subject in subjects)
    plots = HERO_PLOTS if heroes or subjects[0].role == "idea" else _LEADS[lead]
    if len(subjects) == 1 and lead != "hero" and rng.random() < 0.3:
        plots = HERO_PLOTS
    fitting = [plot for plot in plots if _fits(plot, subjects)] or [
        plot for plot in HERO_PLOTS if _fits(plot, subjects)
    ]
    if len(subjects) == 1 and subjects[0].role == "hero" and not (subjects[0].wish or subjects[0].fear):
        fitting = [plot for plot in fitting if not plot.mentions("i")]
    return rng.choice(fitting)


def cast(subjects: list[Subject], casting: Casting) -> dict[str, str]:
    """Slots for all parts: the user's subjects first, then whoever else is needed."""
    rng = casting.rng
    heroes = [subject for subject in subjects if subject.role == "hero"]
    hero = heroes[0] if heroes else _extra(casting, avoid="")
    friend = heroes[1] if len(heroes) > 1 else _extra(casting, avoid=hero.head)
    while friend.name == hero.name:
        friend = _extra(casting, avoid=hero.head)
    thing = next((s for s in subjects if s.role == "thing"), None) or _plain(casting, "thing", words.SOLID)
    place = next((s for s in subjects if s.role == "place"), None) or _plain(casting, "place", words.PLACES)
    idea = next((s for s in subjects if s.role == "idea"), None) or _plain(casting, "idea", words.IDEAS)
    slots = {"at": thing.first, "t": thing.the, "ap": place.first, "p": place.the, "i": idea.head}
    for prefix, who in (("", hero), ("f", friend)):
        slots |= {
            f"{prefix}n": who.name,
            f"{prefix}k": who.the if hero.head != friend.head else who.name,
            f"{prefix}intro": f"{who.first} {rng.choice(('named', 'called', 'named'))} {who.name}",
            f"{prefix}he": "she" if who.female else "he",
            f"{prefix}him": "her" if who.female else "him",
            f"{prefix}his": "her" if who.female else "his",
        }
    slots["where"] = rng.choice(words.SETTINGS)
    slots["wish"] = hero.wish or friend.wish or rng.choice(words.WISHES)
    slots["fear"] = hero.fear or friend.fear or rng.choice(words.FEARS)
    slots["head"], slots["fhead"] = hero.head, friend.head
    return slots


def _extra(casting: Casting, avoid: str) -> Subject:
    """A supporting character: a plain creature or person with a name that is mostly an ordinary one."""
    rng = casting.rng
    female = rng.random() < 0.5
    head = avoid
    while head == avoid:
        head = rng.choice(_SUPPORTING)
    if head in ("girl", "old woman"):
        female = True
    if head in ("boy", "old man", "fisherman"):
        female = False
    name = rng.choice(words.SHE_NAMES if female else words.HE_NAMES)
    first = f"a {rng.choice(_SUPPORTING_LOOKS)} {head}" if rng.random() < 0.5 and " " not in head else f"a {head}"
    return Subject("hero", first, first, head, name, female)


_SUPPORTING = (
    *("mouse", "owl", "heron", "tortoise", "hedgehog", "badger", "squirrel", "goose", "crow", "hare", "otter", "frog"),
    *("girl", "boy", "baker", "sailor", "gardener", "teacher", "fisherman", "old woman", "old man", "painter"),
)
_SUPPORTING_LOOKS = ("young", "little", "quiet", "friendly", "cheerful", "curious", "shy", "kind")


def _plain(casting: Casting, role: str, pool: tuple[str, ...]) -> Subject:
    head = casting.rng.choice(pool) if role == "idea" else casting.pick(pool)
    return Subject(role, head, f"a {head}", head, bare=role == "idea")


def tell(subjects: list[Subject], casting: Casting) -> Story:
    """A whole story about the subjects."""
    plot = choose_plot(subjects, casting.rng)
    slots = cast(subjects, casting)
    text = say(plot.text, casting.rng, slots)
    if casting.chance(0.12):
        text = text.replace("\n\n", " ")
    return Story(
        text, say(plot.short, casting.rng, slots), say(plot.end, casting.rng, slots), slots, plot.mentions("fn")
    )
