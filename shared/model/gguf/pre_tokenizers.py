"""The splits of a text into words before merges, in byte-level BPE tokenizers, by the name in `tokenizer.ggml.pre`.

Each expression is that of the published tokenizer of the models that the name stands for.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _LETTERS + r"\p{N}{1,3}" + _REST
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LETTERS + r"\p{N}" + _REST
_CASES = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
)
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = (
    "|".join(words + _CONTRACTIONS for words in _CASES.split("|"))
    + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = _CASES + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# llama.cpp's own: these expressions one after the other.
_DEFAULT = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)


@dataclass(frozen=True)
class PreTokenizer:
    """patterns: expressions that split a text, one after the other. digits: each digit is a word of its own.

    nfc: texts are normalised to NFC first. ignores_merges: a word of the vocabulary is one token, whatever the merges
    say. adds_bos: the default of `add_bos_token`.
    """

    patterns: tuple[str, ...]
    digits: bool = False
    nfc: bool = False
    ignores_merges: bool = False
    adds_bos: bool = False

    def make(self) -> pre_tokenizers.PreTokenizer:
        """Return the splits, and the bytes of each word as characters."""
        parts: list[pre_tokenizers.PreTokenizer] = []
        if self.digits:
            parts.append(pre_tokenizers.Digits(individual_digits=True))
        parts += [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        return pre_tokenizers.Sequence(parts)

    def make_normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.nfc else None


_OF_LLAMA3 = PreTokenizer((_LLAMA3,), ignores_merges=True, adds_bos=True)
_OF_QWEN2 = PreTokenizer((_QWEN2,), nfc=True)
_OF_GPT4 = PreTokenizer((_LLAMA3,))
_OF_GPT4O = PreTokenizer((_GPT4O,))
_OF_GPT2 = PreTokenizer((_GPT2,))
_OF_STARCODER = PreTokenizer((_GPT2,), digits=True)
PRE_TOKENIZERS = {
    "default": PreTokenizer(_DEFAULT),
    "gpt-2": _OF_GPT2,
    "llama-bpe": _OF_LLAMA3,
    "llama3": _OF_LLAMA3,
    "llama-v3": _OF_LLAMA3,
    "qwen2": _OF_QWEN2,
    "deepseek-r1-qwen": PreTokenizer((_QWEN2,), adds_bos=True),
    "qwen35": PreTokenizer((_QWEN35,), nfc=True),
    "gpt-4o": _OF_GPT4O,
    "llama4": _OF_GPT4O,
    "dbrx": _OF_GPT4,  # OLMo 2 and Phi-4
    "smaug-bpe": _OF_GPT4,  # SmolLM3
    "glm4": PreTokenizer((_LLAMA3,), ignores_merges=True),
    "smollm": _OF_STARCODER,
    "starcoder": _OF_STARCODER,
    "refact": _OF_STARCODER,
    "tekken": PreTokenizer((_TEKKEN,), ignores_merges=True, adds_bos=True),
}
