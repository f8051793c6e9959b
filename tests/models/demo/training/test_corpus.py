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
from models.demo.training.average import OTHERS, WEIGHTS, average
from models.demo.training.corpus import IGNORED, MICRO_BATCH_TOKENS, Encoded, batches, collate, encode, encoded_stream
from models.demo.training.data_files import DATA, FOLDER, DataError, load
from models.demo.training.grammar import Document, documents
from models.demo.training.stories import tell
from models.demo.training.subjects import Casting, is_held_out
from models.demo.training.tool_check import call_of
from models.demo.training.tool_dialogues import ToolDialogues, tool_documents
from models.demo.training.train import WARMUP_STEPS, rate_at
from models.demo.training.vocabulary import BEGIN, END, PAD, save_tokenizer, train_tokenizer
from safetensors.torch import load_file, save_file
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


@pytest.mark.parametrize(("stream", "held_out"), DIGESTS)
def test_the_corpus_changes_on_purpose_only(stream: Callable[..., Iterator[Document]], held_out: bool):
    text = json.dumps(list(islice(stream(1, held_out), 500)))
    assert hashlib.sha256(text.encode()).hexdigest() == DIGESTS[stream, held_out]


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
@pytest.mark.parametrize(
    "wrong",
    [
        r"(?i)\b([a-z]+) \1\b",  # a word twice
        r"\b[Aa] (?!unicorn)[aeiou]|\b[Aa]n (unicorn|[bcdfgjklmnpqrstvwxyz])",
        r"[^.!?\"]\Z",
        r"\A[^\"A-Z0-9]",
        r"[{}\[\]|]|  | [,.!?]|\.\.|[?!]\.",  # a template shows through
    ],
)
def test_texts_are_written_well(wrong: str, said: list[str]):
    assert not [text for text in said if re.search(wrong, text)][:3]


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
        ("recipes", "steps =", "step =", "recipe 1: unknown key 'step'; the keys here are: dish, steps"),
        ("plots", "end =", "#", "hero 1: the key 'end' is missing; add it"),
        ("lessons", "[a GPU|GPUs|the GPU]", "{n}", "term 23.names: unknown slot {n}; the slots here are: none"),
        ("requests", '"Imagine {x}."', '"Imagine {x."', "story 19: expected '}'"),
        ("requests", '"Imagine {x}."', '"Imagine [it|{x}."', "story 19: a choice lacks its ']'"),
        ("requests", '"Imagine {x}."', '"Imagine|{x}."', "story 19: '|' is outside of a choice"),
        ("requests", '"Imagine {x}."', "7", "story 19: 7 is not a text"),
        ("strangers", 'prompts = ["?"', 'prompts = []\nnot = ["?"', "empty"),
        ("words", "spring, summer,", "spring,, summer,", "ideas: a word is empty"),
        ("words", "fox, bear,", "fox, bear, fox,", "creatures: the word 'fox' appears twice; remove one"),
        ("subjects", "weight = 53", 'weight = "53"', "hero 1.weight: '53' is not a number"),
        ("poems", "poems = [", "poems = [[", ""),
    ],
)
def test_a_wrong_entry_of_a_data_file_is_named(
    broken: Callable[[str, str, str], str], name: str, old: str, new: str, message: str
):
    assert broken(f"{name}.toml", old, new).startswith(f"{name}.toml: {message}")


# --- train ------------------------------------------------------------------------------------------------------------
# Training: the loss falls, and weights are averaged.


def test_the_rate_warms_up_and_falls_to_a_hundredth() -> None:
    assert rate_at(0, 0.0, 1.0) == pytest.approx(1 / WARMUP_STEPS)
    assert rate_at(WARMUP_STEPS, 0.0, 2.0) == pytest.approx(2.0)
    assert rate_at(1000, 0.5, 1.0) == pytest.approx(0.505)
    assert rate_at(1000, 1.0, 1.0) == pytest.approx(0.01)
    rates = [rate_at(1000, done / 100, 1.0) for done in range(101)]
    assert rates == sorted(rates, reverse=True)


def checkpoint(folder: Path, value: float, seed: int) -> Path:
    folder.mkdir()
    save_file({"w": torch.full((2, 3), value, dtype=torch.bfloat16)}, folder / WEIGHTS)
    for name in OTHERS:
        (folder / name).write_text(json.dumps({"runs": [{"seed": seed}]}))
    return folder


def test_weights_are_the_weighted_mean_and_the_runs_are_named(tmp_path: Path) -> None:
    first, second = checkpoint(tmp_path / "a", 1.0, 1), checkpoint(tmp_path / "b", 2.0, 2)
    average({first: 0.75, second: 0.25}, tmp_path / "out")
    found = load_file(tmp_path / "out" / WEIGHTS)["w"]
    assert found.dtype is torch.bfloat16
    assert torch.equal(found.float(), torch.full((2, 3), 1.25))
    log = json.loads((tmp_path / "out" / "training.json").read_text())
    assert [(one["share"], one["runs"][0]["seed"]) for one in log["average"]] == [(0.75, 1), (0.25, 2)]
    assert log["runs"] == [{"seed": 1}]


def test_shares_that_do_not_add_up_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="add up to"):
        average({checkpoint(tmp_path / "a", 1.0, 1): 0.5}, tmp_path / "out")
