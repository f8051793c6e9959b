"""Requests that are drawn from /openapi.json: no request fails with a 500, and every answer is one that the document
describes."""

from __future__ import annotations

import asyncio
import http.client
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from quire.shared.protocol.messages import GenerationRequest, Outcome
from tests.gateway.api.test_prompt_parameters import report
from tests.gateway.conftest import Start
from tests.support.gateway.agents import TEMPLATE
from tests.support.gateway.fake_worker import Steps, emit
from tests.support.gateway.running import CONTEXT, MODEL, RunningGateway, tokens, write_model
from tests.support.schema_values import CHARACTERS, SchemaValues

# A stream without end.
ENDLESS = ("/engine/stream",)
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
MESSAGES = [{"role": "user", "content": "Hi."}]
# Bodies that are accepted as they are. Most of the drawn ones are refused for one property of many.
ACCEPTED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": MODEL,
        "messages": MESSAGES,
        "max_tokens": 50,
        "tools": [{"type": "function", "function": FUNCTION}],
    },
    "/v1/completions": {"model": MODEL, "prompt": "Hi.", "max_tokens": 50},
    "/v1/messages": {
        "model": MODEL,
        "messages": MESSAGES,
        "max_tokens": 50,
        "tools": [{"name": "f", "input_schema": FUNCTION["parameters"]}],
    },
    "/v1/responses": {"model": MODEL, "input": "Hi.", "tools": [{"type": "function", **FUNCTION}]},
    "/v1/embeddings": {"model": MODEL, "input": "Hi."},
    "/v1/rerank": {"model": MODEL, "query": "Hi?", "documents": ["Hi.", {"text": "So."}]},
    "/v1/score": {"model": MODEL, "queries": "Hi?", "documents": ["Hi."]},
    "/v1/messages/count_tokens": {"model": MODEL, "messages": MESSAGES},
    "/tokenize": {"model": MODEL, "prompt": "Hi."},
    "/detokenize": {"model": MODEL, "tokens": [5]},
}
# The worker's answer to every call: reasoning, text and a tool call, in the formats of the chat template.
ANSWER = '<think>\nHm.\n</think>\n\nSo.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
# Length of an embedding.
HIDDEN = 8
# A request by itself: visible ASCII goes into headers, and any text into the path and the query.
HEADER_TEXT = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), max_size=20)
ANY_TEXT = st.text(CHARACTERS, max_size=12)


@dataclass(frozen=True)
class Sent:
    """A request of the test."""

    path: str
    method: str
    url: str
    headers: dict[str, str]
    body: Any


class Document:
    """The document of a gateway: draws requests from it, and holds answers to it."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document
        self._values = SchemaValues(document)
        self._validators: dict[str, Draft202012Validator] = {}
        self.operations = [
            (path, method, operation)
            for path, operations in document["paths"].items()
            for method, operation in operations.items()
            if path not in ENDLESS
        ]

    def requests(self) -> st.SearchStrategy[Sent]:
        with_body = [one for one in self.operations if "requestBody" in one[2]]
        # Most of the parameters are in bodies.
        return st.one_of([self._request(*one) for one in (*self.operations, *with_body * 4)])

    def _request(self, path: str, method: str, operation: dict[str, Any]) -> st.SearchStrategy[Sent]:
        places: dict[str, dict[str, Any]] = {"path": {}, "query": {}, "header": {}}
        for reference in operation["parameters"]:
            one = self._values.resolve(reference)
            text = HEADER_TEXT if one["in"] == "header" else ANY_TEXT
            places[one["in"]][one["name"]] = st.one_of(self._values.valid(one["schema"]), text)
        body: st.SearchStrategy[Any] = st.none()
        # An upload is a form, which the tests of files send; here it comes without a body.
        if json_body := operation.get("requestBody", {}).get("content", {}).get("application/json"):
            # The first of several kinds of bodies is the one in ACCEPTED.
            kinds = json_body["schema"].get("anyOf", [json_body["schema"]])
            body = st.one_of([near for kind in kinds for near in (self._values.valid(kind), self._values.near(kind))])
            if path in ACCEPTED:
                body |= self._values.with_one_property(kinds[0], ACCEPTED[path])
        few = st.sets(st.sampled_from([*places["query"], *places["header"]]), max_size=2)

        def build(drawn: dict[str, Any], given: set[str], body: Any) -> Sent:
            names = {name: drawn["path"][name] or "x" for name in places["path"]}
            url = path.format(**{name: quote(value, safe="") for name, value in names.items()})
            query = {name: value for name, value in drawn["query"].items() if name in given}
            # A header may be a number in the document.
            texts = {name: str(value) for name, value in drawn["header"].items() if name in given}
            # Other characters are not HTTP, and are refused before the path is known.
            headers = {name: value for name, value in texts.items() if value.isascii() and value.isprintable()}
            return Sent(path, method, url + ("?" + urlencode(query) if query else ""), headers, body)

        return st.builds(
            build, st.fixed_dictionaries({k: st.fixed_dictionaries(v) for k, v in places.items()}), few, body
        )

    def check(self, sent: Sent, status: int, kind: str, body: bytes) -> None:
        """Raises AssertionError for an answer that the document does not describe."""
        operation = self._document["paths"][sent.path][sent.method]
        described = operation["responses"].get(str(status))
        assert described is not None, f"status {status} is not described"
        content = self._values.resolve(described)["content"]
        assert kind in content, f"{kind} is not described for {status}"
        schema = content[kind]["schema"]
        if kind == "application/json":
            self._validate(schema, json.loads(body))
        elif kind == "text/event-stream":
            inner = schema["properties"]["data"]["contentSchema"]
            error = self._values.resolve(operation["responses"]["400"])["content"]["application/json"]["schema"]
            lines = [line[6:] for line in body.decode().split("\n") if line.startswith("data: ")]
            for event in [json.loads(line) for line in lines if line != "[DONE]"]:
                self._validate(error if "error" in event else inner, event)

    def _validate(self, schema: dict[str, Any], value: Any) -> None:
        key = json.dumps(schema)
        if key not in self._validators:
            whole = {**schema, "components": self._document["components"]}
            self._validators[key] = Draft202012Validator(whole)
        self._validators[key].validate(value)


def fuzz(port: int, examples: int) -> dict[str, int]:
    """Sends requests, and checks the answers. Returns the number of answers by path and status."""
    counts: dict[str, int] = {}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/openapi.json")
    document = Document(json.loads(connection.getresponse().read()))

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate,),
    )
    @given(document.requests())
    def send(sent: Sent) -> None:
        body = None if sent.body is None else json.dumps(sent.body)
        headers = sent.headers | ({"Content-Type": "application/json"} if body is not None else {})
        try:
            connection.request(sent.method.upper(), sent.url, body, headers)
            answer = connection.getresponse()
            data = answer.read()
        except (http.client.HTTPException, OSError):
            connection.close()
            raise
        key = f"{sent.method} {sent.path} {answer.status}"
        counts[key] = counts.get(key, 0) + 1
        if isinstance(sent.body, dict) and sent.body.get("tools"):
            counts[f"{key} with tools"] = counts.get(f"{key} with tools", 0) + 1
        assert answer.status not in (500, 502), data
        document.check(sent, answer.status, answer.headers["Content-Type"].split(";")[0], data)

    send()
    connection.close()
    return counts


async def answer(request: GenerationRequest) -> Steps:
    """The worker's script: ANSWER, or an embedding of the prompt."""
    if request.pooling:
        yield (), Outcome("stop", embedding=struct.pack(f"<{HIDDEN}f", *range(1, HIDDEN + 1)))
        return
    async for step in emit(tokens(ANSWER), "stop", step=24)(request):
        yield step


@pytest.fixture
async def server(start_gateway: Start, tmp_path: Path) -> RunningGateway:
    model = write_model(tmp_path / MODEL, chat_template=TEMPLATE)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"hidden_size": HIDDEN}))
    return await start_gateway(engine_view="on", model=str(model), score_tokens="n,y")


async def run(gateway: RunningGateway, examples: int) -> dict[str, int]:
    async with gateway.worker(answer, max_model_len=CONTEXT, report=report) as worker:
        counts = await asyncio.to_thread(fuzz, gateway.port, examples)
        # Nothing is left behind: neither requests in the queue nor listeners.
        assert await gateway.queued() == 0
        assert len(worker.claimed) > 0
    assert not [line for line in counts if line.endswith(" 500")]
    for path in ACCEPTED:
        assert counts[f"post {path} 200"] > 0, counts
    # Every path refuses bodies; a small run draws few for each.
    refused = [path for path in ACCEPTED if counts.get(f"post {path} 400")]
    assert len(refused) == len(ACCEPTED) or (examples < 10_000 and len(refused) > len(ACCEPTED) // 2), counts
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses"):
        assert counts[f"post {path} 200 with tools"] > 0, counts
    return counts


@pytest.mark.slow
async def test_no_request_fails_and_every_answer_is_described(server: RunningGateway) -> None:
    await run(server, 1600)


@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_twenty_thousand_requests(server: RunningGateway) -> None:
    await run(server, 20_000)
