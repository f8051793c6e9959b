"""Two small tokenizers of kinds that make streaming hard, trained on a few lines in milliseconds."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

_LINES = [
    "The quick brown fox jumps over the lazy dog, again and again.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "user assistant system hello world, how are you today? I am fine.",
]
SPECIAL = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]


@cache
def byte_level() -> Tokenizer:
    """Byte-level BPE, as of GPT-2, Llama 3 and Qwen: a character of four bytes has between one and four tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_LINES, trainer)
    return tokenizer


@cache
def byte_fallback() -> Tokenizer:
    """SentencePiece-like BPE, as of Llama 2 and Mistral: metaspace, and bytes for what the vocabulary lacks.

    A first token loses its leading space when it is decoded, and plain prompts get `<s>` in front.
    """
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    for character in "▁ abcdefghijklmnopqrstuvwxyz.,!?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]<>|/äöü\n":
        vocabulary.setdefault(character, len(vocabulary))
    merges = []
    for pair in [("▁", "a"), ("▁", "t"), ("t", "h"), ("▁t", "h"), ("e", "r"), ("i", "n"), ("o", "n"), ("▁", "w")]:
        if all(part in vocabulary for part in pair):
            merges.append(pair)
            vocabulary.setdefault("".join(pair), len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    return tokenizer


# --- panicking --------------------------------------------------------------------------------------------------------
# A tokenizer that panics, as real ones do whose patterns search for too long.

# The search for the end of the run of `a` is given up.
PANICS = "a" * 60 + "b"


def panicking() -> Tokenizer:
    """Return a tokenizer that panics at the text PANICS."""
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    split = pre_tokenizers.Split(Regex(r"(a+)+$"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return tokenizer
