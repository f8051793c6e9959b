"""Settings of commands: flags of services, the URL of the server, and completions of shells."""

from __future__ import annotations

import pytest

from quire.ops.cli.commands import single_commands
from quire.ops.cli.completions import Interrupted, StreamedAnswer
from quire.ops.cli.server_url import parse_url
from quire.ops.cli.service_flags import lift_service_flags
from quire.ops.cli.settings import ALL_SETTINGS
from quire.shared.config.command_line import CommandError
from quire.shared.config.settings import FROM_FLAGS, Option, SettingError, load, options

# --- settings ---------------------------------------------------------------------------------------------------------
# Each setting of each command: a wrong value is told with its name, the value, where it came from, and a remedy.


def wrong_value(item: Option) -> str | None:
    """A text that the option cannot take; None where it takes any."""
    if item.choices:
        return "no-such-choice" if item.kind is str else "7"
    return None if item.kind is str else "x"


@pytest.mark.parametrize("name", single_commands())
def test_a_wrong_value_is_told_in_full(name: str) -> None:
    cls = single_commands()[name].settings
    for item in options(cls):
        text = wrong_value(item)
        if text is None:
            continue
        sources = [([], {item.variable: text}, item.variable)] if item.variable else []
        if item.kind is not bool:
            sources.append(([f"{item.flag}={text}"], {}, item.flag))
        for argv, environ, source in sources:
            with pytest.raises(SettingError) as caught:
                load(cls, argv, environ, prog=f"quire {name}", known=ALL_SETTINGS)
            message = str(caught.value)
            assert message.startswith(f"{item.label}: {text!r} from {source} "), message
            assert "; give " in message
            assert "\n" not in message


# --- service flags ----------------------------------------------------------------------------------------------------
# Flags of the gateway and the worker that `quire serve` was given.


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


# --- server url -------------------------------------------------------------------------------------------------------
# URLs of servers, as users write them.


@pytest.mark.parametrize("url", ["host:81", "http://host:81", "http://host:81/", "http://host:81/v1", "host:81/v1/"])
def test_scheme_and_v1_may_be_left_out(url: str) -> None:
    found = parse_url(url)
    assert (found.secure, found.host, found.port, found.path) == (False, "host", 81, "/v1")
    assert found.base == "http://host:81/v1"


def test_a_password_is_not_shown_and_a_path_is_kept() -> None:
    found = parse_url("https://me:word@host/proxy")
    assert (found.secure, found.port, found.path) == (True, None, "/proxy/v1")
    assert found.shown == "https://host"


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://host:99999"])
def test_other_urls_are_refused_with_their_flag(url: str) -> None:
    with pytest.raises(CommandError, match=r"^--against .*; give http://host:port"):
        parse_url(url, "--against")


# --- completions ------------------------------------------------------------------------------------------------------
# The client of `quire chat`: figures of an answer, and errors of servers.


@pytest.mark.parametrize("index", [-1, 1, None, "0"])
def test_a_piece_of_no_call_breaks_the_answer_off(index: object) -> None:
    with pytest.raises(Interrupted, match="out of order"):
        StreamedAnswer().add_call({"index": index, "function": {"arguments": "{"}})
