"""`schemathesis` against `/openapi.json` and a real worker: no fault of the server, no death, and flat memory."""

from __future__ import annotations

import os
import re
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import QuireProcess, children_of, clean_environ
from tests.ops.local.test_launcher import three_ports
from tests.outside.environments import Environments

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]
# HTTP requests to send at least.
REQUESTS = int(os.environ.get("TEST_OPENAPI_REQUESTS", "2000"))
# Random cases per operation in one run. A run also has thousands of cases for the bounds of every schema.
CASES = 20
# The most that the gateway may grow by after the first third of the requests. It keeps caches of bounded sizes.
GROWTH_MIB = 16


class Server:
    """A server of the demo model, its processes, and the counts of its gateway."""

    def __init__(self, process: QuireProcess, url: str, metrics: str) -> None:
        self.url = url
        self._process = process
        self._metrics = metrics
        # `quire serve` asks /readyz, which is a 503 at first, until it is ready.
        self._at_start = self._answers()

    def pid_of(self, service: str) -> int:
        """The process of a service, `gateway` or `worker`. `quire serve` replaces one that dies."""
        [pid] = [pid for pid, command in children_of(self._process.pid).items() if f" quire {service}" in command]
        return pid

    def output(self) -> str:
        """The output of `quire serve`, which reports a process that died."""
        return f"exit code {self._process.process.poll()}\n{self._process.stdout}\n{self._process.stderr}"

    def metrics(self) -> str:
        with urllib.request.urlopen(self._metrics, timeout=10) as response:
            text: str = response.read().decode()
        return text

    def answers(self) -> Counter[tuple[str, str]]:
        """The number of answered HTTP requests by route and status, since the server is ready."""
        return self._answers() - self._at_start

    def _answers(self) -> Counter[tuple[str, str]]:
        pattern = r'^quire_http_requests_total\{route="([^"]*)",status="(\w+)"\} (\d+)'
        found = re.findall(pattern, self.metrics(), re.MULTILINE)
        return Counter({(route, status): int(count) for route, status, count in found})

    def gateway_mib(self) -> float:
        """The resident memory of the gateway."""
        status = Path(f"/proc/{self.pid_of('gateway')}/status").read_text()
        return int(re.search(r"^VmRSS:\s+(\d+)", status, re.MULTILINE)[1]) / 1024  # type: ignore[index]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    port = three_ports()
    arguments = ("serve", "--port", "0", "--state-dir", str(tmp_path / "state"), "--internal-port", str(port))
    process = QuireProcess((*arguments, "--dtype", "float32", "--tokenizer-info"), clean_environ(), None)
    try:
        # The port of the gateway follows that of the worker.
        yield Server(process, process.wait_ready(), f"http://127.0.0.1:{port + 1}/metrics")
        assert process.stop() == 0
    finally:
        process.close()


def test_random_requests_find_no_fault(environments: Environments, server: Server) -> None:
    server_pids = server.pid_of("gateway"), server.pid_of("worker")
    memory: list[tuple[int, float]] = []
    seed = 0
    while not memory or memory[-1][0] < REQUESTS:
        seed += 1
        cases = environments.run_python(
            "schemathesis_program.py", server.url, ["schemathesis==4.32.5"], (str(seed), str(CASES)), timeout_s=1800
        )
        done = cases["fuzz"].value()
        assert done["code"] == 0, f"seed {seed}: {done['output'][-20_000:]}\n{server.output()}"
        answers = server.answers()
        memory.append((answers.total(), server.gateway_mib()))
        print(f"seed {seed}: {answers.total()} requests, gateway {memory[-1][1]:.1f} MiB")
        # A deadline that a random call sets to a moment is a 504; nothing else is a fault of the server.
        assert not {one: n for one, n in answers.items() if one[1].startswith("5") and one[1] != "504"}
    assert (server.pid_of("gateway"), server.pid_of("worker")) == server_pids
    # No request has killed a worker or made it give up.
    assert re.search(r"^quire_lane_dead\{.*\} 0\.0$", server.metrics(), re.MULTILINE)
    warm = next(mib for sent, mib in memory if sent >= REQUESTS / 3)
    assert memory[-1][1] - warm < GROWTH_MIB, memory
