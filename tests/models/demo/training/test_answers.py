"""Requests with a single answer."""

from __future__ import annotations

import re
from random import Random

from models.demo.training.answers import counting, craft, numbered, poem, recipe, small_sum, spelling, stranger
from models.demo.training.subjects import Casting


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
