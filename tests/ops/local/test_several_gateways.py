"""`quire serve --gateways 2`: two gateway processes answer at one port, and a client of one resumes at the other."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import QuireProcess, is_running, quire_processes
from tests.ops.local.test_launcher import children, complete, launch, post, three_ports, wait_until_ready

pytestmark = pytest.mark.slow

PROMPT = "Once"
TOKENS = 240
STREAMS = 12


@pytest.fixture(scope="module")
def internal_port() -> int:
    return three_ports()


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, internal_port: int) -> Iterator[QuireProcess]:
    with quire_processes() as start:
        state = tmp_path_factory.mktemp("gateways") / "state"
        process = launch(start, tiny_model, state, "--gateways", "2", "--internal-port", str(internal_port))
        process.wait_ready()
        yield process


def open_streams(internal_port: int) -> list[int]:
    """The open streams of each of the two gateways, whose internal ports follow the worker's."""
    found = []
    for port in (internal_port + 1, internal_port + 2):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as response:
            [line] = re.findall(r"^quire_open_streams(?:\{.*\})? (\d+)", response.read().decode(), re.MULTILINE)
            found.append(int(line))
    return found


class Client:
    """One streamed call: the text and the last event id that the client has."""

    def __init__(self, url: str) -> None:
        self.url, self.id, self.last, self.text, self.is_complete = url, "", "", "", False
        self.response = post(url, prompt=PROMPT, max_tokens=TOKENS, temperature=0, stream=True)

    def read(self, until: int = 2 * TOKENS) -> None:
        """Read until the client has this many tokens, or the stream ends or breaks."""
        try:
            for line in self.response:
                if line.startswith(b"id: "):
                    self.last = line[4:].strip().decode()
                elif line.startswith(b"data: ") and (data := line[6:].strip()) != b"[DONE]":
                    chunk = json.loads(data)
                    self.id = chunk["id"]
                    self.text += "".join(choice["text"] for choice in chunk["choices"])
                    if int(self.last.partition(".")[0]) >= until:
                        return
                elif line.startswith(b"data: "):
                    self.is_complete = True
        except (ConnectionError, http.client.IncompleteRead):
            pass

    def resume(self) -> None:
        """Connect again, as clients do: the kernel resets a connection that it gave to the port of a dying process."""
        request = urllib.request.Request(
            f"{self.url}/v1/completions/{self.id}/stream", headers={"Last-Event-ID": self.last}
        )
        for attempt in range(5):
            try:
                self.response = urllib.request.urlopen(request, timeout=60)
                return
            except ConnectionError:
                if attempt == 4:
                    raise


@contextlib.contextmanager
def suspended(server: QuireProcess) -> Iterator[None]:
    """Suspends the worker, for less than its lease, so that no stream ends meanwhile."""
    [worker] = children(server, "worker")
    os.kill(worker, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(worker, signal.SIGCONT)


def test_both_gateways_serve_and_each_has_its_own_metrics(server: QuireProcess, internal_port: int) -> None:
    url = server.wait_ready()
    assert len(children(server, "gateway")) == 2
    expected = complete(url, max_tokens=8)
    assert all(complete(url, max_tokens=8) == expected for _ in range(4))
    with suspended(server):
        clients = [Client(url) for _ in range(STREAMS)]
        streams = open_streams(internal_port)
    assert sum(streams) == STREAMS
    assert all(streams), f"all connections went to one gateway: {streams}"
    for client in clients:
        client.read()
    assert len({client.text for client in clients}) == 1
    assert all(client.is_complete for client in clients)


def test_a_client_of_a_killed_gateway_resumes_at_the_other_and_ctrl_c_ends_both(
    server: QuireProcess, internal_port: int
) -> None:
    url = server.wait_ready()
    [expected] = {complete(url, prompt=PROMPT, max_tokens=TOKENS)}
    with suspended(server):
        clients = [Client(url) for _ in range(STREAMS)]
    for client in clients:
        client.read(until=1)
    # The first of the two was started first.
    victim, other = sorted(children(server, "gateway"))
    with suspended(server):
        [first, second] = open_streams(internal_port)
        assert first, "the gateway that is killed has streams"
        assert second
        os.kill(victim, signal.SIGKILL)
    for client in clients:
        client.read()
    broken = [client for client in clients if not client.is_complete]
    assert len(broken) == first, "only streams of the killed gateway broke"
    for client in broken:
        client.resume()
        client.read()
    assert [client.text for client in clients] == [expected] * STREAMS
    assert is_running(other)
    server.wait_for(r"^gateway-1 ended, killed by SIGKILL; starting it again in 0.5 s$")
    wait_until_ready(f"http://127.0.0.1:{internal_port + 1}", "/health")
    pids = children(server, "gateway")
    assert len(pids) == 2
    assert other in pids
    logs_folder = Path(server.wait_for(r"logs   (/.*)")[1])
    assert server.stop() == 0
    assert not any(map(is_running, pids))
    logs = {path.name: path.read_text() for path in logs_folder.iterdir()}
    assert {"gateway-1.log", "gateway-2.log"} <= logs.keys()
    assert "Traceback" not in "".join(logs.values()) + server.stderr
