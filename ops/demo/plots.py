"""What a plot is, its slots, and the phrases that many plots share.

A plot is one text whose paragraphs are separated by an empty line. Slots of the cast:
  {n} the hero's name, {k} "the fox", {intro} "a small fox named Tib", {he} {him} {his}
  {fn} {fk} {fintro} {fhe} {fhim} {fhis} the same for the friend
  {at} "a rusty key", {t} "the key";  {ap} "a lighthouse", {p} "the lighthouse";  {i} "winter"
  {where} a setting, {wish} a wish, {fear} a fear
A plot is cast for the slots that it mentions, and `short` retells it in one or two sentences.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Plot:
    text: str  # `{ONCE}`, `{THEN}` and the other fragments below are already in their places
    short: str
    end: str  # the answer to "how does it end?"

    def __post_init__(self) -> None:
        for fragment, phrase in FRAGMENTS.items():
            object.__setattr__(self, "text", self.text.replace(fragment, phrase))

    def mentions(self, slot: str) -> bool:
        return f"{{{slot}}}" in self.text


FRAGMENTS = {
    "{ONCE}": "[Once upon a time there was {intro}|Once upon a time, there lived {intro}|There once was "
    "{intro}|{where}, there lived {intro}]",
    "{THEN}": "[One morning|One evening|One day|One quiet afternoon|On the first day of spring|On a cold winter "
    "day|One rainy morning]",
    "{LATER}": "[After a while|A little later|Before long|By the evening|At last]",
    "{GLAD}": "[{n} smiled|{n} was very glad|{n} laughed out loud|{n} felt warm inside|{n} could hardly believe it]",
    "{GOOD_NIGHT}": "[That night, {n} slept very well.|And when the moon came up, {n} was already fast asleep, "
    "smiling.|From that day on, {n} was never quite so lonely again.|And if you pass that way, you may "
    "still see {k} there today.|{n} never forgot that day, and neither did anyone else.|It had been a "
    "good day, and {n} knew that there would be more.]",
    "{TOGETHER}": "[From that day on, {n} and {fn} were the best of friends.|And so {n} and {fn} sat side by side "
    "until the stars came out.|They are still friends today, and they still laugh about it.|That night "
    "they drank tea together, and nobody felt alone.|{n} and {fn} walked home slowly, because neither "
    "of them wanted the day to end.]",
    "{OLD_THING}": "[was dusty and quiet|had not been used for years|waited patiently]",
}
