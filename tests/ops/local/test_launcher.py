"""`quire serve` starts everything, keeps it running, and leaves nothing behind however it ends."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from quire.ops.paths import PROJECT_ROOT
from tests.conftest import QuireProcess, StartQuire, children_of, is_running, quire_processes
from tests.support.quantized import quantize_checkpoint

pytestmark = pytest.mark.slow


@pytest.fixture
def serve(start_quire: StartQuire, tiny_model: Path, tmp_path: Path):  # type: ignore[no-untyped-def]
    """Starts `quire serve` with the tiny model, in the state folder of this test."""
    return lambda *arguments, **environ: launch(start_quire, tiny_model, tmp_path / "state", *arguments, **environ)


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[QuireProcess]:
    """One `quire serve` for the tests that leave it as it was."""
    with quire_processes() as start:
        process = launch(start, tiny_model, tmp_path_factory.mktemp("server") / "state")
        process.wait_ready()
        yield process


def launch(start: StartQuire, model: Path, state_dir: Path, *arguments: str, **environ: str) -> QuireProcess:
    flags = ["--port", "0", "--state-dir", str(state_dir), *arguments]
    # float32: a continuation that another worker computes has the same tokens.
    return start("serve", str(model), *flags, environ={"QUIRE_DTYPE": "float32", **environ})


def post(url: str, **body: object):  # type: ignore[no-untyped-def]
    data = json.dumps({"model": "tiny", "prompt": "Once", "ignore_eos": True, **body}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=60)


def complete(url: str, **body: object) -> str:
    with post(url, temperature=0, **body) as response:
        text: str = json.load(response)["choices"][0]["text"]
        return text


def stream(url: str, **body: object) -> Iterator[str]:
    """The pieces of text of a streamed answer."""
    with post(url, temperature=0, stream=True, **body) as response:
        for line in response:
            data = line.decode().removeprefix("data:").strip()
            if line.startswith(b"data:") and data != "[DONE]":
                yield json.loads(data)["choices"][0]["text"]


def children(process: QuireProcess, name: str) -> list[int]:
    """The pids of the children of `quire serve` that run redis-server, gateway or worker."""
    pattern = re.compile(rf"-m quire {name}\b|^\S*/{name} ")
    return [pid for pid, command in children_of(process.pid).items() if pattern.search(command)]


def test_it_says_what_a_user_needs(server: QuireProcess) -> None:
    url = server.wait_ready()
    server.wait_for(r"^curl ")
    assert f"API    {url}/v1" in server.stdout
    assert f"page   {url}/" in server.stdout
    assert "model  tiny" in server.stdout
    assert re.search(r"logs   /.*/state/logs\n", server.stdout)
    assert re.search(rf"chat   \S*quire chat --url {url}\n", server.stdout)
    assert "stop   Ctrl-C" in server.stdout


def test_the_line_to_paste_streams_an_answer(server: QuireProcess) -> None:
    curl = server.wait_for(r"^curl .*")[0]
    answer = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, check=True, timeout=60).stdout
    assert answer.count("data: {") > 2
    assert "data: [DONE]" in answer


def test_the_line_to_chat_works_where_it_was_shown(server: QuireProcess) -> None:
    """In a checkout whose virtual environment is not activated, too."""
    server.wait_for(r"^curl ")
    chat = server.wait_for(r"^  chat   (.*)")[1]
    done = subprocess.run(["bash", "-c", f"{chat} --max-tokens 4 Hello"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_folder_with_a_gguf_file_is_served_as_its_model(start_quire: StartQuire, tmp_path: Path) -> None:
    """The demo model in Q4_0 answers a chat."""
    from quire.ops.tools.gguf_writer import write_gguf

    folder = write_gguf(PROJECT_ROOT / "models" / "demo", tmp_path / "model" / "demo.gguf", "Q4_0").parent
    url = launch(start_quire, folder, tmp_path / "state").wait_ready()
    body = {"model": "demo", "messages": [{"role": "user", "content": "Tell me a story."}]}
    data = json.dumps({**body, "temperature": 0, "max_tokens": 10}).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        assert json.load(response)["choices"][0]["message"]["content"].startswith("Once upon a time")


def test_a_second_one_with_the_same_state_folder_names_the_first(server: QuireProcess, start_quire: StartQuire) -> None:
    url = server.wait_ready()
    logs = Path(server.wait_for(r"logs   (/.*)")[1])
    second = start_quire("serve", "--port", "0", "--state-dir", str(logs.parent), "--model", "Qwen/Qwen3-0.6B")
    assert second.wait() == 1
    assert f"another quire serve (pid {server.pid}, {url}) uses {logs.parent};" in second.stderr
    assert f"`quire stop --state-dir {logs.parent}`, or pass another --state-dir" in second.stderr


def test_a_killed_worker_is_started_again_and_its_stream_goes_on(server: QuireProcess) -> None:
    url = server.wait_ready()
    expected = complete(url, max_tokens=200)
    pieces = stream(url, max_tokens=200)
    text = next(pieces)
    [worker] = children(server, "worker")
    os.kill(worker, signal.SIGKILL)
    text += "".join(pieces)
    assert text == expected
    assert server.wait_for(r"^worker-1 ended, killed by SIGKILL; starting it again in 0.5 s$")


def test_killed_gateway_and_redis_are_started_again(server: QuireProcess) -> None:
    url = server.wait_ready()
    for name, line in (("gateway", r"^gateway ended, killed by SIGKILL"), ("redis-server", r"^redis ended, killed by")):
        [before] = children(server, name)
        os.kill(before, signal.SIGKILL)
        server.wait_for(line)
        wait_until_ready(url)
        assert children(server, name) != [before]
        assert complete(url, max_tokens=4)


def test_a_killed_launcher_takes_its_children_along_and_ctrl_c_ends_the_next_one_cleanly(serve, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    first = serve()
    first.wait_ready()
    pids = list(children_of(first.pid))
    first.send(signal.SIGKILL)
    first.wait()
    second = serve(QUIRE_LOG_LEVEL="error")  # the launcher says what the worker does, whatever the worker logs
    url = second.wait_ready()
    before, _, _ = second.stderr.partition("Ready in")
    assert re.search(r"^\d+\.\d s  worker-1: importing torch$", before, re.MULTILINE), before
    assert len(before.splitlines()) == len(set(before.splitlines())), "one line for each phase"
    assert not any(map(is_running, pids))
    assert complete(url, max_tokens=4)
    pids = list(children_of(second.pid))
    assert len(pids) == 3
    assert second.stop() == 0
    assert second.stderr.splitlines()[-2:] == ["Stopping (Ctrl-C again: at once)", "Stopped"]
    assert not any(map(is_running, pids))
    logs = "".join(path.read_text() for path in (tmp_path / "state" / "logs").iterdir())
    assert "Traceback" not in logs + second.stderr


def test_two_workers_at_a_redis_that_runs_already(serve, redis_url: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    port = three_ports()
    flags = ["--workers", "2", "--max-num-seqs", "4", "--redis-url", redis_url, "--internal-port", str(port)]
    process = serve(*flags)
    assert complete(process.wait_ready(), max_tokens=4)
    for internal in (port, port + 1, port + 2):  # the workers', and the gateway's
        wait_until_ready(f"http://127.0.0.1:{internal}", "/health")
    assert len(children(process, "worker")) == 2
    assert children(process, "redis-server") == []
    assert process.stop() == 0
    names = {path.name for path in (tmp_path / "state" / "logs").iterdir()}
    assert names == {"gateway.log", "worker-1.log", "worker-2.log"}


def test_a_child_that_cannot_start_ends_the_start_with_its_last_word(serve, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    process = serve("--num-blocks", "1")
    assert process.wait() == 1
    [line] = [line for line in process.stderr.splitlines() if line.startswith("quire serve:")]
    assert re.search(r"worker-1 ended, exit code 1: .*raise --num-blocks.*\(log: .*worker-1.log\)", line)
    assert "from the environment" not in line, "it was a flag"
    assert "Traceback" not in process.stderr


def test_logs_that_somebody_removed_cost_no_server(server: QuireProcess) -> None:
    url = server.wait_ready()
    logs = Path(server.wait_for(r"logs   (/.*)")[1])
    shutil.rmtree(logs)
    for name in ("worker", "redis-server"):
        [pid] = children(server, name)
        os.kill(pid, signal.SIGTERM)
        server.wait_for(rf"^{name.removesuffix('-server')}\S* ended, exit code 0; starting it again in ")
    assert complete(url, max_tokens=4), "it waits for the worker"
    assert (logs / "worker-1.log").is_file()
    assert server.stop() == 0


@pytest.mark.parametrize(
    ("full", "said"),
    [
        ("redis/redis.conf", r"cannot start Redis below \S+/redis: No space left on device; pass another --state-dir"),
        ("logs/gateway.log/x", r"cannot write the log \S+/gateway.log: Is a directory; make room there"),
    ],
)
def test_a_state_folder_that_takes_no_more_is_one_line(serve, tmp_path: Path, full: str, said: str) -> None:  # type: ignore[no-untyped-def]
    for name in (full, "lock"):
        path = tmp_path / "state" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to("/dev/full")
    process = serve()
    assert process.wait() == 1
    [line] = [line for line in process.stderr.splitlines() if line.startswith("quire serve:")]
    assert re.search(said, line)


def test_ctrl_c_while_starting_ends_cleanly(serve) -> None:  # type: ignore[no-untyped-def]
    process = serve()
    process.wait_for("^Starting tiny")
    pids = list(children_of(process.pid))
    assert process.stop() == 0
    assert not any(map(is_running, pids))
    assert "ready:" not in process.stdout


def test_a_second_ctrl_c_ends_it_at_once(serve) -> None:  # type: ignore[no-untyped-def]
    process = serve(QUIRE_DRAIN_S="600")
    url = process.wait_ready()
    pieces = stream(url, max_tokens=200)
    next(pieces)
    [worker] = children(process, "worker")
    os.kill(worker, signal.SIGSTOP)  # the stream cannot end, and the gateway waits for it
    pids = list(children_of(process.pid))
    process.send(signal.SIGINT)
    process.wait_for("^Stopping")
    drain = threading.Thread(target=lambda: list(ignoring_errors(pieces)))
    drain.start()
    process.send(signal.SIGINT)
    assert process.wait(60) == 130
    assert not any(map(is_running, pids))
    drain.join()


def ignoring_errors(pieces: Iterator[str]) -> Iterator[str]:
    try:
        yield from pieces
    except (OSError, ValueError):
        return


def three_ports() -> int:
    """A free port whose two successors are free too."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port: int = first.getsockname()[1]
            with (
                contextlib.suppress(OSError),
                socket.create_server(("127.0.0.1", port + 1)),
                socket.create_server(("127.0.0.1", port + 2)),
            ):
                return port


def wait_until_ready(url: str, path: str = "/readyz") -> None:
    """Ask until the server says that it is ready, as a load balancer does."""
    waiting = threading.Event()
    for _ in range(600):
        try:
            with urllib.request.urlopen(url + path, timeout=5):
                return
        except OSError:  # HTTPError among them
            waiting.wait(0.05)
    raise AssertionError("not ready again")


@pytest.mark.soak
def test_a_hub_that_does_not_answer_is_named_with_the_remedy(start_quire: StartQuire, tmp_path: Path) -> None:
    unreachable = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "0"}
    flags = ["--port", "0", "--state-dir", str(tmp_path / "state")]
    process = start_quire("serve", "nobody/nothing", *flags, environ=unreachable)
    assert process.wait() == 1
    expected = (
        "model: 'nobody/nothing' is not a folder, and as a Hugging Face name it is neither downloaded nor reachable"
    )
    assert expected in process.stderr
    assert "connect to huggingface.co once (HF_HUB_OFFLINE must be unset), or give a folder" in process.stderr


# --- quantized checkpoints --------------------------------------------------------------------------------------------
# `quire serve` of quantised checkpoints: the answer over HTTP is that of Transformers on the dequantised weights.

QUANTIZED_PROMPT = [1, 30, 41, 52]
TOKENS = 24


def greedy(folder: Path) -> list[int]:
    """Return the tokens of Transformers in float32."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None  # min_new_tokens would forbid end tokens, which ignore_eos does not
    ids = model.generate(torch.tensor([QUANTIZED_PROMPT]), max_new_tokens=TOKENS, do_sample=False)
    tokens: list[int] = ids[0, len(QUANTIZED_PROMPT) :].tolist()
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param("gptq-order", torch.float16, marks=pytest.mark.soak),
        ("awq", torch.float32),
        pytest.param("fp8-block", torch.float32, marks=pytest.mark.soak),
    ],
)
def test_an_answer_over_http(name: str, dtype: torch.dtype, tiny_model: Path, tmp_path: Path) -> None:
    """dtype: in which Quire keeps the dequantised weights."""
    folder = quantize_checkpoint(tiny_model, tmp_path / name, name, dtype)
    with quire_processes() as start:
        process = launch(start, folder, tmp_path / "state")
        url = process.wait_ready()
        body = {
            "model": name,
            "prompt": QUANTIZED_PROMPT,
            "max_tokens": TOKENS,
            "temperature": 0,
            "return_token_ids": True,
        }
        with post(url, **body) as response:
            [choice] = json.load(response)["choices"]
    assert choice["token_ids"] == greedy(folder / "plain")
