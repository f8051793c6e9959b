"""Each format hardly changes the perplexity of the demo model. `-s -m slow` prints the table of docs/models.md."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from quire import kernels
from quire.ops.benchmarks.kernels.perplexity import DEMO, perplexity, read_documents
from quire.ops.paths import PROJECT_ROOT
from quire.worker.models.decoder import Decoder
from tests.support.quantized import FORMATS, quantize_checkpoint

# The largest accepted ratio to the perplexity of the bfloat16 weights.
EIGHT_BITS, FOUR_BITS = 1.001, 1.006
LIMITS = {name: EIGHT_BITS if "8" in name or name == "fbgemm" else FOUR_BITS for name in FORMATS}


@pytest.mark.soak
def test_perplexity_of_each_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        ops = kernels.CpuOps(torch.float32)
    except kernels.KernelsUnavailable:
        pytest.skip("no C++ kernels")
    monkeypatch.syspath_prepend(str(PROJECT_ROOT))
    source = tmp_path / "demo"
    shutil.copytree(DEMO, source, ignore=shutil.ignore_patterns("training"))
    documents = read_documents("perplexity", Tokenizer.from_file(str(source / "tokenizer.json")), True, 64)

    def measured(folder: Path) -> float:
        model = Decoder.load(folder, ops, torch.float32, "cpu")
        with torch.inference_mode():
            found = perplexity(model, documents)
        print(f"| {folder.name} | {found:.4f} | {model.weight_bytes / 2**20:.1f} MiB |")
        return found

    plain = measured(source)
    found = {name: measured(quantize_checkpoint(source, tmp_path / name, name)) / plain for name in FORMATS}
    assert {name: ratio for name, ratio in found.items() if not 0.99 < ratio < LIMITS[name]} == {}
