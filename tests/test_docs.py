"""The documentation is correct: tests check each block of code by its language, and the target of each link.

| language | what the tests do |
|---|---|
| `bash`, `python`, `javascript` | run, against the server that the README's first command starts |
| `output` | compare with the output of the block before; run its `$ command` lines if it has any |
| `json`, `toml`, `yaml` | parse |
| `console` | check the flags only: the commands need a GPU, containers or other machines |
| `text` | nothing: no commands, or parts of commands |
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from quire.ops.cli.commands import COMMANDS, single_commands
from quire.ops.cli.service_flags import lift_service_flags
from quire.ops.cli.settings import ALL_SETTINGS
from quire.ops.paths import PROJECT_ROOT
from quire.ops.tools.marked_tables import with_tables
from quire.ops.tools.settings_table import tables
from quire.shared.config.command_line import CommandGroup
from quire.shared.config.settings import load, options
from quire.shared.protocol.keys import WAITING, AccountKeys, BatchKeys, LaneKeys
from tests.conftest import clean_environ

PUBLISHED = "http://127.0.0.1:8000"
FOLDERS = ("", "docs", "ops", "tests")
PAGES = sorted(
    page
    for folder in FOLDERS
    for page in (PROJECT_ROOT / folder).glob("**/*.md" if folder else "*.md")
    if not any(part.startswith((".", "node_modules")) for part in page.relative_to(PROJECT_ROOT).parts)
)
NAMES = [str(page.relative_to(PROJECT_ROOT)) for page in PAGES]

RUN = ("bash", "python", "javascript")
PARSED: dict[str, Callable[[str], Any]] = {"json": json.loads, "toml": tomllib.loads, "yaml": yaml.safe_load}
SHOWN = ("text", "console")
_FENCE = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```[ ]*$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    page: str
    line: int
    language: str
    text: str
    # The text of the `output` block directly after this block.
    output: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    found = list(_FENCE.finditer(text))
    blocks = []
    for match, after in zip_longest(found, found[1:]):
        is_answered = (
            after is not None
            and after[2] == "output"
            and not text[match.end() : after.start()].strip()
            and not after[3].startswith("$ ")
        )
        blocks.append(
            Block(
                str(page.relative_to(PROJECT_ROOT)),
                text.count("\n", 0, match.start()) + 1,
                match[2],
                textwrap.dedent(match[3]),
                textwrap.dedent(after[3]) if after is not None and is_answered else None,
            )
        )
    return blocks


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
FIRST = next(block for block in BLOCKS if block.page == "README.md" and block.language == "bash")


def blocks(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages and block is not FIRST]


def prose(page: Path) -> str:
    """Return a page without its blocks of code."""
    return _FENCE.sub("", page.read_text())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run the README's first command, and yield the URL of its server."""
    assert FIRST.text.strip() == "make run"
    environ = clean_environ(QUIRE_PORT="0", QUIRE_STATE_DIR=str(tmp_path_factory.mktemp("state")))
    process = subprocess.Popen(
        ["make", "run"], cwd=PROJECT_ROOT, env=environ, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    try:
        yield next(line.split()[1] for line in process.stdout if line.startswith("ready: "))
    finally:
        # Ctrl-C in a terminal also signals make and all processes that make started.
        os.killpg(process.pid, signal.SIGINT)
        process.wait(30)
        process.stdout.close()


def run(command: list[str], url: str) -> str:
    """Return the output of a command, which must succeed and print something."""
    # Greedy: with sampling, a model of this size sometimes leaves the fox out of its story.
    environ = clean_environ(QUIRE_CHAT_URL=url, QUIRE_CHAT_TEMPERATURE="0")
    done = subprocess.run(
        command, cwd=PROJECT_ROOT, env=environ, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    return done.stdout


def objects(text: str) -> list[dict[str, Any]]:
    """Return the JSON objects of a text that consists of JSON objects."""
    found = []
    while text := text.strip():
        value, end = json.JSONDecoder().raw_decode(text)
        found.append(value)
        text = text[end:]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("block", blocks("bash"), ids=str)
def test_a_command(block: Block, server: str) -> None:
    output = run(["bash", "-euc", block.text.replace(PUBLISHED, server)], server)
    assert '{"error"' not in output  # curl exits with 0 after an error response
    if block.output is not None:
        assert output == block.output
    if "/v1/chat/completions -H" in block.text and '"stream": true' in block.text:
        assert "data: [DONE]\n" in output
    if "/cancel" in block.text:
        assert objects(output.splitlines()[-1])[0]["id"].startswith("chatcmpl-")
    if "Idempotency-Key" in block.text:
        first, second = objects(output)
        assert first == second
    if "quire chat" in block.text:
        assert "fox" in output


@pytest.mark.slow
@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_a_python_example(block: Block, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    url = request.getfixturevalue("server") if PUBLISHED in block.text else PUBLISHED
    script = tmp_path / "example.py"
    script.write_text(block.text.replace(PUBLISHED, url))
    output = run([sys.executable, str(script)], url)
    if block.output is not None:
        assert output == block.output
    elif PUBLISHED in block.text:
        assert "heron" in output


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("node") is None, reason="needs node, which stands in for a browser's fetch")
@pytest.mark.parametrize("block", blocks("javascript"), ids=str)
def test_a_javascript_example(block: Block, server: str, tmp_path: Path) -> None:
    script = tmp_path / "example.mjs"
    script.write_text(block.text.replace(PUBLISHED, server))
    assert len(run(["node", str(script)], server).split()) > 10


@pytest.mark.parametrize("block", blocks("output"), ids=str)
def test_what_is_said_to_be_printed_is_printed(block: Block) -> None:
    if not block.text.startswith("$ "):
        before = [other for other in blocks(*RUN) if other.page == block.page and other.output == block.text]
        assert before, "no block that is run stands directly before this output"
        return
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, _, expected = part.partition("\n")
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=PROJECT_ROOT,
            env=clean_environ(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=60,
        )
        assert done.stdout == expected, command


@pytest.mark.parametrize("block", blocks(*PARSED), ids=str)
def test_data_can_be_read(block: Block) -> None:
    assert PARSED[block.language](block.text)


def test_every_block_has_a_language_that_says_what_is_done_with_it() -> None:
    known = (*RUN, *PARSED, *SHOWN, "output")
    assert [f"{block}: {block.language!r}" for block in BLOCKS if block.language not in known] == []


def shown_commands() -> list[tuple[Block, str]]:
    """Return the commands of Quire in blocks that the tests do not run."""
    found = []
    for block in blocks(*SHOWN):
        for line in block.text.splitlines():
            if re.match(r"(?:[A-Z_]+=\S+ )*quire [a-z]", line):
                found.append((block, line))
    return found


@pytest.mark.parametrize(("block", "line"), shown_commands(), ids=str)
def test_the_flags_of_a_shown_command_exist(block: Block, line: str) -> None:
    words = shlex.split(line, comments=True)
    words = words[words.index("quire") + 1 :]
    name, command, arguments, environ = f"quire {words[0]}", COMMANDS[words[0]], words[1:], {}
    if isinstance(command, CommandGroup):
        name, command, arguments = command.find(name, arguments)
    if words[0] == "serve":
        arguments, environ = lift_service_flags(arguments, environ)
    load(command.settings, arguments, environ, prog=name, known=ALL_SETTINGS)


def test_make_knows_the_verbs_that_the_pages_name() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (PROJECT_ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set()
    for page in PAGES:
        named |= set(re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(), re.MULTILINE))
    assert {"run", "test", "soak"} <= named <= targets


@pytest.mark.slow
def test_the_page_is_where_the_readme_says(server: str) -> None:
    assert f"<{PUBLISHED}>" in (PROJECT_ROOT / "README.md").read_text()
    assert "<title>" in run(["curl", "-sf", server + "/"], server)


def test_the_lists_of_settings_are_those_of_the_code() -> None:
    text = (PROJECT_ROOT / "docs" / "settings.md").read_text()
    assert with_tables(text, tables()) == text, "run python -m quire.ops.tools.settings_table"


def test_metrics_that_the_pages_name_are_in_the_lists_of_metrics() -> None:
    text = (PROJECT_ROOT / "docs" / "metrics.md").read_text()
    listed = dict(re.findall(r"^- `(quire_\w+)` \((gauge|counter|histogram)\b", text, re.MULTILINE))
    assert listed
    known = {*listed, *(f"{name}_{part}" for name in listed for part in ("bucket", "count", "sum"))}
    for page in PAGES:
        spans = re.findall(r"`([^`]+)`", prose(page))
        assert {name for span in spans for name in re.findall(r"\bquire_\w+", span)} <= known, page


FLAGS_OF_OTHERS = {
    "docs/benchmarking.md": {
        "--append",
        "--gguf",
        "--llamacpp",
        "--no-repack",
        "--quantization",
        "--quire-args",
        "--vllm",
    },
    "docs/benchmarks.md": {"--random-features"},
    "docs/quickstart.md": {"--profile", "--scale", "--no-deps"},
    "docs/how-to/containers.md": {"--profile", "--scale", "--volumes"},
    "docs/how-to/monitoring.md": {"--web"},
    "docs/how-to/profiling.md": {"--gil", "--native"},
    "docs/runbook.md": {"--fix"},
    "docs/upstream.md": {"--parallel"},
}


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("docs/")])
def test_flags_that_a_page_names_exist(name: str) -> None:
    known = {
        flag for command in single_commands().values() for item in options(command.settings) for flag in item.flags
    }
    known |= FLAGS_OF_OTHERS.get(name, set()) | {"--help"}
    # The flags in `make ...`, `python -m ...` and `stack...` (a script that is no longer in the tree) belong to another
    # program; test_compose.py checks those of Compose.
    spans = [
        span
        for span in re.findall(r"`([^`\n]+)`", prose(PROJECT_ROOT / name))
        if " -m " not in span and "make" not in span and "docker compose" not in span
        if not span.startswith(("stack.", "kernels."))
    ]
    assert {flag for span in spans for flag in re.findall(r"(?<!\S)(--[a-z][a-z-]+)", span)} <= known


# The changelog names files by their paths at the time of the entry.
@pytest.mark.parametrize("name", [name for name in NAMES if name != "CHANGELOG.md"])
def test_files_and_modules_that_a_page_names_exist(name: str) -> None:
    text = (PROJECT_ROOT / name).read_text()
    for path in re.findall(r"`((?:gateway|worker|kernels|shared|ops|tests|models|docs)/[\w./*-]+)`", text):
        if not path.startswith(("models/my-", "ops/benchmarks/results/")):  # of the reader; made by `make paper`
            assert list(PROJECT_ROOT.glob(path.rstrip("/"))), path
    for module in re.findall(r"python -m ((?:quire|tests|models)(?:\.\w+)+)", text):
        path = module.removeprefix("quire.").replace(".", "/")
        assert (PROJECT_ROOT / f"{path}.py").exists() or (PROJECT_ROOT / path / "__main__.py").exists(), module


@pytest.mark.parametrize("name", [name for name in NAMES if name != "CHANGELOG.md"])
def test_lines_of_prose_are_at_most_130_characters_long(name: str) -> None:
    page = PROJECT_ROOT / name
    assert [line for line in prose(page).splitlines() if len(line) > 130 and not line.startswith("|")] == []


def test_the_protocol_has_every_script_and_every_key() -> None:
    text = (PROJECT_ROOT / "docs" / "protocol.md").read_text()
    scripts = {path.stem for path in (PROJECT_ROOT / "shared" / "protocol" / "scripts").glob("[a-z]*.lua")}
    assert set(re.findall(r"^- `(\w+)`: ", text.partition("## Scripts")[2], re.MULTILINE)) == scripts
    keys = LaneKeys("lane")
    made = [
        keys.queue("<class>"),
        keys.queue(WAITING + "<class>"),
        *(keys.tenants("<class>"), keys.users("<class>", "<tenant>"), keys.line("<class>", "<tenant>", "<user>")),
        *(keys.served("<class>"), keys.served("<class>", "<tenant>"), keys.waiting, keys.wake),
        *(
            make("<id>")
            for make in (
                keys.request,
                keys.output,
                keys.conversation,
                keys.kept_conversation,
                keys.worker,
                keys.mailbox,
                keys.left,
                keys.channel,
                keys.gateway_lease,
            )
        ),
        keys.image("<name>"),
        keys.idempotency("<key>"),
        keys.view("<worker>"),
        *(keys.adapters, keys.prefixes, keys.reserved, keys.parked, keys.held, keys.holders, keys.due, keys.dead),
        *(keys.ended("<owner>"), keys.parked_of("<owner>")),
        keys.answering,
        *(keys.load, keys.totals, keys.recoveries, keys.workers, keys.endings),
    ]
    assert set(re.findall(r"^- `(quire:\{lane\}:[^`]+)` \(", text, re.MULTILINE)) == set(made)
    batches = BatchKeys()
    made = [make("<id>") for make in (batches.file, batches.parts, batches.batch)]
    made += [make("<id>") for make in (batches.windows, batches.leases, batches.open)]
    made += [make("<owner>") for make in (batches.files, batches.batches)]
    made += [batches.expiring, batches.doomed, batches.used, batches.active]
    assert set(re.findall(r"^- `(quire:\{batches!\}:[^`]+)` \(", text, re.MULTILINE)) == set(made)
    accounts = AccountKeys()
    made = [accounts.accounts, accounts.audit, accounts.spent("<account>"), accounts.usage("<day>")]
    assert set(re.findall(r"^- `(quire:\{accounts\}:[^`]+)` \(", text, re.MULTILINE)) == set(made)


def newcomer_rows() -> list[str]:
    """Return the rows of the newcomer test: a question, and two steps of files with names in them."""
    text = (PROJECT_ROOT / "CONTRIBUTING.md").read_text()
    return re.findall(r"^\| ([A-Z].+\? \| .+) \|$", text, re.MULTILINE)


@pytest.mark.parametrize("row", newcomer_rows(), ids=lambda row: row.partition("?")[0])
def test_the_names_in_the_newcomer_test_are_in_the_files_next_to_them(row: str) -> None:
    question, *steps = row.split(" | ")
    assert len(steps) <= 2, question
    spans = re.findall(r"`([^`]+)`", row)
    text = "".join((PROJECT_ROOT / span).read_text() for span in spans if "/" in span)
    assert text, question
    assert [span for span in spans if "/" not in span and not re.search(rf"\b{span}\b", text)] == []


def test_the_newcomer_test_has_questions() -> None:
    assert len(newcomer_rows()) >= 5


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page: its headings as GitHub names them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    page = PROJECT_ROOT / name
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        if anchor:
            assert anchor in anchors(there), target


def test_the_index_has_every_page_of_the_documentation() -> None:
    folder = PROJECT_ROOT / "docs"
    linked = set(re.findall(r"\]\(([\w./-]+\.md)\)", (folder / "README.md").read_text()))
    pages = {str(page.relative_to(folder)) for page in folder.rglob("*.md")} - {"README.md"}
    assert pages <= linked


# --- tour -------------------------------------------------------------------------------------------------------------
# docs/tour.md leads through code that exists: ten files, and parts of them that together can be read in one go.

ANCHOR = re.compile(r"^`([\w/]+\.(?:py|lua))(?:::([\w.]+))?`$", re.MULTILINE)
ANCHORS = ANCHOR.findall((PROJECT_ROOT / "docs" / "tour.md").read_text())
FILES = 10
LINES = 1200


def lines_of(path: Path, name: str) -> int:
    """Return the number of lines of a function or class, `Class.method` among them, or of a whole file without a name.

    Raises KeyError if the file has no such name.
    """
    if not name:
        return path.read_text().count("\n")
    node: ast.AST = ast.parse(path.read_text())
    for part in name.split("."):
        children = {
            child.name: child
            for child in ast.iter_child_nodes(node)
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        }
        node = children[part]
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    return (node.end_lineno or 0) - node.lineno + 1


def test_the_tour_has_ten_stops_in_ten_files() -> None:
    assert len({path for path, _ in ANCHORS}) == FILES
    stops = re.findall(r"^## (\d+)\. ", (PROJECT_ROOT / "docs" / "tour.md").read_text(), re.MULTILINE)
    assert stops == [str(number + 1) for number in range(FILES)]


def test_what_the_tour_names_exists_and_is_short() -> None:
    found = {f"{path}::{name}": lines_of(PROJECT_ROOT / path, name) for path, name in ANCHORS}
    assert sum(found.values()) <= LINES, found


def test_the_tour_itself_is_short() -> None:
    assert len((PROJECT_ROOT / "docs" / "tour.md").read_text().split()) <= 900
