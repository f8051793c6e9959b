"""`python -m quire.ops.tools.json_schema_suite CHECKOUT` runs the JSON Schema Test Suite against Quire's grammars.

CHECKOUT: a checkout of github.com/json-schema-org/JSON-Schema-Test-Suite. The schemas of draft 2020-12 are compiled,
and the values of their tests are compared: a grammar may accept fewer values than its schema, never more. Then answers
are drawn by chance under each grammar, and validated with the package jsonschema.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import numpy as np
from llguidance import LLMatcher, LLTokenizer

from quire.shared.text import grammar
from quire.shared.text.grammar_error import GrammarError

DRAFT = Path("tests") / "draft2020-12"
VOCABULARY = grammar.GrammarVocabulary({}, (256,), 257)
# Bytes of an answer; a longer answer is given up.
MAX_ANSWER = 400
END = 256
# Bytes that end a part of an answer, and the end token.
CLOSING = frozenset(b'"]}, ') | {END}


@dataclass(frozen=True, slots=True)
class Case:
    """A schema of the suite with its values, each with its validity."""

    name: str
    schema: Any
    values: list[tuple[Any, bool]]


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one schema.

    refused: the reason; empty if it was accepted. wrong: values and answers that the grammar accepts against the
    schema. missing: valid values that the grammar lacks. answers: the number of answers that were drawn to their end.
    """

    case: Case
    refused: str = ""
    wrong: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    answers: int = 0


def cases(checkout: Path, optional: bool = False) -> Iterator[Case]:
    """Yield the schemas of the suite."""
    folder = checkout / DRAFT
    for path in sorted(folder.rglob("*.json") if optional else folder.glob("*.json")):
        for group in json.loads(path.read_text()):
            values = [(test["data"], test["valid"]) for test in group["tests"]]
            name = f"{path.relative_to(folder).with_suffix('')}: {group['description']}"
            yield Case(name, group["schema"], values)


def run(case: Case, draws: int) -> Result:
    """Compile one schema, compare its values, and draw answers."""
    text = grammar.write("json_schema", case.schema)
    tokenizer = VOCABULARY.tokenizer(has_all_ids=False)
    try:
        grammar.check(text, VOCABULARY)
    except GrammarError as error:
        return Result(case, refused=str(error))
    wrong, missing = [], []
    for value, valid in case.values:
        # Properties in another order than the schema's are another text.
        accepted = _accepts(text, json.dumps(value, ensure_ascii=False), tokenizer)
        if accepted and not valid:
            wrong.append(json.dumps(value))
        if valid and not accepted:
            missing.append(json.dumps(value))
    validator = jsonschema.Draft202012Validator(case.schema)
    answers = 0
    for seed in range(draws):
        if (answer := draw(text, tokenizer, random.Random(seed))) is not None:
            answers += 1
            try:
                if not validator.is_valid(json.loads(answer)):
                    wrong.append(answer)
            except re.error:  # jsonschema does not know a pattern such as \\p{Letter}
                break
    return Result(case, "", tuple(wrong), tuple(missing), answers)


def _accepts(text: str, answer: str, tokenizer: LLTokenizer) -> bool:
    made = grammar.matcher(text, tokenizer, ())
    data = list(answer.encode())
    return bool(made.try_consume_tokens(data) == len(data) and made.is_accepting())


def draw(text: str, tokenizer: LLTokenizer, chance: random.Random) -> str | None:
    """Return an answer of uniformly drawn bytes; None if it becomes too long."""
    made = grammar.matcher(text, tokenizer, ())
    answer = bytearray()
    while len(answer) < MAX_ANSWER:
        allowed = _allowed(made)
        # Quotes, brackets and the end come more often, so that answers are short and varied.
        closing = [token for token in allowed if token in CLOSING]
        token = chance.choice(closing if closing and chance.random() < 0.5 else allowed)
        if token == END:
            return answer.decode() if made.consume_token(token) else None  # no other token was left
        answer.append(token)
        if not made.consume_token(token):
            return None
        if made.is_stopped():
            return answer.decode() if made.is_accepting() else None
    return None


def _allowed(made: LLMatcher) -> list[int]:
    bits = np.unpackbits(np.frombuffer(made.compute_bitmask(), np.uint8), bitorder="little")
    return [int(token) for token in np.flatnonzero(bits)]


def main() -> None:
    """Print refused schemas, faults and counts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--optional", action="store_true", help="the optional tests too")
    parser.add_argument("--draws", type=int, default=20, help="answers to draw for each schema")
    parser.add_argument("--refused", action="store_true", help="print each refused schema")
    parser.add_argument("--missing", action="store_true", help="print valid values that a grammar lacks")
    options = parser.parse_args()
    results = [run(case, options.draws) for case in cases(options.checkout, options.optional)]
    for result in results:
        if result.refused and options.refused:
            print(f"refused  {result.case.name}\n  {json.dumps(result.case.schema)[:1000]}\n  {result.refused}")
        for value in result.wrong:
            print(f"WRONG    {result.case.name}\n  {json.dumps(result.case.schema)[:1000]}\n  {value}")
        for value in result.missing if options.missing else ():
            print(f"missing  {result.case.name}\n  {json.dumps(result.case.schema)[:1000]}\n  {value}")
    refused = Counter(result.case.name.split(":")[0] for result in results if result.refused)
    for name, count in refused.most_common():
        print(f"{count:4} refused of {name}")
    print(
        f"{len(results)} schemas: {sum(refused.values())} refused, "
        f"{sum(len(result.wrong) for result in results)} wrong, "
        f"{sum(len(result.missing) for result in results)} valid values missing, "
        f"{sum(result.answers for result in results)} answers"
    )


if __name__ == "__main__":
    main()
