"""Reads the data files of the grammar, data/*.toml, and checks every entry against data/schema.toml.

`DATA.words.creatures` is the list `creatures` of words.toml. Tables with fixed keys become attributes, tables with
arbitrary keys become dicts, and lists become tuples.
"""

import string
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FOLDER = Path(__file__).resolve().parent / "data"


class DataError(ValueError):
    """An entry of a data file is wrong; the message names the file, the entry, the cause and the remedy."""


class _DataFileReader:
    """Checks one data file against its schema. Every error is a DataError that names the entry."""

    def __init__(self, file: str, verbatim: bool, phrases: dict[str, str]) -> None:
        self.file, self.verbatim = file, verbatim
        self.phrases = {name: self.text("", text, f"phrases.{name}", check=False) for name, text in phrases.items()}

    def wrong(self, entry: str, cause: str) -> DataError:
        return DataError(f"{self.file}: {entry or 'the file'}: {cause}")

    def typed(self, value: Any, kind: Any, called: str, entry: str) -> Any:
        """Return the value, if it has the type `kind` and is not empty."""
        if not isinstance(value, kind) or isinstance(value, bool):
            raise self.wrong(entry, f"{value!r} is not {called}")
        if value in ([], {}):
            raise self.wrong(entry, "is empty; add an entry")
        return value

    def read(self, schema: Any, value: Any, entry: str = "") -> Any:
        """Return the value of any type of schema."""
        if schema == "@words":
            return self.words(value, entry)
        if isinstance(schema, str):
            return self.text(schema, value, entry)
        if isinstance(schema, list):
            return self.items(*schema, value=value, entry=entry)
        if isinstance(schema, dict):
            return self.table(schema, value, entry)
        return self.typed(value, int | float, "a number", entry)

    def table(self, schema: dict[str, Any], value: Any, entry: str) -> Any:
        value = self.typed(value, dict, "a table", entry)
        any_key = next((key for key in schema if key.startswith("*")), "")
        if any_key:
            kinds, required, defaults = dict.fromkeys(value, schema[any_key]), any_key.split()[1:], {}
        else:
            kinds = {key.rstrip("?"): inner for key, inner in schema.items()}
            required = [key for key in schema if not key.endswith("?")]
            defaults = {key: "" if isinstance(kinds[key], str) else kinds[key] for key in kinds if key not in required}
        if unknown := [key for key in value if key not in kinds]:
            raise self.wrong(entry, f"unknown key {unknown[0]!r}; the keys here are: {', '.join(kinds)}")
        if missing := [key for key in required if key not in value]:
            raise self.wrong(entry, f"the key {missing[0]!r} is missing; add it")
        table = {key: self.read(kinds[key], item, f"{entry}.{key}".lstrip(".")) for key, item in value.items()}
        return table if any_key else SimpleNamespace(**(defaults | table))

    def items(self, schema: Any, least: int = 1, *, value: Any, entry: str) -> tuple[Any, ...]:
        items = self.typed(value, list, "a list", entry)
        if len(items) < least:
            raise self.wrong(entry, f"has {len(items)} items; add items up to {least}")
        return tuple(self.read(schema, item, f"{entry} {at}") for at, item in enumerate(items, 1))

    def words(self, value: Any, entry: str) -> tuple[str, ...]:
        words = [" ".join(word.split()) for word in self.typed(value, str, "a text", entry).split(",")]
        if "" in words:
            raise self.wrong(entry, "a word is empty; write one comma between two words, and none after the last")
        if twice := [word for word in words if words.count(word) > 1]:
            raise self.wrong(entry, f"the word {twice[0]!r} appears twice; remove one")
        return tuple(words)

    def text(self, allowed: str, value: Any, entry: str, check: bool = True) -> str:
        """Return a template, with the named phrases of the file filled in."""
        text: str = self.typed(value, str, "a text", entry)
        if not self.verbatim and "\n" in text:
            text = "\n\n".join(" ".join(paragraph.split()) for paragraph in text.strip().split("\n\n"))
        if check:
            for name, phrase in self.phrases.items():
                text = text.replace(f"{{{name}}}", phrase)
            self.check_slots(text, allowed, entry)
            self.check_choices(text, entry)
        return text

    def check_slots(self, text: str, allowed: str, entry: str) -> None:
        try:
            slots = [slot for _, slot, _, _ in string.Formatter().parse(text) if slot is not None]
        except ValueError as error:
            raise self.wrong(entry, f"{error}; write a slot as {{slot}}, and a brace of the text twice") from None
        if unknown := [slot for slot in slots if slot not in allowed.split()]:
            raise self.wrong(entry, f"unknown slot {{{unknown[0]}}}; the slots here are: {allowed or 'none'}")

    def check_choices(self, text: str, entry: str) -> None:
        depth = 0
        for character in text:
            depth += (character == "[") - (character == "]")
            if depth < 0 or (character == "|" and not depth):
                raise self.wrong(entry, f"{character!r} is outside of a choice; write a choice as [one|another]")
        if depth:
            raise self.wrong(entry, "a choice lacks its ']'; write a choice as [one|another]")


def load(folder: Path = FOLDER) -> Any:
    """Return all data files of a folder. Raise DataError for a file that is not TOML or breaks the schema."""

    def parsed(name: str) -> dict[str, Any]:
        try:
            return tomllib.loads((folder / name).read_text(encoding="utf-8"))
        except tomllib.TOMLDecodeError as error:
            raise DataError(f"{name}: {error}") from None

    schema = parsed("schema.toml")
    verbatim = schema.pop("verbatim")
    data = {}
    for name, keys in schema.items():
        content = parsed(f"{name}.toml")
        reader = _DataFileReader(f"{name}.toml", name in verbatim, content.pop("phrases", {}))
        data[name] = reader.read(keys, content)
    return SimpleNamespace(**data)


DATA = load()
