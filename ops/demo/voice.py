"""One speaker of the corpus: its random source, its subjects, and the two tones of user and model."""

from random import Random

from ops.demo import words
from ops.demo.phrase import articles, expand, misspell, say
from ops.demo.requests import STORY_ASKS, held_out_template
from ops.demo.smalltalk import OFFER, TALKS, WHAT_NEXT
from ops.demo.stories import tell
from ops.demo.subjects import Casting, Subject, plural

Turn = tuple[str, str]  # (role, text)
Document = list[Turn]

_PLACES_IN = (" in {}", " at {}", " near {}", " from {}")


class Voice:
    """Speaks from one random source, on one side of the held-out split."""

    def __init__(self, seed: int | str, held_out: bool = False) -> None:
        self.rng = Random(f"quire-demo-{seed}-{held_out}")
        self.casting = Casting(self.rng, held_out)
        asks = [ask for ask in STORY_ASKS if held_out_template(ask) == held_out]
        self.story_asks = asks or list(STORY_ASKS)

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def say(self, template: str, **slots: str) -> str:
        return say(template, self.rng, slots)

    def ask(self, template: str, **slots: str) -> str:
        """A user's sentence: like the model's, but with a user's carelessness."""
        text = " ".join(articles(expand(template, self.rng, slots)).split())
        if self.chance(0.35):
            text = text.replace("I am ", "I'm ")
        draw = self.rng.random()
        if self.chance(0.015):
            return text.upper()
        if draw < 0.10:
            return text[:1].lower() + text[1:]
        if draw < 0.14:
            return text.lower() if not any(len(v) > 1 and v != v.lower() for v in slots.values()) else text
        if draw < 0.155 and not slots:
            return text.upper()
        if draw < 0.20 and len(text) > 8:
            at = text.find(slots["x"]) if "x" in slots and slots["x"] in text else len(text)
            return misspell(text[:at], self.rng) + text[at:] if at > 6 else text
        return text

    def subjects(self) -> tuple[str, list[Subject]]:
        """One or two subjects, and how the user strings them together."""
        first = self.casting.subject()
        if self.chance(0.68):
            return first.asked, [first]
        first = first if first.role == "hero" else self.casting.hero()
        second = self.rng.choices(
            (self.casting.hero, self.casting.thing, self.casting.place, self.casting.idea), (25, 40, 25, 10)
        )[0]()
        if first.wish or first.fear or "that" in first.asked.split() or second.wish or second.fear:
            return first.asked, [first]
        joint = self.rng.choice((" and ", " and ", " and ", " with ", ", ", " who meets ", " & "))
        if second.role == "place" and self.chance(0.5):
            return first.asked + self.rng.choice(_PLACES_IN).format(second.asked), [first, second]
        if joint == " who meets " and second.role != "hero":
            joint = " who finds " if second.role == "thing" else " and "
        if joint == " and " and second.role == "thing" and self.chance(0.2):
            return f"{second.asked} and {first.asked}", [first, second]
        return first.asked + joint + second.asked, [first, second]

    def small_talk(self, kind: str = "") -> Document:
        if not kind:
            kinds = list(TALKS)
            kind = self.rng.choices(kinds, [TALKS[key].weight for key in kinds])[0]
        talk, casting = TALKS[kind], self.casting
        subject = casting.subject()
        while subject.asked.startswith("my ") or subject.wish or subject.fear:
            subject = casting.subject()
        animal = casting.noun(words.CREATURES, 0.05)
        slots = {
            "x": subject.first if subject.role != "hero" or subject.asked != subject.name else subject.name,
            "colour": self.rng.choice(words.COLOURS),
            "season": self.rng.choice(words.SEASONS),
            "food": self.rng.choice(words.FOODS),
            "animal": animal,
            "animals": plural(animal),
            "thing": casting.idea().head,
            "place": self.rng.choice(words.WORLD),
            "OFFER": expand(OFFER, self.rng),
            "WHAT_NEXT": expand(WHAT_NEXT, self.rng),
        }
        prompt = self.ask(
            self.rng.choice(talk.prompts),
            **{key: value for key, value in slots.items() if key not in ("OFFER", "WHAT_NEXT")},
        )
        turns = [("user", prompt), ("assistant", self.say(self.rng.choice(talk.answers), **slots))]
        if kind == "joke" and self.chance(0.3):
            again = self.rng.choice([joke for joke in talk.answers if joke != turns[-1][1]])
            turns += [
                ("user", self.ask("[Another one|One more|Another joke|Again|More][.|!|, please.|]")),
                ("assistant", again),
            ]
        if kind == "agree" or (turns[-1][1].endswith("?") and "story" in turns[-1][1] and self.chance(0.35)):
            turns += self.accepted(
                subject
                if "about a" not in turns[-1][1]
                else Subject("hero", animal, f"a {animal}", animal, *casting.name()),
                "about a" in turns[-1][1],
            )
        return turns

    def accepted(self, subject: Subject, offered: bool) -> Document:
        """The user takes up an offered story, or names a subject."""
        if offered:
            return [
                ("user", self.ask("[Yes, please|Yes|Sure|Okay|Please do|Yes, tell me]")),
                ("assistant", tell([subject], self.casting).text),
            ]
        asked, subjects = self.subjects()
        return [
            (
                "user",
                self.ask(
                    ("[About {x}|Yes, about {x}|{x}|{x}, please|Something about {x}|Yes, a story about {x}][.|]"),
                    x=asked,
                ),
            ),
            ("assistant", tell(subjects, self.casting).text),
        ]
