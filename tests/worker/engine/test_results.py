"""Stop strings in texts with special tokens and leading spaces."""

from __future__ import annotations

import pytest

from quire.worker.engine.results import StopStringMatcher
from tests.support.mock_model import make_engine, request, run
from tests.support.tokenizers import byte_fallback, byte_level


def test_a_stop_string_may_begin_with_the_space_between_the_prompt_and_the_first_word() -> None:
    words = byte_fallback().encode("the way", add_special_tokens=False).ids
    assert StopStringMatcher(byte_fallback(), (" the",)).push(words) == " the"


def test_a_stop_string_may_be_in_a_special_token_if_these_are_text() -> None:
    tokenizer = byte_level()
    token_ids = tokenizer.encode("a<|im_end|>b", add_special_tokens=False).ids
    assert StopStringMatcher(tokenizer, ("im_end",)).push(token_ids) is None
    assert StopStringMatcher(tokenizer, ("im_end",), skip_special_tokens=False).push(token_ids) == "im_end"


@pytest.mark.parametrize(("skips", "expected"), [(True, "length"), (False, "stop")])
def test_sequences_are_watched_in_the_text_that_their_request_asks_for(skips: bool, expected: str) -> None:
    end = byte_level().token_to_id("<|im_end|>")
    engine = make_engine(tokenizer=byte_level)
    engine.add(request("a", (1, 2), stop=("_end",), skip_special_tokens=skips, allowed_token_ids=(end,)))
    assert run(engine)[-1].deltas[-1].finish_reason == expected
