"""Environments of clients are made once, and only a missing package index is a reason to skip a test."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.outside import environments
from tests.outside.environments import Case, Environments

PIP = [sys.executable, "-m", "pip", "install", "--dry-run", "--retries", "1", "--index-url"]
REFUSING = "http://127.0.0.1:9/simple"


def test_an_environment_is_made_once(tmp_path: Path) -> None:
    made: list[Path] = []

    def install(place: Path) -> None:
        place.mkdir()
        made.append(place)

    first = Environments(tmp_path, False).environment("python", ["a==1", "b==2"], install)
    again = Environments(tmp_path, False).environment("python", ["b==2", "a==1"], install)
    other = Environments(tmp_path, False).environment("python", ["a==1", "b==3"], install)
    assert first == again != other
    assert made == [first, other]


def test_pins_can_be_left_out(tmp_path: Path) -> None:
    pinned = ["lm_eval[api]==0.4.13", "httpx", "zod@4.6.7", "@ai-sdk/openai@3.0.141"]
    assert environments.wanted(pinned, newest=False) == pinned
    assert environments.wanted(pinned, newest=True) == ["lm_eval[api]", "httpx", "zod", "@ai-sdk/openai"]
    pinned_place, newest_place = (
        Environments(tmp_path, newest).environment("python", ["a"], Path.mkdir) for newest in (False, True)
    )
    assert pinned_place != newest_place


def test_an_environment_that_was_not_completed_is_made_anew(tmp_path: Path) -> None:
    def install(place: Path) -> None:
        place.mkdir()
        (place / "half").touch()
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        Environments(tmp_path, False).environment("python", ["a==1"], install)
    place = Environments(tmp_path, False).environment("python", ["a==1"], Path.mkdir)
    assert list(place.iterdir()) == []


def test_an_index_that_does_not_answer_skips_the_test(tmp_path: Path) -> None:
    with pytest.raises(pytest.skip.Exception, match="no package index can be reached"):
        environments.install_packages([*PIP, REFUSING, "quire-has-no-such-requirement==1"], tmp_path)


def test_another_failure_of_the_installer_fails_the_test(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="conflicting dependencies"):
        environments.install_packages([sys.executable, "-c", "raise SystemExit('conflicting dependencies')"], tmp_path)


def test_an_exception_of_a_case_fails_the_test() -> None:
    assert Case({"city": "Rome"}, "").value() == {"city": "Rome"}
    with pytest.raises(AssertionError, match="ValueError"):
        Case(None, "Traceback ... ValueError: x").value()


def test_no_key_of_the_user_reaches_a_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://elsewhere")
    code = "import os; print(os.environ['OPENAI_API_KEY'], os.environ.get('OPENAI_BASE_URL'))"
    assert environments.run([sys.executable, "-c", code], tmp_path, 30).stdout == "none None\n"
