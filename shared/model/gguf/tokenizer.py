"""Builds the tokenizer of a GGUF file from its metadata: byte-level BPE (`gpt2`), or SentencePiece BPE (`llama`)."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, processors

from quire.shared.model.gguf.file import GGUFFile
from quire.shared.model.gguf.pre_tokenizers import PRE_TOKENIZERS
from quire.shared.model.gguf.vocabulary import BYTE, CONTROL, UNKNOWN, USER_DEFINED, GGUFVocabulary
from quire.shared.model.sentence_pieces import Pieces, make_tokenizer
from quire.shared.process.errors import FileError

OWN_TOKENIZER = "give the Hugging Face folder that it was made from"


def build_tokenizer(file: GGUFFile) -> Tokenizer:
    """Return the tokenizer of a file. Raises FileError."""
    vocabulary = GGUFVocabulary(file)
    try:
        tokenizer = _byte_level(vocabulary) if vocabulary.kind == "gpt2" else _sentence_piece(vocabulary)
    except FileError:
        raise
    except Exception as error:  # the library raises a plain Exception for every fault of the vocabulary
        what = f"metadata 'tokenizer.ggml.tokens' and 'tokenizer.ggml.merges' are not a tokenizer ({error})"
        raise FileError(file.path, what, OWN_TOKENIZER) from error
    _add_tokens(tokenizer, vocabulary)
    return tokenizer


def _byte_level(vocabulary: GGUFVocabulary) -> Tokenizer:
    file = vocabulary.file
    name = file.text("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        raise file.fault("tokenizer.ggml.pre", f"one of {', '.join(PRE_TOKENIZERS)}", OWN_TOKENIZER)
    pre_tokenizer = PRE_TOKENIZERS[name]
    merges = []
    for merge in file.strings("tokenizer.ggml.merges"):
        left, space, right = merge.partition(" ")
        if not (left and space and right) or " " in right:
            what = f"metadata 'tokenizer.ggml.merges' has {merge[:80]!r}, expected two texts with a space between them"
            raise FileError(file.path, what)
        merges.append((left, right))
    if not merges:
        raise file.fault("tokenizer.ggml.merges", "merges for a tokenizer of the kind gpt2")
    vocab = {text: token for token, text in enumerate(vocabulary.tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre_tokenizer.ignores_merges))
    if (normalizer := pre_tokenizer.make_normalizer()) is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer.make()
    tokenizer.decoder = decoders.ByteLevel()
    _set_affixes(tokenizer, vocabulary, adds_bos=pre_tokenizer.adds_bos)
    return tokenizer


def _sentence_piece(vocabulary: GGUFVocabulary) -> Tokenizer:
    file = vocabulary.file
    unknown = vocabulary.special("unknown")
    if unknown is None:
        unknown = next((token for token, kind in enumerate(vocabulary.types) if kind == UNKNOWN), None)
    has_bytes = sum(kind == BYTE for kind in vocabulary.types) == 256
    if unknown is None and not has_bytes:
        raise file.fault("tokenizer.ggml.unknown_token_id", "the id of the unknown token, as not all bytes are tokens")
    if "tokenizer.ggml.scores" not in file.metadata:
        raise file.fault("tokenizer.ggml.scores", "a score for each token")
    if file.flag("tokenizer.ggml.remove_extra_whitespaces", False):
        raise file.fault("tokenizer.ggml.remove_extra_whitespaces", "false", OWN_TOKENIZER)
    adds_space = file.flag("tokenizer.ggml.add_space_prefix", True)
    tokenizer = make_tokenizer(Pieces(vocabulary.tokens, vocabulary.scores, vocabulary.types, unknown, adds_space))
    _set_affixes(tokenizer, vocabulary, adds_bos=True)
    return tokenizer


def _set_affixes(tokenizer: Tokenizer, vocabulary: GGUFVocabulary, adds_bos: bool) -> None:
    """Make the tokenizer add the special tokens of a plain prompt. adds_bos: the default of `add_bos_token`."""
    file = vocabulary.file
    used: dict[str, int] = {}
    pieces = ["$A"]
    if file.flag("tokenizer.ggml.add_bos_token", adds_bos and vocabulary.bos_token_id is not None):
        pieces.insert(0, _affix(vocabulary, "bos", used))
    if file.flag("tokenizer.ggml.add_eos_token", False):
        pieces.append(_affix(vocabulary, "eos", used))
    if used:
        tokenizer.post_processor = processors.TemplateProcessing(single=pieces, special_tokens=list(used.items()))


def _affix(vocabulary: GGUFVocabulary, name: str, used: dict[str, int]) -> str:
    token = vocabulary.special(name)
    if token is None:
        raise vocabulary.file.fault(f"tokenizer.ggml.{name}_token_id", f"a token id, as add_{name}_token is true")
    used[vocabulary.tokens[token]] = token
    return vocabulary.tokens[token]


def _add_tokens(tokenizer: Tokenizer, vocabulary: GGUFVocabulary) -> None:
    """Tell the tokenizer which texts are one token wherever they stand."""
    special = {token for name in ("bos", "eos", "unknown") if (token := vocabulary.special(name)) is not None}

    def added(kind: int) -> list[AddedToken]:
        tokens = [token for token, token_kind in enumerate(vocabulary.types) if token_kind == kind]
        tokens += sorted(special.difference(tokens)) if kind == CONTROL else []
        return [AddedToken(vocabulary.tokens[token], special=kind == CONTROL, normalized=False) for token in tokens]

    tokenizer.add_special_tokens(added(CONTROL))
    tokenizer.add_tokens(added(USER_DEFINED))
