"""A wrong entry of a data file is refused with its file and place."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from models.demo.training.data_files import FOLDER, DataError, load


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
