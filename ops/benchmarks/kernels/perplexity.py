"""Measures the perplexity of a model with each format of weights and each type of the KV cache: the demo model, or
random layers with a trained head. `--gguf` measures the demo model in each type of GGUF files instead.

    PYTHONPATH=. python -m quire.ops.benchmarks.kernels.perplexity
    PYTHONPATH=. python -m quire.ops.benchmarks.kernels.perplexity --random-features

The documents are the held-out ones of the model's training: their nouns and requests are not in the training data.
Each document is one prefill of the C++ kernels.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from quire import kernels
from quire.kernels.grouped_weight import FP8
from quire.ops.benchmarks.kernels.random_features import (
    BLOCK_SIZE,
    BLOCKS,
    Document,
    document_batch,
    make_random_features,
)
from quire.ops.paths import PROJECT_ROOT
from quire.worker.models.native.decoder import Decoder

DEMO = PROJECT_ROOT / "models" / "demo"
# Name, dtype of activations, bits of quantised weights or FP8, dtype of the KV cache if it is not that of activations.
FORMATS = [
    ("bfloat16 weights, float32 activations", torch.float32, 0, None),
    ("bfloat16", torch.bfloat16, 0, None),
    ("int8", torch.float32, 8, None),
    ("int4", torch.float32, 4, None),
    ("fp8", torch.float32, FP8, None),
    ("fp8, bfloat16 activations", torch.bfloat16, FP8, None),
    ("KV cache bfloat16", torch.float32, 0, torch.bfloat16),
    ("KV cache int8", torch.float32, 0, torch.int8),
    ("KV cache fp8", torch.float32, 0, torch.float8_e4m3fn),
]
# Types of GGUF files. K-quants are rounded by ops/tools/k_quants.py, which llama.cpp does a little better.
GGUF_TYPES = ("F16", "Q8_0", "Q6_K", "Q5_K", "Q5_0", "Q4_K", "Q4_0", "Q3_K", "Q2_K")


def perplexity(model: Decoder, documents: list[Document]) -> float:
    """Return the perplexity of the targets: of labels that are not negative."""
    cache = model.alloc_kv_cache(BLOCKS, BLOCK_SIZE)
    total, count = 0.0, 0
    for ids, labels in documents:
        targets = torch.tensor(labels[1:])
        total += float(F.cross_entropy(model.forward(document_batch(ids), cache)[:-1], targets, reduction="sum"))
        count += int((targets >= 0).sum())
    return math.exp(total / count)


def measure_gguf(documents: list[Document]) -> None:
    """Print the perplexity and the size of the demo model as a GGUF file of each type."""
    from quire.ops.tools.gguf_writer import write_gguf  # needs the package gguf, of the extra dev

    print(f"{'format':<40}{'perplexity':>12}{'change':>10}{'file':>8}{'MiB':>8}")
    first, ops = 0.0, kernels.CpuOps(torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        for kind in GGUF_TYPES:
            file = write_gguf(DEMO, Path(folder) / f"{kind}.gguf", kind)
            model = Decoder.load(file, ops, torch.float32, "cpu")
            with torch.inference_mode():
                found = perplexity(model, documents)
            first = first or found
            sizes = f"{file.stat().st_size / 2**20:>8.1f}{model.weight_bytes / 2**20:>8.1f}"
            print(f"{'GGUF, ' + kind:<40}{found:>12.4f}{found / first - 1:>+10.3%}{sizes}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=256)
    parser.add_argument("--random-features", action="store_true", help="random layers with a trained head")
    parser.add_argument("--training-documents", type=int, default=1024, help="of the head")
    parser.add_argument("--gguf", action="store_true", help="measure GGUF files, instead of formats")
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    with tempfile.TemporaryDirectory(prefix="quire-perplexity-") as folder:
        model = DEMO
        if args.random_features:
            training = read_documents("training", tokenizer, False, args.training_documents)
            model = make_random_features(DEMO, Path(folder) / "model", training)
        documents = read_documents("perplexity", tokenizer, True, args.documents)
        if args.gguf:
            measure_gguf(documents)
        else:
            measure(model, documents)
    return 0


def read_documents(seed: str, tokenizer: Tokenizer, held_out: bool, count: int) -> list[Document]:
    """Return documents of the demo model's training, or of its held-out nouns and requests."""
    from models.demo.training.corpus import encoded_stream  # a folder of the repository, not of the package

    return [(one.ids, one.labels) for one in islice(encoded_stream(seed, tokenizer, held_out), count)]


def measure(folder: Path, documents: list[Document]) -> None:
    """Print a line for each format."""
    first = 0.0
    print(f"{'format':<40}{'perplexity':>12}{'change':>10}{'MiB':>8}")
    for name, dtype, bits, kv_dtype in FORMATS:
        try:
            ops = kernels.CpuOps(dtype, kv_dtype)
        except kernels.KernelsUnavailable as missing:
            print(f"{name:<40} not measured: {missing}")
            continue
        model = Decoder.load(folder, ops, dtype, "cpu", bits=bits)
        with torch.inference_mode():
            found = perplexity(model, documents)
        first = first or found
        print(f"{name:<40}{found:>12.4f}{found / first - 1:>+10.3%}{model.weight_bytes / 2**20:>8.1f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
