"""The signatures of thinking blocks."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.gateway.api.messages.signature import hidden_text, sign


@given(st.text())
def test_a_hidden_text_comes_back(text: str) -> None:
    assert hidden_text(sign(text, True)) == text
    assert hidden_text(sign(text, False)) == ""


def test_a_shown_text_is_signed_by_its_hash() -> None:
    assert sign("Hm.", False) == "sha256-" + hashlib.sha256(b"Hm.").hexdigest()


@pytest.mark.parametrize("signature", ["", "EqQBCgIYAhIM", "sha256-00"])
def test_other_signatures_carry_no_text(signature: str) -> None:
    assert hidden_text(signature) == ""


@pytest.mark.parametrize("signature", ["base64-*", "base64-/w=="])
def test_a_damaged_text_is_an_error(signature: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        hidden_text(signature)
