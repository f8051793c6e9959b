"""Subjects of stories: every one has a phrase, and held-out words stay on their side."""

from __future__ import annotations

from random import Random

from models.demo.training.subjects import HELD_OUT_ONE_IN, WORDS, Casting, Subject, is_held_out


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
