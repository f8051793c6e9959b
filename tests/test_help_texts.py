"""Each `--help` text of a setting and each HELP of a metric can be read alone: it names its subject."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from quire.ops.cli.commands import COMMANDS, run
from quire.ops.paths import PROJECT_ROOT
from quire.shared.settings import options

# First words that refer to something outside the text, or begin a relative clause instead of naming the subject.
OPENINGS = re.compile(
    r"(?:It|Its|This|These|Those|That|They|Their|Them|Such|Another|The same|The others?|Of|Whether|What|How|Which|Who"
    r"|Whose|Where|When|Between|From|For how)\b"
)
UNCLEAR = re.compile(r"\b(?:somebody|nobody|beside|behind the|so (?:long|many|often))\b", re.IGNORECASE)


def settings() -> Iterator[tuple[str, str]]:
    for name, command in COMMANDS.items():
        yield f"quire {name}", command.summary
        yield f"quire {name} --help", command.description
        for item in options(command.settings):
            yield f"quire {name} {item.flag}", item.help


def metrics() -> Iterator[tuple[str, str]]:
    """Every name of a metric that stands before a text: in a call, or in a row of a table."""
    for folder in ("gateway", "worker", "shared"):
        for path in sorted((PROJECT_ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                values = node.args if isinstance(node, ast.Call) else node.elts if isinstance(node, ast.Tuple) else []
                match values[:2]:
                    case [ast.Constant(value=str(name)), ast.Constant(value=str(text))] if name.startswith(
                        "quire_"
                    ) and not text.startswith("quire_"):
                        yield name, text


TEXTS = [*settings(), *metrics()]


def test_the_texts_are_found() -> None:
    names = {name for name, _ in TEXTS}
    assert {"quire serve --port", "quire worker --block-size", "quire bench --rate", "quire chat"} <= names
    assert {"quire_build_info", "quire_calls", "quire_queue_requests", "quire_kv_blocks", "quire_step_seconds"} <= names
    assert len(TEXTS) > 200


@pytest.mark.parametrize(("name", "text"), TEXTS, ids=[name for name, _ in TEXTS])
def test_a_text_can_be_read_alone(name: str, text: str) -> None:
    assert text[:1].isupper(), f"{name}: begins with no capital letter: {text!r}"
    assert not OPENINGS.match(text), f"{name}: does not name its subject: {text!r}"
    assert not UNCLEAR.search(text), f"{name}: {text!r}"


@pytest.mark.parametrize("width", [60, 100])
def test_help_is_as_wide_as_the_terminal_and_breaks_no_word(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Examples are commands to paste, and stay on one line."""
    for arguments in ([], *([name, "--help"] for name in COMMANDS)):
        monkeypatch.setenv("COLUMNS", "2000")
        run(arguments, {})
        whole = capsys.readouterr().out.split()
        monkeypatch.setenv("COLUMNS", str(width))
        run(arguments, {})
        shown = capsys.readouterr().out
        assert shown.split() == whole
        texts = [line for line in shown.partition("\nexamples:")[0].splitlines() if not re.match("  [-A-Z]", line)]
        assert [line for line in texts if len(line) > width] == [], arguments


def test_the_help_of_usage_has_only_what_it_uses(capsys: pytest.CaptureFixture[str]) -> None:
    run(["usage", "--help"], {})
    flags = re.findall(r"^  (--[a-z-]+)", capsys.readouterr().out, re.MULTILINE)
    assert flags == ["--action", "--id", "--days", "--json", "--redis-url", "--state-dir"]
