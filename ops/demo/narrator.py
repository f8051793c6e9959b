"""Stories on request, and what users ask or wish for afterwards."""

from ops.demo.requests import ANY_ASKS, SHORT_ASKS
from ops.demo.stories import Story, tell
from ops.demo.subjects import Subject
from ops.demo.voice import Document, Voice


class Narrator(Voice):
    """Tells stories about what the user names, and answers questions about them."""

    def story(self) -> Document:
        """A request and its story, and often a question or a wish afterwards."""
        draw = self.rng.random()
        if draw < 0.06:
            subject = self.casting.hero()
            turns = [
                ("user", self.ask(self.rng.choice(ANY_ASKS))),
                ("assistant", (told := tell([subject], self.casting)).text),
            ]
            return turns + self.after_story([subject], told)
        asked, subjects = self.subjects()
        told = tell(subjects, self.casting)
        if draw < 0.11:
            return [("user", self.ask(self.rng.choice(SHORT_ASKS), x=asked)), ("assistant", told.short)]
        turns = [("user", self.ask(self.rng.choice(self.story_asks), x=asked)), ("assistant", told.text)]
        return turns + self.after_story(subjects, told)

    def after_story(self, subjects: list[Subject], told: Story) -> Document:
        """None to three follow-ups on a story."""
        turns: Document = []
        while self.chance(0.42) and len(turns) < 6:
            turns += self.follow_up(subjects, told)
            if len(turns[-1][1]) > 400:
                break
        return turns

    def follow_up(self, subjects: list[Subject], told: Story) -> Document:
        slots = told.slots
        kind = self.rng.choices(
            ("name", "friend", "shorter", "another", "end", "title", "liked", "where", "new"),
            (20, 12, 14, 18, 8, 8, 8, 4, 10),
        )[0]
        question, answer = "", ""
        if kind == "name":
            who = slots["k"] if slots["k"] != slots["n"] else f"the {slots['head']}"
            question = (
                f"[What was {who}'s name|What was the name of {who}|What was {who} called|What is "
                f"{who}'s name|What is {who} called]?"
            )
            answer = f"[{who}'s name was {{n}}|{who} was called {{n}}]."
            if self.chance(0.25):
                question, answer = (
                    "[Who was the hero|Who was the story about|Who is the hero]?",
                    f"It was about {{n}}, {who}.",
                )
        elif kind == "friend" and told.has_friend:
            question = (
                "[Who was {n}'s friend|Who did {n} meet|Who helped|What was the friend's name|Who else was "
                "there|Who was {fn}]?"
            )
            answer = "It was {fn}, {a}."
        elif kind == "shorter":
            question = (
                "[Make it shorter|Shorter, please|Summarise it|Can you make it shorter|Tell it in one sentence|A "
                "summary, please|What happened|What is it about|In short|Too long][.|?|!|]"
            )
            answer = told.short
        elif kind == "end":
            question = (
                "[How does it end|What happened at the end|How did it end|And then|What happened then|What is the "
                "ending][?|]"
            )
            answer = told.end
        elif kind == "title":
            question = "[Give it a title|What is the title|What would you call it|A title, please][.|?|]"
            names = f" and {slots['fn']}" if told.has_friend and self.chance(0.6) else ""
            answer = f'I would call it "{{n}}{names}".'
        elif kind == "liked":
            return self.small_talk("thanks")
        elif kind == "new":
            return self.new_subject()
        elif kind == "where":
            question, answer = (
                "[Is it true|Is that a true story|Did that really happen][?|]",
                ("[Every word of it, if you believe in stories.|I made it up, but it could be true.]"),
            )
        if not question:
            again = tell(subjects, self.casting)
            return [
                (
                    "user",
                    self.ask(
                        "[Another one|Another one, please|Tell me another one|One more|Another story|Again|Tell me "
                        "another story|More|One more, please|A different one][.|!|]"
                    ),
                ),
                ("assistant", again.text),
            ]
        slots = slots | {"a": f"a {slots['fhead']}"}
        return [("user", self.ask(question, **slots)), ("assistant", self.say(answer, **slots))]

    def new_subject(self) -> Document:
        asked, subjects = self.subjects()
        ask = (
            "[Now tell me one about {x}|Now one about {x}|And now about {x}|A story about {x}, please|Now a "
            "story about {x}|And {x}|What about {x}][.|?|]"
        )
        return [("user", self.ask(ask, x=asked)), ("assistant", tell(subjects, self.casting).text)]
