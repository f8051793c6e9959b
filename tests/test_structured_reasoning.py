"""Structured output of a model that reasons, through the whole stack: the content follows its grammar, all of it.

The checkpoint is random, with the marks and the switch of Qwen3's template.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import anthropic.types
import openai
import pytest
from tokenizers import AddedToken, Tokenizer

from tests.conftest import QuireProcess, clean_environ
from tests.support.checkpoints import VOCAB_SIZE, make_checkpoint

pytestmark = pytest.mark.slow

START, END = "<think>", "</think>"
# `enable_thinking`: true begins the reasoning, false closes it, and absent leaves it to the model.
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking %}<think>\n{% endif %}"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
SCHEMA = {
    "type": "object",
    "properties": {"sky": {"enum": ["sunny", "cloudy"]}, "days": {"type": "integer", "minimum": 1, "maximum": 3}},
    "required": ["sky", "days"],
    "additionalProperties": False,
}
TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "<sky>sunny</sky>"}}
JSON_ANSWER = r'\{"sky": "(sunny|cloudy)", "days": [123]\}'
# Each form of structured output, with a pattern of its answers.
FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "json_schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
        JSON_ANSWER,
    ),
    "json": ({"structured_outputs": {"json": SCHEMA}}, JSON_ANSWER),
    "regex": ({"structured_outputs": {"regex": "[0-9]{3}-[0-9]{2}"}}, "[0-9]{3}-[0-9]{2}"),
    "choice": ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
    "ebnf": ({"structured_outputs": {"grammar": 'root ::= "<" [a-c]{2} ">"'}}, "<[a-c]{2}>"),
    "lark": ({"structured_outputs": {"grammar": 'start: "a" ("b" | "c")'}}, "a[bc]"),
    "structural_tag": ({"response_format": TAG}, "<sky>sunny</sky>"),
}
USER: Any = {"role": "user", "content": "How is the weather?"}


@pytest.fixture(
    scope="module", params=[pytest.param(True, marks=pytest.mark.soak), False], ids=["special marks", "plain marks"]
)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """The URL of a server, and the id of the mark at the end of the reasoning. Qwen3's marks are not special."""
    model = tmp_path_factory.mktemp("models") / "thinker"
    make_checkpoint(model, "qwen3", max_position_embeddings=1024, initializer_range=0.02, vocab_size=VOCAB_SIZE + 2)
    end = write_marks(model, request.param)
    state = tmp_path_factory.mktemp("state")
    arguments = ("serve", str(model), "--port", "0", "--state-dir", str(state), "--dtype", "float32")
    process = QuireProcess(arguments, clean_environ(), None)
    try:
        yield process.wait_ready(), end
        assert process.stop() == 0
    finally:
        process.close()


def write_marks(model: Path, is_special: bool) -> int:
    """Add the marks of reasoning to the tokenizer of a checkpoint, and the template; return the id of the end."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(mark, special=is_special) for mark in (START, END)])
    tokenizer.save(str(model / "tokenizer.json"))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    end = tokenizer.token_to_id(END)
    assert end is not None
    return int(end)


def ask(server: tuple[str, int], thinks: bool | None, form: str, **more: Any) -> dict[str, Any]:
    """The message of a chat, with the finish reason, whole or streamed."""
    url, end = server
    kwargs = {} if thinks is None else {"enable_thinking": thinks}
    # The end of the reasoning is likely, so that it comes soon.
    body = {"chat_template_kwargs": kwargs, "logit_bias": {str(end): 3.0}, "max_tokens": 700, **FORMS[form][0], **more}
    streams = body.pop("stream", False)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        create: Any = client.chat.completions.create
        answer = create(model="thinker", messages=[USER], extra_body=body, stream=streams)
        if not streams:
            [choice] = answer.choices
            return {**choice.message.model_dump(), "finish_reason": choice.finish_reason}
        whole: dict[str, Any] = {"content": "", "reasoning_content": "", "finish_reason": None}
        for chunk in answer:
            [choice] = chunk.choices
            for name in ("content", "reasoning_content"):
                whole[name] += getattr(choice.delta, name, None) or ""
            whole["finish_reason"] = choice.finish_reason or whole["finish_reason"]
        return whole


@pytest.mark.parametrize("form", FORMS)
def test_the_content_follows_the_grammar_after_the_reasoning(server: tuple[str, int], form: str) -> None:
    reasonings = []
    for seed in range(2):
        whole = {"reasoning_content": "", **ask(server, True, form, seed=seed)}
        assert whole["finish_reason"] == "stop", whole
        assert re.fullmatch(FORMS[form][1], whole["content"]), whole
        streamed = ask(server, True, form, seed=seed, stream=True)
        assert streamed == {name: whole[name] for name in streamed}
        reasonings.append(whole["reasoning_content"])
    assert any(reasonings)


@pytest.mark.parametrize("form", FORMS)
def test_the_grammar_holds_from_the_first_token_without_reasoning(server: tuple[str, int], form: str) -> None:
    for seed in range(2):
        off = ask(server, False, form, seed=seed, max_tokens=100)
        assert re.fullmatch(FORMS[form][1], off["content"]), off
        assert "reasoning_content" not in off


def test_the_model_decides_whether_it_reasons(server: tuple[str, int]) -> None:
    """A template that leaves it to the model: a bias on the mark at the beginning makes it reason."""
    start = server[1] - 1
    for bias, reasons in ((8.0, True), (-100.0, False)):
        found = ask(server, None, "json", seed=1, logit_bias={str(start): bias, str(server[1]): 4.0})
        assert re.fullmatch(JSON_ANSWER, found["content"]), found
        assert bool(found.get("reasoning_content")) is reasons


def test_reasoning_that_does_not_end_leaves_no_content(server: tuple[str, int]) -> None:
    found = ask(server, True, "json", logit_bias={str(server[1]): -100}, max_tokens=30)
    assert (found["finish_reason"], found["content"]) == ("length", "")
    assert found["reasoning_content"]


def test_a_budget_ends_reasoning_that_does_not_end_and_the_content_follows_its_grammar(
    server: tuple[str, int],
) -> None:
    endless = {"logit_bias": {str(server[1]): -100}, "seed": 1}
    found = {budget: ask(server, True, "json", thinking_token_budget=budget, **endless) for budget in (0, 6, 12)}
    for answer in found.values():
        assert answer["finish_reason"] == "stop"
        assert re.fullmatch(JSON_ANSWER, answer["content"]), answer
    assert not found[0].get("reasoning_content")
    assert found[12]["reasoning_content"].startswith(found[6]["reasoning_content"].rstrip())
    with anthropic.Anthropic(base_url=server[0], api_key="none", max_retries=0) as client:
        message = client.messages.create(
            model="thinker",
            messages=[USER],
            max_tokens=900,
            thinking={"type": "enabled", "budget_tokens": 12},
            extra_body={"seed": 1, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        )
    assert [block.type for block in message.content] == ["thinking", "text"]
    same = ask(server, True, "json", thinking_token_budget=12, seed=1, logit_bias={})
    assert isinstance(message.content[0], anthropic.types.ThinkingBlock)
    assert message.content[0].thinking == same["reasoning_content"]


def test_responses_and_messages_have_the_same_rule(server: tuple[str, int]) -> None:
    url, _ = server
    form = {"type": "json_schema", "name": "a", "schema": SCHEMA}
    more = {"chat_template_kwargs": {"enable_thinking": True}}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        respond: Any = client.responses.create
        response = respond(
            model="thinker", input=[USER], text={"format": form}, max_output_tokens=900, extra_body={"seed": 4, **more}
        )
    assert [item.type for item in response.output] == ["reasoning", "message"], response.status
    assert re.fullmatch(JSON_ANSWER, response.output_text)
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        message = client.messages.create(
            model="thinker",
            messages=[USER],
            max_tokens=900,
            thinking={"type": "enabled", "budget_tokens": 1024},
            extra_body={"seed": 4, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        )
    assert [block.type for block in message.content] == ["thinking", "text"], message.stop_reason
    assert isinstance(message.content[-1], anthropic.types.TextBlock)
    assert re.fullmatch(JSON_ANSWER, message.content[-1].text)
