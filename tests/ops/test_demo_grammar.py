"""The demonstration grammar writes whole English, and the same English for the same seed."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from random import Random

import pytest
from models.demo.training.answers import another_poem
from models.demo.training.data_files import DATA, FOLDER, DataError, load
from models.demo.training.grammar import Document, documents
from models.demo.training.phrase import articles, expand, made_up, misspell, plural, tidy
from models.demo.training.stories import tell
from models.demo.training.subjects import Casting, is_held_out

slow = pytest.mark.slow

MANY = 4000
ROLES = {"system", "user", "assistant", "text"}
# By held-out side: the SHA-256 of the first 500 documents of seed 1 as JSON. A new entry in a data file or another
# order of random draws changes it; the assertion then shows the new value.
DIGESTS = {
    False: "6639abd78b50f0365c0b1a24801d6ac1c8630bfbbfa980a26e830ed9407c9d54",
    True: "c3299bdc97bffb98de1e678737fb188655ebdf4d25da43504b47006faffbf61b",
}


@pytest.fixture(scope="module")
def corpus() -> list[Document]:
    return list(islice(documents("test"), MANY))


@pytest.fixture(scope="module")
def said(corpus: list[Document]) -> list[str]:
    return [text for document in corpus for role, text in document if role in ("assistant", "text")]


def offenders(pattern: str, texts: list[str], flags: int = 0) -> list[str]:
    return [text for text in texts if re.search(pattern, text, flags)][:3]


@pytest.mark.parametrize("held_out", DIGESTS)
def test_the_corpus_changes_on_purpose_only(held_out: bool):
    text = json.dumps(list(islice(documents(1, held_out), 500)))
    assert hashlib.sha256(text.encode()).hexdigest() == DIGESTS[held_out]


def test_the_same_seed_writes_the_same_documents():
    assert list(islice(documents(7), 200)) == list(islice(documents(7), 200))


def test_another_seed_writes_other_documents():
    assert list(islice(documents(7), 50)) != list(islice(documents(8), 50))


@slow
def test_the_held_out_stream_never_ends_for_want_of_words():
    assert len(list(islice(documents(7, held_out=True), 500))) == 500


def test_held_out_nouns_are_drawn_on_their_side_only():
    for held_out in (False, True):
        casting = Casting(Random(1), held_out)
        assert all(is_held_out(casting.pick(DATA.words.creatures)) == held_out for _ in range(300))


@slow
def test_every_document_alternates_user_and_assistant(corpus: list[Document]):
    for document in corpus:
        roles = [role for role, _ in document]
        assert set(roles) <= ROLES
        turns = [role for role in roles if role != "system"]
        assert turns == ["text"] or turns == ["user", "assistant"] * (len(turns) // 2)


@slow
def test_no_word_is_doubled(said: list[str]):
    assert not offenders(r"\b([a-z]+) \1\b", said, re.IGNORECASE)


@slow
def test_articles_agree(said: list[str]):
    texts = [text.replace("unicorn", "horse") for text in said]
    assert not offenders(r"\b[Aa] [aeiou]", texts)
    assert not offenders(r"\b[Aa]n [bcdfgjklmnpqrstvwxyz]", texts)


@slow
def test_every_text_ends_in_punctuation(said: list[str]):
    assert not [text for text in said if text[-1] not in '.!?"'][:3]


@slow
def test_every_text_begins_with_a_capital_or_a_number(said: list[str]):
    assert not [text for text in said if not (text[0] in '"1' or text[0].isupper() or text[0].isdigit())][:3]


@slow
def test_no_template_shows_through(said: list[str]):
    assert not offenders(r"[{}\[\]|]|  | [,.!?]|\.\.|[?!]\.", said)


@slow
def test_every_plot_names_what_it_is_cast_for():
    casting = Casting(Random(3))
    for _ in range(1500):
        subject = casting.subject()
        story = tell([subject], casting).text.lower()
        assert subject.head.removeprefix("the ").lower() in story or subject.name.lower() in story


@slow
def test_stories_are_short_and_whole():
    casting = Casting(Random(4))
    lengths = [len(tell([casting.subject()], casting).text.split()) for _ in range(1000)]
    assert min(lengths) >= 60
    assert max(lengths) <= 170


def test_there_are_plots_and_kinds_of_small_talk_enough():
    assert len(DATA.plots.hero + DATA.plots.thing + DATA.plots.place) >= 18
    assert len(DATA.smalltalk.talk) >= 12


@slow
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
    with pytest.raises(KeyError, match="nobody"):
        expand("{nobody}", Random(1))


def test_made_up_words_take_the_article_that_their_first_letter_asks_for():
    rng = Random(6)
    assert not [word for word in (made_up(rng) for _ in range(3000)) if word[0] == "u" or not word.isalpha()]


def test_a_slip_of_the_fingers_changes_little():
    rng = Random(8)
    assert all(abs(len(misspell("story about", rng)) - 11) <= 1 for _ in range(100))


@pytest.fixture
def broken(tmp_path: Path) -> Callable[[str, str, str], str]:
    """Replaces a text of one data file, loads a copy of the folder, and returns the error's message."""

    def load_broken(name: str, old: str, new: str) -> str:
        shutil.copytree(FOLDER, tmp_path / "data")
        text = (FOLDER / name).read_text(encoding="utf-8")
        assert old in text
        (tmp_path / "data" / name).write_text(text.replace(old, new, 1), encoding="utf-8")
        with pytest.raises(DataError) as error:
            load(tmp_path / "data")
        return str(error.value)

    return load_broken


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        (
            "recipes.toml",
            "steps =",
            "step =",
            "recipes.toml: recipe 1: unknown key 'step'; the keys here are: dish, steps",
        ),
        ("plots.toml", "end =", "#", "plots.toml: hero 1: the key 'end' is missing; add it"),
        ("smalltalk.toml", "[talk.joke]", "[talk.jokes]", "smalltalk.toml: talk: the key 'joke' is missing; add it"),
        (
            "dialogues.toml",
            "I am {x}]",
            "I am {nobody}]",
            "dialogues.toml: asked_name.answer: unknown slot {nobody}; the slots here are: x OFFER",
        ),
        (
            "lessons.toml",
            "[a GPU|GPUs|the GPU]",
            "{n}",
            "lessons.toml: term 23.names: unknown slot {n}; the slots here are: none",
        ),
        ("plots.toml", "{LATER}", "{EARLIER}", "plots.toml: hero 1.text: unknown slot {EARLIER}"),
        ("requests.toml", '"Imagine {x}."', '"Imagine {x."', "requests.toml: story 19: expected '}'"),
        (
            "requests.toml",
            '"Imagine {x}."',
            '"Imagine [it|{x}."',
            "requests.toml: story 19: a choice lacks its ']'",
        ),
        (
            "requests.toml",
            '"Imagine {x}."',
            '"Imagine|{x}."',
            "requests.toml: story 19: '|' is outside of a choice",
        ),
        ("requests.toml", '"Imagine {x}."', "7", "requests.toml: story 19: 7 is not a text"),
        ("strangers.toml", 'prompts = ["?"', 'prompts = []\nnot = ["?"', "strangers.toml: empty"),
        ("schema.toml", '["", 6]', '["", 11]', "lists.toml: lists.rainy_day.items: has 10 items; add items up to 11"),
        ("words.toml", "spring, summer,", "spring,, summer,", "words.toml: ideas: a word is empty"),
        (
            "words.toml",
            "fox, bear,",
            "fox, bear, fox,",
            "words.toml: creatures: the word 'fox' appears twice; remove one",
        ),
        ("subjects.toml", "weight = 53", 'weight = "53"', "subjects.toml: hero 1.weight: '53' is not a number"),
        ("poems.toml", "poems = [", "poems = [[", "poems.toml: "),
    ],
)
def test_a_wrong_entry_of_a_data_file_is_named(
    broken: Callable[[str, str, str], str], name: str, old: str, new: str, message: str
):
    assert broken(name, old, new).startswith(message)
