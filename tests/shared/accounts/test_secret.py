"""Secrets have an id that is found again, and digests that do not show them."""

from __future__ import annotations

import pytest

from quire.shared.accounts.secret import PREFIX, digest_of, key_id_of, new_secret


def test_the_id_of_a_secret_is_found_again() -> None:
    key_id, secret = new_secret()
    assert key_id_of(secret) == key_id
    assert secret.startswith(PREFIX + key_id)
    same, other = new_secret(key_id)
    assert (same, other != secret) == (key_id, True)
    assert digest_of(secret) != digest_of(other)
    assert len(digest_of(secret)) == 64


@pytest.mark.parametrize("text", ["", "sk-quire-", "sk-other", "x" * 10_000, PREFIX + "0" * 16 + "-" + "ä" * 43])
def test_other_texts_are_no_secrets(text: str) -> None:
    assert key_id_of(text) == ""
