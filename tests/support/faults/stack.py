"""The stack of the fault tests: real processes, real clients, and the invariants that hold afterwards."""

from __future__ import annotations

import http.client
import json
import threading
import time
import urllib.parse
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Protocol

from redis import Redis
from tokenizers import Tokenizer

from quire.ops.local.embedded_redis import EmbeddedRedis
from quire.shared.protocol.keys import LaneKeys
from tests.conftest import QuireProcess, clean_environ
from tests.support.faults import invariants
from tests.support.faults.proxy import Proxy

MODEL = "tiny"
KEYS = LaneKeys(MODEL)
STEP_S = 0.01


@dataclass
class Event:
    """One SSE event and its arrival time."""

    at: float
    id: str
    data: str


class Way(Protocol):
    """The route of a process to Redis: through a proxy, or from its own machine."""

    @property
    def url(self) -> str: ...

    @property
    def prefix(self) -> tuple[str, ...]:
        """The words before the command that run it on that machine."""


def parse(events: Sequence[Event]) -> list[dict[str, Any]]:
    return [json.loads(event.data) for event in events if event.data != "[DONE]"]


def texts(events: Sequence[Event]) -> list[tuple[int, str]]:
    """Return (choice, text) of each piece of text."""
    found = []
    for choice in (choice for data in parse(events) for choice in data.get("choices", ())):
        text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
        if text:
            found.append((choice["index"], text))
    return found


def said(pieces: Sequence[dict[str, Any]]) -> str:
    """Return the joined text of one choice of a completion, with its log-probabilities if it has them."""
    rows = scored(pieces)
    return "".join(piece["text"] for piece in pieces) + (f" {rows}" if rows else "")


def scored(pieces: Sequence[dict[str, Any]]) -> list[tuple[str, float, dict[str, float]]]:
    """Return each token of a choice with its log-probability and those of the most probable tokens."""
    found = [piece["logprobs"] for piece in pieces if piece["logprobs"] is not None]
    columns = ("tokens", "token_logprobs", "top_logprobs")
    return [row for one in found for row in zip(*(one[name] for name in columns), strict=True)]


@dataclass
class Stream:
    """A client that reads an answer in a thread."""

    # Streams started since a stack last checked what its clients received.
    started: ClassVar[list[Stream]] = []

    url: str
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)
    path: str = "/v1/completions"
    method: str = "POST"

    def __post_init__(self) -> None:
        self.events: list[Event] = []
        self.status = 0
        self.response_headers: dict[str, str] = {}
        self.text_body = ""
        self.failure: BaseException | None = None
        self._connection: http.client.HTTPConnection | None = None
        self._response: http.client.HTTPResponse | None = None
        self._changed = threading.Condition()
        self._over = False
        self._texts = 0
        self.started.append(self)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            parts = urllib.parse.urlsplit(self.url)
            self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
            body = json.dumps(self.body) if self.method == "POST" else None
            self._connection.request(self.method, self.path, body, {"Content-Type": "application/json", **self.headers})
            response = self._response = self._connection.getresponse()
            self.status = response.status
            self.response_headers = {name.lower(): text for name, text in response.getheaders()}
            event_id = ""
            while line := response.readline():
                if line.startswith(b"id: "):
                    event_id = line[4:].decode().strip()
                elif line == b"\n":  # the next event has an id of its own, or none
                    event_id = ""
                elif line.startswith(b"data: "):
                    event = Event(time.monotonic(), event_id, line[6:].decode().strip())
                    with self._changed:
                        self.events.append(event)
                        self._texts += len(texts([event]))
                        self._changed.notify_all()
                elif line.startswith(b"{"):
                    self.text_body = line.decode()
        except (OSError, http.client.HTTPException) as error:
            self.failure = error
        finally:
            if self._response is not None:
                self._response.close()
            if self._connection is not None:
                self._connection.close()
            with self._changed:
                self._over = True
                self._changed.notify_all()

    def leave(self) -> None:
        """Disconnect as a killed client does."""
        if self._connection is not None and self._connection.sock is not None:
            with suppress(OSError):  # the server may have closed the connection meanwhile
                self._connection.sock.shutdown(2)

    def wait_events(self, count: int, timeout_s: float = 60) -> Stream:
        """Wait until `count` events with text have arrived."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._texts >= count or self._over, timeout_s), "no events"
        return self

    def wait_end(self, timeout_s: float = 60) -> Stream:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), f"the stream did not end; it has {len(self.events)} events"
        return self

    @property
    def parsed(self) -> list[dict[str, Any]]:
        return parse(self.events)

    @property
    def pieces(self) -> list[tuple[int, str]]:
        """Return (choice, text) of each event."""
        return texts(self.events)

    def choices(self, index: int = 0) -> list[dict[str, Any]]:
        """Return all pieces of one choice."""
        return [choice for data in self.parsed for choice in data.get("choices", ()) if choice["index"] == index]

    def text(self, choice: int = 0) -> str:
        return "".join(text for index, text in self.pieces if index == choice)

    @property
    def answer(self) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        found: dict[str, Any] = json.loads(self.text_body)
        return found

    @property
    def error(self) -> dict[str, Any] | None:
        if self.events and self.events[-1].data != "[DONE]":
            found: dict[str, Any] | None = json.loads(self.events[-1].data).get("error")
            return found
        return None

    @property
    def is_complete(self) -> bool:
        return bool(self.events) and self.events[-1].data == "[DONE]"

    @property
    def longest_pause_s(self) -> float:
        times = [event.at for event in self.events]
        return max((b - a for a, b in pairwise(times)), default=0.0)


class RedisServers(Protocol):
    """Several Redis servers that hold the queue together."""

    url: str

    def client(self, lane: str) -> Redis:
        """Return a client of the server that owns this lane now."""


class FaultStack:
    """One Redis, and the gateways and workers of the tiny model that a test starts."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        servers: RedisServers | None = None,
        redis_server: EmbeddedRedis | None = None,
    ) -> None:
        """servers: running servers to use instead of starting one; the caller stops them."""
        self.model = model
        self.keys = KEYS
        self.tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self.servers = servers
        if servers is None:
            self.redis_server = redis_server or EmbeddedRedis(folder)
            self.redis_server.start()
            self.redis = Redis.from_url(self.redis_server.url)
        else:
            self.redis = servers.client(MODEL)
        self.processes: list[QuireProcess] = []
        self.proxies: list[Proxy] = []
        self.streams = Stream.started
        self.streams.clear()
        # The most recent process of each worker name.
        self._workers: dict[str, QuireProcess] = {}

    def close(self) -> None:
        for proxy in self.proxies:
            proxy.heal()
        # The end of the processes is not part of the test, so all are killed at once.
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.close()
        for proxy in self.proxies:
            proxy.close()
        self.redis.close()
        if self.servers is None:
            self.redis_server.stop()

    def proxy(self) -> Proxy:
        """Return a proxy to Redis for processes that are started `via` it."""
        proxy = Proxy(self.redis_server.url)
        self.proxies.append(proxy)
        return proxy

    def _start(
        self, module: str, arguments: tuple[str, ...], environ: dict[str, str], via: Way | None = None
    ) -> QuireProcess:
        url = via.url if via else self.servers.url if self.servers else self.redis_server.url
        prefix = via.prefix if via else ()
        arguments = (*arguments, "--redis-url", url)
        if "--served-model-name" not in arguments:
            arguments = (*arguments, "--served-model-name", MODEL)
        process = QuireProcess(arguments, clean_environ(**environ), None, module, prefix)
        self.processes.append(process)
        return process

    def worker(
        self, name: str, *flags: str, ready: bool = True, via: Way | None = None, **environ: str
    ) -> QuireProcess:
        """Start a worker whose steps take STEP_S; `broken_worker` lists the other faults.

        Without --speculation it drafts nothing, so that each token takes a step.
        """
        arguments = ("worker", str(self.model), "--worker-id", name, "--dtype", "float32", "--threads", "1")
        drafting = () if "--speculation" in flags else ("--speculation", "off")
        process = self._start(
            "tests.support.faults.broken_worker",
            (*arguments, *drafting, *flags),
            {"TEST_STEP_S": str(STEP_S)} | environ,
            via,
        )
        if "--served-model-name" not in flags or MODEL in flags:  # other models have their own lanes
            self._workers[name] = process
        if ready:
            process.wait_for("ready: worker")
        return process

    def man(self, workers: dict[str, QuireProcess], *flags: str) -> None:
        """Start the workers `a` and `b` unless they run, and wait until both are ready."""
        for name in "ab":
            if name not in workers or workers[name].process.poll() is not None:
                workers[name] = self.worker(name, *flags, ready=False)
        for worker in workers.values():
            worker.wait_for("ready: worker", 100)

    def gateway(self, *flags: str, port: int = 0, via: Way | None = None, **environ: str) -> tuple[QuireProcess, str]:
        """Start a gateway, on a free port unless one is given; return it with its URL."""
        arguments = ("gateway", str(self.model), "--port", str(port), *flags)
        process = self._start("tests.support.faults.broken_gateway" if environ else "quire", arguments, environ, via)
        return process, process.wait_for(r"(http://[\d.]+:\d+)")[1]

    def wait(self, condition: Callable[[], Any], timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "it did not happen in time"
            time.sleep(0.02)

    def live_workers(self) -> list[str]:
        """The names of the workers whose processes have not ended."""
        return [name for name, process in self._workers.items() if process.process.poll() is None]

    def totals(self) -> dict[str, int]:
        """Return the number of accepted requests, and of ended ones by outcome."""
        found = {name.decode(): int(count) for name, count in self.redis.hgetall(KEYS.totals).items()}
        return {name: count for name, count in found.items() if name != "arrivals"}

    def is_drained(self) -> bool:
        """Return whether no request is queued, running or pending."""
        return invariants.is_drained(self)

    def assert_invariants(self) -> None:
        """Check the invariants after all requests have ended and all clients have their answers."""
        invariants.assert_invariants(self)
