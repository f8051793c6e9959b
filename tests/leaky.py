"""`quire` with faults that quote: exceptions whose texts are the prompt, as careless libraries raise them.

A prompt with the word BREAKTOKENIZER breaks its tokenization; a step with the token TEST_FAILING_TOKEN fails; one with
TEST_DEADLY_TOKEN kills the process.
"""

from __future__ import annotations

import os
import sys

import torch

from gateway.rendering import Renderer
from ops.cli import main
from tests.faults import broken_worker
from worker.models.batch import ForwardBatch
from worker.models.decoder import Decoder, KVCache

FAILING = int(os.environ.get("TEST_FAILING_TOKEN", "-1"))

_encode = Renderer._encode


def encode(self: Renderer, text: str, add_special_tokens: bool) -> list[int]:
    if "BREAKTOKENIZER" in text:
        try:
            raise KeyError(text)
        except KeyError as error:
            raise ValueError(f"cannot tokenize {text!r}") from error
    return _encode(self, text, add_special_tokens)


def forward(self: Decoder, batch: ForwardBatch, kv_cache: KVCache) -> torch.Tensor:
    if (batch.token_ids == FAILING).any():
        raise RuntimeError("a kernel failed")
    return broken_worker.forward(self, batch, kv_cache)


if __name__ == "__main__":
    Renderer._encode = encode  # type: ignore[method-assign]
    Decoder.forward = forward  # type: ignore[method-assign]
    sys.exit(main())
