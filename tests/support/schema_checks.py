"""Schemas that tests of rewriting use: which values their grammars accept."""

from __future__ import annotations

import json
from typing import Any

from quire.shared.text import grammar
from quire.shared.text.grammar import GrammarVocabulary

VOCABULARY = GrammarVocabulary({}, (256,), 257)
BYTES = VOCABULARY.tokenizer(has_all_ids=False)


def accepts(schema: Any, value: Any) -> bool:
    """Tell if the grammar of a schema accepts a value as `json.dumps` writes it. Raises GrammarError."""
    return accepts_text(schema, json.dumps(value, ensure_ascii=False))


def accepts_text(schema: Any, text: str) -> bool:
    """Tell if the grammar of a schema accepts a text. Raises GrammarError."""
    made = grammar.matcher(grammar.write("json_schema", schema), BYTES, ())
    data = list(text.encode())
    return bool(made.try_consume_tokens(data) == len(data) and made.is_accepting())


def accepted(schema: Any, *values: Any) -> list[Any]:
    """Return the values that the grammar of a schema accepts."""
    return [value for value in values if accepts(schema, value)]
