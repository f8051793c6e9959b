"""Stories are about their subjects, and their cast fits the text."""

from __future__ import annotations

from random import Random

from models.demo.training.stories import cast, choose_plot, mentions, tell
from models.demo.training.subjects import Casting, Subject

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
