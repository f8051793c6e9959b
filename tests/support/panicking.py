"""A tokenizer that panics, as real ones do whose patterns search for too long."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, pre_tokenizers

from tests.support.tokenizers import byte_level

# The search for the end of the run of `a` is given up.
PANICS = "a" * 60 + "b"


def panicking() -> Tokenizer:
    """Return a tokenizer that panics at the text PANICS."""
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    split = pre_tokenizers.Split(Regex(r"(a+)+$"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return tokenizer
