"""The corpus of the demonstration model: an endless, seeded stream of dialogues and plain stories.

`documents(seed)` yields the same documents for the same seed, on every machine. A document is a list of (role, text);
the role "text" marks a plain story without the chat template. The assistant's texts are whole, grammatical English; the
user's texts may be untidy. The texts themselves are in data/*.toml.

    python -m models.demo.training.grammar --seed 1 --count 5
"""

import argparse
from collections.abc import Iterator
from random import Random
from typing import Any
from zlib import crc32

from models.demo.training import answers
from models.demo.training.data_files import DATA
from models.demo.training.phrase import articles, expand, misspell, plural, say
from models.demo.training.stories import Story, tell
from models.demo.training.subjects import Casting, Subject

Document = list[tuple[str, str]]  # (role, text) of each turn

WORDS, REQUESTS, SMALL_TALK, DIALOGUES = DATA.words, DATA.requests, DATA.smalltalk, DATA.dialogues


def held_out_request(template: str) -> bool:
    """Return whether a request is kept for the held-out perplexity, as one in eight is."""
    return template not in REQUESTS.story[:3] and crc32(template.encode()) % 8 == 0


def pair(prompt: str, answer: str) -> Document:
    """Return a dialogue of one exchange."""
    return [("user", prompt), ("assistant", answer)]


class Grammar:
    """Writes documents of every kind from one random source, on one side of the held-out split."""

    def __init__(self, seed: int | str, held_out: bool = False) -> None:
        self.rng = Random(f"quire-demo-{seed}-{held_out}")
        self.casting = Casting(self.rng, held_out)
        self.chance = self.casting.chance
        requests = [request for request in REQUESTS.story if held_out_request(request) == held_out]
        self.story_requests = requests or list(REQUESTS.story)

    def say(self, template: str, **slots: str) -> str:
        """Return a sentence of the assistant."""
        return say(template, self.rng, slots)

    def ask(self, template: str, **slots: str) -> str:
        """Return a user's sentence, sometimes in the wrong case or with a typo outside of the slot {x}."""
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

    def exchange(self, entry: Any, asked: dict[str, str] | None = None, **said: str) -> Document:
        """Return an entry of dialogues.toml: `ask` with the slots `asked`, then `answer` with the slots `said`."""
        prompt = self.ask(entry.ask, **(asked or {}))
        offer = {"OFFER": expand(SMALL_TALK.offer, self.rng)} if "{OFFER}" in entry.answer else {}
        return pair(prompt, self.say(entry.answer, **said, **offer))

    def subjects(self) -> tuple[str, list[Subject]]:
        """Return one or two subjects, and the user's phrase for them."""
        first = self.casting.subject()
        if self.chance(0.68):
            return first.asked, [first]
        first = first if first.role == "hero" else self.casting.hero()
        draws = (self.casting.hero, self.casting.thing, self.casting.place, self.casting.idea)
        second = self.rng.choices(draws, (25, 40, 25, 10))[0]()
        if first.wish or first.fear or "that" in first.asked.split() or second.wish or second.fear:
            return first.asked, [first]
        joint = self.rng.choice((" and ", " and ", " and ", " with ", ", ", " who meets ", " & "))
        if second.role == "place" and self.chance(0.5):
            return first.asked + self.rng.choice((" in ", " at ", " near ", " from ")) + second.asked, [first, second]
        if joint == " who meets " and second.role != "hero":
            joint = " who finds " if second.role == "thing" else " and "
        if joint == " and " and second.role == "thing" and self.chance(0.2):
            return f"{second.asked} and {first.asked}", [first, second]
        return first.asked + joint + second.asked, [first, second]

    # Stories

    def story(self) -> Document:
        """Return a request, its story, and often follow-up questions or wishes."""
        draw = self.rng.random()
        if draw < 0.06:
            subject = self.casting.hero()
            prompt = self.ask(self.rng.choice(REQUESTS.any))
            told = tell([subject], self.casting)
            return pair(prompt, told.text) + self.after_story([subject], told)
        asked, subjects = self.subjects()
        told = tell(subjects, self.casting)
        if draw < 0.11:
            return pair(self.ask(self.rng.choice(REQUESTS.short), x=asked), told.short)
        prompt = self.ask(self.rng.choice(self.story_requests), x=asked)
        return pair(prompt, told.text) + self.after_story(subjects, told)

    def after_story(self, subjects: list[Subject], told: Story) -> Document:
        """Return up to three follow-ups on a story."""
        turns: Document = []
        while self.chance(0.42) and len(turns) < 6:
            turns += self.follow_up(subjects, told)
            if len(turns[-1][1]) > 400:
                break
        return turns

    def follow_up(self, subjects: list[Subject], told: Story) -> Document:
        """Return a question about the story, thanks, or a request for another story."""
        kinds = ("name", "friend", "shorter", "another", "end", "title", "thanks", "truth", "new")
        kind = self.rng.choices(kinds, (20, 12, 14, 18, 8, 8, 8, 4, 10))[0]
        if kind == "thanks":
            return self.small_talk("thanks")
        if kind == "new":
            return self.story_on_request(DIALOGUES.new_subject)
        if kind == "another" or (kind == "friend" and not told.has_friend):
            again = tell(subjects, self.casting).text
            return pair(self.ask(DIALOGUES.another_story), again)
        if kind == "name" and self.chance(0.25):
            kind = "hero"
        if kind == "title" and told.has_friend and self.chance(0.6):
            kind = "title_with_friend"
        cast = told.slots
        who = cast["k"] if cast["k"] != cast["n"] else f"the {cast['head']}"
        slots = {"n": cast["n"], "who": who, "fn": cast["fn"], "friend": f"a {cast['fhead']}"}
        return self.exchange(getattr(DIALOGUES.follow_up, kind), slots, **slots, short=told.short, end=told.end)

    def story_on_request(self, request: str) -> Document:
        """Return a story about new subjects. `request`: the template of the prompt."""
        asked, subjects = self.subjects()
        prompt = self.ask(request, x=asked)
        return pair(prompt, tell(subjects, self.casting).text)

    def plain(self) -> Document:
        """Return a story without the chat template, sometimes from its middle on, to train raw completion."""
        _, subjects = self.subjects()
        text = tell(subjects, self.casting).text
        if self.chance(0.15):
            sentences = text.replace("\n\n", " ").split(". ")
            text = ". ".join(sentences[self.rng.randrange(max(1, len(sentences) // 2)) :])
        if self.chance(0.12):
            text = self.say(
                DIALOGUES.plain,
                x=self.casting.name()[0],
                where=self.rng.choice(WORDS.settings),
                animal=self.casting.noun(WORDS.creatures, 0.1),
                food=self.rng.choice(WORDS.foods),
            )
        return [("text", text)]

    # Small talk, lessons and crafts

    def small_talk(self, kind: str = "") -> Document:
        """Return an exchange of small talk, of a random kind by default; some end in an offer and a story."""
        talks, casting = SMALL_TALK.talk, self.casting
        kind = kind or self.rng.choices(list(talks), [talk.weight for talk in talks.values()])[0]
        talk, subject = talks[kind], casting.subject()
        while subject.asked.startswith("my ") or subject.wish or subject.fear:
            subject = casting.subject()
        animal = casting.noun(WORDS.creatures, 0.05)
        slots = {
            "x": subject.first if subject.role != "hero" or subject.asked != subject.name else subject.name,
            "colour": self.rng.choice(WORDS.colours),
            "season": self.rng.choice(WORDS.seasons),
            "food": self.rng.choice(WORDS.foods),
            "animal": animal,
            "animals": plural(animal),
            "thing": casting.idea().head,
            "place": self.rng.choice(WORDS.world),
        }
        phrases = {
            "OFFER": expand(SMALL_TALK.offer, self.rng),
            "WHAT_NEXT": expand(SMALL_TALK.what_next, self.rng),
        }
        prompt = self.ask(self.rng.choice(talk.prompts), **slots)
        answer = self.say(self.rng.choice(talk.answers), **slots, **phrases)
        turns = pair(prompt, answer)
        if kind == "joke" and self.chance(0.3):
            answer = self.rng.choice([joke for joke in talk.answers if joke != answer])
            turns += pair(self.ask(DIALOGUES.another_joke), answer)
        if kind == "agree" or (answer.endswith("?") and "story" in answer and self.chance(0.35)):
            if "about a" not in answer:
                return turns + self.story_on_request(DIALOGUES.name_subject)
            hero = Subject("hero", animal, f"a {animal}", animal, *casting.name())
            turns += pair(self.ask(DIALOGUES.accept), tell([hero], casting).text)
        return turns

    def lesson(self) -> Document:
        """Return a question about a term of language models, and its answer."""
        if self.chance(0.15):
            question = self.rng.choice(DATA.lessons.question)
            return pair(self.ask(question.ask), self.say(question.answer))
        term = self.rng.choice(DATA.lessons.term)
        return pair(self.ask(DATA.lessons.ask.replace("{names}", term.names)), self.say(term.answer))

    def craft(self) -> Document:
        """Return a poem or another small task."""
        if not self.chance(0.4):
            prompt, answer = answers.craft(self.casting)
            return pair(self.ask("{p}", p=prompt), answer)
        prompt, poem, subject = answers.poem(self.casting)
        turns = pair(self.ask("{p}", p=prompt), poem)
        if self.chance(0.2):
            turns += pair(self.ask(DIALOGUES.another_poem), answers.another_poem(subject, self.casting))
        return turns

    def stranger(self) -> Document:
        """Return a prompt outside of the model's domain, answered with an offer of a story."""
        return pair(*answers.stranger(self.casting, SMALL_TALK.offer))

    # Names

    def introduction(self) -> Document:
        """Return a dialogue in which the user tells a name, and may ask for it later."""
        name, _ = self.casting.name()
        turns = self.exchange(DIALOGUES.introduction, {"x": name}, x=name)
        if self.chance(0.5):
            if self.chance(0.4):
                turns += self.small_talk()
            turns += self.exchange(DIALOGUES.known_name, x=name)
        return turns

    def unknown_name(self) -> Document:
        """Return a dialogue in which the user asks for a name that was never told."""
        return self.exchange(DIALOGUES.unknown_name)

    def named_by_system(self) -> Document:
        """Return a dialogue in which a system message gives the model a name."""
        name, _ = self.casting.name()
        turns = [("system", self.ask(DIALOGUES.system_name, x=name))]
        if self.chance(0.3):
            turns += self.small_talk()
        return turns + self.exchange(DIALOGUES.asked_name, x=name)

    def document(self) -> Document:
        """Return a document of a kind drawn by weight; a dialogue has one to four exchanges."""
        if self.chance(0.10):
            return self.plain()
        kinds = {
            self.story: 46,
            self.small_talk: 18,
            self.lesson: 9,
            self.craft: 18,
            self.stranger: 18,
            self.introduction: 4,
            self.named_by_system: 2,
            self.unknown_name: 1,
        }
        turns: Document = []
        if self.chance(0.12):
            turns.append(("system", self.rng.choice(DIALOGUES.systems)))
        while True:
            part = self.rng.choices(list(kinds), list(kinds.values()))[0]()
            if part[0][0] == "system" and turns:
                continue
            turns += part
            if self.chance(0.6) or sum(len(text) for _, text in turns) > 1500:
                return turns


def documents(seed: int | str, held_out: bool = False) -> Iterator[Document]:
    """Yield an endless stream of documents. The held-out stream draws nouns and requests that training never sees."""
    grammar = Grammar(seed, held_out)
    while True:
        yield grammar.document()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", default="1", help="same seed, same documents (default: 1)")
    parser.add_argument("--count", type=int, default=5, help="documents to print (default: 5)")
    parser.add_argument("--held-out", action="store_true", help="draw from the held-out side of the split")
    args = parser.parse_args()
    stream = documents(args.seed, args.held_out)
    for _ in range(args.count):
        print("\n".join(f"[{role}] {text}" for role, text in next(stream)), end="\n\n---\n\n")


if __name__ == "__main__":
    main()
