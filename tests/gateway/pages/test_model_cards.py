"""`/v1/models`: the limits and capabilities of the model, in the shapes of OpenAI and vLLM."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from quire.gateway.model.served_model import load_model
from quire.gateway.pages.model_cards import CAPABILITIES, capabilities, reasoning_format
from tests.gateway.conftest import Start
from tests.support.gateway.agents import TEMPLATE as AGENTS
from tests.support.gateway.running import CONTEXT, MODEL, RunningGateway, write_model
from tests.support.gateway.running import TEMPLATE as PLAIN


async def test_the_card_has_limits_and_capabilities(gateway: RunningGateway) -> None:
    reply = await gateway.get("/v1/models")
    assert reply.json["object"] == "list"
    [card] = reply.json["data"]
    assert (await gateway.get(f"/v1/models/{MODEL}")).json == card
    assert (card["id"], card["object"], card["root"], card["parent"]) == (MODEL, "model", MODEL, None)
    assert card["max_model_len"] == CONTEXT
    assert card["vocab_size"] == gateway.gateway.model.vocab_size
    assert card["max_num_seqs"] == gateway.gateway.worker_registry.max_num_seqs
    assert (card["max_n"], card["max_prompts"], card["max_choices"]) == (16, 64, 128)
    assert {"chat", "completions", "json_schema"} < set(card["capabilities"])
    assert card["permission"][0]["allow_logprobs"] is True
    assert set(card["sampling_defaults"]) == {"temperature", "top_p", "top_k", "min_p", "repetition_penalty"}


async def test_the_folder_of_the_model_is_not_told(gateway: RunningGateway, model_folder: Path) -> None:
    assert str(model_folder) not in (await gateway.get("/v1/models")).body.decode()


async def test_another_model_is_not_found(gateway: RunningGateway) -> None:
    reply = await gateway.get("/v1/models/another")
    assert (reply.status, reply.error["code"]) == (404, "model_not_found")


async def test_the_limits_are_those_of_the_settings(start_gateway: Start) -> None:
    gateway = await start_gateway(max_n=3, max_model_len=100)
    [card] = (await gateway.get("/v1/models")).json["data"]
    assert (card["max_n"], card["max_model_len"]) == (3, 100)


def test_a_model_without_a_template_has_no_chat(tmp_path: Path) -> None:
    model = load_model(str(write_model(tmp_path / "plain", chat_template=None)), "plain")
    assert {"chat", "messages", "tools", "reasoning"}.isdisjoint(capabilities(model))
    assert {"completions", "scoring", "structured_outputs"} < set(capabilities(model))
    assert capabilities(model) == sorted(capabilities(model))
    assert (model.tool_format, reasoning_format(model)) == ("", "")


def test_a_model_without_an_end_token_follows_no_grammar(tmp_path: Path) -> None:
    model = replace(load_model(str(write_model(tmp_path / "plain")), "plain"), eos_token_ids=frozenset())
    assert {"json_object", "json_schema", "structured_outputs", "tools"}.isdisjoint(capabilities(model))
    assert {"chat", "messages"} < set(capabilities(model))


def test_the_capabilities_are_in_order() -> None:
    assert list(CAPABILITIES) == sorted(CAPABILITIES)


@pytest.mark.parametrize(
    ("template", "formats", "reasons"),
    [
        (PLAIN, ("json", None), False),
        (AGENTS, ("hermes", "think"), True),
        # The format of harmony has reasoning of its own.
        ("{{ tools }}<|channel|>final<|message|>", ("harmony", "harmony"), True),
    ],
)
async def test_the_card_has_the_formats_of_tool_calls_and_reasoning(
    start_gateway: Start, tmp_path: Path, template: str, formats: tuple[str, str | None], reasons: bool
) -> None:
    gateway = await start_gateway(model=str(write_model(tmp_path / MODEL, chat_template=template)))
    [card] = (await gateway.get("/v1/models")).json["data"]
    assert (card["tool_call_format"], card["reasoning_format"]) == formats
    assert "tools" in card["capabilities"]
    assert ("reasoning" in card["capabilities"]) == reasons
