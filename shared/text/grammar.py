"""Grammars that an answer must follow, the same in gateway and worker; llguidance compiles them.

The text of a grammar is a JSON object with one key, the kind of the grammar (`KINDS`). The kind `framed` puts another
grammar into a Lark grammar, such as that of the reasoning before it. Messages carry this text, so that it means the
same in both services.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, regex_to_lark

from quire.shared.text import ebnf, json_schema, structural_tag
from quire.shared.text.grammar_error import GrammarError, one_line
from quire.shared.text.json_schema import canonical

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# The grammar of the response format `{"type": "json_object"}`.
ANY_OBJECT = '{"json_schema":{"type":"object"}}'

# Limits of the work for one mask: some milliseconds, because the thread that computes masks serves all requests. An
# ordinary mask takes less than 2 ms with a vocabulary of 50,000. With llguidance's default limits some masks take more
# than a second. A state of the lexer takes half a kilobyte.
_LIMITS = LLParserLimits(step_lexer_fuel=50_000, step_max_items=10_000, max_lexer_states=100_000, verbose_errors=False)

# Walks of a check, their tokens, and the longest time of all walks.
_WALKS, _WALK_TOKENS, _WALKS_S = 3, 100, 0.3
_CLOSING = frozenset(b'"]}, ')


def lark_json(schema: dict[str, Any]) -> str:
    """Return an expression of a Lark grammar that matches JSON that follows a schema. Raise GrammarError."""
    return f"%json {json_schema.compiled(schema)}"


def write(kind: str, value: Any) -> str:
    """Return the text of a grammar of one of `KINDS`."""
    return canonical({kind: value})


def framed(lark: str, content: str) -> str:
    """Return the text of a grammar in Lark in which `@content` stands for another grammar, the text `content`."""
    return write("framed", {"lark": lark, "content": json.loads(content)})


def grammar(text: str, special_tokens: Collection[str]) -> str:
    """Return a grammar as llguidance takes it.

    special_tokens: the texts of the tokenizer's special tokens. Raise GrammarError.
    """
    try:
        parsed = json.loads(text)
        frame = ""
        if type(parsed) is dict and "framed" in parsed:
            value = parsed["framed"]
            frame, parsed = f"{{{_lark_field(_text('lark', value['lark']))}}},", value["content"]
        return f'{{"grammars":[{frame}{{"name":"content",{_compiled(parsed, special_tokens)}}}]}}'
    except GrammarError:
        raise
    except RecursionError as error:
        raise GrammarError("it is nested too deeply") from error
    except ValueError as error:
        raise GrammarError(one_line(str(error))) from error
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise GrammarError("a value in it is of the wrong type") from error


def _compiled(parsed: Any, special_tokens: Collection[str]) -> str:
    """Return the field of llguidance's JSON for a grammar that is not framed: `"json_schema": ...`."""
    if type(parsed) is not dict or len(parsed) != 1:
        raise GrammarError("a grammar must be a JSON object with one key")
    ((kind, value),) = parsed.items()
    if kind not in _COMPILERS:
        raise GrammarError(f"a grammar must be one of {', '.join(KINDS)}")
    return _COMPILERS[kind](value, special_tokens)


def _lark_field(lark: str) -> str:
    return f'"lark_grammar":{json.dumps(lark)}'


def _json_schema(value: Any, special_tokens: Collection[str]) -> str:
    return f'"json_schema":{json_schema.compiled(value)}'


def _regex(value: Any, special_tokens: Collection[str]) -> str:
    return _lark_field(f"start: /{regex_to_lark(_text('regex', value))}/")


def _choice(value: Any, special_tokens: Collection[str]) -> str:
    if type(value) is not list or not value or any(type(text) is not str for text in value):
        raise GrammarError("choice must be an array of strings")
    # One terminal instead of a rule for each choice: a mask then takes the same time for any number of choices.
    return _lark_field(f"start: CHOICE\nCHOICE: {' | '.join(canonical(text) for text in value)}")


def _lark(value: Any, special_tokens: Collection[str]) -> str:
    return _lark_field(_text("lark", value))


def _ebnf(value: Any, special_tokens: Collection[str]) -> str:
    return _lark_field(ebnf.to_lark(_text("ebnf", value)))


def _structural_tag(value: Any, special_tokens: Collection[str]) -> str:
    return _lark_field(structural_tag.to_lark(value, special_tokens))


def _text(kind: str, value: Any) -> str:
    if type(value) is not str:
        raise GrammarError(f"{kind} must be a string")
    return value


_COMPILERS: dict[str, Callable[[Any, Collection[str]], str]] = {
    "json_schema": _json_schema,
    "regex": _regex,
    "choice": _choice,
    "ebnf": _ebnf,
    "lark": _lark,
    "structural_tag": _structural_tag,
}
KINDS = tuple(_COMPILERS)


def matcher(text: str, tokenizer: LLTokenizer, special_tokens: Collection[str]) -> LLMatcher:
    """Return a matcher at the beginning of an answer, with its first mask computed. Raise GrammarError."""
    made = LLMatcher(tokenizer, grammar(text, special_tokens), log_level=0, limits=_LIMITS)
    return _look(made)


def check(text: str, vocabulary: GrammarVocabulary) -> None:
    """Raise GrammarError unless answers can follow a grammar.

    The check may run without end, exhaust the memory or end the process. Check the grammars of clients in a process
    with limits (`grammar_trial.py`).
    """
    # Numbers of tokens in Lark refer to the ids of the model; without them a small vocabulary saves time.
    made = matcher(text, vocabulary.tokenizer(has_all_ids="<[" in text), vocabulary.special_tokens)
    # Most limits are met after the forced beginning of an answer, such as a brace, where all properties may follow.
    made.consume_tokens(made.compute_ff_tokens())
    _look(made)
    # Others are met after some tokens, whatever they are.
    chance = random.Random(0)
    ends_at = time.process_time() + _WALKS_S
    for _ in range(_WALKS):
        _walk(made.deep_copy(), chance, ends_at)


def follow(text: str, vocabulary: GrammarVocabulary, output: Sequence[int | str]) -> None:
    """Raise GrammarError unless an answer that follows a grammar, which passes `check`, can begin with `output`.

    output: ids of special tokens, and the texts between them. It may run as long as `check`.
    """
    tokenizer = vocabulary.tokenizer(has_all_ids=True)
    made = matcher(text, tokenizer, vocabulary.special_tokens)
    for part in output:
        tokens = [part] if isinstance(part, int) else tokenizer.tokenize_bytes(part.encode())
        if made.try_consume_tokens(tokens) < len(tokens):
            raise GrammarError("the answer follows a grammar that does not allow this text here")


def _walk(made: LLMatcher, chance: random.Random, ends_at: float) -> None:
    """Follow a grammar by chance, for some tokens. Raise GrammarError if that leads to where no token is allowed."""
    for _ in range(_WALK_TOKENS):
        if made.is_stopped() or time.process_time() > ends_at:
            break
        mask = made.compute_bitmask()
        allowed = [8 * place + bit for place, byte in enumerate(mask) if byte for bit in range(8) if byte >> bit & 1]
        # Quotes and brackets come more often, so that a walk leaves the first string. Their ids are their bytes, unless
        # special tokens have these ids.
        closing = [token for token in allowed if token in _CLOSING]
        made.consume_token(chance.choice(closing if closing and chance.random() < 0.3 else allowed))
        _look(made)


def _look(made: LLMatcher) -> LLMatcher:
    """Compute the mask of the next token, unless the matcher has stopped. Raise GrammarError."""
    if not made.is_error() and not made.is_stopped():
        made.compute_bitmask()
    if made.is_error():
        raise GrammarError(one_line(made.get_error()))
    return made


@dataclass(frozen=True, slots=True)
class GrammarVocabulary:
    """The part of a model's vocabulary that a check of grammars needs.

    special_tokens: ids by text. A Lark grammar refers to a special token by its text, such as `<|python_tag|>`.
    eos_token_ids: at least one. size: the number of tokens of the model.
    """

    special_tokens: dict[str, int]
    eos_token_ids: tuple[int, ...]
    size: int

    @classmethod
    def of(cls, tokenizer: Tokenizer, eos_token_ids: Iterable[int], size: int) -> GrammarVocabulary:
        """Return the vocabulary of a model of `size` tokens."""
        size = max(size, tokenizer.get_vocab_size(with_added_tokens=True))
        return cls(special_tokens(tokenizer), tuple(sorted(eos for eos in eos_token_ids if eos < size)), size)

    def tokenizer(self, has_all_ids: bool) -> LLTokenizer:
        """Return a tokenizer with one token for each byte, and the special tokens and end tokens.

        has_all_ids: the special tokens have their ids, and the tokenizer as many tokens as the model. Otherwise the
        tokenizer has no other tokens.
        """
        named = {token_id: text for text, token_id in self.special_tokens.items()}
        for token_id in self.eos_token_ids:
            named.setdefault(token_id, f"<eos {token_id}>")
        if has_all_ids:
            tokens = [b""] * max(self.size, 256 + len(named))
            free = (place for place in range(len(tokens)) if place not in named)
            places = {token_id: token_id for token_id in named}
        else:
            tokens = [b""] * (256 + len(named))
            free = (place for place in range(256))
            places = {token_id: place for place, token_id in enumerate(named, 256)}
        bytes_at = [next(free) for _ in range(256)]
        for byte, place in enumerate(bytes_at):
            tokens[place] = bytes([byte])
        for token_id, text in named.items():
            tokens[places[token_id]] = text.encode()
        eos = [places[token_id] for token_id in self.eos_token_ids]
        wrapper = TokenizerWrapper(_Bytes(tokens, list(places.values()), eos[0], bytes_at))
        return LLTokenizer(wrapper, eos_token=eos)


class _Bytes:
    """A tokenizer as llguidance wants it: one token for each byte of a text."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special_token_ids: list[int], eos_token_id: int, bytes_at: list[int]):
        self.tokens = tokens
        self.special_token_ids = special_token_ids
        self.eos_token_id = eos_token_id
        self._bytes_at = bytes_at

    def __call__(self, text: bytes) -> list[int]:
        return [self._bytes_at[byte] for byte in text]


def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the ids of the tokens that llguidance takes for special, by text.

    llguidance takes all added tokens that the tokenizer calls special, or whose text is in angle brackets. The text of
    such a token in a string or pattern of a grammar does not match the token.
    """
    return {
        token.content: token_id
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
        if token.special or (token.content.startswith("<") and token.content.endswith(">"))
    }
