"""The table of sampling parameters: what clients send becomes the final form, which a message carries."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

import msgpack
import pytest

from quire.shared.sampling_params import GRAMMAR_PARAMETERS, MODEL_DEFAULTS, PARAMETERS, SamplingParams
from quire.shared.validators import InvalidValue

# By parameter: values as clients send them, with their final form.
GIVEN: list[tuple[str, Any, Any]] = [
    ("top_k", -1, 0),
    ("top_k", 5, 5),
    ("seed", -1, 2**64 - 1),
    ("seed", 7, 7),
    ("stop", "END", ("END",)),
    ("stop", ["a", "b"], ("a", "b")),
    ("stop_token_ids", [5, 6], (5, 6)),
    ("early_stopping", False, "false"),
    ("early_stopping", "never", "never"),
    ("logit_bias", {"5": -1, "7": 0.5}, ((5, -1.0), (7, 0.5))),
    ("temperature", 1, 1.0),
]


@pytest.mark.parametrize(("name", "value", "final"), GIVEN)
def test_the_final_form_is_one_that_a_message_carries(name: str, value: Any, final: Any) -> None:
    assert PARAMETERS[name].read(name, value) == final
    [field] = [one for one in fields(SamplingParams) if one.name == name]
    decoded = msgpack.unpackb(msgpack.packb(final))
    assert field.metadata["check"](name, decoded) == final


@pytest.mark.parametrize("field", fields(SamplingParams), ids=lambda field: str(field.name))
def test_a_default_is_a_value_that_a_message_carries(field: Any) -> None:
    if field.default is MISSING:
        assert field.name == "max_tokens"
    else:
        assert field.metadata["check"](field.name, msgpack.unpackb(msgpack.packb(field.default))) == field.default


@pytest.mark.parametrize("name", ["a logit bias", "a number", "too many"])
def test_a_wrong_bias_is_named(name: str) -> None:
    value: Any = {"a logit bias": {"x": 1}, "a number": {"5": "1"}, "too many": {str(one): 1 for one in range(1025)}}
    with pytest.raises(InvalidValue, match=r"^logit_bias"):
        PARAMETERS["logit_bias"].read("logit_bias", value[name])


def test_names_that_a_parameter_requires_or_excludes_exist() -> None:
    known = {*PARAMETERS, *GRAMMAR_PARAMETERS, "use_beam_search", "stream"}
    for one in PARAMETERS.values():
        assert {*one.excludes} | ({one.requires} if one.requires else set()) <= known


def test_a_beam_search_takes_values_in_range() -> None:
    for name, one in PARAMETERS.items():
        if one.beam_value is not None:
            assert one.read(name, one.beam_value) == one.beam_value


def test_a_model_may_have_the_five_defaults_of_vllm() -> None:
    assert MODEL_DEFAULTS == {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


def test_the_documentation_has_type_range_and_default() -> None:
    found = {name: (one.documented_kind, one.documented_default) for name, one in PARAMETERS.items()}
    assert found["temperature"] == ("number from 0 to 2", "")
    assert found["n"] == ("integer from 1 to 128", "`1`")
    assert found["seed"] == ("integer from -2^63 to 2^64-1", "")
    assert found["stop"] == ("string or an array of at most 16 strings of 1 to 1024 characters each", "none")
    assert found["early_stopping"] == ('true, false or "never"', "")
