from __future__ import annotations

import subprocess
import sys


def try_out(schema: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-P", "-m", "quire.shared.text.json_schema_trial"]
    return subprocess.run(command, input=schema.encode(), capture_output=True, timeout=60, check=False)


def test_a_schema_that_answers_can_follow_has_no_fault() -> None:
    trial = try_out('{"type":"object","properties":{"a":{"type":"integer"}}}')
    assert (trial.returncode, trial.stdout) == (0, b"")


def test_a_fault_is_one_line_on_standard_output() -> None:
    trial = try_out('{"type":"array","not":{}}')
    assert trial.returncode == 0
    assert b"not" in trial.stdout
    assert b"\n" not in trial.stdout


def test_a_schema_that_asks_for_too_much_ends_the_process() -> None:
    chain = ",".join(f'"d{i}":{{"$ref":"#/$defs/d{i + 1}"}}' for i in range(20_000))
    assert try_out(f'{{"$ref":"#/$defs/d0","$defs":{{{chain},"d20000":{{}}}}}}').returncode != 0
