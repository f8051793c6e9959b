"""`local-completions` of lm-evaluation-harness: its figures are those of Transformers for the same texts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from quire.ops.paths import PROJECT_ROOT
from quire.shared.model.model_argument import DEFAULT_MODEL
from tests.outside.environments import Case, Environments

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]
NAMES = pytest.mark.parametrize("name", ["evaluated", "evaluated_in_batches"])
STOPS, MAX_TOKENS = (".", "\n"), 24


@pytest.fixture(scope="module")
def cases(environments: Environments, demo_url: str) -> dict[str, Case]:
    return environments.run_python("lm_eval_program.py", demo_url, ["lm_eval[api]==0.4.13"])


class Reference:
    """The demo model in Transformers, with float32 as in the server under test."""

    def __init__(self) -> None:
        import transformers

        folder = PROJECT_ROOT / DEFAULT_MODEL
        load: Any = transformers.AutoModelForCausalLM.from_pretrained
        self._model = load(folder, dtype=torch.float32)
        self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def likelihood(self, context: str, continuation: str) -> tuple[float, bool]:
        """The log-likelihood of a continuation, and whether it is the greedy one; an empty context is its bos token."""
        before = self._ids(context) or [self._tokenizer.bos_token_id]
        after = self._ids(context + continuation)[len(before) if context else 0 :]
        with torch.no_grad():
            logits = self._model(torch.tensor([before + after])).logits[0, len(before) - 1 : -1].double()
        scores = logits.log_softmax(-1)
        return float(sum(scores[range(len(after)), after])), logits.argmax(-1).tolist() == after

    def greedy(self, text: str) -> str:
        """The greedy answer to a text, before the first stop string."""
        ids = torch.tensor([self._ids(text)])
        out = self._model.generate(ids, max_new_tokens=MAX_TOKENS, do_sample=False, pad_token_id=0)
        answer: str = self._tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        return min((answer.split(stop)[0] for stop in STOPS), key=len)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


@NAMES
def test_choices_have_the_likelihoods_of_transformers(cases: dict[str, Case], reference: Reference, name: str) -> None:
    found = cases[name].value()
    samples = found["samples"]["pick"]
    hits = 0
    for one in samples:
        expected = [reference.likelihood(*asked) for asked in one["asked"]]
        assert [got[0] for got in one["got"]] == pytest.approx([score for score, _ in expected], abs=1e-3)
        assert [got[1] for got in one["got"]] == [greedy for _, greedy in expected]
        hits += max(range(len(expected)), key=lambda index: expected[index][0]) == int(one["target"])
    assert 0 < hits < len(samples)  # of both there are some, or an accuracy would say little
    assert found["results"]["pick"]["acc,none"] == hits / len(samples)


@NAMES
def test_texts_have_the_bits_per_byte_of_transformers(cases: dict[str, Case], reference: Reference, name: str) -> None:
    found = cases[name].value()
    total, size = 0.0, 0
    for one in found["samples"]["rolling"]:
        [[text]] = one["asked"]
        expected, _ = reference.likelihood("", text)
        [got] = one["got"]
        assert (got if isinstance(got, float) else got[0]) == pytest.approx(expected, abs=1e-3)
        total, size = total + expected, size + len(text.encode())
    assert found["results"]["rolling"]["bits_per_byte,none"] == pytest.approx(-total / size / math.log(2), abs=1e-5)


@NAMES
def test_generated_texts_are_those_of_transformers(cases: dict[str, Case], reference: Reference, name: str) -> None:
    samples = cases[name].value()["samples"]["story"]
    for one in samples:
        [[text, _]] = one["asked"]
        assert one["got"] == [reference.greedy(text)]
    assert any(one["got"][0] for one in samples)
