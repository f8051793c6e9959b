"""The tables of docs/api.md, docs/api/, docs/batches.md and docs/responses.md are those of the code."""

from __future__ import annotations

import ast
import re
from typing import Any

import pytest

import quire.gateway.features.pages.engine_page
from quire.gateway.admission.terms import REQUEST_TIMEOUT
from quire.gateway.api.headers import CLIENT_ID_HEADER, IDEMPOTENCY_KEY, NO_EFFECT_HEADER, SERVER_ID_HEADER
from quire.gateway.api.labels import JsonObject
from quire.gateway.api.parameters import CHAT, COMPLETIONS
from quire.gateway.api.responses.body import ResponseStatus
from quire.gateway.api.responses.items import ITEM_TYPES
from quire.gateway.api.responses.output_items import ItemStatus
from quire.gateway.api.responses.query import ITEMS
from quire.gateway.api.resume import LAST_EVENT_ID
from quire.gateway.errors.api_errors import ApiError, InvalidRequest
from quire.gateway.errors.message_errors import error_type
from quire.gateway.features.admin.model_cards import CAPABILITIES
from quire.gateway.features.batches.batch_parameters import FILES_QUERY, MAX_EXPIRY_S, MIN_EXPIRY_S
from quire.gateway.features.pages import static_files
from quire.gateway.model.served_model import load_model
from quire.gateway.output.tools import ToolMode
from quire.gateway.server.app import create_app
from quire.gateway.serving.service import Gateway
from quire.gateway.settings import GatewaySettings
from quire.ops.paths import PROJECT_ROOT
from quire.ops.tools.marked_tables import with_tables
from quire.ops.tools.parameters_table import tables
from quire.shared.config.validators import Flag, Integer, InvalidValue, Number, OneOf, Text
from quire.shared.protocol.sampling_params import MAX_ALLOWED_TOKENS, Converted
from quire.shared.text.grammar import ANY_OBJECT
from quire.shared.text.schema.formats import FORMATS

# --- api page ---------------------------------------------------------------------------------------------------------
# These pages say what the code does: parameters, ranges, defaults, refusals, error codes and endpoints, both ways.


DOCS = PROJECT_ROOT / "docs"
FOLDER = DOCS / "api"
PAGE = "\n".join(path.read_text() for path in (FOLDER.with_suffix(".md"), *sorted(FOLDER.glob("*.md"))))
RESPONSES_PAGE = (DOCS / "responses.md").read_text()
BATCHES_PAGE = (DOCS / "batches.md").read_text()
# Refusals whose code is not that of their class.
CODES_BY_NAME = {"internal": 500, "shutting_down": 500, "quarantined": 500}


def table(name: str) -> list[list[str]]:
    """The cells of the table between `<!-- name -->` and its end, without its head."""
    text = PAGE.split(f"<!-- {name} -->")[1].split(f"<!-- /{name} -->")[0]
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def test_the_parameters_are_written_from_the_code() -> None:
    for name, of_the_page in tables().items():
        text = (DOCS / name).read_text()
        assert with_tables(text, of_the_page) == text, "run python -m quire.ops.tools.parameters_table"


# Their kinds follow from their bounds.
DERIVED = (Converted, Flag, Integer, JsonObject, Number, OneOf, Text)
DESCRIBED = [
    (of, name)
    for of, parameters in (("chat", CHAT), ("completions", COMPLETIONS))
    for name, parameter in parameters.items()
    if (parameter.kind or not isinstance(parameter.read, DERIVED)) and (of == "chat" or CHAT.get(name) != parameter)
]
# Readers of their own check these.
READ_LATER = ("messages", "prompt", "stream_options", "timeout")


@pytest.mark.parametrize(("of", "name"), DESCRIBED)
def test_a_kind_that_is_described_is_that_of_the_check(of: str, name: str) -> None:
    parameter = {"chat": CHAT, "completions": COMPLETIONS}[of][name]
    check, kind = parameter.read, parameter.kind or str(parameter.read)
    wrong: list[object] = []
    if name == "tools":
        tools = [
            {"type": "function", "function": {"name": f"f{number}"}} for number in range(GatewaySettings().max_tools)
        ]
        assert [tool.name for tool in check(name, tools)] == [tool["function"]["name"] for tool in tools]
        assert int(re.search(r"at most `--max-tools` \((\d+)\)", kind)[1]) == len(tools)  # type: ignore[index]
        wrong = ["x", {}, 5, True]
    elif name == "tool_choice":
        choices = re.findall(r"`(\w+)`", kind)
        assert (
            [check(name, value).mode for value in choices]
            == choices
            == sorted(set(ToolMode) - {ToolMode.NAMED}, key=choices.index)
        )
        assert check(name, {"type": "function", "function": {"name": "f"}}) == (ToolMode.NAMED, "f", True)
        wrong = ["named", "f", {}, ["auto"], 5]
    elif found := re.fullmatch(r"object with at most (\d+) names", kind):
        full = {f"a{number}": number for number in range(int(found[1]))}
        assert check(name, full) == full
        wrong = [{**full, "more": 1}, [], "x", 5]
    elif name == "metadata":
        assert check(name, {"k" * 64: "x" * 512, "e": ""}) == (("k" * 64, "x" * 512), ("e", ""))
        check(name, {str(number): "x" for number in range(16)})
        wrong = [{str(number): "x" for number in range(17)}, {"k" * 65: "x"}, {"": "x"}, [], "x", 5]
    elif name == "stop":
        check(name, ["x" * 1024] * 16)
        wrong = [["x"] * 17, ["x" * 1025], [""], 5]
    elif name == "stop_token_ids":
        assert check(name, [5, 0]) == (5, 0)
        check(name, [1] * 64)
        wrong = [[1] * 65, [-1], ["5"], [1.0], [True], 5, "5"]
    elif name == "allowed_token_ids":
        check(name, [1] * MAX_ALLOWED_TOKENS)
        wrong = [[1] * (MAX_ALLOWED_TOKENS + 1), [-1], ["5"], [True], 5, "5"]
    elif name == "priority":
        assert [check(name, value) for value in (-7, 0, 1, "batch")] == ["interactive", "standard", "batch", "batch"]
        wrong = ["urgent", 0.5, True, 2**63]
    elif name == "truncate_prompt_tokens":
        assert [check(name, value) for value in (-1, 1)] == [-1, 1]
        wrong = [0, -2, 1.0, True, "1"]
    elif name == "bad_words":
        assert check(name, ["x" * 256] * 64) == ("x" * 256,) * 64
        wrong = [["x"] * 65, ["x" * 257], [""], ["  "], [5], "x", 5]
    elif name == "early_stopping":
        assert [check(name, value) for value in (True, False, "never")] == ["true", "false", "never"]
        wrong = ["true", 1]
    elif name == "logit_bias":
        assert check(name, {"5": -100, "0": 100.0}) == ((5, -100.0), (0, 100.0))
        check(name, {str(token_id): 1 for token_id in range(1024)})
        wrong = [{str(token_id): 1 for token_id in range(1025)}, {"x": 1}, {"-1": 1}, {"01": 1}, {"": 1}, [], "5", 5]
    elif name == "response_format":
        assert [check(name, {"type": kind}) for kind in ("text", "json_object")] == [(), (name, ANY_OBJECT)]
        wrong = ["json_object", 1, ["text"]]
    elif name == "structured_outputs":
        for form in re.findall(r"`(\w+)`", kind):
            value: Any = True if form == "json_object" else ["a"] if form == "choice" else "a"
            assert check(name, {form: {} if form in ("json", "structural_tag") else value}).name == f"{name}.{form}"
        wrong = ["json", 1, {}, {"regex": "a", "choice": ["a"]}]
    elif name.startswith("guided_"):
        assert check(name, {"json": {}, "choice": ["a"]}.get(name.removeprefix("guided_"), "a")).name == name
        wrong = [1, "", [], [""], True]
    elif name == "repetition_detection":
        assert check(name, {"max_pattern_size": 4, "min_count": 3}) == (1, 4, 3)
        wrong = [True, "4:3", {"max_pattern_size": 4}, {"max_pattern_size": 4, "min_count": 3, "size": 1}]
    elif name == "prediction":
        assert check(name, {"type": "content", "content": [{"type": "text", "text": "a"}]}) == "a"
        wrong = ["a", 1, [{"type": "text", "text": "a"}]]
    else:
        assert name in READ_LATER, kind
    for value in wrong:
        with pytest.raises((InvalidRequest, InvalidValue)) as caught:
            check(name, value)
        refusal = caught.value
        assert (refusal.name if isinstance(refusal, InvalidValue) else refusal.param) == name


def test_the_defaults_of_settings_are_those_of_the_code() -> None:
    text = " ".join(f"{PAGE}\n{RESPONSES_PAGE}\n{BATCHES_PAGE}".split())
    named = re.findall(r"`--([a-z-]+)` \((\d[\d,]*)(?! MiB| days)\b", text)
    assert ("max-embedding-inputs", "2048") in named
    settings = GatewaySettings()
    for name, value in named:
        assert getattr(settings, name.replace("-", "_")) == int(value.replace(",", "")), name


def test_the_error_types_of_messages_are_those_of_the_code() -> None:
    types = {error_type(cls("x")): cls.status for cls in subclasses(ApiError)}
    documented = {row[0].strip("`"): row[1] for row in table("message-errors")}
    assert documented.keys() == types.keys()
    assert all(str(types[name]) in status or status == "all other 4xx" for name, status in documented.items())


def subclasses(cls: type[ApiError]) -> set[type[ApiError]]:
    return {cls} | {found for child in cls.__subclasses__() for found in subclasses(child)}


def codes_of_the_source() -> dict[str, int]:
    """Every code that a gateway's source names, with its status."""
    assert quire.gateway.features.pages.engine_page  # its class is one of them
    found = {
        cls.code: cls.status for cls in subclasses(ApiError) if cls.code and cls.__module__.startswith("quire.gateway.")
    }
    for path in (PROJECT_ROOT / "gateway").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "code":
                for part in ast.walk(node.value):
                    if isinstance(part, ast.Constant) and isinstance(part.value, str):
                        found.setdefault(part.value, CODES_BY_NAME.get(part.value, 400))
    # Named where an outcome becomes an error.
    return found | {"quarantined": CODES_BY_NAME["quarantined"]}


def test_the_error_codes_are_those_of_the_code() -> None:
    text = PAGE.split("<!-- errors -->")[1].split("<!-- /errors -->")[0]
    found = re.findall(r"^- `(\w+)` \((\d+)\): ", text, re.MULTILINE)
    assert len(found) == len(re.findall("^- ", text, re.MULTILINE))
    assert {code: int(status) for code, status in found} == codes_of_the_source()


def test_the_endpoints_are_those_of_the_application() -> None:
    model = load_model(str(PROJECT_ROOT / "models" / "demo"), "demo")
    app = create_app(Gateway(GatewaySettings(engine_view="on"), model))
    files = {static_files.path_of(name) for name in static_files.names() if not name.endswith(".html")}
    served = {
        f"{route.method} {route.resource.canonical}"
        for route in app.router.routes()
        if route.method != "HEAD" and route.resource and route.resource.canonical not in files
    }
    documented = re.findall(r"^- `((?:GET|POST|DELETE) [^`]+)`: ", PAGE, re.MULTILINE)
    assert set(documented) == served
    assert len(documented) == len(served)


def test_the_headers_are_those_of_the_code() -> None:
    assert set(re.findall(r"^\| `([A-Z][\w-]+)` \|", PAGE, re.MULTILINE)) == {
        IDEMPOTENCY_KEY,
        REQUEST_TIMEOUT,
        LAST_EVENT_ID,
        CLIENT_ID_HEADER,
        SERVER_ID_HEADER,
        NO_EFFECT_HEADER,
        "Retry-After",
    }


def test_the_capabilities_are_those_of_the_code() -> None:
    assert [name for row in table("capabilities") for name in re.findall(r"`(\w+)`", row[0])] == list(CAPABILITIES)


def test_the_formats_are_those_of_the_code() -> None:
    listed = PAGE.split("<!-- formats -->")[1].split("<!-- /formats -->")[0]
    assert re.findall(r"`([a-z0-9-]+)`", listed) == sorted(FORMATS)


# --- responses page ---------------------------------------------------------------------------------------------------
# docs/responses.md says what the code does: parameters, events, statuses, items.


def section(title: str) -> str:
    return RESPONSES_PAGE.split(f"## {title}\n")[1].split("\n## ")[0]


def test_the_pages_of_lists_are_those_of_the_code() -> None:
    text = " ".join(RESPONSES_PAGE.split())
    assert f"`limit` (1 to {ITEMS.most}, by default {ITEMS.default}), `order`" in text
    batches = " ".join(BATCHES_PAGE.split())
    assert f"`limit` (1 to {FILES_QUERY.most:,}), `after`, `order` and `purpose`" in batches
    assert f"`expires_after[seconds]` ({MIN_EXPIRY_S} to {MAX_EXPIRY_S})" in batches


def test_the_items_are_those_of_the_code() -> None:
    assert re.findall(r"^\| `(\w+)` \|", section("Items"), re.MULTILINE) == list(ITEM_TYPES)


def test_the_statuses_are_those_of_the_code() -> None:
    text = section("Stored responses")
    for status in (*ResponseStatus, *ItemStatus):
        assert f"`{status}`" in text


def test_the_events_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| (`[a-z_.`, ]+) \|", section("Events of a response"), re.MULTILINE)
    documented = set(re.findall(r"`([a-z_.]+)`", "".join(rows)))
    source = (PROJECT_ROOT / "gateway" / "api" / "responses" / "events.py").read_text()
    written = {name.removeprefix("response.") for name in re.findall(r'"(response\.[a-z_]+(?:\.[a-z]+)?)"', source)}
    deltas = {f"{name}.{end}" for name in written if "." not in name and "_" in name for end in ("delta", "done")}
    whole = {name for name in written if "." in name} | {"failed"}
    assert documented == whole | deltas | {"created", "queued", "in_progress", "completed", "incomplete"}
