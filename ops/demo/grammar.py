"""The corpus of the demonstration model: an endless, seeded stream of dialogues and plain stories.

`documents(seed)` yields the same documents for the same seed, on every machine. A document is a list of (role, text);
the role "text" marks a plain story without the chat template. Everything that the assistant says is whole, grammatical
English; what users write may be untidy.

    python -m ops.demo.grammar --seed 1 --count 5
"""

import argparse
from collections.abc import Iterator

from ops.demo import crafts, poems, strangers, words
from ops.demo.lessons import ASK, HOW, TERMS
from ops.demo.narrator import Narrator
from ops.demo.phrase import expand
from ops.demo.smalltalk import OFFER
from ops.demo.stories import tell
from ops.demo.voice import Document

_SYSTEMS = (
    "You are a helpful assistant.",
    "You are a friendly storyteller.",
    "You are a kind assistant. Be brief.",
    "Be polite and brief.",
    "You tell stories.",
    "You are a helpful, honest and harmless assistant.",
    "Answer in English.",
    "You are Quire, a helpful assistant.",
    "Keep your answers short and simple.",
    "You are an expert.",
    "Speak simply.",
    "You are a chatbot.",
)


class Grammar(Narrator):
    """Writes whole documents of every kind."""

    def lesson(self) -> Document:
        if self.chance(0.15):
            ask, answer = self.rng.choice(HOW)
            return [("user", self.ask(ask)), ("assistant", self.say(answer))]
        names, answer = self.rng.choice(TERMS)
        return [("user", self.ask(ASK.replace("{}", names))), ("assistant", self.say(answer))]

    def craft(self) -> Document:
        if self.chance(0.4):
            prompt, answer, subject = poems.poem(self.casting)
            turns = [("user", self.ask("{p}", p=prompt)), ("assistant", answer)]
            if self.chance(0.2):
                turns += [
                    ("user", self.ask("[Another one|One more|Another poem|Again][.|, please.|!|]")),
                    ("assistant", poems.another_poem(subject, self.casting)),
                ]
            return turns
        prompt, answer = self.rng.choice(crafts.CRAFTS)(self.casting)
        return [("user", self.ask("{p}", p=prompt)), ("assistant", answer)]

    def stranger(self) -> Document:
        prompt, answer = strangers.exchange(self.casting)
        return [("user", prompt), ("assistant", answer)]

    def introduction(self) -> Document:
        """The user's name is told, and asked for later."""
        name, _ = self.casting.name()
        greeting = self.ask(
            (
                "[My name is {x}|I am {x}|I'm {x}|Hi, I'm {x}|Hello, my name is {x}|Hello, I am {x}|Call me "
                "{x}|They call me {x}][.|!|]"
            ),
            x=name,
        )
        reply = self.say(
            "[Nice to meet you|It is nice to meet you|Hello|Welcome], {name}! {OFFER}",
            name=name,
            OFFER=expand(OFFER, self.rng),
        )
        turns = [("user", greeting), ("assistant", reply)]
        if self.chance(0.5):
            if self.chance(0.4):
                turns += self.small_talk()
            turns += [
                (
                    "user",
                    self.ask(
                        "[What is my name|Do you know my name|What's my name|Who am I|Do you remember my name][?|]"
                    ),
                ),
                (
                    "assistant",
                    self.say("[Your name is {name}.|You are {name}.|You told me that your name is {name}.]", name=name),
                ),
            ]
        return turns

    def forgotten_name(self) -> Document:
        return [
            ("user", self.ask("[What is my name|Do you know my name|What's my name|Who am I][?|]")),
            ("assistant", self.say("[I do not know your name yet.|You have not told me your name yet.] What is it?")),
        ]

    def named_by_system(self) -> Document:
        """A system message gives the model a name."""
        name, _ = self.casting.name()
        turns = [
            (
                "system",
                self.ask(
                    (
                        "[You are {x}, a friendly storyteller|Your name is {x}|You are called {x}|You are {x}|You are "
                        "{x}, a helpful assistant]."
                    ),
                    x=name,
                ),
            )
        ]
        if self.chance(0.3):
            turns += self.small_talk()
        return [
            *turns,
            (
                "user",
                self.ask("[What is your name|Who are you|What's your name|How are you called|Introduce yourself][?|]"),
            ),
            (
                "assistant",
                self.say(
                    "[My name is {name}|I am {name}], and I [like to tell|tell] short stories. {OFFER}",
                    name=name,
                    OFFER=expand(OFFER, self.rng),
                ),
            ),
        ]

    def plain(self) -> Document:
        """A story without the template, at times from the middle on: what raw completion continues."""
        _, subjects = self.subjects()
        text = tell(subjects, self.casting).text
        if self.chance(0.15):
            sentences = text.replace("\n\n", " ").split(". ")
            text = ". ".join(sentences[self.rng.randrange(max(1, len(sentences) // 2)) :])
        if self.chance(0.12):
            name, _ = self.casting.name()
            text = self.say(
                "[Hello, my|My|Hi, my] name is {name}, and I live {where}. [I have a {animal} that|My best friend "
                "is a {animal} that] [follows me everywhere|sleeps all day|likes {food}]. [In the morning|On "
                "Sundays] we [walk to the river|sit in the sun|go to the market], and in the evening we [read a "
                "book|look at the stars|cook {food}]. [It is a good life.|I would not change it for anything.]",
                name=name,
                where=self.rng.choice(words.SETTINGS),
                animal=self.casting.noun(words.CREATURES, 0.1),
                food=self.rng.choice(words.FOODS),
            )
        return [("text", text)]

    def document(self) -> Document:
        """One document of a kind drawn by weight; dialogues run on for one to four exchanges."""
        if self.chance(0.10):
            return self.plain()
        kinds = (
            self.story,
            self.small_talk,
            self.lesson,
            self.craft,
            self.stranger,
            self.introduction,
            self.named_by_system,
            self.forgotten_name,
        )
        weights = (46, 18, 9, 18, 18, 4, 2, 1)
        turns: Document = []
        if self.chance(0.12):
            turns.append(("system", self.rng.choice(_SYSTEMS)))
        while True:
            part = self.rng.choices(kinds, weights)[0]()
            if part[0][0] == "system" and turns:
                continue
            turns += part
            if self.chance(0.6) or sum(len(text) for _, text in turns) > 1500:
                return turns


def documents(seed: int | str, held_out: bool = False) -> Iterator[Document]:
    """An endless stream of documents; the held-out stream draws nouns and requests that training never sees."""
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
