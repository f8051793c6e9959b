"""Checkpoints that GPTQModel and AutoAWQ write have the logits of the weights that these packages dequantise."""

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

# What both packages need besides the packages of Quire.
SHARED = (
    "accelerate==1.15.0",
    "pillow==13.0.0",
    "pyarrow==26.0.1",
    "pandas==3.1.1",
    "dill==0.4.1",
    "multiprocess==0.70.19",
    "xxhash==4.1.0",
    "python-dateutil==4.0.0",
    "six==1.17.0",
)
GPTQMODEL = (
    *SHARED,
    "gptqmodel==7.7.0",
    "datasets==5.2.0",
    "defuser==0.0.28",
    "device-smi==0.5.7",
    "logbar==0.4.15",
    "pypcre==0.6.4",
    "threadpoolctl==3.8.0",
    "tokenicer==0.0.14",
    "httpx",
    "httpcore",
)
# AutoAWQ 0.2.9 is the last version, and these are the last versions of Hugging Face's packages that it runs with: a
# range with an upper end instead of a pin holds for the newest versions too.
AUTOAWQ = (
    *SHARED,
    "autoawq==0.2.9",
    "transformers>=4.51.3,<4.51.4",
    "tokenizers>=0.21.4,<0.22",
    "huggingface_hub>=0.36,<0.36.1",
    "datasets>=3.6,<3.7",
    "zstandard==0.25.0",
)
# Sizes for groups of 128 weights, and weights with which logits do not saturate.
SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 256,
    "initializer_range": 0.1,
}
LINEAR_LAYERS = 7 * SIZES["num_hidden_layers"]
# The cases of each program, and the storage of their layers in the words of the reader's log; "": expanded.
WRITERS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "gptqmodel_program.py": (
        GPTQMODEL,
        {
            "gptq": "as uint4 without further rounding",
            "gptq_order": "",
            "gptq_asym": "",
            "gptq_v2_asym": "",
            "gptq_8": "as uint8 without further rounding",
            "awq": "",
        },
    ),
    "autoawq_program.py": (AUTOAWQ, {"gemm": ""}),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the checkpoint that is quantised."""
    return make_checkpoint(tmp_path_factory.mktemp("source") / "plain", "llama", **SIZES)


@pytest.fixture(scope="module", params=WRITERS)
def written(
    request: pytest.FixtureRequest, environments: Environments, source: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """Return the name of a program and the folder with a checkpoint of each of its cases."""
    requirements, names = WRITERS[request.param]
    folder = tmp_path_factory.mktemp("written")
    prompts = folder / "prompts.json"
    prompts.write_text(json.dumps([prompt.tolist() for prompt in draw_prompts(1)]))
    cases = environments.run_beside_quire(request.param, [str(source), str(folder / "out"), str(prompts)], requirements)
    assert {name: case.value() for name, case in cases.items()} == dict.fromkeys(names, LINEAR_LAYERS)
    return request.param, folder / "out"


def test_logits_are_those_of_the_dequantised_weights(
    written: tuple[str, Path], source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    program, folder = written
    prompts = draw_prompts(1)
    steps = [{at: len(prompt) for at, prompt in enumerate(prompts)}]
    plain = Stepper(Decoder.load(source, operations("cpu"), torch.float32, "cpu", 64), prompts).run(steps)
    for name, kept in WRITERS[program][1].items():
        expected = load_file(folder / name / "logits.safetensors")
        (folder / name / "logits.safetensors").unlink()  # it is no part of the checkpoint
        caplog.clear()
        with caplog.at_level("INFO"):
            decoder = Decoder.load(folder / name, operations("cpu"), torch.float32, "cpu", 64)
        assert (kept or "quantised") in caplog.text, name
        found = Stepper(decoder, prompts).run(steps)
        for at, one in enumerate(found):
            torch.testing.assert_close(
                one, expected[str(at)], rtol=0, atol=TOLERANCE, msg=lambda said, name=name: f"{name}: {said}"
            )
            assert float((one - plain[at]).abs().max()) > 10 * TOLERANCE, f"{name}: nothing was rounded"
