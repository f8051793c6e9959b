"""Checkpoints that LLM Compressor and compressed-tensors write have the logits of their own decompressed weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from quire.worker.models.native.decoder import Decoder
from tests.outside.environments import Environments
from tests.support.checkpoints import make_checkpoint
from tests.worker.models.test_decoder import TOLERANCE, Stepper, draw_prompts, operations

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

# The package needs older versions than Quire. Torch and what all versions can share are those of Quire.
REQUIREMENTS = (
    "llmcompressor==0.14.0.1",
    "compressed-tensors==0.19.0",
    "transformers==5.17.0",
    "huggingface_hub==1.33.0",
    "accelerate==1.15.0",
    "datasets==5.2.0",
    "loguru==0.7.3",
    "nvidia-ml-py==13.615.71",
    "pyarrow==26.0.1",
    "pandas==3.1.1",
    "dill==0.4.1",
    "multiprocess==0.70.19",
    "xxhash==4.1.0",
    "python-dateutil==4.0.0",
    "six==1.17.0",
    "auto-round==0.16.1",
    "httpx",
    "httpcore",
    "hf-xet",
    "shellingham",
)
# Sizes for groups of 128 weights, and weights with which logits do not saturate.
SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 256,
    "initializer_range": 0.1,
}
# The storage of the layers of each case, in the words of the reader's log.
KEPT = {
    "w4a16": "as uint4 without further rounding",
    "w4a16_asym": "as uint4 without further rounding",
    "w8a16": "as uint8 without further rounding",
    "w8a16_groups": "as uint8 without further rounding",
    "w8a8": "as int8 without further rounding",
    "fp8_dynamic": "as fp8 without further rounding",
    "fp8_block": "as fp8 without further rounding",
    "nvfp4": "as nvfp4 without further rounding",
    "nvfp4a16": "as nvfp4 without further rounding",
    "mxfp4a16": "as mxfp4 without further rounding",
    "gptq": "as uint4 without further rounding",
    "gptq_static": "as uint4 without further rounding",
}
NEAREST = 0.98  # the cosine of logits, if activations are rounded to 8 bits


@pytest.fixture(scope="module")
def written(environments: Environments, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with a checkpoint of each case."""
    folder = tmp_path_factory.mktemp("llm_compressor")
    source = make_checkpoint(folder / "source", "llama", **SIZES)
    prompts = folder / "prompts.json"
    prompts.write_text(json.dumps([prompt.tolist() for prompt in draw_prompts(1)]))
    arguments = [str(source), str(folder / "out"), str(prompts)]
    cases = environments.run_beside_quire("llm_compressor_program.py", arguments, REQUIREMENTS)
    assert set(cases) == set(KEPT)
    return folder / "out"


@pytest.mark.parametrize("name", KEPT)
def test_logits_are_those_of_the_decompressed_weights(
    written: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    prompts, expected = draw_prompts(1), load_file(written / name / "logits.safetensors")
    (written / name / "logits.safetensors").rename(written / f"{name}.safetensors")  # it is no part of the checkpoint
    with caplog.at_level("INFO"):
        decoder = Decoder.load(written / name, operations("cpu"), torch.float32, "cpu", 64)
    assert KEPT[name] in caplog.text
    found = Stepper(decoder, prompts).run([{at: len(prompt) for at, prompt in enumerate(prompts)}])
    for at, one in enumerate(found):
        if name == "w8a8":
            assert float(torch.cosine_similarity(one, expected[str(at)], dim=1).min()) > NEAREST
        else:
            torch.testing.assert_close(one, expected[str(at)], rtol=0, atol=TOLERANCE)
