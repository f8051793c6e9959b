"""Grammars are tried in processes of their own; the results are kept."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from quire.gateway.features.grammars import grammar_check
from quire.gateway.features.grammars.schema_fault import MAX_TRIALS, SchemaFault, find_fault
from quire.shared.text.grammar import GrammarVocabulary, write
from quire.shared.text.grammar_error import GrammarError
from tests.gateway.conftest import Start
from tests.support.gateway.running import RunningGateway, chat_body

# --- Grammars are tried in processes of their own; the results are kept -----------------------------------------------


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"enum": ["ä", 1]}}, "required": ["b"]}
VOCABULARY = GrammarVocabulary({}, (256,), 257)


def wanted(schema: Any = SCHEMA, **changes: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema} | changes}


@pytest.fixture
async def server(start_gateway: Start) -> AsyncIterator[RunningGateway]:
    """A gateway whose queue must still be untouched when the test is over."""
    gateway = await start_gateway()
    yield gateway
    assert await gateway.accepted() == 0


async def test_who_asks_for_a_schema_that_is_known_waits_for_no_trial_of_another(
    server: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, may_end = threading.Event(), threading.Event()
    tried: list[tuple[str, str]] = []

    def try_out(grammar: str, vocabulary: GrammarVocabulary) -> str:
        tried.append((grammar, threading.current_thread().name))
        has_begun.set()
        may_end.wait(60)
        return "so it is"

    known = wanted({"type": "strin"})
    assert (await server.post(CHAT, chat_body(response_format=known))).status == 400
    monkeypatch.setattr(grammar_check, "try_out", try_out)
    others = [
        asyncio.create_task(server.post(CHAT, chat_body(response_format=wanted({"const": number}))))
        for number in range(8)
    ]
    try:
        assert await asyncio.to_thread(has_begun.wait, 60)
        assert "Invalid type" in (await server.post(CHAT, chat_body(response_format=known))).error["message"]
        assert not any(other.done() for other in others)
    finally:
        may_end.set()
    for other in others:
        assert "so it is" in (await other).error["message"]
    assert len(tried) == 8
    assert all(name.startswith("grammar") for _, name in tried)


async def test_the_schemas_that_are_known_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    monkeypatch.setattr(grammar_check, "try_out", lambda grammar, vocabulary: tried.append(grammar) or "")
    some = grammar_check.GrammarTrials(VOCABULARY, 1)
    for number in range(grammar_check.KEPT):
        await some.check(str(number))
        await some.check("0")
    await some.check(str(grammar_check.KEPT))
    await some.check("0")
    assert tried == [str(number) for number in range(grammar_check.KEPT + 1)]
    await some.check("1")  # the one that nobody has asked for since
    assert tried[-1] == "1"
    some.close()


async def test_the_texts_that_are_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    monkeypatch.setattr(grammar_check, "try_out", lambda grammar, vocabulary: tried.append(grammar[0]) or "")
    monkeypatch.setattr(grammar_check, "KEPT_CHARACTERS", 1000)
    some = grammar_check.GrammarTrials(VOCABULARY, 1)
    for letter in "abcdef" + "defc":
        await some.check(letter * 300)
    assert "".join(tried) == "abcdefc"
    some.close()


async def test_the_longest_grammar_is_kept_while_it_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_check, "try_out", lambda grammar, vocabulary: "its fault")
    monkeypatch.setattr(grammar_check, "KEPT_CHARACTERS", 1000)
    some = grammar_check.GrammarTrials(VOCABULARY, 1)
    with pytest.raises(GrammarError, match="its fault"):
        await some.check("x" * 2000)
    some.close()


async def test_a_schema_that_got_no_time_on_a_busy_machine_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    some = grammar_check.GrammarTrials(VOCABULARY, 1)
    with monkeypatch.context() as patch:
        patch.setattr(grammar_check, "TIMEOUT_S", 0.0)
        with pytest.raises(GrammarError, match="takes too long"):
            await some.check(write("json_schema", {"const": 1}))
    await some.check(write("json_schema", {"const": 1}))
    some.close()


# ---  -----------------------------------------------------------------------------------------------------------------


BAD = {"type": "string", "pattern": "BAD"}
GOOD = {"type": "integer"}


class Attempts:
    """Refuses each grammar with the text BAD."""

    def __init__(self) -> None:
        self.count = 0

    async def __call__(self, grammar: str) -> None:
        self.count += 1
        if "BAD" in grammar:
            raise GrammarError("it is bad")


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"properties": {"a": GOOD, "x": BAD}}, ".properties.x"),
        ({"properties": {"a": {"type": "array", "items": {"anyOf": [GOOD, BAD]}}}}, ".properties.a.items.anyOf[1]"),
        ({"properties": {"a": {"allOf": [{"not": BAD}]}}, "additionalProperties": False}, ".properties.a.allOf[0].not"),
        ({"properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": BAD}}, ".properties.a"),
        ({"title": "BAD", "properties": {"a": GOOD}}, ""),
        ({"required": ["BAD"], "properties": [], "anyOf": {}}, ""),
    ],
)
async def test_the_place_of_a_fault(schema: dict[str, Any], path: str) -> None:
    assert await find_fault(schema, Attempts()) == SchemaFault(path, "it is bad")


async def test_a_schema_without_a_fault() -> None:
    attempts = Attempts()
    assert await find_fault({"properties": {"a": GOOD}}, attempts) is None
    assert attempts.count == 1


async def test_the_number_of_trials_is_bounded() -> None:
    attempts = Attempts()
    properties = {f"p{index}": GOOD for index in range(1000)}
    assert await find_fault({"properties": {**properties, "x": BAD}}, attempts) == SchemaFault("", "it is bad")
    assert attempts.count == MAX_TRIALS
