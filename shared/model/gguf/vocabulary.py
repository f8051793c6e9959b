"""The vocabulary in the metadata of a GGUF file: texts, types and scores of tokens, merges and special tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

from quire.shared.model.gguf.file import GGUFFile
from quire.shared.process.errors import FileError

MAX_VOCABULARY = 1 << 22
# Types of tokens (`tokenizer.ggml.token_type` in the specification of GGUF). SentencePiece has the same.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
# Control tokens with these texts end a generation, too: a GGUF file names one end token, many models have several.
END_TEXTS = (
    *("<|eot_id|>", "<|im_end|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "</s>"),
    *("<|eot|>", "<|return|>", "<|call|>", "<|end|>"),
)
# A text between the parts of an answer, if the vocabulary also has the text that ends the answer.
INNER_END, OUTER_END = "<|end|>", "<|return|>"
KINDS = ("gpt2", "llama")


class GGUFVocabulary:
    """The tokens of a file. Construction and properties raise FileError."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.kind = file.text("tokenizer.ggml.model")
        if self.kind not in KINDS:
            remedy = "give the Hugging Face folder that it was made from"
            raise file.fault("tokenizer.ggml.model", f"one of {', '.join(KINDS)}", remedy)

    @cached_property
    def tokens(self) -> list[str]:
        tokens = self.file.strings("tokenizer.ggml.tokens")
        if not 0 < len(tokens) <= MAX_VOCABULARY or len(set(tokens)) != len(tokens):
            raise self.file.fault("tokenizer.ggml.tokens", "the text of each token, none of them twice")
        return tokens

    @cached_property
    def types(self) -> list[int]:
        """Types of tokens; all are NORMAL if the file has no types."""
        return [int(value) for value in self._of_each("tokenizer.ggml.token_type", NORMAL)]

    @cached_property
    def scores(self) -> list[float]:
        """Scores of tokens: of two merges, that with the higher score comes first."""
        return [float(value) for value in self._of_each("tokenizer.ggml.scores", 0)]

    @property
    def size(self) -> int:
        return len(self.tokens)

    @property
    def bos_token_id(self) -> int | None:
        return self.special("bos")

    @property
    def eos_token_ids(self) -> list[int]:
        """The ids of all tokens that end a generation, those that the file names first."""
        named = [self.special(name) for name in ("eos", "eot", "eom")]
        ids = [token for token in named if token is not None]
        control = {text: token for token, text in enumerate(self.tokens) if self.types[token] == CONTROL}
        ends = [text for text in END_TEXTS if text != INNER_END or OUTER_END not in control]
        ids += [control[text] for text in ends if text in control and control[text] != self.bos_token_id]
        return list(dict.fromkeys(ids))

    def special(self, name: str) -> int | None:
        """Return the id of the special token `name`, such as "bos"; None if the file does not name it."""
        key = f"tokenizer.ggml.{name}_token_id"
        if key not in self.file.metadata:
            return None
        return self.file.integer(key, 0, self.size - 1)

    def special_tokens(self) -> dict[str, str]:
        """Return the special tokens by their names in chat templates: `bos_token`, ..."""
        names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
        ids = {field: self.special(name) for name, field in names.items()}
        return {field: self.tokens[token] for field, token in ids.items() if token is not None}

    def _of_each(self, key: str, default: int) -> Sequence[float]:
        values = self.file.numbers(key)
        if key not in self.file.metadata:
            return [default] * self.size
        if len(values) != self.size or not all(math.isfinite(value) for value in values):
            raise self.file.fault(key, f"a number for each of {self.size} tokens")
        return values


def chat_template(file: GGUFFile) -> str | None:
    """Return the default chat template of a file; None if it has none."""
    key = "tokenizer.chat_template"
    if key not in file.metadata:
        return None
    template = file.text(key)
    if not template:
        raise FileError(file.path, f"metadata {key!r} is empty, expected a Jinja template")
    return template
