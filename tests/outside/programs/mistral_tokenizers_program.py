"""The tokenizer files of `mistral-common`, and the ids that SentencePiece and `mistral_common` give for texts.

Takes a file with the texts as JSON in place of the URL.
"""

import json
import sys
from pathlib import Path

import mistral_common
import sentencepiece
from cases import run
from mistral_common.tokens.tokenizers.tekken import Tekkenizer

DATA = Path(mistral_common.__file__).parent / "data"
TEXTS = json.loads(Path(sys.argv[1]).read_text())


def sentence_pieces(path):
    encode = sentencepiece.SentencePieceProcessor(model_file=str(path)).encode
    return {"path": str(path), "ids": [encode(text) for text in TEXTS]}


def tekken(path):
    tokenizer = Tekkenizer.from_file(path)
    return {"path": str(path), "ids": [tokenizer.encode(text, bos=True, eos=False) for text in TEXTS]}


files = sorted(DATA.glob("*.model*")) + sorted(DATA.glob("tekken*.json"))
run(**{path.name: lambda _, p=path: (tekken if p.suffix == ".json" else sentence_pieces)(p) for path in files})
