"""A prompt over the context is refused in the words by which clients recognise it, to shorten the conversation.

The patterns are those of Claude Code 2.1 and of pi (for servers that speak OpenAI's APIs).
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support.gateway.running import MODEL, RunningGateway

CLAUDE_CODE = re.compile(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", re.IGNORECASE)
PI = re.compile(r"maximum context length is (\d+) tokens", re.IGNORECASE)
CONTEXT = 512
# Tokenized, and refused by the number of characters alone.
LONG, VERY_LONG = "x " * 1000, "x" * (CONTEXT * 16 + 1)


def bodies(text: str) -> dict[str, dict[str, Any]]:
    messages = [{"role": "user", "content": text}]
    return {
        "/v1/chat/completions": {"messages": messages},
        "/v1/completions": {"prompt": text},
        "/v1/responses": {"input": text},
        "/v1/messages": {"messages": messages, "max_tokens": 5},
    }


@pytest.mark.parametrize("text", [LONG, VERY_LONG], ids=["tokens", "characters"])
async def test_clients_recognise_the_refusal(server: RunningGateway, text: str) -> None:
    for path, body in bodies(text).items():
        replies = [await server.post(path, {"model": MODEL, **body, "stream": streams}) for streams in (False, True)]
        assert [reply.status for reply in replies] == [400, 400]
        errors = [reply.json["error"] for reply in replies]
        assert errors[0] == errors[1]
        message = errors[0]["message"]
        found = PI.search(message)
        assert found, message
        assert int(found[1]) == CONTEXT
        assert ".." not in message
        code = errors[0]["details"]["error_code"] if path == "/v1/messages" else errors[0]["code"]
        assert code == "context_length_exceeded"
        if path == "/v1/messages":
            assert message.startswith("prompt is too long: ")
            numbers = CLAUDE_CODE.search(message)
            assert numbers, message
            # The client drops as many tokens as the prompt is too long by.
            assert int(numbers[1]) > int(numbers[2]) == CONTEXT - 1


async def test_a_prompt_that_just_leaves_no_room_for_an_answer(server: RunningGateway) -> None:
    count = (await server.post("/tokenize", {"messages": [{"role": "user", "content": "x"}]})).json["count"]
    letters = CONTEXT - count + 1
    body = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "x" * letters}]}
    tokens = (await server.post("/v1/messages/count_tokens", {key: body[key] for key in ("model", "messages")})).json[
        "input_tokens"
    ]
    reply = await server.post("/v1/messages", body)
    assert (reply.status, tokens) == (400, CONTEXT)
    assert reply.json["error"]["message"].startswith(f"prompt is too long: {CONTEXT} tokens > {CONTEXT - 1} maximum. ")


async def test_a_count_is_refused_by_the_number_of_characters_alone(server: RunningGateway) -> None:
    path = "/v1/messages/count_tokens"
    reply = await server.post(path, {"model": MODEL, "messages": [{"role": "user", "content": VERY_LONG}]})
    assert reply.status == 400
    assert CLAUDE_CODE.search(reply.json["error"]["message"])
