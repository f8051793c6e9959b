"""The demonstration grammar writes whole English, and the same English for the same seed."""

import re
from itertools import islice
from random import Random

import pytest

from ops.demo import words
from ops.demo.grammar import documents
from ops.demo.hero_plots import HERO_PLOTS
from ops.demo.phrase import articles, expand, made_up, misspell, tidy
from ops.demo.poems import another_poem
from ops.demo.smalltalk import TALKS
from ops.demo.stories import tell
from ops.demo.subjects import Casting, is_held_out, plural
from ops.demo.voice import Document
from ops.demo.world_plots import PLACE_PLOTS, THING_PLOTS

pytestmark = pytest.mark.slow

MANY = 4000
ROLES = {"system", "user", "assistant", "text"}


@pytest.fixture(scope="module")
def corpus() -> list[Document]:
    return list(islice(documents("test"), MANY))


@pytest.fixture(scope="module")
def said(corpus: list[Document]) -> list[str]:
    return [text for document in corpus for role, text in document if role in ("assistant", "text")]


def offenders(pattern: str, texts: list[str], flags: int = 0) -> list[str]:
    return [text for text in texts if re.search(pattern, text, flags)][:3]


def test_the_same_seed_writes_the_same_documents():
    assert list(islice(documents(7), 200)) == list(islice(documents(7), 200))


def test_another_seed_writes_other_documents():
    assert list(islice(documents(7), 50)) != list(islice(documents(8), 50))


def test_the_held_out_stream_never_ends_for_want_of_words():
    assert len(list(islice(documents(7, held_out=True), 500))) == 500


def test_held_out_nouns_are_drawn_on_their_side_only():
    for held_out in (False, True):
        casting = Casting(Random(1), held_out)
        assert all(is_held_out(casting.pick(words.CREATURES)) == held_out for _ in range(300))


def test_every_document_alternates_user_and_assistant(corpus: list[Document]):
    for document in corpus:
        roles = [role for role, _ in document]
        assert set(roles) <= ROLES
        turns = [role for role in roles if role != "system"]
        assert turns == ["text"] or turns == ["user", "assistant"] * (len(turns) // 2)


def test_no_word_is_doubled(said: list[str]):
    assert not offenders(r"\b([a-z]+) \1\b", said, re.IGNORECASE)


def test_articles_agree(said: list[str]):
    texts = [text.replace("unicorn", "horse") for text in said]
    assert not offenders(r"\b[Aa] [aeiou]", texts)
    assert not offenders(r"\b[Aa]n [bcdfgjklmnpqrstvwxyz]", texts)


def test_every_text_ends_in_punctuation(said: list[str]):
    assert not [text for text in said if text[-1] not in '.!?"'][:3]


def test_every_text_begins_with_a_capital_or_a_number(said: list[str]):
    assert not [text for text in said if not (text[0] in '"1' or text[0].isupper() or text[0].isdigit())][:3]


def test_no_template_shows_through(said: list[str]):
    assert not offenders(r"[{}\[\]|]|  | [,.!?]|\.\.|[?!]\.", said)


def test_every_plot_names_what_it_is_cast_for():
    casting = Casting(Random(3))
    for _ in range(1500):
        subject = casting.subject()
        story = tell([subject], casting).text.lower()
        assert subject.head.removeprefix("the ").lower() in story or subject.name.lower() in story


def test_stories_are_short_and_whole():
    casting = Casting(Random(4))
    lengths = [len(tell([casting.subject()], casting).text.split()) for _ in range(1000)]
    assert min(lengths) >= 60
    assert max(lengths) <= 170


def test_there_are_plots_and_kinds_of_small_talk_enough():
    assert len(HERO_PLOTS + THING_PLOTS + PLACE_PLOTS) >= 18
    assert len(TALKS) >= 12


def test_a_poem_has_four_lines():
    casting = Casting(Random(5))
    assert all(len(another_poem(casting.thing(), casting).splitlines()) == 4 for _ in range(200))


@pytest.mark.parametrize(
    ("plain", "right"),
    [
        ("a owl", "an owl"),
        ("a unicorn", "a unicorn"),
        ("a hour", "an hour"),
        ("A old fox", "An old fox"),
        ("a fox", "a fox"),
    ],
)
def test_articles(plain: str, right: str):
    assert articles(plain) == right


@pytest.mark.parametrize(
    ("one", "several"),
    [("fox", "foxes"), ("mouse", "mice"), ("pony", "ponies"), ("donkey", "donkeys"), ("sea lion", "sea lions")],
)
def test_plurals(one: str, several: str):
    assert plural(one) == several


def test_choices_nest_and_slots_are_filled():
    assert expand("[a|[a]] {who}", Random(1), {"who": "fox"}) == "a fox"
    assert tidy("it is a  owl. it flies.") == "It is an owl. It flies."


def test_an_unknown_slot_names_itself():
    with pytest.raises(KeyError, match=r"no slot \{nobody\}"):
        expand("{nobody}", Random(1))


def test_made_up_words_take_the_article_that_their_first_letter_asks_for():
    rng = Random(6)
    assert not [word for word in (made_up(rng) for _ in range(3000)) if word[0] == "u" or not word.isalpha()]


def test_a_slip_of_the_fingers_changes_little():
    rng = Random(8)
    assert all(abs(len(misspell("story about", rng)) - 11) <= 1 for _ in range(100))
