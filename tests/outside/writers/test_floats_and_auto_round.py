"""Checkpoints of bitsandbytes, Model Optimizer and AutoRound have the logits of the weights that these dequantise."""

from __future__ import annotations

import json
from functools import cache
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

SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 256,
    "initializer_range": 0.1,
}
DATASETS = ("datasets==5.2.0", "pyarrow==26.0.1", "pandas==3.1.1", "dill==0.4.1", "multiprocess==0.70.19",
            "xxhash==4.1.0", "python-dateutil==4.0.0", "six==1.17.0", "pytz", "tzdata")  # fmt: skip
REQUIREMENTS = {
    "bitsandbytes": ("bitsandbytes==0.50.2",),
    "modelopt": ("nvidia-modelopt==0.47.0", "omegaconf==2.4.0", "antlr4-python3-runtime==4.9.3", "pulp==3.3.2",
                 "ninja==1.13.2", "nvidia-ml-py==13.615.71", *DATASETS),
    "auto_round": ("auto-round==0.16.1", "py-cpuinfo==9.0.0", "threadpoolctl==3.8.0", "loguru==0.7.3",
                   "termcolor==3.3.0", *DATASETS),
}  # fmt: skip
# The program, the case, and the storage of the layers in the words of the reader's log.
KEPT = [
    ("bitsandbytes", "nf4", "14 layers: NF4 in blocks of 64 as nf4"),
    ("bitsandbytes", "nf4_double", "14 layers: NF4 in blocks of 64, double quantisation as nf4"),
    ("bitsandbytes", "fp4", "14 layers: FP4 in blocks of 64 as fp4"),
    ("bitsandbytes", "fp4_double", "14 layers: FP4 in blocks of 64, double quantisation as fp4"),
    ("bitsandbytes", "nf4_mixed", "9 layers: NF4 in blocks of 64 as nf4"),
    ("bitsandbytes", "int8", "14 layers: 8 bits, per channel as sint8"),
    ("modelopt", "fp8", "14 layers: FP8 per channel or tensor as fp8"),
    ("modelopt", "nvfp4", "14 layers: NVFP4 as nvfp4"),
    ("modelopt", "nvfp4_mixed", "8 layers: NVFP4 as nvfp4"),
    ("auto_round", "auto_round", "14 layers: 4 bits, groups of 32 as uint4"),
    ("auto_round", "auto_round_gptq", "14 layers: 4 bits, groups of 128 as uint4"),
    ("auto_round", "auto_round_awq", "14 layers: 4 bits, groups of 64 as uint4"),
    ("auto_round", "auto_round_mixed", "8 layers: 4 bits, groups of 32 as uint4"),
    ("auto_round", "gptq", "14 layers: 4 bits, groups of 128 as uint4"),
    ("auto_round", "gptq_asym", "14 layers: 4 bits, groups of 128 as uint4"),
    ("auto_round", "awq", "14 layers: 4 bits, groups of 64 as uint4"),
    ("auto_round", "mxfp4", "14 layers: MXFP4 as mxfp4"),
]


@pytest.fixture(scope="module")
def written(environments: Environments, tmp_path_factory: pytest.TempPathFactory):
    """Return a function from the name of a program to the folder with a checkpoint of each of its cases."""
    folder = tmp_path_factory.mktemp("writers")
    source = make_checkpoint(folder / "source", "llama", **SIZES)
    prompts = folder / "prompts.json"
    prompts.write_text(json.dumps([prompt.tolist() for prompt in draw_prompts(1)]))

    @cache
    def write(program: str) -> Path:
        arguments = [str(source), str(folder / program), str(prompts)]
        cases = environments.run_beside_quire(f"{program}_program.py", arguments, REQUIREMENTS[program])
        assert set(cases) == {case for of, case, _ in KEPT if of == program}
        return folder / program

    return write


@pytest.mark.parametrize(("program", "case", "kept"), KEPT)
def test_logits_are_those_of_the_dequantised_weights(
    written: Any, program: str, case: str, kept: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = written(program)
    prompts, expected = draw_prompts(1), load_file(folder / case / "logits.safetensors")
    (folder / case / "logits.safetensors").rename(folder / f"{case}.safetensors")  # it is no part of the checkpoint
    with caplog.at_level("INFO"):
        decoder = Decoder.load(folder / case, operations("cpu"), torch.float32, "cpu", 64)
    assert f"{kept} without further rounding" in caplog.text
    found = Stepper(decoder, prompts).run([{at: len(prompt) for at, prompt in enumerate(prompts)}])
    for at, one in enumerate(found):
        torch.testing.assert_close(one, expected[str(at)], rtol=0, atol=TOLERANCE)
