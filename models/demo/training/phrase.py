"""From a template to a sentence: choices, slots, articles, capitals, plurals and made-up words.

A template is English with `[one|another]` for a choice and `{slot}` for a word; choices nest. A finished sentence has
one space between words, "an" before a vowel and a capital after a full stop.
"""

import re
from random import Random

from models.demo.training.data_files import DATA

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_SPACES = re.compile(r" {2,}")
_BEFORE_VOWEL = re.compile(r"\b([Aa]) (?=[\"']?[aeiouAEIOU])(?![\"']?(?:uni|use|usu|eur|one\b|once\b|uku))", re.ASCII)
_BEFORE_SILENT_H = re.compile(r"\b([Aa]) (?=(?:hour|honest|heir))")
_AFTER_STOP = re.compile(r"((?:^|[.!?]\s+|\n|^\d+\. )\"?)([a-z])", re.MULTILINE)


def expand(template: str, rng: Random, slots: dict[str, str] | None = None) -> str:
    """Return the template with every choice made, from the inside out, and every slot filled.

    Raise KeyError if `slots` lacks a slot of the template.
    """
    while choice := _CHOICE.search(template):
        template = template[: choice.start()] + rng.choice(choice[1].split("|")) + template[choice.end() :]
    return template.format_map(slots or {})


def articles(text: str) -> str:
    """Write "a" as "an" before a vowel sound, as far as spelling tells it."""
    return _BEFORE_SILENT_H.sub(r"\1n ", _BEFORE_VOWEL.sub(r"\1n ", text))


def tidy(text: str) -> str:
    """Return a text with one space between words, the right articles, and capitals that begin sentences and lines."""
    text = articles(_SPACES.sub(" ", text.strip()))
    return _AFTER_STOP.sub(lambda m: m[1] + m[2].upper(), text)


def say(template: str, rng: Random, slots: dict[str, str] | None = None) -> str:
    """Return a finished text from a template."""
    return tidy(expand(template, rng, slots))


def plural(noun: str) -> str:
    """Return the plural of a noun: "mice", "sea lions"."""
    *before, last = noun.split()
    if last in DATA.words.irregular_plurals:
        last = DATA.words.irregular_plurals[last]
    elif last.endswith(("s", "x", "z", "ch", "sh")):
        last += "es"
    elif last.endswith("y") and last[-2:-1] not in "aeiou":
        last = last[:-1] + "ies"
    else:
        last += "s"
    return " ".join((*before, last))


# Parts of a syllable; a part that is listed twice is drawn more often.
_ONSETS = "b bl br c cl cr d dr f fl fr g gl gr h j k kl kr l m n p pl pr qu r s sh sk sl sn sp st t th tr v w y z ch"
_VOWELS = "a e i o u a e i o u ai ea ee oa oo ou y"
_CODAS = ",,,b,ck,d,f,g,k,l,ll,m,n,nd,ng,nk,nt,p,r,rd,rk,rn,s,sh,st,t,th,x,zz"
_SYLLABLE = (_ONSETS.split(), _VOWELS.split(), _CODAS.split(","))
_ACCENTS = str.maketrans("aeouicn", "áéöüíçñ")


def made_up(rng: Random, syllables: int = 0) -> str:
    """Return a pronounceable word that is in no pool, so that a model can only copy it. It never starts with a "u"."""
    count = syllables or rng.choices((1, 2, 3, 4), (15, 50, 28, 7))[0]
    word = "".join(rng.choice(parts) for _ in range(count) for parts in _SYLLABLE)
    if count > 1 and rng.random() < 0.2:
        word = rng.choice("aeio") + rng.choice(("", "l", "r", "n", "m")) + word
    if rng.random() < 0.03:
        at = rng.randrange(1, len(word))
        word = word[:at] + word[at].translate(_ACCENTS) + word[at + 1 :]
    return word if len(word) > 2 else word + "mo"


def made_up_name(rng: Random) -> str:
    """Return a made-up name: mostly like "Tarvel", sometimes like "Tarvel Moon" or "BX-7"."""
    if rng.random() < 0.04:
        return "".join(rng.choice("ABCDEFGHKLMNPRSTVWXZ") for _ in range(2)) + f"-{rng.randrange(1, 100)}"
    name = made_up(rng, rng.choices((1, 2, 3), (20, 60, 20))[0]).capitalize()
    return f"{name} {made_up(rng, 2).capitalize()}" if rng.random() < 0.06 else name


def misspell(text: str, rng: Random) -> str:
    """Return the text with one typo: two letters swapped, one doubled, or one left out."""
    at = rng.randrange(1, max(2, len(text) - 2))
    before, letter, after = text[:at], text[at : at + 1], text[at + 1 :]
    return before + (after[:1] + letter + after[1:], letter * 2 + after, after)[rng.randrange(3)]
