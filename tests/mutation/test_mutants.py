"""The faults that `make mutants` makes."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.mutation.mutants import sample

ROOT = Path(__file__).resolve().parents[2]

LUA = """-- a comment with 1 == 2
local count = redis.call('HGET', KEYS[1], 'a == b')
if count == 3 and not waits then
    redis.call('DEL', KEYS[1])
    count = count - 1
end
"""


def test_lua_mutants_change_one_place_outside_of_comments_and_strings(tmp_path: Path) -> None:
    (tmp_path / "a.lua").write_text(LUA)
    mutants = {(mutant.line, mutant.after) for mutant in sample(tmp_path, ["a.lua"], 100, seed=1)}
    assert mutants == {
        (2, "local count = redis.call('HGET', KEYS[2], 'a == b')"),
        (3, "if count ~= 3 and not waits then"),
        (3, "if count == 4 and not waits then"),
        (3, "if count == 3 or not waits then"),
        (3, "if count == 3 and  waits then"),
        (4, "redis.call('DEL', KEYS[2])"),
        (4, "do end"),
        (5, "count = count + 1"),
        (5, "count = count - 2"),
        (5, "count = nil"),
    }


def test_python_mutants_leave_out_log_lines_and_messages(tmp_path: Path) -> None:
    pytest.importorskip("mutmut", reason="mutmut is not installed: make mutants")
    (tmp_path / "a.py").write_text(
        "LIMIT = 3\n\n\ndef check(size):\n    log.info('%d of %d', size, LIMIT)\n"
        "    if size > LIMIT:\n        raise ValueError('it is too large')\n"
    )
    mutants = sample(tmp_path, ["a.py"], 100, seed=1)
    assert {(mutant.line, mutant.after) for mutant in mutants} == {
        (6, "if size >= LIMIT:"),
        (7, "raise ValueError(None)"),
    }


def test_a_seed_gives_the_same_mutants(tmp_path: Path) -> None:
    (tmp_path / "a.lua").write_text(LUA)
    names = [[mutant.name for mutant in sample(tmp_path, ["a.lua"], 4, seed)] for seed in (1, 1, 2)]
    assert names[0] == names[1] != names[2]


def test_equivalent_mutants_are_of_lines_that_exist() -> None:
    reasons = tomllib.loads((ROOT / "tests/mutation/equivalent.toml").read_text())
    for mutant in (mutant for entry in reasons.values() for mutant in entry["mutants"]):
        path, change = mutant.split(": ", 1)
        line = change.split(" -> ", 1)[0]
        assert " ".join(line.split()) in " ".join((ROOT / path).read_text().split()), mutant
