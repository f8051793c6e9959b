"""Flags of the gateway and the worker that `quire serve` was given."""

from __future__ import annotations

import pytest

from quire.ops.cli.service_flags import lift_service_flags
from quire.shared.settings import FROM_FLAGS, SettingError


def test_flags_of_the_services_become_variables_and_the_rest_stays() -> None:
    words = [
        "./model",
        "--port",
        "9000",
        "--block-size",
        "32",
        "--max-n=4",
        "--no-prefix-caching",
        "--",
        "--threads",
    ]
    rest, environ = lift_service_flags(words, {"HOME": "/root", "QUIRE_BLOCK_SIZE": "8"})
    assert rest == ["./model", "--port", "9000", "--", "--threads"]
    assert environ == {
        "HOME": "/root",
        "QUIRE_BLOCK_SIZE": "32",
        "QUIRE_MAX_N": "4",
        "QUIRE_PREFIX_CACHING": "false",
        FROM_FLAGS: "QUIRE_BLOCK_SIZE QUIRE_MAX_N QUIRE_PREFIX_CACHING",
    }


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--block-size"], r"--block-size needs a value; give 8, 16"),
        (["--block-size", "--port", "1"], r"--block-size needs a value"),
        (["--block-size", "17"], r"'17' from --block-size is not one of its values"),
        (["--blok-size", "16"], r"unknown flag --blok-size: did you mean --block-size\?"),
    ],
)
def test_a_wrong_flag_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        lift_service_flags(words, {})


def test_a_repeatable_flag_becomes_one_variable_with_all_values() -> None:
    _, environ = lift_service_flags(["--lora", "a=1", "--lora=b=2"], {"QUIRE_LORA": "c=3"})
    assert environ["QUIRE_LORA"] == "a=1,b=2"
