"""The schemas of /openapi.json describe real bodies, answers and events of the Responses API."""

from __future__ import annotations

from typing import Any

import pytest
from jsonschema import Draft202012Validator

from quire.gateway.api.responses.parameters import RESPONSES
from quire.gateway.api.responses.schemas import ANSWERS
from tests.gateway.api.test_conversation import answering
from tests.gateway.test_coding_agents import INPUT, TURN
from tests.support.gateway.response_calls import PATH, TOOL, WHOLE, create, raw_events
from tests.support.gateway.running import MODEL, RunningGateway

PARAMETERS = {name: one.schema for name, one in RESPONSES.items() if one.schema is not None}


def validator(name: str) -> Draft202012Validator:
    return Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": {"schemas": ANSWERS}})


@pytest.mark.parametrize("schema", [*PARAMETERS.values(), *ANSWERS.values()])
def test_a_schema_is_one(schema: Any) -> None:
    Draft202012Validator.check_schema(schema)
    assert not Draft202012Validator(schema).is_valid(None)


def test_the_body_of_a_coding_agent_follows_the_schemas() -> None:
    for name, value in {**TURN, "input": INPUT}.items():
        Draft202012Validator(PARAMETERS.get(name, {})).validate(value)


async def test_answers_and_events_follow_the_schemas(gateway: RunningGateway) -> None:
    asked = {"tools": [TOOL, {"type": "web_search"}], "metadata": {"a": "b"}}
    async with gateway.worker(answering(WHOLE)):
        whole = (await create(gateway, **asked)).json
        events = await raw_events(gateway, PATH, {"model": MODEL, "input": "Hello", "stream": True, **asked})
    queued = (await create(gateway, background=True)).json
    for response in (whole, queued):
        validator("Response").validate(response)
    for event in events:
        validator("ResponseEvent").validate(event)
    validator("ResponseItems").validate((await gateway.get(f"{PATH}/{whole['id']}/input_items")).json)
    counted = await gateway.post(f"{PATH}/input_tokens", {"model": MODEL, "input": "Hello"})
    validator("ResponseTokens").validate(counted.json)
    deleted = await gateway.send(f"DELETE {PATH}/{whole['id']} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
    validator("ResponseDeletion").validate(deleted.json)
    assert not validator("Response").is_valid({**whole, "status": "other"})
