"""Prompts and answers appear in no log and no span, whatever goes wrong, unless a setting allows it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import QuireProcess
from tests.support.checkpoints import make_checkpoint
from tests.support.collector import running_collector
from tests.support.faults.stack import MODEL, FaultStack, Stream

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

MARK = "kolibri77"
# No other text of this test has these tokens in this order.
DEADLY, FAILING = "ΩΩΩΩ", "ΨΨΨΨ"
TEMPLATE = (
    "{% set said = messages[0].content %}"
    "{% if 'RAISE' in said %}{{ raise_exception('not this: ' + said) }}{% endif %}"
    "{% if 'TYPE' in said %}{{ said + 1 }}{% endif %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint(tmp_path_factory.mktemp("models") / "long", "llama", max_position_embeddings=2048)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def stack(tmp_path: Path, model: Path) -> Iterator[FaultStack]:
    stack = FaultStack(tmp_path, model)
    try:
        yield stack
    finally:
        stack.close()


def leaky(stack: FaultStack, *arguments: str, **environ: str) -> QuireProcess:
    return stack._start("tests.support.leaky", (arguments[0], str(stack.model), *arguments[1:]), environ)


def chat(text: str, **parameters: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 4, **parameters}


def complete(text: str, **parameters: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": text, "max_tokens": 4, "ignore_eos": True, **parameters}


# Path, body, and the expected status.
CALLS: tuple[tuple[str, dict[str, Any], int], ...] = (
    ("chat/completions", chat(MARK), 200),
    ("chat/completions", chat(MARK, stop=[f"{MARK} stop"], stream=True), 200),
    ("completions", complete(MARK, n=2, stream=True), 200),
    ("chat/completions", chat(MARK, temperature=99), 400),
    ("chat/completions", chat(MARK, response_format={MARK: MARK}), 400),
    ("chat/completions", {"model": MODEL, "messages": MARK}, 400),
    ("chat/completions", {"model": MODEL, "messages": [{"role": MARK, "content": MARK}]}, 400),
    ("chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": {MARK: 1}}]}, 400),
    ("chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": MARK, MARK: 1}]}, 400),
    ("chat/completions", chat(f"{MARK} RAISE"), 400),
    ("chat/completions", chat(f"{MARK} TYPE"), 400),
    ("chat/completions", chat(MARK * 400), 400),
    ("completions", complete(MARK * 4000), 400),
    ("completions", complete(f"{MARK}\ud800"), 400),
    ("completions", {"model": MODEL, "prompt": {MARK: MARK}}, 400),
    ("completions", complete(MARK, **{MARK: MARK}), 400),
    ("completions", complete(f"{MARK} BREAKTOKENIZER"), 500),
    ("chat/completions", chat(f"{MARK} BREAKTOKENIZER"), 500),
    ("completions", complete(f"{MARK} {FAILING}", stop=[MARK]), 500),
)


@pytest.mark.parametrize("form", ["json", pytest.param("text", marks=pytest.mark.soak)])
def test_no_prompt_is_in_any_log_or_span(stack: FaultStack, form: str) -> None:
    # The first token may depend on the text before the word.
    deadly, failing = (",".join(map(str, stack.tokenizer.encode(word).ids[-3:])) for word in (DEADLY, FAILING))
    assert deadly != failing
    with running_collector() as collector:
        flags = ("--log-format", form, "--log-level", "debug", "--otlp-endpoint", collector.url)

        def worker() -> QuireProcess:
            return leaky(
                stack,
                *("worker", *flags, "--worker-id", "a", "--dtype", "float32", "--threads", "1"),
                *("--lease-s", "1", "--beat-s", "0.25"),
                TEST_DEADLY=deadly,
                TEST_FAILING=failing,
            )

        workers = [worker()]
        gateway = leaky(stack, "gateway", *flags, "--port", "0")
        url = gateway.wait_for(r"listening on (http://[\d.]+:\d+)")[1]
        workers[0].wait_for("ready: worker")
        for path, body, status in CALLS:
            stream = Stream(url, body, path=f"/v1/{path}").wait_end()
            assert stream.status == status, (path, body, stream.status, stream.text_body)
        poison = Stream(url, complete(f"{MARK} {DEADLY}"))
        while poison._thread.is_alive():
            stack.wait(lambda: not poison._thread.is_alive() or workers[-1].process.poll() is not None, 60)
            if workers[-1].process.poll() is not None:
                workers.append(worker())
        assert poison.wait_end().status == 500
        assert "quarantined" in poison.text_body
        collector.wait(lambda spans: any(s.attributes.get("quire.outcome") == "quarantined" for s in spans))
        stack.close()
        for process in (gateway, *workers):
            assert MARK not in process.stdout + process.stderr
            if form == "json":
                assert all(isinstance(json.loads(line), dict) for line in process.stderr.splitlines())
        assert "failed unexpectedly" in gateway.stderr  # the errors did occur
        assert "builtins.ValueError: (text withheld" in gateway.stderr
        assert any("step failed" in process.stderr for process in workers)
        assert len(collector.spans) > len(CALLS)
        assert not [body for body in collector.bodies if MARK.encode() in body]


def test_prompts_are_logged_where_that_is_asked_for(stack: FaultStack) -> None:
    gateway = leaky(stack, "gateway", "--log-format", "json", "--log-prompts", "--port", "0")
    url = gateway.wait_for(r"listening on (http://[\d.]+:\d+)")[1]
    refused = Stream(url, chat(f"{MARK} {'x' * 100_000}", temperature=99), path="/v1/chat/completions").wait_end()
    Stream(url, complete(f"{MARK} BREAKTOKENIZER")).wait_end()
    gateway.wait_for("failed unexpectedly")
    stack.close()
    lines = [json.loads(line) for line in gateway.stderr.splitlines()]
    asked = [line for line in lines if "prompt" in line]
    assert [MARK in line["prompt"] for line in asked] == [True, True]
    assert asked[0]["request_id"] == refused.response_headers["x-request-id"]
    assert len(asked[0]["prompt"]) == 4096
    [failure] = [line for line in lines if "failed unexpectedly" in line["msg"]]
    assert f"ValueError: cannot tokenize '{MARK}" in failure["exception"]
