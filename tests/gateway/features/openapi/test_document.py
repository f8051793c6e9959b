"""/openapi.json is valid, and describes what the gateway accepts and answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import OpenAPIV31SpecValidator

from quire.gateway.api.embeddings import EMBEDDINGS
from quire.gateway.api.messages.headers import ANSWER_ID
from quire.gateway.api.messages.parameters import CREATE, REFUSED, WITHOUT_EFFECT
from quire.gateway.api.parameters import CHAT, COMPLETIONS, UNSUPPORTED
from quire.gateway.api.responses.parameters import RESPONSES
from quire.gateway.errors.api_errors import ApiError, ModelNotFound, QueueIsFull
from quire.gateway.errors.api_errors import body as error_body
from quire.gateway.errors.message_errors import ERROR_TYPES, error_type, is_messages_path
from quire.gateway.features.batches.batch_parameters import BATCHES
from quire.gateway.features.openapi import answers
from quire.gateway.features.openapi.document import document
from quire.gateway.features.openapi.endpoints import ENDPOINTS, EVERY
from quire.gateway.features.openapi.parameter_schemas import body_schema, parameter_schema, schema_of
from quire.gateway.features.pages import static_files
from quire.gateway.features.rerank.score_parameters import RERANK, SCORE
from quire.gateway.features.tokenization.token_requests import DETOKENIZE, TOKENIZE
from quire.gateway.model.served_model import load_model
from quire.gateway.server.app import ANSWERS, BODIES, create_app
from quire.gateway.server.app import PARAMETERS as PARAMETERS_OF_FEATURES
from quire.gateway.serving.service import Gateway
from quire.gateway.settings import GatewaySettings
from quire.ops.paths import PROJECT_ROOT
from quire.shared.config.schema_parts import ref
from quire.shared.config.validators import InvalidValue
from quire.shared.protocol.sampling_params import Parameter
from tests.gateway.api.test_prompt_parameters import answering, report
from tests.gateway.conftest import Start
from tests.support.gateway.agents import ANSWER, TEMPLATE, WEATHER, body, saying, stream_events
from tests.support.gateway.batch_calls import BatchClient, chat_line, jsonl
from tests.support.gateway.fake_worker import emit
from tests.support.gateway.running import MODEL, RunningGateway, chat_body, tokens, write_model

# --- /openapi.json is a valid document of OpenAPI 3.1 -----------------------------------------------------------------


DOCUMENT = document("served", BODIES, ANSWERS, PARAMETERS_OF_FEATURES)
OPERATIONS = [operation for operations in DOCUMENT["paths"].values() for operation in operations.values()]


def test_the_document_is_valid() -> None:
    assert list(OpenAPIV31SpecValidator(DOCUMENT).iter_errors()) == []
    # The validator finds faults at all.
    broken = json.loads(json.dumps(DOCUMENT))
    broken["paths"]["/v1/models"]["get"]["parameters"] = [{"name": "x", "in": "nowhere"}]
    assert not OpenAPIV31SpecValidator(broken).is_valid()


def test_every_component_is_used() -> None:
    text = json.dumps(DOCUMENT)
    for kind, components in DOCUMENT["components"].items():
        if kind != "securitySchemes":
            for name in components:
                assert f'"#/components/{kind}/{name}"' in text, f"{kind}/{name}"


def test_every_answer_that_is_an_error_has_the_shape_of_errors() -> None:
    for operation in OPERATIONS:
        assert {str(status) for status in EVERY} < set(operation["responses"])
    for name, response in DOCUMENT["components"]["responses"].items():
        shape = name.rstrip("0123456789")
        assert response["content"] == {"application/json": {"schema": {"$ref": f"#/components/schemas/{shape}"}}}


def test_errors_of_messages_have_a_shape_of_their_own() -> None:
    for path, operations in DOCUMENT["paths"].items():
        for operation in operations.values():
            names = {one["$ref"].rsplit("/", 1)[1] for one in operation["responses"].values() if "$ref" in one}
            # The head of a request is refused before its path is known.
            shapes = {name.rstrip("0123456789") for name in names - {"Error431"}}
            assert shapes == {"MessageError" if is_messages_path(path) else "Error"}
            assert "Error431" in names


def test_answers_of_messages_have_their_id() -> None:
    for path, operations in DOCUMENT["paths"].items():
        for operation in operations.values():
            assert (ANSWER_ID in next(iter(operation["responses"].values()))["headers"]) == is_messages_path(path)


def test_only_the_served_model_is_a_model() -> None:
    for name in ("ChatCompletionRequest", "CompletionRequest", "MessageRequest", "MessageCountRequest"):
        assert DOCUMENT["components"]["schemas"][name]["properties"]["model"]["enum"] == ["served"]
    assert DOCUMENT["components"]["schemas"]["TokenizeRequest"]["properties"]["model"]["enum"] == ["served", None]


@pytest.mark.parametrize(
    ("body", "accepted"),
    [
        ({"input": "Hello"}, True),
        ({"previous_response_id": "resp_1"}, True),
        ({"input": None, "previous_response_id": "resp_1"}, True),
        ({}, False),
        ({"input": None}, False),
        ({"previous_response_id": None}, False),
    ],
    ids=str,
)
def test_a_response_needs_an_input_or_a_previous_response(body: dict[str, object], accepted: bool) -> None:
    schema = {"$ref": "#/components/schemas/ResponseRequest", "components": DOCUMENT["components"]}
    validator = jsonschema.Draft202012Validator(schema)
    assert validator.is_valid({"model": "served", **body}) == accepted


async def test_the_document_is_that_of_the_served_model(gateway: RunningGateway) -> None:
    reply = await gateway.get("/openapi.json")
    assert (reply.status, reply.json) == (200, document(MODEL, BODIES, ANSWERS, PARAMETERS_OF_FEATURES))
    assert reply.headers["content-type"].startswith("application/json")
    assert reply.headers["cache-control"] == "no-cache"


# --- The described endpoints are those of the application -------------------------------------------------------------


def test_every_route_is_described_and_every_description_is_a_route() -> None:
    app = create_app(
        Gateway(GatewaySettings(engine_view="on"), load_model(str(PROJECT_ROOT / "models" / "demo"), "demo"))
    )
    files = {static_files.path_of(name) for name in static_files.names() if not name.endswith(".html")}
    routes = {
        (route.method.lower(), route.resource.canonical)
        for route in app.router.routes()
        if route.method != "HEAD" and route.resource is not None and route.resource.canonical not in files
    }
    assert {(one.method, one.path) for one in ENDPOINTS} == routes
    assert len(ENDPOINTS) == len(routes)


# --- The schemas of answers describe real answers, and refuse others --------------------------------------------------


SCHEMAS = schema_of(answers.SCHEMAS | ANSWERS)
CHAT_PATH, COMPLETIONS_PATH = "/v1/chat/completions", "/v1/completions"


def validator(name: str) -> Draft202012Validator:
    return Draft202012Validator({**ref(name), "components": {"schemas": SCHEMAS}})


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_is_one_and_refuses_an_empty_object(name: str) -> None:
    Draft202012Validator.check_schema(SCHEMAS[name])
    assert not validator(name).is_valid({})


def test_errors_have_exactly_four_fields() -> None:
    check = validator("Error")
    for error in (ModelNotFound("x", param="model"), QueueIsFull("x")):
        found: Any = json.loads(error_body(error))
        assert check.is_valid(found)
        found["error"]["more"] = 1
        assert not check.is_valid(found)


async def validated(gateway: RunningGateway, path: str, name: str, asked: dict[str, Any]) -> tuple[Any, list[Any]]:
    """The whole answer to a call, and the events of its stream, which the schemas accept."""
    streamed = {**asked, "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    # The log-probabilities of a prompt cannot be streamed.
    streamed.pop("prompt_logprobs", None)
    whole = (await gateway.post(path, asked)).json
    validator(name).validate(whole)
    events = [event.data for event in await gateway.events(path, streamed) if event.data != "[DONE]"]
    for event in events:
        validator(f"{name}Chunk").validate(event)
    return whole, events


def refuses(name: str, answer: Any, choice: dict[str, Any]) -> bool:
    """True if a schema refuses an answer whose choice has other values."""
    return not validator(name).is_valid({**answer, "choices": [{**answer["choices"][0], **choice}]})


async def test_tool_calls_and_reasoning(start_gateway: Start, tmp_path: Path) -> None:
    gateway = await start_gateway(model=str(write_model(tmp_path / MODEL, chat_template=TEMPLATE)))
    function = {"name": WEATHER["name"], "parameters": WEATHER["input_schema"]}
    asked = chat_body(tools=[{"type": "function", "function": function}], return_token_ids=True)
    async with gateway.worker(saying(ANSWER), report=report):
        whole, events = await validated(gateway, CHAT_PATH, "ChatCompletion", asked)
    [choice] = whole["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message.keys() >= {"reasoning_content", "tool_calls"}
    deltas = [one["delta"].keys() for event in events for one in event["choices"]]
    assert {"reasoning_content", "content", "tool_calls"} <= set().union(*deltas)
    assert any("prompt_token_ids" in event for event in events)
    for wrong in ({"tool_calls": []}, {"reasoning_content": None}, {"tool_calls": [{"id": "x"}]}):
        assert refuses("ChatCompletion", whole, {"message": {**message, **wrong}})
    assert refuses("ChatCompletion", whole, {"finish_reason": "content_filter"})


async def test_scores(gateway: RunningGateway) -> None:
    for path, name, more in [
        (CHAT_PATH, "ChatCompletion", {**chat_body(), "logprobs": True, "top_logprobs": 2}),
        (COMPLETIONS_PATH, "Completion", {"model": MODEL, "prompt": "ab", "logprobs": 2, "echo": True}),
    ]:
        async with gateway.worker(answering, report=report):
            asked = {**more, "prompt_logprobs": 1, "return_token_ids": True}
            whole, events = await validated(gateway, path, name, asked)
        [choice] = whole["choices"]
        of_prompt = whole if name == "ChatCompletion" else choice
        assert of_prompt["prompt_logprobs"][0] is None
        assert of_prompt["prompt_token_ids"]
        assert choice["token_ids"] == [
            one for event in events for c in event["choices"] for one in c.get("token_ids", [])
        ]
        assert refuses(name, whole, {"token_ids": ["x"]})
        assert refuses(name, whole, {"logprobs": {}})
        assert refuses(name, whole, {"stop_reason": []})
        if name == "Completion":
            assert choice["logprobs"]["token_logprobs"][0] is None
            assert refuses(name, whole, {"prompt_logprobs": [{"x": {}}]})


async def test_usage_has_cached_tokens_and_stop_reasons_are_texts_or_tokens(gateway: RunningGateway) -> None:
    async with gateway.worker(emit(tokens("ab"), "stop"), report=report):
        whole = (await gateway.chat()).json
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    check = validator("ChatCompletion")
    for reason in ("x", 5, None):
        assert not refuses("ChatCompletion", whole, {"stop_reason": reason})
    for lacking in ("system_fingerprint", "usage"):
        assert not check.is_valid({name: value for name, value in whole.items() if name != lacking})
    assert not check.is_valid({**whole, "usage": {**whole["usage"], "prompt_tokens_details": None}})


# --- The schemas of files and batches describe real answers -----------------------------------------------------------


async def test_answers_of_files_and_batches(start_gateway: Start, tmp_path: Path) -> None:
    gateway = await start_gateway(files_dir=str(tmp_path))
    client = BatchClient(gateway)
    wrong = await client.create(b"{}\n")
    created = await client.create(jsonl([chat_line(1)]), metadata={"a": "b"})
    async with gateway.worker(emit([ord("a")])):
        ended = [await client.ended(one["id"]) for one in (wrong, created)]
    for batch in (wrong, created, *ended):
        validator("Batch").validate(batch)
    assert not validator("Batch").is_valid({**ended[0], "status": "done"})
    assert not validator("Batch").is_valid({**ended[0], "errors": {"object": "list", "data": [{}]}})
    validator("BatchList").validate(await client.json("GET", "/v1/batches"))
    files = await client.json("GET", "/v1/files")
    validator("FileList").validate(files)
    assert {one["purpose"] for one in files["data"]} == {"batch", "batch_output"}
    validator("FileDeletion").validate(await client.json("DELETE", f"/v1/files/{files['data'][0]['id']}"))


# --- The schemas of the Messages API describe real answers, events and errors, and refuse others ----------------------


PATH = "/v1/messages"


@pytest.fixture
async def server(start_gateway: Start, tmp_path: Path) -> RunningGateway:
    return await start_gateway(model=str(write_model(tmp_path / MODEL, chat_template=TEMPLATE)))


async def test_a_message_and_its_events(server: RunningGateway) -> None:
    for more in [{}, {"thinking": {"type": "enabled", "display": "omitted"}}, {"max_tokens": 0}]:
        asked = body(tools=[WEATHER], **more) if "max_tokens" not in more else body() | more
        async with server.worker(saying(ANSWER)):
            whole = (await server.post(PATH, asked)).json
            events = [event.data for event in await stream_events(server, PATH, asked | {"stream": True})]
        check = validator("Message")
        check.validate(whole)
        assert [block["type"] for block in whole["content"]] == (
            [] if "max_tokens" in more else ["thinking", "text", "tool_use"]
        )
        for event in events:
            validator("MessageEvent").validate(event)
        assert {"message_start", "message_delta", "message_stop"} <= {event["type"] for event in events}
        for wrong in (
            {**whole, "more": 1},
            {**whole, "stop_reason": "stop"},
            {**whole, "content": [{"type": "image"}]},
        ):
            assert not check.is_valid(wrong)
        assert not validator("MessageEvent").is_valid({**events[0], "type": "message_begin"})


async def test_a_stream_that_fails_ends_with_an_error(server: RunningGateway) -> None:
    async with server.worker(saying("Hello", reason="error")):
        events = [event.data for event in await stream_events(server, PATH, body(stream=True))]
    assert events[-1]["type"] == "error"
    validator("MessageEvent").validate(events[-1])


async def test_a_count_and_an_error(server: RunningGateway) -> None:
    count = {name: value for name, value in body().items() if name != "max_tokens"}
    validator("MessageCount").validate((await server.post(f"{PATH}/count_tokens", count)).json)
    for wrong in ({}, {**body(), "max_tokens": "many"}):
        reply = await server.post(PATH, wrong)
        assert reply.status == 400
        validator("MessageError").validate(reply.json)
        assert not validator("Error").is_valid(reply.json)


def subclasses(cls: type[ApiError]) -> set[type[ApiError]]:
    return {cls} | {found for child in cls.__subclasses__() for found in subclasses(child)}


def test_names_are_those_of_the_code() -> None:
    assert set(ERROR_TYPES) == {error_type(cls("x")) for cls in subclasses(ApiError)}


# --- The schema of a parameter accepts exactly the values that its check accepts --------------------------------------


TABLES = {"chat": CHAT, "completions": COMPLETIONS, "tokenize": TOKENIZE, "detokenize": DETOKENIZE}
TABLES |= {"rerank": RERANK, "score": SCORE}
TABLES |= {"messages": CREATE | WITHOUT_EFFECT, "responses": RESPONSES, "embeddings": EMBEDDINGS, "batches": BATCHES}
PARAMETERS = [(of, name) for of, table in TABLES.items() for name in table]
# Read by a function that has more than the value: the model's name, its vocabulary, or the longest deadline.
READ_LATER = ("messages", "prompt", "input", "timeout")
# Read by functions with more than the value, too: tests/gateway/api/messages/test_tools.py compares those of messages.
# The schemas of responses let some tools pass that the reader refuses.
READ_LATER_OF = {"messages": ("system", "tools", "tool_choice"), "responses": ("tools", "tool_choice")}
# A window is a pattern with a bound, which a pattern cannot tell.
READ_LATER_OF["batches"] = ("completion_window",)

READ_AT_ONCE = [(of, name) for of, name in PARAMETERS if name not in (*READ_LATER, *READ_LATER_OF.get(of, ()))]

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
PROBES += [{"anchor": "created_at", "seconds": value} for value in (3599, 3600, 2_592_000, 2_592_001, "x")]
PROBES += [
    {"anchor": "created_at"},
    "/v1/embeddings",
    "x" * 128,
    "x" * 64,
    ["message.output_text.logprobs"],
    "disabled",
]
PROBES += [{"effort": "none", "summary": "auto"}, {"summary": "none"}, {"context": "all_turns"}, {"effort": 5}]
PROBES += [{"format": {"type": kind, **more}} for kind in ("text", "json_schema", "x") for more in ({}, {"name": "a"})]
PROBES += [{"format": {"type": "json_schema", "name": "a", "schema": {}}}, {"verbosity": "low"}, {"verbosity": "x"}]
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


def test_a_check_that_tells_no_schema_accepts_anything() -> None:
    assert schema_of({"a": lambda name, value: value, "b": "text"}) == {"a": {}, "b": "text"}
