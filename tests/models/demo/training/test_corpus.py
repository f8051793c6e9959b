"""The corpus: grammar, phrases, stories, dialogues and vocabulary."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from random import Random

import pytest
import torch
from models.demo.training.answers import (
    another_poem,
    counting,
    craft,
    numbered,
    poem,
    recipe,
    small_sum,
    spelling,
    stranger,
)
from models.demo.training.corpus import IGNORED, MICRO_BATCH_TOKENS, Encoded, batches, collate, encode, encoded_stream
from models.demo.training.data_files import DATA, FOLDER, DataError, load
from models.demo.training.grammar import Document, documents
from models.demo.training.phrase import articles, expand, made_up, misspell, plural, tidy
from models.demo.training.stories import cast, choose_plot, mentions, tell
from models.demo.training.subjects import HELD_OUT_ONE_IN, WORDS, Casting, Subject, is_held_out
from models.demo.training.tool_check import call_of
from models.demo.training.tool_dialogues import ToolDialogues, tool_documents, written
from models.demo.training.vocabulary import BEGIN, END, PAD, SPECIAL, VOCABULARY_SIZE, save_tokenizer, train_tokenizer
from tokenizers import Tokenizer
from transformers import AutoTokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(Path(__file__).parents[4] / "models/demo/tokenizer.json"))


def test_targets_are_what_the_assistant_says(tokenizer: Tokenizer) -> None:
    found = encode([("user", "Hello."), ("assistant", "Good day.")], tokenizer)
    text = tokenizer.decode(found.ids, skip_special_tokens=False)
    assert text == f"{BEGIN}<|user|>Hello.{END}<|assistant|>Good day.{END}"
    learned = [label for label in found.labels if label != IGNORED]
    assert tokenizer.decode(learned, skip_special_tokens=False) == f"Good day.{END}"
    assert all(label in (token, IGNORED) for token, label in zip(found.ids, found.labels, strict=True))


def test_a_plain_story_is_learned_whole(tokenizer: Tokenizer) -> None:
    found = encode([("text", "Once upon a time.")], tokenizer, begin=False)
    assert found.labels == found.ids
    assert found.ids[-1] == tokenizer.token_to_id(END)


def test_rows_are_padded_at_the_end() -> None:
    batch = collate([Encoded([1, 2, 3], [1, 2, 3]), Encoded([4], [IGNORED])], pad=9)
    assert batch.ids.tolist() == [[1, 2, 3], [4, 9, 9]]
    assert batch.labels.tolist() == [[1, 2, 3], [IGNORED] * 3]


def test_batches_have_every_document_and_are_small(tokenizer: Tokenizer) -> None:
    rows = list(islice(encoded_stream("test", tokenizer), 40))
    made = list(batches(iter(rows), tokenizer, seed=1))
    assert sum(len(batch.ids) for batch in made) == len(rows)
    assert all(batch.ids.numel() <= MICRO_BATCH_TOKENS for batch in made)
    pad = tokenizer.token_to_id(PAD)
    tokens = torch.cat([batch.ids[batch.ids != pad] for batch in made])
    assert len(tokens) == sum(len(row.ids) for row in rows)


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


FOX = Subject("hero", "a fox named Tib", "a fox", "fox", "Tib")

OWL = Subject("hero", "an owl named Una", "an owl", "owl", "Una", female=True)

LAMP = Subject("thing", "a lamp", "a lamp", "lamp")


def test_a_plot_has_a_part_for_every_subject() -> None:
    rng = Random(1)
    assert all(mentions(choose_plot([FOX, OWL], rng), "fintro") for _ in range(50))
    assert all(mentions(choose_plot([FOX, LAMP], rng), "t") for _ in range(50))
    wishing = Subject("hero", "a fox who wants to fly", "a fox", "fox", "Tib", wish="fly")
    assert all(mentions(choose_plot([wishing], rng), "wish") for _ in range(50))


def test_the_users_subjects_have_the_main_parts() -> None:
    slots = cast([FOX, OWL, LAMP], Casting(Random(2)))
    assert (slots["n"], slots["fn"], slots["t"]) == ("Tib", "Una", "the lamp")
    assert (slots["he"], slots["fhe"]) == ("he", "she")


def test_hero_and_friend_have_different_names() -> None:
    for seed in range(50):
        slots = cast([FOX], Casting(Random(seed)))
        assert slots["fn"] != slots["n"]
        assert slots["fhead"] != slots["head"]


def test_a_story_names_its_hero_and_leaves_no_slot() -> None:
    for seed in range(50):
        story = tell([FOX], Casting(Random(seed)))
        assert "Tib" in story.text or "fox" in story.text
        assert not {"{", "}", "["} & set(story.text + story.short + story.end)


def test_about_one_word_in_twenty_is_held_out() -> None:
    words = [f"word{at}" for at in range(4000)]
    share = sum(map(is_held_out, words)) / len(words)
    assert 0.5 / HELD_OUT_ONE_IN < share < 2 / HELD_OUT_ONE_IN


def test_later_mentions_have_an_article_unless_the_subject_takes_none() -> None:
    assert Subject("hero", "a fox", "a fox", "fox").the == "the fox"
    assert Subject("place", "Paris", "Paris", "Paris", bare=True).the == "Paris"


def test_each_role_has_what_a_story_needs_of_it() -> None:
    casting = Casting(Random(3))
    for _ in range(200):
        for draw, role in (
            (casting.hero, "hero"),
            (casting.thing, "thing"),
            (casting.place, "place"),
            (casting.idea, "idea"),
        ):
            subject = draw()
            assert subject.role == role
            assert subject.asked
            assert subject.head
            assert bool(subject.name) == (role == "hero")
            assert "{" not in subject.asked + subject.first


def test_an_adjective_never_repeats_a_word_of_its_noun() -> None:
    casting = Casting(Random(4))
    adjective = WORDS.looks[0]
    assert casting.adorned((adjective,), f"{adjective} fox", 1.0) == f"{adjective} fox"
    assert casting.adorned((adjective,), "fox", 1.0) == f"{adjective} fox"
    assert casting.adorned((adjective,), "fox", 0.0) == "fox"


def test_items_are_numbered_from_one() -> None:
    assert numbered(["a", "b"]) == "1. a\n2. b"


def test_sums_are_right_and_words_are_repeated() -> None:
    casting = Casting(Random(1))
    for _ in range(100):
        prompt, answer = small_sum(casting)
        a, b = map(int, re.findall(r"\d+", prompt)[:2])
        assert str(a + b) in answer
        prompt, answer = spelling(casting)
        assert answer[1:-1] in prompt


def test_counting_has_every_number_once() -> None:
    casting = Casting(Random(2))
    for _ in range(100):
        _, answer = counting(casting)
        digits = [int(text) for text in re.findall(r"\d+", answer)]
        assert digits in ([], sorted(digits), sorted(digits, reverse=True))
        assert len(set(digits)) == len(digits)


def test_every_prompt_has_a_finished_answer() -> None:
    casting = Casting(Random(3))
    for _ in range(300):
        answers = [craft(casting)[1], recipe(casting)[1], poem(casting)[1], stranger(casting, "a story")[1]]
        assert all(answer and not set(answer) & {"{", "}", "["} for answer in answers), answers


def test_the_answer_of_a_call_has_its_result() -> None:
    dialogues = ToolDialogues(1)
    for _ in range(200):
        tool = next(one for one in dialogues.tools() if one.kind != "other")
        (_, _), (_, call), (_, result), (_, answer) = dialogues.called(tool)
        found = call_of(call)
        assert found is not None
        assert found[0] == tool.name
        assert list(found[1]) == [tool.argument]
        value = re.sub(r"</?tool_response>", "", result).strip().removeprefix("error: ")
        assert value in answer


def test_the_value_of_an_expression_is_right() -> None:
    dialogues = ToolDialogues(2)
    for _ in range(200):
        _, expression, result = dialogues.arithmetic()
        assert re.fullmatch(r"[-+*/(). 0-9]+", expression)
        try:
            value = eval(expression)  # of our own digits and operators
        except ZeroDivisionError:
            assert result == "error: division by zero"
        else:
            assert abs(float(result) - value) <= 1e-6 * max(1, abs(value))


def test_every_dialogue_declares_its_tools_and_the_same_seed_gives_the_same() -> None:
    first, second = (list(islice(tool_documents(3), 50)) for _ in range(2))
    assert first == second
    assert all(role == "system" and "Tools:" in text for (role, text), *_ in first)
    assert any("<tool_call>" in text for document in first for _, text in document)


def test_results_are_written_as_a_calculator_writes_them() -> None:
    from fractions import Fraction

    assert [written(one) for one in (Fraction(7), Fraction(1, 4), None)] == ["7", "0.25", "error: division by zero"]
    assert json.dumps(written(Fraction(1, 3))) == '"0.333333333"'


@pytest.fixture(scope="module")
def trained_tokenizer() -> Tokenizer:
    return train_tokenizer(["Once upon a time, there was a fox.", "The fox was happy."] * 10)


def test_special_tokens_come_first_and_bytes_follow(trained_tokenizer: Tokenizer) -> None:
    assert [trained_tokenizer.id_to_token(at) for at in range(len(SPECIAL))] == list(SPECIAL)
    assert len(SPECIAL) + 256 <= trained_tokenizer.get_vocab_size() <= VOCABULARY_SIZE


@pytest.mark.parametrize("text", ["The fox.", "  two  spaces ", "Füchse 狐 🦊", "\x00\n\t"])
def test_any_text_survives(trained_tokenizer: Tokenizer, text: str) -> None:
    encoded = trained_tokenizer.encode(text)
    assert encoded.tokens[0] == BEGIN
    assert trained_tokenizer.decode(encoded.ids) == text


def test_the_saved_files_are_read_by_transformers(trained_tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_tokenizer(trained_tokenizer, tmp_path, context=64)
    loaded = AutoTokenizer.from_pretrained(str(tmp_path))
    assert (loaded.bos_token, loaded.model_max_length) == (BEGIN, 64)
    messages = [{"role": "user", "content": "Hello."}]
    text = loaded.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|begin|><|user|>Hello.<|end|><|assistant|>"


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
