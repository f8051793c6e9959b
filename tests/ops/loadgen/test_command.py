"""`quire bench` against a real `quire serve` of the demo model, and against servers that misbehave."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from quire.ops.cli.main import main
from tests.conftest import StartQuire, quire_processes


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run `quire serve` with the demo model and return its URL."""
    with quire_processes() as start:
        yield start("serve", "--port", "0", "--state-dir", str(tmp_path_factory.mktemp("state"))).wait_ready()


@dataclass
class Done:
    """The exit code and the output of a command."""

    code: int
    stdout: str
    stderr: str


Bench = Callable[..., Done]


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str]) -> Bench:
    """Return a function that runs `quire bench ARGUMENTS` in this process."""

    def run(*arguments: str, **environ: str) -> Done:
        code = main(["bench", *arguments], environ)
        out, err = capsys.readouterr()
        return Done(code, out, err)

    return run


Measured = Callable[..., dict[str, Any]]


@pytest.fixture
def measured(bench: Bench, tmp_path: Path) -> Measured:
    """Return the JSON of a run, which must succeed."""

    def run(*arguments: str) -> dict[str, Any]:
        file = tmp_path / "result.json"
        done = bench(*arguments, "--json", str(file))
        assert done.code == 0, done.stdout + done.stderr
        result: dict[str, Any] = json.loads(file.read_text())
        return result

    return run


@pytest.mark.slow
def test_a_closed_loop_has_exact_lengths_and_never_more_open_than_asked(served: str, measured: Measured) -> None:
    lengths = ("--shape", "fixed", "--input-tokens", "20", "--output-tokens", "12")
    result = measured(served, *lengths, "--requests", "12", "--concurrency", "3", "--save-requests")
    [server] = result["servers"]
    assert (server["completed"], server["failed"], server["model"]) == (12, 0, "demo")
    assert server["software"].startswith("quire ")
    assert (server["input_tokens"], server["output_tokens"]) == (12 * 20, 12 * 12)
    assert (server["counted_by"], server["other_length"]) == ("server", 0)
    for one in server["records"]:
        beside = [other for other in server["records"] if other["sent_s"] <= one["sent_s"] < other["ended_s"]]
        assert len(beside) <= 3
        assert 0 < one["chunks_s"][0] <= one["chunks_s"][-1] <= one["ended_s"] - one["sent_s"] + 1e-3
    assert server["ttft_ms"]["p50"] <= server["e2e_ms"]["p50"]


@pytest.mark.slow
def test_an_open_loop_keeps_to_its_times_and_two_servers_get_the_same(
    served: str, measured: Measured, tmp_path: Path
) -> None:
    page = tmp_path / "report.html"
    load = ("--shape", "alpaca", "--rate", "40", "--requests", "12", "--rounds", "2", "--slo", "e2e=60s")
    result = measured(served, "--against", served, *load, "--save-requests", "--html", str(page))
    first, second = result["servers"]
    for server in (first, second):
        assert (server["completed"], server["good_share"]) == (12, 1.0)
        for one in server["records"]:
            assert one["sent_s"] >= one["due_s"] - 0.002
    asked = [[(r["asked_input_tokens"], r["asked_output_tokens"]) for r in s["records"]] for s in (first, second)]
    assert asked[0] == asked[1]
    assert len(set(asked[0])) > 6
    # The two sides take turns to run first in a block: A B, then B A.
    starts = {(side, r["block"]): r["sent_s"] for side, s in enumerate((first, second)) for r in s["records"][::-1]}
    assert sorted(starts, key=starts.__getitem__) == [(0, 0), (1, 0), (1, 1), (0, 1)]
    assert {one["name"] for one in result["comparison"]} >= {"requests/s", "output tokens/s", "TTFT p99 ms"}
    assert "<svg" in page.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--tokenizer", "models/demo")])
def test_chats_have_nearly_exact_lengths(served: str, measured: Measured, more: tuple[str, ...]) -> None:
    lengths = ("--endpoint", "chat", "--shape", "fixed", "--input-tokens", "60", "--output-tokens", "8")
    result = measured(served, *lengths, "--requests", "16", *more)
    [server] = result["servers"]
    assert server["completed"] == 16
    if more:
        assert server["input_tokens"] == 16 * 60
    else:
        assert server["input_tokens"] == pytest.approx(16 * 60, rel=0.1)
    assert server["output_tokens"] == 16 * 8


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["sharegpt", "prefix"])
def test_every_shape_fits_into_the_demo_model(served: str, measured: Measured, shape: str) -> None:
    result = measured(served, "--shape", shape, "--requests", "6", "--concurrency", "6")
    assert result["servers"][0]["completed"] == 6


@pytest.mark.slow
def test_a_closed_loop_by_time_ends(served: str, measured: Measured) -> None:
    lengths = ("--shape", "fixed", "--input-tokens", "10", "--output-tokens", "5")
    result = measured(served, *lengths, "--duration-s", "1", "--concurrency", "2")
    [server] = result["servers"]
    assert server["completed"] >= 2
    assert 1 <= server["seconds"] < 10


class Handler(BaseHTTPRequestHandler):
    """Streams answers. Each request for exactly 7 tokens takes the next fault from the server's list."""

    server: Awkward

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._json(200, {"data": [{"id": name} for name in self.server.models]})
        else:
            self._json(404, {"error": {"message": "nothing here"}})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.authorization = self.headers["Authorization"]
        if refusal := self.server.refuses(request):
            self._json(400, {"error": {"message": refusal}})
            return
        fault = ""
        if request["max_tokens"] == 7:
            with self.server.lock:
                fault = self.server.faults.pop(0) if self.server.faults else ""
        if fault == "full":
            self._json(503, {"error": {"message": "The queue is full."}})
            return
        self.send_response(200)
        self.end_headers()
        for _ in range(0 if fault == "silent" else request["max_tokens"]):
            self._event({"choices": [{"text": "x", "finish_reason": None}]})
        if fault == "event":
            self._event({"error": {"message": "The worker is gone."}})
        if fault == "slow":
            self.server.over.wait(60)
        if fault == "garbage":
            self.wfile.write(b"data: {nonsense\n\n")
        self._event({"choices": [{"text": "", "finish_reason": "length"}]})
        if fault not in ("", "silent"):
            return
        if "stream_options" in request:
            usage = {"prompt_tokens": 3, "completion_tokens": request["max_tokens"]}
            self._event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")
        self.server.answered.release()

    def _event(self, data: Any) -> None:
        self.wfile.write(f"data: {json.dumps(data)}\n\n".encode())

    def _json(self, status: int, data: Any) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(data).encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Awkward(ThreadingHTTPServer):
    """A server that refuses an option such as `stream_options`, or sends faulty answers."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.models = ["<b>nasty</b>"]
        self.faults: list[str] = []
        self.unknown: str = ""
        self.authorization: str | None = None
        self.lock = threading.Lock()
        self.over = threading.Event()
        self.answered = threading.Semaphore(0)
        self.url = f"http://127.0.0.1:{self.server_port}"

    def refuses(self, request: dict[str, Any]) -> str:
        return f"unknown parameter {self.unknown}" if self.unknown in request else ""


@pytest.fixture
def awkward() -> Iterator[Awkward]:
    server = Awkward()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.over.set()
    server.shutdown()
    thread.join()
    server.server_close()


SEVEN = ("--shape", "fixed", "--input-tokens", "3", "--output-tokens", "7", "--concurrency", "2", "--warmup", "0")


def test_errors_are_counted_by_kind_and_the_run_goes_on(awkward: Awkward, bench: Bench, tmp_path: Path) -> None:
    awkward.faults = ["full", "event", "cut", "slow", "garbage", "full"]
    file, page = tmp_path / "result.json", tmp_path / "report.html"
    arguments = (awkward.url, *SEVEN, "--requests", "10", "--timeout-s", "1", "--json", str(file), "--html", str(page))
    done = bench(*arguments)
    assert done.code == 1, done.stderr
    [server] = json.loads(file.read_text())["servers"]
    assert (server["completed"], server["failed"]) == (4, 6)
    errors = {error["kind"]: (error["count"], error["first_message"]) for error in server["errors"]}
    assert errors["status 503"] == (2, "The queue is full.")
    assert errors["error event"] == (1, "The worker is gone.")
    assert set(errors) == {"status 503", "error event", "broken off", "timeout", "not understood"}
    assert "2 x status 503: The queue is full." in done.stdout
    assert "<b>nasty</b>" not in page.read_text()
    assert "&lt;b&gt;nasty" in page.read_text()


def test_ctrl_c_reports_what_was_measured(awkward: Awkward, start_quire: StartQuire, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    arguments = ("--shape", "fixed", "--duration-s", "600", "--concurrency", "2", "--json", str(file))
    process = start_quire("bench", awkward.url, *arguments)
    process.wait_for("^measuring .*Ctrl-C")
    awkward.answered = threading.Semaphore(0)
    for _ in range(10):
        assert awkward.answered.acquire(timeout=60)
    process.send(signal.SIGINT)
    assert process.wait() == 130
    result = json.loads(file.read_text())
    [server] = result["servers"]
    assert result["stopped"] is True
    assert server["completed"] >= 8
    assert server["failed"] == 0
    assert "note: the run was stopped" in process.stdout
    assert process.stderr.count("\n") == 0


def test_errors_can_be_allowed(awkward: Awkward, bench: Bench) -> None:
    awkward.faults = ["full"]
    assert bench(awkward.url, *SEVEN, "--requests", "3", "--allow-errors").code == 0


def test_an_answer_without_text_is_no_error_if_its_tokens_were_counted(awkward: Awkward, measured: Measured) -> None:
    awkward.faults = ["silent"]
    [server] = measured(awkward.url, *SEVEN, "--requests", "1")["servers"]
    assert (server["completed"], server["output_tokens"]) == (1, 7)
    assert server["ttft_ms"]["p50"] <= server["e2e_ms"]["p50"]


def test_without_usage_chunks_are_counted_and_that_is_said(awkward: Awkward, bench: Bench) -> None:
    awkward.unknown = "stream_options"
    done = bench(awkward.url, *SEVEN, "--requests", "3")
    assert done.code == 0, done.stderr
    assert "each chunk counts as one" in done.stdout
    assert "(9 and 21 tokens)" in done.stdout


def test_a_server_without_ignore_eos_is_told_apart(awkward: Awkward, bench: Bench) -> None:
    awkward.unknown = "ignore_eos"
    done = bench(awkward.url, *SEVEN)
    assert done.code == 1
    assert "unknown parameter ignore_eos; give --no-ignore-eos" in done.stderr
    assert bench(awkward.url, *SEVEN, "--requests", "2", "--no-ignore-eos").code == 0


def test_the_key_comes_from_the_environment(awkward: Awkward, bench: Bench) -> None:
    done = bench(awkward.url, *SEVEN, "--requests", "1", OPENAI_API_KEY="sk-one")
    assert (done.code, awkward.authorization) == (0, "Bearer sk-one")
    bench(awkward.url, *SEVEN, "--requests", "1", OPENAI_API_KEY="sk-one", QUIRE_BENCH_API_KEY="sk-two")
    assert awkward.authorization == "Bearer sk-two"


def test_mistakes_are_one_line_with_a_remedy(awkward: Awkward, bench: Bench) -> None:
    for arguments, code, says in (
        (("--shape", "nonsense"), 2, "give sharegpt, alpaca"),
        (("--rate", "2", "--concurrency", "2"), 2, "give --rate for an open loop or --concurrency for a closed one"),
        (("http://127.0.0.1:9",), 1, "no server at http://127.0.0.1:9"),
        ((awkward.url, "--model", "other"), 1, "has no model 'other'; give --model with one of <b>nasty</b>"),
        ((awkward.url, "--tokenizer", "/nothing"), 2, "tokenizer: there is no '/nothing'; give"),
    ):
        done = bench(*arguments)
        assert done.code == code, done.stderr
        assert says in done.stderr
        assert len(done.stderr.splitlines()) == 1
