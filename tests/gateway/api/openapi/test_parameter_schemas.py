"""The schema of a parameter accepts exactly the values that its check accepts."""

from __future__ import annotations

from typing import Any

import pytest
from jsonschema import Draft202012Validator

from quire.gateway.api.messages.parameters import CREATE, REFUSED, WITHOUT_EFFECT
from quire.gateway.api.openapi.parameter_schemas import body_schema, parameter_schema, schema_of
from quire.gateway.api.parameters import CHAT, COMPLETIONS, UNSUPPORTED
from quire.gateway.api.token_requests import DETOKENIZE, TOKENIZE
from quire.gateway.errors.api_errors import ApiError
from quire.shared.sampling_params import Parameter
from quire.shared.validators import InvalidValue

TABLES = {"chat": CHAT, "completions": COMPLETIONS, "tokenize": TOKENIZE, "detokenize": DETOKENIZE}
TABLES["messages"] = CREATE | WITHOUT_EFFECT
PARAMETERS = [(of, name) for of, table in TABLES.items() for name in table]
# Read by a function that has more than the value: the model's name, its vocabulary, or the longest deadline.
READ_LATER = ("messages", "prompt", "timeout")
# Read by functions with more than the value, too: tests/gateway/api/messages/test_request_schemas.py compares these.
READ_LATER_OF_MESSAGES = ("system", "tools", "tool_choice")

READ_AT_ONCE = [
    (of, name)
    for of, name in PARAMETERS
    if name not in READ_LATER and not (of == "messages" and name in READ_LATER_OF_MESSAGES)
]

PROBES: list[Any] = [True, False, 0, 1, -1, 2, 3, 20, 21, 100, 128, 129, 2_000_000, 2_000_001, -(2**63), 2**64, 10**30]
PROBES += [0.5, -0.5, 1.5, 99.5, 1e308, "", " ", "x", "batch", "interactive", "never", "auto", "flex", "24h", "x" * 65]
PROBES += ["x" * 256, "x" * 257, "x" * 513, "x" * 1025, [], [1], [-1], [2**31], [True], [1.5], ["x"], [""], [" "]]
PROBES += [
    ["x"] * 17,
    ["x"] * 65,
    [1] * 65,
    ["x" * 257],
    [["x"]],
    [None],
    {},
    {"5": 1},
    {"5": 101},
    {"01": 1},
    {"x": "y"},
]
PROBES += [{"x": 1}, {"": "x"}, {"k" * 65: "x"}, {"k": "x" * 513}, {str(number): "x" for number in range(17)}]
PROBES += [{str(number): 1 for number in range(1025)}, {"include_usage": True}, {"include_usage": 1}]
PROBES += [{"include_obfuscation": True}, {"include_obfuscation": False}, {"type": "text"}, {"type": "json_object"}]
PROBES += [{"type": "json_schema"}, {"type": "text", "json_schema": {}}]
PROBES += [
    {"type": "json_schema", "json_schema": {"name": name, **more}}
    for name in ("a", "a b", 5)
    for more in ({}, {"schema": {}}, {"schema": {}, "strict": 1}, {"schema": 5}, {"schema": {}, "extra": 1})
]
PROBES += [{"type": "structural_tag", **more} for more in ({"format": {}}, {"structures": [], "triggers": ["x"]})]
PROBES += [{"type": "structural_tag", "other": {}}, -(2**63) + 1, 2**63 - 1, 2**63, "{}", ' {"x": 1}\n', "[]"]
PROBES += [{"include_usage": a, "continuous_usage_stats": b} for a in (True, False, None) for b in (True, False, None)]
PROBES += [{"continuous_usage_stats": True}, "root ::= %json", "start: %json {}", "x" * 65_536, "x" * 65_537]
PROBES += [
    {form: value, **more}
    for form in ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
    for value in ({}, "{}", "x", "", ["x"], [""], [], True, False, None, 5)
    for more in ({}, {"regex": "a"}, {"other": None}, {"other": 1})
]
TOOL = {"type": "function", "function": {"name": "f"}}
FUNCTIONS: list[Any] = [
    {"name": "f", **more}
    for more in (
        {"description": "d", "parameters": {"type": "object"}, "strict": True},
        {"description": None, "parameters": None, "strict": None},
        {"parameters": {}},
        {"parameters": {"type": "string"}},
        {"parameters": {"type": None}},
        {"parameters": 5},
        {"strict": 1},
        {"description": 1},
        {"other": None},
    )
]
PROBES += [[{"type": "function", "function": one}] for one in (*FUNCTIONS, {}, {"name": "a b"}, {"name": ""}, None)]
PROBES += [TOOL, [{"function": {"name": "f"}}], [{**TOOL, "other": None}], [{"type": "web_search"}], {**TOOL, "x": 1}]
PROBES += [
    {"enable_thinking": True},
    {"_x": 1},
    {"messages": []},
    {"\xe9": 1},
    {f"a{number}": 1 for number in range(33)},
]
PROBES += [{"type": kind} for kind in ("enabled", "adaptive", "disabled", "ephemeral", "all", None, 5)]
PROBES += [
    {"type": kind, name: value}
    for kind in ("enabled", "adaptive", "disabled")
    for name in ("budget_tokens", "display", "other")
    for value in (None, 0, 1, -1, "omitted", "summarized", 2_000_001)
]
PROBES += [
    {"ttl": "5m"},
    {"type": "ephemeral", "ttl": "1h", "scope": "x"},
    {"type": "ephemeral", "ttl": 5},
    {"scope": 5},
]
PROBES += [{"user_id": value} for value in ("", "u", "u" * 512, "u" * 513, None, 5)]
SCHEMA_FORMAT = {"type": "json_schema", "schema": {}}
FORMATS: list[Any] = [SCHEMA_FORMAT, {"type": "json_schema"}, {**SCHEMA_FORMAT, "x": None}, {**SCHEMA_FORMAT, "x": 1}]
PROBES += [*FORMATS, *({"format": one} for one in FORMATS), {"effort": "max"}, {"effort": "none"}, {"effort": None}]
KEEPS: list[Any] = ["all", None, "none", {"type": "all"}, {"type": "thinking_turns", "value": 1}, {"value": 1}]
KEEPS += [{"type": "thinking_turns", "value": value} for value in (0, 10_000, 10_001, "1", None)]
PROBES += [{"edits": [{"type": kind, "keep": keep}]} for kind in ("clear_thinking_20251015", "x") for keep in KEEPS]
PROBES += [{"edits": value} for value in ([], None, [5], [{}], "x", [{"type": "clear_thinking_20251015", "x": 1}])]


def accepts(parameter: Parameter, name: str, value: Any) -> bool:
    try:
        parameter.read(name, value)
    except (ApiError, InvalidValue):
        return False
    return True


@pytest.mark.parametrize(("of", "name"), PARAMETERS)
def test_every_parameter_has_a_schema_with_its_meaning(of: str, name: str) -> None:
    schema = parameter_schema(TABLES[of][name])
    assert schema.keys() - {"description", "default"}, "declare `schema`, or register the class of the check"
    assert schema["description"]
    assert "](" not in schema["description"]
    Draft202012Validator.check_schema(schema)


@pytest.mark.slow
@pytest.mark.parametrize(("of", "name"), READ_AT_ONCE)
def test_a_schema_accepts_what_the_check_accepts(of: str, name: str) -> None:
    parameter = TABLES[of][name]
    validator = Draft202012Validator(parameter_schema(parameter))
    for probe in PROBES:
        assert validator.is_valid(probe) == accepts(parameter, name, probe), probe
    assert validator.is_valid(None) == (not parameter.required)


def test_the_default_is_in_the_schema() -> None:
    assert parameter_schema(CHAT["n"])["default"] == 1
    assert parameter_schema(CHAT["stream"])["default"] is False
    # The model has another default, and null is no value of the API.
    assert "default" not in parameter_schema(CHAT["temperature"])
    assert "default" not in parameter_schema(CHAT["timeout"])


def test_a_body_has_the_parameters_of_its_call_and_no_others() -> None:
    schema = body_schema(CHAT, "served")
    assert schema["required"] == ["messages", "model"]
    assert set(schema["properties"]) == CHAT.keys() | UNSUPPORTED.keys()
    validator = Draft202012Validator(schema)
    body: dict[str, Any] = {"model": "served", "messages": [{"role": "user", "content": "x"}]}
    for more in (
        {},
        {"n": None},
        {"functions": []},
        {"tools": None},
        {"stop": "x"},
        {"user": "u"},
        {"background": False},
    ):
        assert validator.is_valid({**body, **more}), more
    # `echo` is a parameter of completions only.
    for more in (
        {"echo": False},
        {"functions": [1]},
        {"surprise": None},
        {"n": "1"},
        {"model": "x"},
        {"messages": []},
        {"prompt": "x"},
    ):
        assert not validator.is_valid({**body, **more}), more
    assert validator.is_valid({**body, "background": True, "stream": True, "stream_options": {}})
    assert validator.is_valid({**body, "background": False})
    assert validator.is_valid({**body, "background": None, "top_logprobs": 0, "stream_options": None})
    for more in ({"background": True}, {"stream": False, "stream_options": {}}, {"top_logprobs": 1}):
        assert not validator.is_valid({**body, **more}), more


def test_a_body_of_messages_has_its_own_unsupported_parameters() -> None:
    table = CREATE | WITHOUT_EFFECT
    schema = body_schema(table, "served", REFUSED)
    assert set(schema["properties"]) == table.keys() | REFUSED.keys()
    validator = Draft202012Validator(schema)
    body: dict[str, Any] = {"model": "served", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
    for more in ({}, {"speed": "standard"}, {"diagnostics": {}}, {"mcp_servers": []}, {"container": None}):
        assert validator.is_valid({**body, **more}), more
    for more in ({"speed": "fast"}, {"n": 1}, {"functions": []}, {"max_tokens": None}, {"diagnostics": 5}):
        assert not validator.is_valid({**body, **more}), more


def test_a_check_of_an_unknown_class_accepts_anything() -> None:
    assert schema_of(object()) == {}
