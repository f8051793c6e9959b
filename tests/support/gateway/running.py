"""A gateway inside the test process with real sockets, and clients that read and write its raw bytes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import aiohttp
import openai
from tokenizers import Tokenizer

from quire.gateway.model.scoring import ScoreSettings
from quire.gateway.model.served_model import load_model
from quire.gateway.server.app import create_app
from quire.gateway.server.http_server import GatewayRunner, start_site
from quire.gateway.serving.service import Gateway
from quire.gateway.settings import GatewaySettings
from quire.gateway.stream.sse import EventId
from tests.support.gateway.fake_worker import FakeWorker, Script
from tests.support.tokenizers import byte_level

MODEL = "test-model"
CONTEXT = 512
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model(folder: Path, tokenizer: Tokenizer | None = None, **tokenizer_config: Any) -> Path:
    """Write a model folder with everything except weights."""
    tokenizer = tokenizer or byte_level()
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE, **tokenizer_config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    model = {"max_position_embeddings": CONTEXT, "vocab_size": tokenizer.get_vocab_size(), "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(model))
    return folder


@dataclass
class Reply:
    """An HTTP response as the client received it."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        assert list(self.json) == ["error"]
        error: dict[str, Any] = self.json["error"]
        assert list(error) == ["message", "type", "param", "code"]
        return error


@dataclass(frozen=True)
class Event:
    """One server-sent event."""

    id: EventId
    data: Any


def parse_events(text: str) -> list[Event]:
    """Return the events of a stream without its comments. Check the framing of each event."""
    assert text.endswith("\n\n")
    events: list[Event] = []
    for block in text[:-2].split("\n\n"):
        if block.startswith(":"):
            continue
        number, data = block.split("\n")
        assert number.startswith("id: ")
        assert data.startswith("data: ")
        event_id = EventId.parse(number[4:])
        assert event_id is not None
        assert not events or event_id > events[-1].id
        events.append(Event(event_id, data[6:] if data == "data: [DONE]" else json.loads(data[6:])))
    return events


TIMEOUT = aiohttp.ClientTimeout(total=20)


class Stream:
    """An open event stream."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response

    async def next(self) -> Event:
        """Return the next event. Raises IncompleteReadError at the end."""
        while True:
            line = await self.response.content.readline()
            if not line.startswith(b":"):
                break
        if not line:
            raise asyncio.IncompleteReadError(b"", None)
        block = line + await self.response.content.readuntil(b"\n\n")
        [event] = parse_events(block.decode())
        return event

    async def take(self, count: int) -> list[Event]:
        return [await self.next() for _ in range(count)]

    async def rest(self) -> list[Event]:
        """Return all remaining events when the stream has ended."""
        found = []
        try:
            while True:
                found.append(await self.next())
        except asyncio.IncompleteReadError:
            return found


class RunningGateway:
    """A listening gateway, with a fake worker for tests that need one."""

    def __init__(
        self, settings: GatewaySettings, gateway: Gateway, port: int, runner: GatewayRunner | None = None
    ) -> None:
        self.settings = settings
        self.gateway = gateway
        # None for a gateway in another process.
        self._runner = runner
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    def worker(self, script: Script, **options: Any) -> Any:
        """Return a fake worker of this gateway's lane, as a context manager."""
        return FakeWorker(self.settings.redis_url, self.gateway.model.name, script, **options).running()

    def openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0, timeout=60)

    async def get(self, path: str, **headers: str) -> Reply:
        return await self.send(raw_request("GET", path, headers=headers))

    async def post(self, path: str, body: Any, **headers: str) -> Reply:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.send(raw_request("POST", path, data, headers))

    async def chat(self, **parameters: Any) -> Reply:
        return await self.post("/v1/chat/completions", chat_body(**parameters))

    async def complete(self, **parameters: Any) -> Reply:
        return await self.post("/v1/completions", {"model": MODEL, "prompt": "Hello", **parameters})

    async def events(self, path: str, body: Any) -> list[Event]:
        """Return the events of a streamed call, which must be accepted."""
        headers = {"Accept": "text/event-stream"}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.post(self.url + path, json=body) as response,
        ):
            assert response.status == 200, await response.text()
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            return parse_events(await response.text())

    @asynccontextmanager
    async def stream(self, path: str, body: Any = None, **headers: str) -> AsyncIterator[Stream]:
        """Open a streamed answer: by GET without a body, else by POST."""
        async with (
            aiohttp.ClientSession(headers={"Accept": "text/event-stream"}, timeout=TIMEOUT) as session,
            session.request(
                "GET" if body is None else "POST",
                self.url + path,
                json=body,
                headers={name.replace("_", "-"): value for name, value in headers.items()},
            ) as response,
        ):
            yield Stream(response)

    async def send(self, data: bytes) -> Reply:
        """Send bytes as they are and read one answer."""
        reader, writer = await self.connect(data)
        try:
            return await asyncio.wait_for(read_reply(reader), 60)
        finally:
            writer.close()

    async def connect(self, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        return reader, writer

    async def shut_down(self) -> None:
        """Run the shutdown handlers, the first step of a gateway's end."""
        assert self._runner is not None
        await self._runner.shutdown()

    async def cancellations(self) -> None:
        """Wait until the cancellations that this gateway has begun are over."""
        await self.gateway.submission.canceller._idle.wait()

    @property
    def app(self) -> Any:
        assert self._runner is not None
        return self._runner.app

    @property
    def connections(self) -> int:
        """The number of connections that clients have open."""
        assert self._runner is not None
        assert self._runner.server is not None
        return len(self._runner.server.connections)

    async def queued(self) -> int:
        return (await self.gateway.broker.queued())[0]

    async def accepted(self) -> int:
        """Return the number of requests that ever reached the queue."""
        broker = self.gateway.broker
        return int(await broker.client.hget(broker.keys.totals, "accepted") or 0)


def chat_body(**parameters: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], **parameters}


def raw_request(method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None) -> bytes:
    lines = {"Host": "test", "Content-Type": "application/json", "Content-Length": str(len(body))}
    lines |= {name.replace("_", "-"): value for name, value in (headers or {}).items()}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value)
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body


async def read_reply(reader: asyncio.StreamReader) -> Reply:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    status, *lines = head.strip().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    body = await reader.readexactly(int(headers["content-length"])) if "content-length" in headers else b""
    return Reply(int(status.split()[1]), headers, body)


def tokens(text: str) -> list[int]:
    ids: list[int] = byte_level().encode(text, add_special_tokens=False).ids
    return ids


def texts(events: Sequence[Event], choice: int = 0) -> list[str]:
    """Return the texts of one choice in a stream's events."""
    found = []
    for event in events:
        if event.data == "[DONE]":
            continue
        for item in event.data["choices"]:
            text = item["delta"].get("content") if "delta" in item else item["text"]
            if item["index"] == choice and text:
                found.append(text)
    return found


async def until(condition: Any) -> None:
    """Wait for something that another process or connection does; fails after some seconds."""
    async with asyncio.timeout(60):
        while not await condition():  # noqa: ASYNC110 - the condition is in another process
            await asyncio.sleep(0.005)


# Most tests serve the same folder. No test changes a folder from which a gateway was started.
_load = lru_cache(maxsize=8)(load_model)


@asynccontextmanager
async def running_gateway(settings: GatewaySettings, tracer: Any = None) -> AsyncIterator[RunningGateway]:
    model = _load(
        settings.model,
        settings.name,
        settings.generation_config == "auto",
        settings.tool_call_format,
        settings.reasoning_format,
        scores=ScoreSettings(settings.score_texts, settings.score_template),
    )
    gateway = Gateway(settings, model, tracer)
    runner = GatewayRunner(create_app(gateway))
    await runner.setup()
    try:
        port = await start_site(runner, "127.0.0.1", settings.port, settings.reuse_port)
        await asyncio.wait_for(gateway.subscription.ready.wait(), 60)
        yield RunningGateway(settings, gateway, port, runner)
    finally:
        await runner.cleanup()


# --- refusals ---------------------------------------------------------------------------------------------------------
# Refusals: an error in the shape of the OpenAI API that names the field, for little work.

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USER = {"role": "user", "content": "Hello"}


async def check(gateway: RunningGateway, path: str, body: Any, status: int, param: str | None, says: str = "") -> None:
    # The gateway is in this process. Other processes change how long it takes, and not how much it computes.
    before = time.process_time()
    reply = await gateway.post(path, body)
    assert time.process_time() - before < 1.0, body
    assert (reply.status, reply.error["param"]) == (status, param), (body, reply.error)
    assert says in reply.error["message"], body
    assert reply.headers["content-type"].startswith("application/json")
    assert len(reply.headers["x-request-id"]) == 32
