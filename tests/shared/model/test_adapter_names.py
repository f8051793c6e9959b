"""Names and paths of adapters: hostile ones are refused wherever they come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.shared.model.adapter_names import (
    Announcement,
    InvalidAdapter,
    check_adapter_name,
    check_adapter_path,
    parse_adapters,
)


@pytest.mark.parametrize("name", ["a", "org/name:v1.2+x_y-z", "a" * 128])
def test_a_name_is_kept(name: str) -> None:
    assert check_adapter_name(name) == name


@pytest.mark.parametrize("name", ["", "-a", "a b", "a@b", "a,b", "a=b", "a\n", "ä", "a" * 129, 3, None])
def test_another_name_is_refused(name: Any) -> None:
    with pytest.raises(InvalidAdapter, match="cannot be the name of an adapter: use 1 to 128"):
        check_adapter_name(name)


@pytest.mark.parametrize("path", ["", "/etc", "..", "a/../../b", "a\\b", "a\0b", "a\nb", "a" * 513, 3, None])
def test_a_path_that_could_leave_the_folder_is_refused(path: Any) -> None:
    with pytest.raises(InvalidAdapter, match="give one relative to --lora-dir"):
        check_adapter_path(path)


def test_the_setting_names_folders() -> None:
    assert parse_adapters("a=/x/y, b=z=1,", "m") == {"a": Path("/x/y"), "b": Path("z=1")}
    assert parse_adapters("", "m") == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("/x/y", "--lora '/x/y' is not NAME=FOLDER"),
        ("a=", "--lora 'a=' is not NAME=FOLDER"),
        ("a=x,a=y", "another adapter has the name 'a'"),
        ("m=x", "the model has the name 'm'"),
        ("a b=x", "--lora: 'a b' cannot be the name"),
    ],
)
def test_a_wrong_setting_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidAdapter, match=message):
        parse_adapters(text, "m")


def test_an_announcement_survives_its_encoding() -> None:
    one = Announcement("a", "x/y", "123")
    assert Announcement.decode("a", one.encode()) == one


@pytest.mark.parametrize(
    "data", ["", "[]", "{}", '{"path": "../x", "stamp": "1"}', '{"path": "x", "stamp": 3}', "[" * 9999]
)
def test_a_corrupt_announcement_is_refused(data: str) -> None:
    with pytest.raises(InvalidAdapter):
        Announcement.decode("a", data)
