"""Settings: one frozen dataclass per process, read from flags and environment variables, and nothing else.

Each field is declared with `option(...)` and can be given as `--field-name` or as `QUIRE_FIELD_NAME`. The flag
overrides the variable, the variable overrides the default, and an empty variable counts as not set. A wrong or unknown
setting stops the process with a `SettingError`: one line with the name, the value, its source and the remedy.
`with_sources` adds the sources to errors found later, about settings that do not fit each other or the machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import re
import shutil
import textwrap
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

PREFIX = "QUIRE_"
# A variable with names of variables, separated by spaces. `quire serve` was given these settings as flags, or set them
# itself, and passes them to its services in the environment.
FROM_FLAGS = "_QUIRE_FROM_FLAGS"
EXIT_CODE = 2
# The width of help in columns.
MIN_HELP_WIDTH, MAX_HELP_WIDTH = 40, 110

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")
_INTEGER = re.compile(r"[+-]?[0-9]+", re.ASCII)
# The text that sets an optional number to None if its default is a number.
_NONE = "none"

T = TypeVar("T")


class SettingError(ValueError):
    """A setting cannot be used. The text is one line: name, value, source and remedy."""


@dataclass(frozen=True, slots=True)
class Option:
    """The declaration of one setting, for the parser, `--help` and the documentation."""

    name: str
    kind: type
    optional: bool
    default: Any
    help: str
    minimum: float | None
    maximum: float | None
    choices: tuple[Any, ...]
    metavar: str
    variable: str
    positional: bool
    secret: bool
    last: bool
    repeatable: bool

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def flags(self) -> tuple[str, ...]:
        return (self.flag, "--no-" + self.flag[2:]) if self.kind is bool else (self.flag,)

    @property
    def label(self) -> str:
        """The flag and the variable, as errors name the option: `--port (QUIRE_PORT)`."""
        return f"{self.flag} ({self.variable})" if self.variable else self.flag

    def parse(self, text: str, source: str) -> Any:
        """Return the value of `text`. source: the flag or variable that it came from. Raise SettingError."""
        if self.optional and self.kind is not str and text.lower() == _NONE:
            return None
        value = self._convert(text, source)
        if self.choices and value not in self.choices:
            raise self.wrong(text, source, "is not one of its values")
        if self.minimum is not None and value < self.minimum:
            raise self.wrong(text, source, "is too small")
        if self.maximum is not None and value > self.maximum:
            raise self.wrong(text, source, "is too large")
        return value

    def _convert(self, text: str, source: str) -> Any:
        if self.kind is bool:
            if text.lower() in _TRUE + _FALSE:
                return text.lower() in _TRUE
            raise self.wrong(text, source, "is neither true nor false")
        if self.kind is int:
            if _INTEGER.fullmatch(text.strip()) and len(text) < 40:
                return int(text)
            raise self.wrong(text, source, "is not a whole number")
        if self.kind is float:
            try:
                number = float(text)
            except ValueError:
                number = math.nan
            if not math.isfinite(number):
                raise self.wrong(text, source, "is not a number")
            return number
        if not text and self.default != "":
            raise self.wrong(text, source, "is empty")
        return text

    def joined(self, before: Any, value: Any) -> Any:
        """Return the value after the flag was given again: the last, or all if the option is repeatable."""
        return f"{before},{value}" if self.repeatable and before else value

    def format(self, value: Any) -> str:
        """Return the text that `parse` reads as `value`."""
        if value is None:
            return "" if self.default is None else _NONE
        if self.kind is bool:
            return "true" if value else "false"
        return repr(value) if self.kind is float else str(value)

    def wrong(self, text: str, source: str, what: str) -> SettingError:
        """Return the error for this option's value `text` from `source`."""
        shown = "the value" if self.secret else repr(text)
        return SettingError(f"{self.label}: {shown} from {source} {what}; {self.remedy()}")

    def remedy(self) -> str:
        """Return the valid values as the end of a sentence: `give a whole number from 0 to 65535`."""
        if self.kind is bool:
            variable = f", or {self.variable}=true or false" if self.variable else ""
            return f"give {self.flags[0]} or {self.flags[1]}{variable}"
        if self.choices:
            return "give " + " or ".join(", ".join(map(str, self.choices)).rsplit(", ", 1))
        if self.kind is str:
            return f"give {self.metavar}, or leave it out for the default"
        noun = "a whole number" if self.kind is int else "a number"
        low, high = _number(self.minimum), _number(self.maximum)
        if low and high:
            return f"give {noun} from {low} to {high}"
        if low or high:
            return f"give {noun} of at {'least' if low else 'most'} {low or high}"
        return f"give {noun}"


def option(
    default: Any,
    *,
    help: str,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: Sequence[Any] | None = None,
    metavar: str | None = None,
    variable: str | None = None,
    positional: bool = False,
    secret: bool = False,
    last: bool = False,
    repeatable: bool = False,
) -> Any:
    """Declare a field of a settings dataclass.

    positional: the option can also be given without its flag; at most one per class. secret: the value is never
    printed, and never put on a command line. variable: its name, if QUIRE_<NAME> belongs to another command; "" for an
    option that has only its flag. last: `--help` lists the option of a base class after the options of the class that
    inherits it. repeatable: the flag may be given several times; the values of a text are joined with commas, as the
    variable has them.
    """
    metadata = {
        "option": {
            "help": help,
            "minimum": minimum,
            "maximum": maximum,
            "choices": tuple(choices or ()),
            "metavar": metavar,
            "variable": variable,
            "positional": positional,
            "secret": secret,
            "last": last,
            "repeatable": repeatable,
        }
    }
    return dataclasses.field(default=default, metadata=metadata, repr=not secret)


def options(cls: Any) -> tuple[Option, ...]:
    """Return the options of a settings class in the order of its fields, those with `last` at the end.

    Raise TypeError for a wrong declaration.
    """
    hints = get_type_hints(cls)
    all_options = []
    for field in dataclasses.fields(cls):
        if "option" not in field.metadata:
            raise TypeError(f"{cls.__name__}.{field.name} is not declared with option(...)")
        declared = dict(field.metadata["option"])
        kind, optional, literals = _kind(f"{cls.__name__}.{field.name}", hints[field.name])
        declared["choices"] = declared["choices"] or literals
        declared["metavar"] = declared["metavar"] or field.name.upper()
        if declared["variable"] is None:
            declared["variable"] = PREFIX + field.name.upper()
        if optional and kind is str and field.default is not None:
            raise TypeError(f"{cls.__name__}.{field.name}: an optional text needs the default None")
        all_options.append(Option(name=field.name, kind=kind, optional=optional, default=field.default, **declared))
    if sum(item.positional for item in all_options) > 1:
        raise TypeError(f"{cls.__name__} has more than one positional option")
    return tuple(sorted(all_options, key=lambda item: item.last))


def load(
    cls: type[T],
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    prog: str,
    description: str = "",
    examples: Sequence[str] = (),
    known: Iterable[Any] = (),
) -> T:
    """Read the settings of a process.

    known: settings classes, or names of variables, of other processes: their `QUIRE_*` variables are accepted and
    ignored. `--help` prints the help to standard output and raises SystemExit(0), and `--help=WORDS` that of the
    options that match. Raise SettingError.
    """
    declared = options(cls)
    if (search := help_search(argv)) is not None:
        shown = matching(declared, search, prog)
        print(render_help(shown, prog=prog, description=description, examples=() if search else examples))
        raise SystemExit(0)
    check_environment(environ, (cls, *known))
    values: dict[str, Any] = {}
    for item in declared:
        if text := environ.get(item.variable):
            values[item.name] = item.parse(text, item.variable)
    values.update(_parse_flags(declared, argv, prog))
    return cls(**values)


def check_environment(environ: Mapping[str, str], known: Iterable[Any]) -> None:
    """Raise SettingError for unknown `QUIRE_*` variables: a misspelt setting must not be ignored silently."""
    names: set[str] = set()
    for entry in known:
        names |= {entry} if isinstance(entry, str) else {item.variable for item in options(entry) if item.variable}
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in names:
            nearest = difflib.get_close_matches(name, sorted(names), n=1, cutoff=0.5)
            remedy = f"did you mean {nearest[0]}? Otherwise unset it" if nearest else "unset it"
            raise SettingError(f"{name} in the environment is not a setting: {remedy}")


def refuse_flag(flag: str, known: Iterable[str], prog: str) -> NoReturn:
    """Raise the SettingError for an unknown flag, and propose the most similar flag."""
    nearest = difflib.get_close_matches(flag, sorted(known), n=1)
    remedy = f"did you mean {nearest[0]}?" if nearest else f"`{prog} --help` lists the flags"
    raise SettingError(f"unknown flag {flag}: {remedy}")


def with_sources(message: str, settings: Any, environ: Mapping[str, str]) -> str:
    """Return an error about `settings`, with the environment variables that set what it names.

    The message names a setting by its flag, or by its field name at the beginning. Nothing is added for settings that
    were given as flags, or not at all.
    """
    came = []
    flags = environ.get(FROM_FLAGS, "").split()
    for item in options(type(settings)):
        if item.variable in flags or not (
            re.search(rf"(?<![\w-]){item.flag}(?![\w-])", message) or message.startswith(f"{item.name}:")
        ):
            continue
        with contextlib.suppress(SettingError):
            text = environ.get(item.variable)
            if text and item.parse(text, item.variable) == getattr(settings, item.name):
                came.append(f"{item.flag} came as {item.variable} from the environment")
    return f"{message} ({'; '.join(came)})" if came else message


def to_environ(settings: Any) -> dict[str, str]:
    """Return environment variables from which `load` reads these settings again, defaults included."""
    return {item.variable: item.format(getattr(settings, item.name)) for item in options(type(settings))}


def render_help(declared: Sequence[Option], *, prog: str, description: str, examples: Sequence[str]) -> str:
    """Return the text of `--help`."""
    positional = [item for item in declared if item.positional]
    usage = " ".join([f"usage: {prog}", *(f"[{item.metavar}]" for item in positional), "[options]"])
    parts = [usage]
    if description:
        parts += ["", wrap(description)]
    parts += ["", "options:"]
    parts += map(render_option, declared)
    parts += ["  -h, --help", wrap("Show this help; --help=WORDS shows the options that match.", " " * 6)]
    if examples:
        parts += ["", "examples:", *(f"  {example}" for example in examples)]
    return "\n".join(parts)


def render_option(item: Option) -> str:
    """Return the lines of `--help` about one option."""
    heads = [item.metavar] if item.positional else []
    heads += [f"{item.flag}, {item.flags[1]}"] if item.kind is bool else [f"{item.flag} {_argument(item)}"]
    where = f"; {item.variable}" if item.variable else ""
    return "  " + ", ".join(heads) + "\n" + wrap(f"{item.help} [{_default(item)}{where}]", " " * 6)


def wrap(text: str, indent: str = "", first_indent: str | None = None) -> str:
    """Return the text in lines as wide as the terminal, within limits. Words, flags and paths are never broken.

    first_indent: of the first line, if it differs.
    """
    return textwrap.fill(
        text,
        max(MIN_HELP_WIDTH, min(shutil.get_terminal_size((100, 24)).columns, MAX_HELP_WIDTH)),
        initial_indent=indent if first_indent is None else first_indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def help_search(argv: Sequence[str]) -> str | None:
    """Return the words in `--help=WORDS`, empty for `--help`; None if the arguments do not ask for help."""
    words = argv[: argv.index("--")] if "--" in argv else argv
    return next((word.partition("=")[2] for word in words if word == "-h" or word.partition("=")[0] == "--help"), None)


def matching(declared: Iterable[Option], search: str, prog: str) -> list[Option]:
    """Return the options whose flag, variable or help has all words of `search`. Raise SettingError if none has."""
    wanted = search.lower().split()
    texts = {item: " ".join((*item.flags, item.variable, item.help)).lower() for item in declared}
    if found := [item for item, said in texts.items() if all(word in said for word in wanted)]:
        return found
    raise SettingError(f"no flag matches {search!r}: `{prog} --help` lists all")


def _parse_flags(declared: Sequence[Option], argv: Sequence[str], prog: str) -> dict[str, Any]:
    by_flag = {flag: item for item in declared for flag in item.flags}
    positional = next((item for item in declared if item.positional), None)
    values: dict[str, Any] = {}
    free: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if word == "--":
            free += words
            break
        if not word.startswith("-") or word == "-":
            free.append(word)
            continue
        flag, equals, text = word.partition("=")
        item = by_flag.get(flag)
        if item is None:
            refuse_flag(flag, by_flag, prog)
        if item.kind is bool:
            if equals:
                raise SettingError(f"{item.label}: {flag} takes no value; give {item.flags[0]} or {item.flags[1]}")
            values[item.name] = flag == item.flags[0]
            continue
        if not equals:
            if not words or words[0].startswith("--"):
                raise SettingError(f"{item.label}: {flag} needs a value; {item.remedy()}")
            text = words.pop(0)
        value = item.parse(text, flag)
        values[item.name] = item.joined(values.get(item.name), value)
    if positional is not None and free:
        text = free.pop(0)
        if positional.repeatable:
            text, free = ",".join([text, *free]), []
        value = positional.parse(text, "the command line")
        if values.setdefault(positional.name, value) != value:
            raise SettingError(f"{positional.label}: given twice, as {text!r} and with {positional.flag}; give it once")
    if free:
        raise SettingError(f"unexpected argument {free[0]!r}: `{prog} --help` shows what may be given")
    return values


def _kind(name: str, hint: Any) -> tuple[type, bool, tuple[Any, ...]]:
    """Return the plain type of a field, whether None is allowed, and the values of a Literal."""
    optional = False
    if get_origin(hint) in (Union, types.UnionType):
        members = [member for member in get_args(hint) if member is not type(None)]
        if len(members) != 1 or len(members) == len(get_args(hint)):
            raise TypeError(f"{name}: a setting is one type, or that or None, not {hint}")
        hint, optional = members[0], True
    if get_origin(hint) is Literal:
        literals = get_args(hint)
        if not all(isinstance(value, str) for value in literals):
            raise TypeError(f"{name}: the values of a Literal setting must be texts")
        return str, optional, literals
    if hint not in (int, float, str, bool) or (optional and hint is bool):
        raise TypeError(f"{name}: a setting cannot be of the type {hint}")
    return hint, optional, ()


def _argument(item: Option) -> str:
    return "|".join(map(str, item.choices)) if item.choices else item.metavar


def _default(item: Option) -> str:
    if item.default is None or item.default == "":
        return "default: not set"
    return f"default: {item.format(item.default)}"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return str(int(value)) if value == int(value) else repr(value)
