"""Settings of all processes, by flags and variables."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import combinations
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.gateway.settings import GatewaySettings
from quire.ops.cli.settings import ServeSettings
from quire.shared.config.service_settings import CommonSettings
from quire.shared.config.settings import FROM_FLAGS, SettingError, load, option, options, to_environ, with_sources
from quire.worker.settings import WorkerSettings

# --- settings ---------------------------------------------------------------------------------------------------------
# Flags beat variables, variables beat defaults, and every mistake is one line that names its remedy.


@dataclass(frozen=True, kw_only=True)
class Sample:
    model: str = option("models/demo", help="The model.", positional=True)
    port: int = option(8000, help="The port.", minimum=0, maximum=65535)
    rate: float = option(1.5, help="A rate.", minimum=0)
    limit: int | None = option(7, help="A limit.", minimum=1)
    share: float | None = option(None, help="A share.")
    dtype: Literal["auto", "float32"] = option("auto", help="A type.")
    block: int = option(16, help="A size.", choices=(8, 16, 32))
    eager: bool = option(False, help="A switch.")
    cache: bool = option(True, help="Another switch.")
    name: str = option("", help="A name.")
    key: str = option("", help="A key.", secret=True)
    many: str = option("", help="Several values.", repeatable=True)
    other: str = option("", help="Renamed.", variable="QUIRE_SAMPLE_OTHER")


@dataclass(frozen=True)
class Elsewhere:
    threads: int = option(0, help="A setting of another process.")


def read(*argv: str, **environ: str) -> Sample:
    return load(Sample, argv, environ, prog="quire sample", known=[Elsewhere])


def refusal(*argv: str, **environ: str) -> str:
    with pytest.raises(SettingError) as caught:
        read(*argv, **environ)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_flag_beats_a_variable_which_beats_the_default() -> None:
    assert read(QUIRE_PORT="1").port == 1
    assert read("--port", "2", QUIRE_PORT="1").port == 2
    assert read("--port=3").port == 3


def test_a_repeatable_flag_keeps_all_values_and_another_one_the_last() -> None:
    found = read("--many", "a=1", "--many=b=2", "--name", "x", "--name", "y", QUIRE_MANY="c=3")
    assert (found.many, found.name) == ("a=1,b=2", "y")
    assert read(QUIRE_MANY="c=3,d=4").many == "c=3,d=4"


def test_an_empty_variable_counts_as_not_set() -> None:
    assert read(QUIRE_PORT="", QUIRE_MODEL="") == Sample()


@pytest.mark.parametrize("text", ["1", "true", "YES", "on"])
def test_switches_by_variable(text: str) -> None:
    assert read(QUIRE_EAGER=text).eager


def test_switches_by_flag() -> None:
    assert read("--eager", "--no-cache") == Sample(eager=True, cache=False)


def test_the_positional_setting_may_be_given_either_way_but_not_twice() -> None:
    assert read("m", "--port", "1").model == read("--port", "1", "m").model == read("--model", "m").model == "m"
    assert read("--", "-m").model == "-m"
    assert "given twice" in refusal("m", "--model", "n")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (
            ["--port", "x"],
            "--port (QUIRE_PORT): 'x' from --port is not a whole number; give a whole number from 0 to 65535",
        ),
        (
            ["--port", "65536"],
            "--port (QUIRE_PORT): '65536' from --port is too large; give a whole number from 0 to 65535",
        ),
        (["--port", "-1"], "--port (QUIRE_PORT): '-1' from --port is too small; give a whole number from 0 to 65535"),
        (["--rate", "nan"], "--rate (QUIRE_RATE): 'nan' from --rate is not a number; give a number of at least 0"),
        (
            ["--dtype", "int8"],
            "--dtype (QUIRE_DTYPE): 'int8' from --dtype is not one of its values; give auto or float32",
        ),
        (["--block", "9"], "--block (QUIRE_BLOCK): '9' from --block is not one of its values; give 8, 16 or 32"),
        (["--eager=1"], "--eager (QUIRE_EAGER): --eager takes no value; give --eager or --no-eager"),
        (["--port"], "--port (QUIRE_PORT): --port needs a value; give a whole number from 0 to 65535"),
        (["--port", "--eager"], "--port (QUIRE_PORT): --port needs a value; give a whole number from 0 to 65535"),
        (["--model="], "--model (QUIRE_MODEL): '' from --model is empty; give MODEL, or leave it out for the default"),
        (["--prot", "1"], "unknown flag --prot: did you mean --port?"),
        (["--xyzzy"], "unknown flag --xyzzy: `quire sample --help` lists the flags"),
        (["-p", "1"], "unknown flag -p: `quire sample --help` lists the flags"),
        (["a", "b"], "unexpected argument 'b': `quire sample --help` shows what may be given"),
    ],
)
def test_a_wrong_flag_names_value_and_remedy(argv: list[str], said: str) -> None:
    assert refusal(*argv) == said


def test_a_wrong_variable_is_named_as_the_source() -> None:
    assert (
        refusal(QUIRE_PORT="x")
        == "--port (QUIRE_PORT): 'x' from QUIRE_PORT is not a whole number; give a whole number from 0 to 65535"
    )
    assert refusal(QUIRE_EAGER="maybe").startswith(
        "--eager (QUIRE_EAGER): 'maybe' from QUIRE_EAGER is neither true nor false; give --eager"
    )


def test_what_is_found_wrong_later_is_told_with_the_variables_that_it_came_from() -> None:
    environ = {"QUIRE_PORT": "7", "QUIRE_RATE": "3"}
    settings = read("--rate", "2", **environ)

    def told(message: str) -> str:
        return with_sources(message, settings, environ)

    assert told("--port 7 is taken") == "--port 7 is taken (--port came as QUIRE_PORT from the environment)"
    assert told("port: 7 is taken; give another").endswith(" (--port came as QUIRE_PORT from the environment)")
    # Flags, defaults, and flags whose names only begin alike.
    assert told("--rate 2 is too fast for --limit 7, --portal or --no-port") == (
        "--rate 2 is too fast for --limit 7, --portal or --no-port"
    )


def test_a_variable_that_was_a_flag_of_who_started_the_process_is_not_told_as_the_source() -> None:
    environ = {"QUIRE_PORT": "7", FROM_FLAGS: "QUIRE_RATE QUIRE_PORT"}
    assert with_sources("--port 7 is taken", read(QUIRE_PORT="7"), environ) == "--port 7 is taken"


def test_an_unknown_variable_is_refused_and_one_of_another_process_is_not() -> None:
    assert "did you mean QUIRE_PORT?" in refusal(QUIRE_PROT="1")
    assert "is not a setting" in refusal(QUIRE_XYZZY="1")
    assert read(QUIRE_THREADS="2", OTHER="x") == Sample()


def test_a_secret_is_shown_nowhere() -> None:
    settings = read(QUIRE_KEY="hunter2")
    assert "hunter2" not in repr(settings)
    assert to_environ(settings)["QUIRE_KEY"] == "hunter2"


def test_a_wrong_declaration_is_the_programmers_error() -> None:
    @dataclass(frozen=True)
    class Bare:
        port: int = 1

    @dataclass(frozen=True)
    class Odd:
        names: tuple[str, ...] = option((), help="Too much.")

    for cls in (Bare, Odd):
        with pytest.raises(TypeError):
            options(cls)


SETTINGS = st.builds(
    Sample,
    model=st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1),
    port=st.integers(0, 65535),
    rate=st.floats(0, allow_infinity=False, allow_nan=False),
    limit=st.none() | st.integers(1, 10**12),
    share=st.none() | st.floats(allow_infinity=False, allow_nan=False),
    dtype=st.sampled_from(["auto", "float32"]),
    block=st.sampled_from([8, 16, 32]),
    eager=st.booleans(),
    cache=st.booleans(),
    name=st.text(st.characters(codec="utf-8", exclude_characters="\0")),
    key=st.text(st.characters(codec="utf-8", exclude_characters="\0")),
)


@given(SETTINGS)
def test_settings_pass_to_a_child_through_its_environment(settings: Sample) -> None:
    assert read(**to_environ(settings)) == settings


@given(
    st.lists(st.text(max_size=12), max_size=6),
    st.dictionaries(st.sampled_from([f.name for f in fields(Sample)]), st.text()),
)
def test_nothing_that_a_user_types_ends_in_anything_but_settings_or_a_refusal(
    argv: list[str], given: dict[str, Any]
) -> None:
    environ = {f"QUIRE_{name.upper()}": text for name, text in given.items() if name != "other"}
    if {"-h", "--help"} & set(argv):
        return
    try:
        settings = read(*argv, **environ)
    except SettingError:
        return
    assert 0 <= settings.port <= 65535


# --- service settings -------------------------------------------------------------------------------------------------


# Settings of several processes with a default or bounds of their own. `quire serve` takes several models.
OWN = {"drain_s", "max_model_len", "model", "redis_url", "served_model_name"}


def test_a_setting_of_several_processes_is_the_same_in_each() -> None:
    for one, other in combinations((ServeSettings, GatewaySettings, WorkerSettings), 2):
        ours, theirs = ({item.name: item for item in options(cls)} for cls in (one, other))
        both = ours.keys() & theirs.keys() - OWN
        assert {item.name for item in options(CommonSettings)} - OWN <= both
        assert {name: ours[name] for name in both} == {name: theirs[name] for name in both}
