"""Answers under the schemas that Pydantic and zod make of types: each can go on, and each that ends is valid.

The tokens are drawn by chance with the matcher of the worker and the tokenizer of the demo model.
"""

from __future__ import annotations

import datetime
import enum
import ipaddress
import json
import random
import re
import uuid
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import jsonschema
import numpy as np
import pydantic
import pytest
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from tokenizers import Tokenizer
from typing_extensions import TypedDict

from quire.ops.paths import PROJECT_ROOT
from quire.shared.model.model_argument import DEFAULT_MODEL
from quire.shared.text import grammar
from quire.shared.text.grammar import GrammarVocabulary
from quire.shared.text.grammar_error import GrammarError
from quire.worker.engine.features.grammars import Grammars, Matcher


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Size(enum.IntEnum):
    SMALL = 1
    LARGE = 2


class Pair(NamedTuple):
    left: int
    right: str


class Entry(TypedDict, total=False):
    name: str
    size: int


class Point(BaseModel):
    x: float
    y: float = 0


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")
    a: int
    b: str | None = None


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    a: int


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, Field(ge=1, le=9)]


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str


class Tree(BaseModel):
    value: int
    children: list[Tree] = []


TYPES: list[Any] = [
    int, float, str, bool, None, Any, bytes, Decimal, datetime.date, datetime.datetime, datetime.time,
    datetime.timedelta, uuid.UUID, ipaddress.IPv4Address, ipaddress.IPv6Address, ipaddress.IPv6Network, Path,
    pydantic.FilePath, re.Pattern,
    Colour, Size, Pair, Entry, Point, Closed, Open, Tree, Cat | Dog, Annotated[Cat | Dog, Field(discriminator="kind")],
    Literal["a", 1, None], int | None, int | str, list[int], list[Any], dict[str, int], dict[str, Any],
    dict[Path, int], dict[Colour, int], dict[Literal["a", "b"], int], dict[int, str], tuple[int, str], tuple[int, ...],
    set[Literal[1, 2, 3]], set[Size], set[Colour], set[bool], frozenset[Literal["a", "b"]], set[Literal["a", 1]],
    Annotated[int, Field(ge=-(2**63), le=2**63 - 1)], Annotated[int, Field(gt=0, lt=10)], Annotated[int, Field(ge=0)],
    Annotated[int, Field(multiple_of=7)], Annotated[float, Field(gt=0, lt=0.5)],
    Annotated[float, Field(ge=-3.4e38, le=3.4e38)],
    Annotated[float, Field(ge=5e-324)], Annotated[float, Field(multiple_of=0.5)],
    Annotated[Decimal, Field(max_digits=5, decimal_places=2)], Annotated[str, Field(min_length=2, max_length=5)],
    Annotated[str, Field(pattern=r"^[A-Z]{2}\d+$")], Annotated[str, Field(pattern="ab|cd")],
    Annotated[list[int], Field(min_length=1, max_length=3)],
    dict[Annotated[str, Field(pattern="^k[0-9]$")], int], dict[Annotated[str, Field(pattern="^(x|y)$")], int],
    dict[Annotated[str, Field(max_length=2)], int], pydantic.EmailStr, pydantic.AnyUrl, pydantic.PositiveInt,
    pydantic.NegativeFloat, pydantic.Json[list[int]], pydantic.SecretStr, pydantic.Base64Str, pydantic.ByteSize,
]  # fmt: skip
# `z.toJSONSchema` of the types of zod 4.6.7, most for the input as well. `zod_schemas.mjs` writes the file.
ZOD: dict[str, Any] = json.loads((Path(__file__).parent / "zod_schemas.json").read_text())
# Tokens of an answer; a longer one is given up.
MAX_TOKENS = 250
# A look-around that cannot be followed, and a pattern that Python does not have.
LEFT_OUT = {"isoduration", "emoji"}


def pydantic_schema(a_type: Any) -> dict[str, Any] | None:
    try:
        return TypeAdapter(a_type).json_schema()
    except (pydantic.errors.PydanticInvalidForJsonSchema, ImportError):
        return None


LEAVES = [schema for one in TYPES if (schema := pydantic_schema(one)) is not None] + [
    schema for name, schema in ZOD.items() if name not in LEFT_OUT
]


class Composer:
    """Composes schemas of the ones in LEAVES, in the forms that both libraries have."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._definitions: dict[str, Any] = {}

    def root(self) -> dict[str, Any]:
        schema = self._object(2) if self._chance.random() < 0.8 else self._schema(2)
        return {**schema, "$defs": {**schema.get("$defs", {}), **self._definitions}}

    def _leaf(self) -> dict[str, Any]:
        """Return a schema whose definitions moved to the root, under names of their own."""
        text = json.dumps(self._chance.choice(LEAVES))
        prefix = f"d{len(self._definitions)}_"
        for keyword in ("$defs", "definitions"):
            text = text.replace(f"#/{keyword}/", f"#/$defs/{prefix}")
        if '"#"' in text:  # the schema refers to itself
            text = text.replace('"#"', f'"#/$defs/{prefix}self"')
        schema: dict[str, Any] = json.loads(text)
        for keyword in ("$defs", "definitions"):
            for name, inner in schema.pop(keyword, {}).items():
                self._definitions[prefix + name] = inner
        if f"{prefix}self" in text:
            self._definitions[f"{prefix}self"] = schema
        return schema

    def _schema(self, depth: int) -> dict[str, Any]:
        if depth <= 0 or self._chance.random() < 0.5:
            return self._leaf()
        form = self._chance.choice([self._object, self._array, self._record, self._union, self._both])
        return form(depth - 1)

    def _object(self, depth: int) -> dict[str, Any]:
        names = self._chance.sample(["a", "b", "name", "score", "x y", "ä", 'q"', ""], self._chance.randint(1, 4))
        found: dict[str, Any] = {"type": "object", "properties": {name: self._schema(depth) for name in names}}
        found["required"] = [name for name in names if self._chance.random() < 0.6]
        extra = self._chance.choice([None, False, False, True, {}, "schema"])
        if extra is not None:
            found["additionalProperties"] = self._schema(depth) if extra == "schema" else extra
        if self._chance.random() < 0.15:
            patterns = self._chance.sample(["^score$", "^(a|b)$", "^k", "^name$", "^x.y$"], self._chance.randint(1, 2))
            found["patternProperties"] = {pattern: self._leaf() for pattern in patterns}
        if self._chance.random() < 0.1:
            found["propertyNames"] = self._chance.choice(
                [{"pattern": "^a$"}, {"maxLength": 4}, {"enum": ["a", "score"]}]
            )
        return found

    def _array(self, depth: int) -> dict[str, Any]:
        return {"type": "array", "items": self._schema(depth), "maxItems": 4}

    def _record(self, depth: int) -> dict[str, Any]:
        return {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": self._schema(depth)}

    def _union(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self._schema(depth) for _ in range(self._chance.randint(2, 3))]}

    def _both(self, depth: int) -> dict[str, Any]:
        return {"allOf": [self._object(depth), self._object(depth)]}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(PROJECT_ROOT / DEFAULT_MODEL / "tokenizer.json"))


class Answers:
    """Draws answers as the worker computes masks, and counts the ways in which they end."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._grammars = Grammars(tokenizer, tokenizer.get_vocab_size(), [2])
        self._vocabulary = GrammarVocabulary.of(tokenizer, [2], tokenizer.get_vocab_size())
        texts = [tokenizer.decode([token]) for token in range(tokenizer.get_vocab_size())]
        self._closing = {
            token for token, text in enumerate(texts) if text.strip()[:1] in ('"', "]", "}", ",") or token == 2
        }
        self.drawn = self.ended = self.refused = 0
        self.faults: list[str] = []

    def draw(self, seed: int, schema: dict[str, Any], answers: int = 1) -> None:
        text = grammar.write("json_schema", schema)
        try:
            grammar.check(text, self._vocabulary)
        except GrammarError:
            self.refused += 1
            return
        validator = jsonschema.Draft202012Validator(schema)
        for number in range(answers):
            answer = self._answer(self._grammars.matcher(text), random.Random(seed * 100 + number))
            self.drawn += 1
            if answer is None:
                continue
            if answer.startswith("{") or not answer.startswith("ERROR"):
                self.ended += 1
                if validator.is_valid(json.loads(answer)):
                    continue
            self.faults.append(f"{seed}: {json.dumps(schema)}: {answer}")

    def _answer(self, matcher: Matcher, chance: random.Random) -> str | None:
        """Return an answer, None if it is too long, or an error."""
        token_ids: list[int] = []
        while len(token_ids) < MAX_TOKENS:
            mask = matcher.allowed()
            if matcher.error:
                return f"ERROR {matcher.error} after {self._tokenizer.decode(token_ids)}"
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
            closing = [token for token in allowed if token in self._closing]
            token = chance.choice(closing if closing and chance.random() < 0.5 else allowed)
            if token == 2:
                return self._tokenizer.decode(token_ids)
            token_ids.append(token)
            matcher.consume([token])
            if matcher.error:
                return f"ERROR {matcher.error} after {self._tokenizer.decode(token_ids)}"
        return None


@pytest.mark.parametrize("schema", LEAVES, ids=lambda schema: json.dumps(schema)[:60])
def test_answers_under_the_schema_of_a_type_are_valid(schema: dict[str, Any], tokenizer: Tokenizer) -> None:
    answers = Answers(tokenizer)
    answers.draw(0, schema, answers=3)
    assert (answers.faults, answers.refused) == ([], 0)


def test_answers_under_composed_schemas_are_valid(tokenizer: Tokenizer) -> None:
    answers = Answers(tokenizer)
    for seed in range(60):
        answers.draw(seed, Composer(random.Random(seed)).root(), answers=3)
    assert answers.faults == []
    assert answers.ended > 100, "too few answers came to their end"


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_ten_thousand_answers_are_valid(tokenizer: Tokenizer) -> None:
    answers = Answers(tokenizer)
    seed = 1000
    while answers.ended < 10_000:
        answers.draw(seed, Composer(random.Random(seed)).root(), answers=4)
        seed += 1
    print(f"{answers.drawn} answers drawn, {answers.ended} ended, {answers.refused} of {seed - 1000} schemas refused")
    assert answers.faults == []
