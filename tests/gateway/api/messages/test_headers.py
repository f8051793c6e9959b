"""The headers of the Messages API."""

from __future__ import annotations

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from quire.gateway.api.messages.headers import KNOWN_BETAS, MAX_BETAS, check_headers
from quire.gateway.errors.api_errors import InvalidRequest


def check(*pairs: tuple[str, str]) -> list[str]:
    return check_headers(CIMultiDictProxy(CIMultiDict(pairs)))


def test_the_version_may_be_missing_or_any_date() -> None:
    assert check() == []
    assert check(("anthropic-version", "2023-06-01"), ("x-api-key", "secret")) == []
    assert check(("anthropic-version", "2031-01-01")) == []


@pytest.mark.parametrize("version", ["latest", "", "2023-6-1", "2023-06-01x", "v" * 500])
def test_a_version_that_is_no_date_is_refused(version: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check(("anthropic-version", version))
    assert caught.value.param == "anthropic-version"
    assert len(caught.value.message) < 300


def test_unknown_betas_are_named_once_and_known_ones_are_not() -> None:
    known = min(KNOWN_BETAS)
    found = check(("anthropic-beta", f"claude-code-20250219, {known},claude-code-20250219"), ("anthropic-beta", "x-1,"))
    assert found == ["claude-code-20250219", "x-1"]


@pytest.mark.parametrize("value", ["two words", "a\u00e9", "x" * 101, ",".join(["b"] * (MAX_BETAS + 1))])
def test_betas_that_are_no_names_are_refused(value: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check(("anthropic-beta", value))
    assert caught.value.param == "anthropic-beta"
