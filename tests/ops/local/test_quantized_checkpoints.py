"""`quire serve` of quantised checkpoints: the answer over HTTP is that of Transformers on the dequantised weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.conftest import quire_processes
from tests.ops.local.test_launcher import launch, post
from tests.support.quantized import quantize_checkpoint

transformers = pytest.importorskip("transformers")

PROMPT = [1, 30, 41, 52]
TOKENS = 24


def greedy(folder: Path) -> list[int]:
    """Return the tokens of Transformers in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None  # min_new_tokens would forbid end tokens, which ignore_eos does not
    ids = model.generate(torch.tensor([PROMPT]), max_new_tokens=TOKENS, do_sample=False)
    tokens: list[int] = ids[0, len(PROMPT) :].tolist()
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param("gptq-order", torch.float16, marks=pytest.mark.soak),
        ("awq", torch.float32),
        pytest.param("fp8-block", torch.float32, marks=pytest.mark.soak),
    ],
)
def test_an_answer_over_http(name: str, dtype: torch.dtype, tiny_model: Path, tmp_path: Path) -> None:
    """dtype: in which Quire keeps the dequantised weights."""
    folder = quantize_checkpoint(tiny_model, tmp_path / name, name, dtype)
    with quire_processes() as start:
        process = launch(start, folder, tmp_path / "state")
        url = process.wait_ready()
        body = {"model": name, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "return_token_ids": True}
        with post(url, **body) as response:
            [choice] = json.load(response)["choices"]
    assert choice["token_ids"] == greedy(folder / "plain")
