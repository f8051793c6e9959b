"""The bodies of `/tokenize` and `/detokenize`: defaults and refusals."""

from __future__ import annotations

from typing import Any

import pytest

from quire.gateway.api.token_requests import read_detokenize, read_tokenize
from quire.gateway.errors.api_errors import InvalidRequest

MESSAGES = [{"role": "user", "content": "x"}]


def test_special_tokens_are_by_default_for_prompts_only() -> None:
    assert read_tokenize({"prompt": "x"}).form.add_special_tokens is None
    assert read_tokenize({"prompt": "x", "add_special_tokens": False}).form.add_special_tokens is False
    chat = read_tokenize({"messages": MESSAGES, "prompt": None})
    assert (chat.form.add_generation_prompt, chat.return_token_strs) == (True, False)
    assert chat.conversation is not None
    assert chat.conversation.messages == MESSAGES


def test_a_conversation_has_tools_and_variables() -> None:
    tool = {"type": "function", "function": {"name": "add"}}
    found = read_tokenize({"messages": MESSAGES, "tools": [tool], "chat_template_kwargs": {"loud": True}})
    assert found.conversation is not None
    assert [one.name for one in found.conversation.callable_tools] == ["add"]
    assert found.conversation.template_variables == {"loud": True}


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "prompt", "either prompt or messages"),
        ({"prompt": "x", "messages": MESSAGES}, "prompt", "either prompt or messages"),
        ({"prompt": 5}, "prompt", "a string"),
        ({"prompt": ["x"]}, "prompt", "a string"),
        ({"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt", "only with messages"),
        ({"prompt": "x", "add_special_tokens": 1}, "add_special_tokens", "true or false"),
        ({"messages": []}, "messages", "1 to 10000"),
        ({"messages": [{"role": "x"}]}, "messages[0].role", "system"),
        ({"prompt": "x", "chat_template": "x"}, "chat_template", "not a parameter"),
        ({"messages": MESSAGES, "tools": [{}]}, "tools[0].type", "must be function"),
        ({"prompt": "x", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "only with messages"),
        ({"prompt": "x", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs", "only with messages"),
        ({"messages": MESSAGES, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "cannot be set"),
        (
            {"messages": MESSAGES, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "cannot both be true",
        ),
    ],
)
def test_a_wrong_body_is_refused(body: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        read_tokenize(body)
    assert caught.value.param is not None
    assert caught.value.param.startswith(param)


@pytest.mark.parametrize("tokens", [None, "x", [True], [-1], [1.0], [["x"]], [0, 100], [10**30]])
def test_tokens_are_those_of_the_vocabulary(tokens: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_detokenize({"tokens": tokens}, 100)
    assert caught.value.param is not None
    assert caught.value.param.startswith("tokens")


def test_any_number_of_tokens_will_do() -> None:
    assert read_detokenize({"tokens": []}, 100) == ("", [])
    assert read_detokenize({"tokens": [0, 99], "model": "m"}, 100) == ("m", [0, 99])
