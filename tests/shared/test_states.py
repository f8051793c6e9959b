"""The Lua scripts and Python use the same words: each script returns exactly the values of its enum."""

from __future__ import annotations

import re
from enum import StrEnum
from importlib.resources import files

import pytest

from quire.shared.states import (
    CancelReply,
    ClaimReply,
    DeleteReply,
    DropReason,
    ExpireReply,
    OutcomeName,
    ParkReply,
    RequestState,
    SubmitReply,
    UnparkReply,
)

SCRIPTS = {
    path.name.removesuffix(".lua"): re.sub(r"--.*", "", path.read_text())
    for path in (files("quire.shared") / "scripts").iterdir()
    if path.name.endswith(".lua")
}
EVERYTHING = "\n".join(SCRIPTS.values())


def words(pattern: str, source: str) -> set[str]:
    return set(re.findall(pattern, source))


@pytest.mark.parametrize(
    ("script", "replies"),
    [("cancel", CancelReply), ("expire", ExpireReply), ("delete", DeleteReply), ("park", ParkReply)],
)
def test_a_script_that_returns_a_word_returns_each_of_its_enum(script: str, replies: type[StrEnum]) -> None:
    assert words(r"return '(\w+)'", SCRIPTS[script]) == set(replies)


@pytest.mark.parametrize(
    ("script", "replies"), [("submit", SubmitReply), ("claim", ClaimReply), ("unpark", UnparkReply)]
)
def test_a_script_that_returns_an_array_begins_it_with_each_of_its_enum(script: str, replies: type[StrEnum]) -> None:
    assert words(r"return \{'(\w+)'", SCRIPTS[script]) == set(replies)


def test_claim_drops_for_each_reason() -> None:
    assert words(r"(?:drop\(|\{'dropped', )'(\w+)'", SCRIPTS["claim"]) == set(DropReason)


def test_the_states_of_a_request() -> None:
    compared = words(r"(?:state|req\[1\]|req\[2\]|state\[[12]\]) [=~]= '(\w+)'", EVERYTHING)
    assert compared == set(RequestState)
    assert words(r"'HSET'[^\n]*'state', '(\w+)'", EVERYTHING) == set(RequestState)


def test_the_outcomes_that_scripts_give_are_known() -> None:
    given = words(r"finish_unowned\(prefix, id, '(\w+)'", EVERYTHING) | words(r"outcome = '(\w+)'", EVERYTHING)
    assert given == set(OutcomeName) - {OutcomeName.STOP, OutcomeName.LENGTH}
