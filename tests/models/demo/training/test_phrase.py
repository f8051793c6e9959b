"""Phrases of the training texts: choices, slots, articles, plurals and misspellings."""

from random import Random

import pytest
from models.demo.training.phrase import articles, expand, made_up, misspell, plural, tidy


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
