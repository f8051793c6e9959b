"""The prefixes with which calls reach Redis: of a name, of a chain of responses, of the first messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgpack
import pytest

from tests.gateway.api.test_conversation import TEMPLATE, answering
from tests.gateway.conftest import Start
from tests.support.gateway.response_calls import PATH as RESPONSES
from tests.support.gateway.running import MODEL, Reply, RunningGateway, write_model

CHATS, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
TEXT = "What is the name of the village by the sea? " * 5


class TwoWorkers:
    workers: Any = ("card", "card")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("affinity") / "test-model", chat_template=TEMPLATE)


@pytest.fixture
async def gateway(start_gateway: Start, folder: Path) -> RunningGateway:
    gateway = await start_gateway(model=str(folder), tool_call_format="hermes", reasoning_format="think")
    gateway.gateway.affinity._live = TwoWorkers()
    return gateway


async def prefixes(gateway: RunningGateway, reply: Reply) -> list[bytes]:
    assert reply.status == 200, reply.json
    broker = gateway.gateway.broker
    request_id = reply.json["id"].rpartition("-")[2].rpartition("_")[2]
    packed = await broker.client.hget(broker.keys.request(request_id), "prefixes")
    return msgpack.unpackb(packed, raw=True) if packed else []


async def ask(gateway: RunningGateway, path: str, **body: Any) -> list[bytes]:
    async with gateway.worker(answering("x")):
        return await prefixes(gateway, await gateway.post(path, {"model": MODEL, **body}))


def chat(*texts: str) -> list[dict[str, str]]:
    return [{"role": "assistant" if at % 2 else "user", "content": text} for at, text in enumerate(texts)]


async def test_the_turns_of_a_chat_share_the_prefix_of_its_first_message(gateway: RunningGateway) -> None:
    first = await ask(gateway, CHATS, messages=chat(TEXT))
    assert len(first) == 1
    assert await ask(gateway, CHATS, messages=chat(TEXT, "x", "And now?")) == first
    assert await ask(gateway, CHATS, messages=chat(TEXT + "?")) != first
    assert await ask(gateway, CHATS, messages=chat(TEXT), cache_salt="s") != first
    assert await ask(gateway, "/v1/messages", messages=chat(TEXT), max_tokens=9) == first


async def test_a_key_names_the_conversation(gateway: RunningGateway) -> None:
    named = await ask(gateway, CHATS, messages=chat(TEXT), prompt_cache_key="k")
    assert len(named) == 2
    assert await ask(gateway, CHATS, messages=chat(TEXT, "x", "y"), prompt_cache_key="k") == named
    compacted = await ask(gateway, CHATS, messages=chat("In short: " + TEXT), prompt_cache_key="k")
    assert (compacted[0] == named[0], compacted[1]) == (False, named[1])
    assert not {*await ask(gateway, CHATS, messages=chat(TEXT), prompt_cache_key="l")} & {*named}


async def test_the_chain_names_a_conversation_of_stored_responses(gateway: RunningGateway) -> None:
    async with gateway.worker(answering("x")):
        first = await gateway.post(RESPONSES, {"model": MODEL, "input": TEXT, "instructions": "Be kind."})
        body = {"model": MODEL, "input": "And now?", "previous_response_id": first.json["id"]}
        second = await gateway.post(RESPONSES, body | {"instructions": "Be brief."})
        third = await gateway.post(RESPONSES, body | {"previous_response_id": second.json["id"]})
        other = await gateway.post(RESPONSES, {"model": MODEL, "input": TEXT})
        unstored = await gateway.post(RESPONSES, {"model": MODEL, "input": TEXT, "store": False})
    names = {(await prefixes(gateway, reply))[1] for reply in (first, second, third)}
    assert len(names) == 1
    assert (await prefixes(gateway, other))[1] not in names
    # Its items have new names each time, so its first message counts.
    assert len(await prefixes(gateway, unstored)) == 1


async def test_a_prompt_without_messages_is_known_by_its_first_tokens(gateway: RunningGateway) -> None:
    first = await ask(gateway, COMPLETIONS, prompt=TEXT)
    assert len(first) == 1
    assert await ask(gateway, COMPLETIONS, prompt=TEXT + "More.") == first
    assert await ask(gateway, COMPLETIONS, prompt="A" + TEXT) != first
    assert await ask(gateway, COMPLETIONS, prompt=[TEXT, TEXT]) == []
    assert await ask(gateway, COMPLETIONS, prompt="short") == []
