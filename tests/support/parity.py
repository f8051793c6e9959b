"""Compares the answers of the engine with those of Transformers."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import kernels
from quire.shared.process.errors import CheckpointError
from quire.shared.protocol.messages import SamplingParams
from quire.worker.engine.engine import Engine
from quire.worker.engine.features.drafts.drafts import Drafts
from quire.worker.engine.features.drafts.start import why_none
from quire.worker.engine.limits import EngineLimits
from quire.worker.engine.offline import generate
from quire.worker.engine.paged_model import PagedModel
from quire.worker.models.native.decoder import Decoder
from quire.worker.models.transformers.bridge import TransformersModel
from quire.worker.models.transformers.config import read_transformers_config
from tests.support.architectures import ARCHITECTURES
from tests.support.checkpoints import FAMILIES as OWN
from tests.support.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.support.hybrid_checkpoints import FAMILIES as HYBRID
from tests.support.transformers_checkpoints import make_other

MAX_TOKENS = 16
GREEDY = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
# So few blocks that sequences are preempted; prompts are computed in chunks of 32 tokens.
SMALL: dict[str, Any] = {"num_blocks": 40, "block_size": 8, "max_num_seqs": 12, "max_num_batched_tokens": 32}
NUM_STATE_SLOTS = 60  # of a model with recurrent states
BRIDGED = " by Transformers"
# Two tokens whose logits differ by less than this may change places by rounding.
TIE = 1e-4


@cache
def prompts() -> list[tuple[int, ...]]:
    """32 prompts of 1 to 90 tokens."""
    draw = random.Random(5)
    lengths = [1, 2, 15, 16, 17, 90, *(draw.randint(3, 70) for _ in range(26))]
    return [tuple(draw.randrange(VOCAB_SIZE - 3) for _ in range(length)) for length in lengths]


def load(
    path: Path, max_model_len: int = 0, dtype: torch.dtype = torch.float32, prefer: str = "auto"
) -> TransformersModel:
    """Load a model that Transformers computes. prefer: the kernels."""
    ops = kernels.select_ops("cpu", dtype, prefer)
    return TransformersModel.load(read_transformers_config(path), ops, "cpu", max_model_len)


def load_own(path: Path, prefer: str = "auto") -> Decoder:
    """Load a model that Quire's decoder computes."""
    return Decoder.load(path, kernels.select_ops("cpu", torch.float32, prefer), torch.float32, "cpu")


def refusal(path: Path, max_model_len: int = 0) -> str:
    """Return the line with which Transformers' bridge refuses a checkpoint."""
    with pytest.raises(CheckpointError) as caught:
        load(path, max_model_len)
    said = str(caught.value)
    assert said.startswith(str(path))
    assert "\n" not in said
    return said


def make_engine(model: Any, **limits: Any) -> Engine:
    """Make an engine that checks itself after each step, and speculates. limits: what differs from SMALL."""
    slots = {"num_state_slots": NUM_STATE_SLOTS, "snapshot_interval": 16} if getattr(model, "state_bytes", 0) else {}
    chosen = EngineLimits(**(SMALL | {"max_model_len": model.max_model_len} | slots | limits))
    engine = Engine(model, chosen, model.config.eos_token_ids, None)
    engine.checks_itself = True
    if not why_none(model):
        engine.drafts = Drafts(engine.groups, None)
    return engine


def load_reference(path: Path, model_class: Any = None, attention: str = "eager") -> Any:
    """Load a checkpoint with Transformers in float32. model_class: AutoModelForCausalLM by default."""
    from transformers import AutoModelForCausalLM

    model_class = model_class or AutoModelForCausalLM
    return model_class.from_pretrained(path, dtype=torch.float32, attn_implementation=attention).eval()


def reference(path: Path) -> Any:
    """Load a checkpoint of any architecture with Transformers, without two faults of it.

    The attention that it calls eager adds the biases of Falcon twice, and it does not read alibi_bias_max of MPT.
    """
    import transformers

    text = (path / "config.json").read_text()
    (name,) = json.loads(text)["architectures"]
    attention = "sdpa" if '"model_type": "falcon"' in text else "eager"
    model = load_reference(path, getattr(transformers, name), attention)
    if '"model_type": "mpt"' in text:
        body, largest = model.transformer, model.config.attn_config.alibi_bias_max
        body.build_mpt_alibi_tensor = partial(body.build_mpt_alibi_tensor, alibi_bias_max=largest)
    return model


def by_hugging_face(path: Path) -> list[list[int]]:
    """Return the output of Hugging Face for each prompt, including an end token. Prompts are padded on the left."""
    model = load_reference(path)
    longest = max(map(len, prompts()))
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts()])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts()])
    out = model.generate(ids, attention_mask=mask, max_new_tokens=MAX_TOKENS, do_sample=False, pad_token_id=0)
    end = model.generation_config.eos_token_id
    rows = out[:, longest:].tolist()
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


def assert_greedy(
    model: Any, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], tie: float = TIE
) -> None:
    """Check that each answer is the greedy one of a model of Transformers, by teacher forcing.

    Each token must be the best one after all before it: by induction, these are the tokens of greedy decoding. Each
    text is computed alone, without padding and without a cache.
    """
    assert len(prompts) == len(answers)
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        assert answer
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0]
        rows = logits[len(prompt) - 1 : -1].float()
        lost = rows.max(dim=-1).values - rows.gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert float(lost.max()) <= tie, f"prompt {number} of {len(prompt)} tokens, token {int(lost.argmax())}"


class Family:
    """A checkpoint, the model that the engine runs, and the greedy answers of Transformers. Made once per process."""

    def __init__(self, name: str, folder: Path) -> None:
        """name: a family of Quire's decoder, a hybrid model, or one of ARCHITECTURES.

        With the suffix BRIDGED, Transformers computes a model that Quire's decoder has, too.
        """
        self.is_own = name in OWN
        if self.is_own:
            self.path = make_checkpoint(folder / name, name)
        else:
            kind = name.removesuffix(BRIDGED)
            model_type, fields = HYBRID.get(kind) or ARCHITECTURES[kind]
            self.path = make_other(folder / name, model_type, **fields)
        self.model = self.load()
        self.prompts = prompts()[:12]
        self._answers: list[list[int]] = []

    def load(self, prefer: str = "auto") -> PagedModel:
        return load_own(self.path, prefer) if self.is_own else load(self.path, prefer=prefer)

    def generate(self, engine: Engine, n: int = 1) -> list[list[list[int]]]:
        """Return the choices of each prompt."""
        return generate(engine, self.prompts, SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, n=n))

    def assert_equal(self, found: list[list[list[int]]]) -> None:
        """Check that all choices of each prompt are the answer of Transformers."""
        answers = [choices[0] for choices in found]
        assert found == [[answer] * len(choices) for answer, choices in zip(answers, found, strict=True)]
        if not self._answers:
            assert_ends(answers, self.model.config.eos_token_ids)
            assert_greedy(reference(self.path), self.prompts, answers, tie=0.0)
            assert len({tuple(one) for one in answers}) > len(answers) // 2
            self._answers = answers
        assert answers == self._answers


def assert_ends(answers: list[list[int]], eos_token_ids: Sequence[int], max_tokens: int = MAX_TOKENS) -> None:
    """Check that an end token ends an answer, and nothing else but the number of tokens."""
    for answer in answers:
        assert not {*answer[:-1]} & {*eos_token_ids}
        assert len(answer) == max_tokens or answer[-1] in eos_token_ids
