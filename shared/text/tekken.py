"""Mistral's tokenizer file `tekken.json`: byte-level BPE whose merges follow from the ranks of its tokens.

The file has a pattern that splits texts, tokens as base64 by rank, and special tokens, whose ids come before those of
all others. Two neighbours merge if both together are a token, that of the lowest rank first, as in tiktoken.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

BOS, EOS = "<s>", "</s>"
MAX_BYTES = 64 << 20
# Special tokens of the first versions, which do not list them; further ids have names of the form <SPECIAL_20>.
_FIRST = (
    *("<unk>", BOS, EOS, "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *(
        "[/TOOL_RESULTS]",
        "[TOOL_CALLS]",
        "[IMG]",
        "<pad>",
        "[IMG_BREAK]",
        "[IMG_END]",
        "[PREFIX]",
        "[MIDDLE]",
        "[SUFFIX]",
    ),
    *("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)


def load_tekken(path: Path) -> Tokenizer:
    """Return the tokenizer of a file; a plain prompt begins with `<s>`. Raise ValueError for a damaged file."""
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES >> 20} MiB")
    file = json.loads(path.read_text(encoding="utf-8"))
    try:
        config = file["config"]
        num_special = int(config["default_num_special_tokens"])
        special = _special_tokens(file.get("special_tokens"), num_special)
        ranks = [base64.b64decode(entry["token_bytes"], validate=True) for entry in file["vocab"]]
        ranks = ranks[: int(config["default_vocab_size"]) - num_special]
        pattern = str(config["pattern"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it lacks a field, or one has a wrong type: {error}") from None
    if len(set(ranks)) != len(ranks) or b"" in ranks:
        raise ValueError("it has a token twice, or an empty one")
    return _tokenizer(special, ranks, pattern)


def _special_tokens(listed: Any, count: int) -> list[str]:
    """Return the text of each special token, by id."""
    names = dict(enumerate(_FIRST))
    if listed:
        names = {int(entry["rank"]): str(entry["token_str"]) for entry in listed}
    texts = [names.get(index, f"<SPECIAL_{index}>") for index in range(count)]
    if len(set(texts)) != len(texts) or not {BOS, EOS} <= set(texts):
        raise ValueError("it has a special token twice, or lacks <s> or </s>")
    return texts


def _tokenizer(special: list[str], ranks: list[bytes], pattern: str) -> Tokenizer:
    shown = _shown_bytes()
    texts = [token.decode("latin-1").translate(shown) for token in ranks]
    order = {token: rank for rank, token in enumerate(ranks)}
    merges = [
        (rank, order[token[:at]], order[token[at:]])
        for rank, token in enumerate(ranks)
        for at in range(1, len(token))
        if token[:at] in order and token[at:] in order
    ]
    merges.sort()
    vocab = {text: token for token, text in enumerate([*special, *texts])}
    pairs = [(texts[left], texts[right]) for _, left, right in merges]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[BOS, "$A"], special_tokens=[(BOS, special.index(BOS))]
    )
    return tokenizer


def _shown_bytes() -> dict[int, str]:
    """Return the character that byte-level BPE writes for each byte: itself if it is printable, else from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + at) for at, byte in enumerate(others)}
