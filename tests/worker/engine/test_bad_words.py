"""`bad_words`: in an output, the last token of a banned word never follows the word's other tokens."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire.worker.engine.engine import Engine
from quire.worker.engine.limits import RequestRefused
from quire.worker.engine.sampler import bad_word_tokens
from tests.support.mock_model import Letters, MockModel, MockOps, continuation, make_engine, request, run, text
from tests.support.tokenizers import PANICS, byte_level, panicking

PROMPT = (3, 1, 4)
LENGTH = 16


class Numbers(Letters):
    """A tokenizer whose texts are token ids, separated by spaces."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> SimpleNamespace:
        return SimpleNamespace(ids=[int(word) for word in text.split()])


class DrawingOps(MockOps):
    """Sampling operations that draw from all tokens by their probabilities."""

    def sample(self, logits: torch.Tensor, temperature: Any, top_k: Any, top_p: Any, min_p: Any, uniform: Any) -> Any:
        shares = torch.softmax(logits / temperature[:, None], dim=-1).cumsum(dim=-1)
        return (shares < uniform[:, None]).sum(dim=-1).to(torch.int32)


def engine(**options: Any) -> Engine:
    return make_engine(tokenizer=Numbers, **options)


def asked(*words: Sequence[int], **params: Any) -> Any:
    """Return a request for LENGTH tokens that bans the words, each given as a list of its tokens."""
    bad_words = tuple(" ".join(map(str, word)) for word in words)
    return request("a", PROMPT, max_tokens=LENGTH, ignore_eos=True, bad_words=bad_words, **params)


def contains(output: Sequence[int], word: Sequence[int]) -> bool:
    return any(list(output[at : at + len(word)]) == list(word) for at in range(len(output)))


def output_of(made: Engine, one: Any, choice: int = 0) -> list[int]:
    made.add(one)
    return text(run(made), "a", choice)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_the_output_is_as_without_the_words_until_one_would_be_complete(length: int) -> None:
    plain = list(continuation(PROMPT, LENGTH))
    word = plain[5 : 5 + length]
    last = next(at for at in range(LENGTH) if plain[at : at + length] == word) + length - 1
    found = output_of(engine(), asked(word))
    assert len(found) == LENGTH
    assert found[:last] == plain[:last]
    assert found[last] != plain[last]
    assert not contains(found, word)


def test_only_generated_tokens_count() -> None:
    """A word whose beginning is in the prompt is not banned."""
    plain = list(continuation(PROMPT, LENGTH))
    assert output_of(engine(), asked([PROMPT[-1], plain[0]])) == plain


@pytest.mark.parametrize("params", [{}, {"n": 3}, {"logprobs": True, "top_logprobs": 2}, {"repetition_penalty": 1.3}])
def test_no_choice_that_is_drawn_has_a_word(params: dict[str, Any]) -> None:
    drawn: dict[str, Any] = {"temperature": 2.0, "seed": 5, **params}
    choices = range(params.get("n", 1))
    plain = make_engine(model=MockModel(DrawingOps(), branches=True))
    plain.add(asked(**drawn))
    items = run(plain)
    words = [text(items, "a", choice)[at : at + 2] for choice in choices for at in range(0, LENGTH, 3)]
    made = engine(model=MockModel(DrawingOps(), branches=True))
    made.add(asked(*words, **drawn))
    items = run(made)
    for choice in choices:
        output = text(items, "a", choice)
        assert len(output) == LENGTH
        assert not any(contains(output, word) for word in words)


def test_a_beam_search_has_no_word_in_any_beam() -> None:
    beams: dict[str, Any] = {"n": 3, "beam_width": 4}
    plain = make_engine(branches=True)
    plain.add(asked(**beams))
    best = text(run(plain), "a")
    made = engine(branches=True)
    made.add(asked(best[2:4], best[:1], **beams))
    items = run(made)
    for choice in range(3):
        output = text(items, "a", choice)
        assert len(output) == LENGTH
        assert not contains(output, best[2:4])
        assert not contains(output, best[:1])


def test_words_have_tokens_at_the_beginning_and_after_a_space() -> None:
    tokenizer = byte_level()
    found = bad_word_tokens(["world", " world"], tokenizer, tokenizer.get_vocab_size())
    assert [tokenizer.decode(list(word)) for word in found] == ["world", " world"]
    assert bad_word_tokens([], None, 100) == ()


def test_words_with_tokens_that_the_model_lacks_cannot_come() -> None:
    assert bad_word_tokens(["5 99", "7"], Numbers(), 90) == ((7,),)


def test_words_at_which_the_tokenizer_panics_are_refused() -> None:
    with pytest.raises(RequestRefused, match="the tokenizer fails at bad_words: Onig: Regex search error: retry-limit"):
        bad_word_tokens([PANICS], panicking(), 1000)


def test_without_a_tokenizer_words_are_refused() -> None:
    made = make_engine(tokenizer=lambda: None)
    with pytest.raises(RequestRefused, match="bad_words needs a tokenizer"):
        made.add(asked([5]))
    assert not made.has_work
