"""The corpus: grammar, phrases, stories, dialogues and vocabulary."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from random import Random

import pytest
import torch
from models.demo.training.answers import counting, small_sum, spelling
from models.demo.training.corpus import IGNORED, MICRO_BATCH_TOKENS, Encoded, batches, collate, encode, encoded_stream
from models.demo.training.data_files import DATA, FOLDER, DataError, load
from models.demo.training.grammar import Document, documents
from models.demo.training.stories import tell
from models.demo.training.subjects import Casting, is_held_out
from models.demo.training.tool_check import call_of
from models.demo.training.tool_dialogues import ToolDialogues, tool_documents
from models.demo.training.vocabulary import BEGIN, END, PAD, save_tokenizer, train_tokenizer
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

# The SHA-256 of the first documents of seed 1 as JSON. A new entry in a data file or another order of random draws
# changes it; the assertion then shows the new value.
DIGESTS = {
    (documents, False): "6639abd78b50f0365c0b1a24801d6ac1c8630bfbbfa980a26e830ed9407c9d54",
    (documents, True): "c3299bdc97bffb98de1e678737fb188655ebdf4d25da43504b47006faffbf61b",
    (tool_documents, False): "4292a8c5bf1dcac30e353264f0ef7ca74a750a65eb4f6400315bf947f69a4d89",
    (tool_documents, True): "fecccd4c4a4bbc209eae8868a865b2b0192ed9839351c1c24a1c8ccd473e77a0",
}


@pytest.fixture(scope="module")
def corpus() -> list[Document]:
    return list(islice(documents("test"), MANY))


@pytest.fixture(scope="module")
def said(corpus: list[Document]) -> list[str]:
    return [text for document in corpus for role, text in document if role in ("assistant", "text")]


def offenders(pattern: str, texts: list[str], flags: int = 0) -> list[str]:
    return [text for text in texts if re.search(pattern, text, flags)][:3]


@pytest.mark.parametrize(("stream", "held_out"), DIGESTS)
def test_the_corpus_changes_on_purpose_only(stream: Callable[..., Iterator[Document]], held_out: bool):
    text = json.dumps(list(islice(stream(1, held_out), 500)))
    assert hashlib.sha256(text.encode()).hexdigest() == DIGESTS[stream, held_out]


def test_another_seed_writes_other_documents():
    assert list(islice(documents(7), 50)) != list(islice(documents(8), 50))


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


@pytest.fixture(scope="module")
def trained_tokenizer() -> Tokenizer:
    return train_tokenizer(["Once upon a time, there was a fox.", "The fox was happy."] * 10)


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
