"""From a template to a sentence: choices, slots, articles, capitals and made-up words.

A template is English with `[one|another]` for a choice and `{slot}` for a word; both may nest. What comes out has one
space between words, "an" before a vowel and a capital after a full stop, so that templates need not care.
"""

import re
from random import Random

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_SPACES = re.compile(r" {2,}")
_BEFORE_VOWEL = re.compile(r"\b([Aa]) (?=[\"']?[aeiouAEIOU])(?![\"']?(?:uni|use|usu|eur|one\b|once\b|uku))", re.ASCII)
_AFTER_STOP = re.compile(r"((?:^|[.!?]\s+|\n|^\d+\. )\"?)([a-z])", re.MULTILINE)


class Slots(dict[str, str]):
    """Slot values; `{Hero}` is `{hero}` with a capital, so that a template can open a quotation's tail or a title."""

    def __missing__(self, key: str) -> str:
        if key[:1].isupper():
            value = self[key[0].lower() + key[1:]]
            return value[:1].upper() + value[1:]
        raise KeyError(f"no slot {{{key}}}: the plot needs a slot that was not cast")


def expand(template: str, rng: Random, slots: dict[str, str] | None = None) -> str:
    """Choose every `[a|b]` from the inside out, then fill the slots."""
    while choice := _CHOICE.search(template):
        template = template[: choice.start()] + rng.choice(choice[1].split("|")) + template[choice.end() :]
    return template.format_map(Slots(slots or {}))


def articles(text: str) -> str:
    """ "a" becomes "an" before a vowel sound, as far as spelling tells it."""
    text = _BEFORE_VOWEL.sub(lambda m: f"{m[1]}n ", text)
    return re.sub(r"\b([Aa]) (?=(?:hour|honest|heir))", r"\1n ", text)


def tidy(text: str) -> str:
    """One space between words, the right article, a capital at the start of every sentence and line."""
    text = articles(_SPACES.sub(" ", text.strip()))
    return _AFTER_STOP.sub(lambda m: m[1] + m[2].upper(), text)


def say(template: str, rng: Random, slots: dict[str, str] | None = None) -> str:
    """A finished text from a template."""
    return tidy(expand(template, rng, slots))


# Of a syllable; what stands more than once is drawn more often.
_ONSETS = "b bl br c cl cr d dr f fl fr g gl gr h j k kl kr l m n p pl pr qu r s sh sk sl sn sp st t th tr v w y z ch"
_VOWELS = "a e i o u a e i o u ai ea ee oa oo ou y"
_CODAS = ",,,b,ck,d,f,g,k,l,ll,m,n,nd,ng,nk,nt,p,r,rd,rk,rn,s,sh,st,t,th,x,zz"
_SYLLABLE = (_ONSETS.split(), _VOWELS.split(), _CODAS.split(","))
_ACCENTS = str.maketrans({"a": "á", "e": "é", "o": "ö", "u": "ü", "i": "í", "c": "ç", "n": "ñ"})


def made_up(rng: Random, syllables: int = 0) -> str:
    """A pronounceable word that no pool holds, so that a model can only copy it; it never starts with a "u"."""
    count = syllables or rng.choices((1, 2, 3, 4), (15, 50, 28, 7))[0]
    word = "".join(
        rng.choice(_ONSETS.split()) + rng.choice(_VOWELS.split()) + rng.choice(_CODAS.split(",")) for _ in range(count)
    )
    if count > 1 and rng.random() < 0.2:
        word = rng.choice("aeio") + rng.choice(("", "l", "r", "n", "m")) + word
    if rng.random() < 0.03:
        at = rng.randrange(1, len(word))
        word = word[:at] + word[at].translate(_ACCENTS) + word[at + 1 :]
    return word if len(word) > 2 else word + "mo"


def made_up_name(rng: Random) -> str:
    """A made-up word as a name: mostly "Tarvel", at times "Tarvel Moon" or "BX-7"."""
    if rng.random() < 0.04:
        return "".join(rng.choice("ABCDEFGHKLMNPRSTVWXZ") for _ in range(2)) + f"-{rng.randrange(1, 100)}"
    name = made_up(rng, rng.choices((1, 2, 3), (20, 60, 20))[0]).capitalize()
    return f"{name} {made_up(rng, 2).capitalize()}" if rng.random() < 0.06 else name


def misspell(text: str, rng: Random) -> str:
    """One slip of the fingers: two letters swapped, one doubled or one left out."""
    at = rng.randrange(1, max(2, len(text) - 2))
    slip = rng.randrange(3)
    if slip == 0:
        return text[:at] + text[at + 1 : at + 2] + text[at : at + 1] + text[at + 2 :]
    return text[:at] + text[at : at + 1] * 2 + text[at + 1 :] if slip == 1 else text[:at] + text[at + 1 :]
