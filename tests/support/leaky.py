"""`quire` with faults that quote: exceptions whose texts are the prompt, as careless libraries raise them.

A prompt with the word BREAKTOKENIZER breaks its tokenization. A step with the tokens TEST_FAILING, in this order with
commas between them, fails; one with TEST_DEADLY kills the process.
"""

from __future__ import annotations

import os
import signal
import sys

import torch
from tokenizers import Encoding

from quire.gateway.model.renderer import Renderer
from quire.ops.cli.main import main
from quire.worker.engine.forward_batch import ForwardBatch
from quire.worker.engine.paged_model import KVCache
from quire.worker.models.native.decoder import Decoder

FAILING, DEADLY = (os.environ.get(name, "never") for name in ("TEST_FAILING", "TEST_DEADLY"))

_encoding = Renderer._encoding
_forward = Decoder.forward


def encoding(self: Renderer, name: str, texts: list[str], add_special_tokens: bool) -> Encoding:
    text = "".join(texts)
    if "BREAKTOKENIZER" in text:
        try:
            raise KeyError(text)
        except KeyError as error:
            raise ValueError(f"cannot tokenize {text!r}") from error
    return _encoding(self, name, texts, add_special_tokens)


def forward(self: Decoder, batch: ForwardBatch, kv_cache: KVCache) -> torch.Tensor:
    tokens = f",{','.join(map(str, batch.token_ids.tolist()))},"
    if f",{DEADLY}," in tokens:
        os.kill(os.getpid(), signal.SIGKILL)
    if f",{FAILING}," in tokens:
        raise RuntimeError("a kernel failed")
    return _forward(self, batch, kv_cache)


if __name__ == "__main__":
    Renderer._encoding = encoding  # type: ignore[method-assign]
    Decoder.forward = forward  # type: ignore[method-assign]
    sys.exit(main())
