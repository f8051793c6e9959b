"""docs/api.md says what the code does: parameters, ranges, defaults, refusals, error codes and endpoints, both ways."""

from __future__ import annotations

import ast
import json
import re

import pytest

import quire.gateway.pages.engine_page
from quire.gateway.admission.admission_options import IDEMPOTENCY_KEY, REQUEST_TIMEOUT
from quire.gateway.api.errors import ApiError, InvalidRequest
from quire.gateway.api.parameters import CHAT, COMPLETIONS, UNSUPPORTED
from quire.gateway.api.resume import LAST_EVENT_ID
from quire.gateway.app import create_app
from quire.gateway.model.served_model import load_model
from quire.gateway.pages import static_files
from quire.gateway.service import Gateway
from quire.gateway.settings import GatewaySettings
from quire.ops.paths import PROJECT_ROOT
from quire.ops.tools.parameters_table import with_table
from quire.shared.text.json_schema import ANY_OBJECT, FORMATS
from quire.shared.validators import InvalidValue

PAGE = (PROJECT_ROOT / "docs" / "api.md").read_text()
# Refusals whose code is not that of their class.
CODES_BY_NAME = {"internal": 500, "shutting_down": 500, "quarantined": 500}


def table(name: str) -> list[list[str]]:
    """The cells of the table between `<!-- name -->` and its end, without its head."""
    text = PAGE.split(f"<!-- {name} -->")[1].split(f"<!-- /{name} -->")[0]
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


TABLES = {"chat": CHAT, "completions": COMPLETIONS, "both": CHAT}
# By name and call: type and range, and default.
PARAMETERS = {(row[0].strip("`"), row[1]): row[2:] for row in table("parameters")}
IDS = [f"{name} of {of}" for name, of in PARAMETERS]


def test_the_table_of_parameters_is_written_from_the_code() -> None:
    assert with_table(PAGE) == PAGE, "run python -m quire.ops.tools.parameters_table"


def test_the_parameters_are_those_of_the_code() -> None:
    both = {name for name in CHAT if CHAT[name] is COMPLETIONS.get(name)}
    expected = [(name, "both") for name in both]
    expected += [(name, of) for of in ("chat", "completions") for name in TABLES[of] if name not in both]
    assert len(table("parameters")) == len(PARAMETERS)
    assert set(PARAMETERS) == set(expected)


@pytest.mark.parametrize(("name", "of"), PARAMETERS, ids=IDS)
def test_the_default_is_that_of_the_code(name: str, of: str) -> None:
    parameter = TABLES[of][name]
    shown = PARAMETERS[name, of][1]
    if parameter.required:
        assert shown == "required"
    elif shown == "none":
        assert parameter.default in ((), "")
    elif shown:
        assert json.loads(shown.strip("`")) == parameter.default
    else:  # the text tells it
        assert "by default" in PARAMETERS[name, of][2].lower() or parameter.default is None


def bound(text: str) -> float:
    base, power, rest = re.fullmatch(r"(-?[0-9.]+)(?:\^([0-9]+))?(-1)?", text).groups()  # type: ignore[union-attr]
    value = abs(int(base)) ** int(power) * (-1 if base.startswith("-") else 1) if power else json.loads(base)
    return value - 1 if rest else value


@pytest.mark.parametrize(("name", "of"), PARAMETERS, ids=IDS)
def test_the_range_is_that_of_the_code(name: str, of: str) -> None:
    check = TABLES[of][name].read
    kind = PARAMETERS[name, of][0]
    wrong: list[object] = []
    if found := re.fullmatch(r"(integer|number) from (\S+) to (\S+)", kind):
        low, high = bound(found[2]), bound(found[3])
        check(name, low)
        check(name, high)
        wrong = [low - 1, high + 1, "1", True]
        if found[1] == "integer":
            wrong.append(1.5)
    elif kind == "true or false":
        assert [check(name, value) for value in (True, False)] == [True, False]
        wrong = [0, "true"]
    elif choices := re.fullmatch(r"`(\w+)`, `(\w+)` or `(\w+)`", kind):
        assert [check(name, value) for value in choices.groups()] == list(choices.groups())
        wrong = ["urgent", 1]
    elif found := re.fullmatch(r"string of 1 to (\d+) characters", kind):
        check(name, "x" * int(found[1]))
        wrong = ["", "x" * (int(found[1]) + 1), 5]
    elif name == "stop":
        check(name, ["x" * 1024] * 16)
        wrong = [["x"] * 17, ["x" * 1025], [""], 5]
    elif name == "stop_token_ids":
        assert check(name, [5, 0]) == (5, 0)
        check(name, [1] * 64)
        wrong = [[1] * 65, [-1], ["5"], [1.0], [True], 5, "5"]
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
        assert [check(name, {"type": kind}) for kind in ("text", "json_object")] == ["", ANY_OBJECT]
        wrong = ["json_object", 1, ["text"]]
    else:  # what a reader of its own checks
        assert name in ("model", "messages", "prompt", "stream_options", "timeout"), kind
    for value in wrong:
        with pytest.raises((InvalidRequest, InvalidValue)) as caught:
            check(name, value)
        refusal = caught.value
        assert (refusal.name if isinstance(refusal, InvalidValue) else refusal.param) == name


def test_what_is_refused_is_what_the_code_refuses() -> None:
    documented = {
        row[0].strip("`"): [json.loads(value) for value in re.findall(r"`([^`]+)`", row[1])]
        for row in table("unsupported")
    }
    assert documented == {name: list(neutral) for name, neutral in UNSUPPORTED.items()}


def subclasses(cls: type[ApiError]) -> set[type[ApiError]]:
    return {cls} | {found for child in cls.__subclasses__() for found in subclasses(child)}


def codes_of_the_source() -> dict[str, int]:
    """Every code that a gateway's source names, with its status."""
    assert quire.gateway.pages.engine_page  # its class is one of them
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
    assert {row[0].strip("`"): int(row[1]) for row in table("errors")} == codes_of_the_source()


def test_the_endpoints_are_those_of_the_application() -> None:
    model = load_model(str(PROJECT_ROOT / "models" / "demo"), "demo")
    app = create_app(Gateway(GatewaySettings(engine_view="on"), model))
    files = {static_files.path_of(name) for name in static_files.names() if not name.endswith(".html")}
    served = {
        f"{route.method} {route.resource.canonical}"
        for route in app.router.routes()
        if route.method != "HEAD" and route.resource and route.resource.canonical not in files
    }
    documented = re.findall(r"^\| `((?:GET|POST) [^`]+)` \|", PAGE, re.MULTILINE)
    assert set(documented) == served
    assert len(documented) == len(served)


def test_the_headers_are_those_of_the_code() -> None:
    assert set(re.findall(r"^\| `([A-Z][\w-]+)` \|", PAGE, re.MULTILINE)) == {
        IDEMPOTENCY_KEY,
        REQUEST_TIMEOUT,
        LAST_EVENT_ID,
    }


def test_the_formats_are_those_of_the_code() -> None:
    listed = PAGE.split("<!-- formats -->")[1].split("<!-- /formats -->")[0]
    assert re.findall(r"`([a-z0-9-]+)`", listed) == sorted(FORMATS)
