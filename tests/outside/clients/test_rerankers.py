"""Rerankers that `sentence-transformers` writes have its scores, and the SDK `cohere` gets them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import QuireProcess, clean_environ
from tests.outside.environments import Case, Environments
from tests.support.checkpoints import EOS_TOKEN_ID, SPECIAL_TOKENS, make_checkpoint, make_tokenizer
from tests.worker.engine.features.test_scores import OWN, make_classifier

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

# What the package needs besides Quire's packages.
SENTENCE_TRANSFORMERS = (
    *("sentence-transformers==6.2.0", "scikit-learn==1.9.1", "scipy==1.17.1", "joblib==1.6.0", "threadpoolctl==3.8.0"),
    *("cloudpickle==3.1.3", "narwhals==2.29.0"),
)
COHERE = ("cohere==7.3.1",)
TEMPLATE = (
    "<|im_start|>Find\n"
    "{{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}\n"
    "{{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}<|im_end|>\n"
)
QUERY = "Where do herons nest?"
DOCUMENTS = ["Herons nest in tall trees.", "A lantern by the sea.", "Reeds hide many birds.", "x" * 100]
TEXTS = json.dumps([QUERY, DOCUMENTS])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rerankers")


def edit(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.fixture(scope="module")
def expected(environments: Environments, folder: Path) -> dict[str, Case]:
    """The scores of sentence-transformers, which writes its checkpoints into `folder`."""
    causal, classifier = folder / "a", folder / "b"
    make_checkpoint(causal, "qwen3")
    (causal / "chat_template.jinja").write_text(TEMPLATE)
    make_classifier(classifier, "Qwen3", OWN["Qwen3"])
    make_tokenizer(classifier)
    for one in (causal, classifier):  # the package pads the texts of a batch
        edit(one / "tokenizer_config.json", pad_token=SPECIAL_TOKENS[2])
        edit(one / "config.json", pad_token_id=EOS_TOKEN_ID)
    return environments.run_beside_quire(
        "cross_encoder_program.py", [str(causal), str(classifier), str(folder), TEXTS], SENTENCE_TRANSFORMERS
    )


@pytest.fixture(scope="module", params=["causal", "classifier"])
def served(request: pytest.FixtureRequest, expected: dict[str, Case], folder: Path) -> Iterator[tuple[str, Any]]:
    """The URL of a gateway that serves a checkpoint as it was written, and the scores of its writer."""
    scores = expected[request.param].value()
    state = folder / f"state-{request.param}"
    names = ("--served-model-name", "reranker", "--state-dir", str(state))
    arguments = ("serve", str(folder / request.param), "--port", "0", "--dtype", "float32", *names)
    process = QuireProcess(arguments, clean_environ(), None)
    try:
        yield process.wait_ready(), scores
        assert process.stop() == 0
    finally:
        process.close()


def test_cohere_gets_the_scores_of_sentence_transformers(environments: Environments, served: tuple[str, Any]) -> None:
    url, scores = served
    cases = environments.run_python("cohere_program.py", url, COHERE, [TEXTS])
    best = sorted(range(len(DOCUMENTS)), key=lambda index: -scores["scores"][index])
    first = cases["version_1"].value()
    assert [index for index, _ in first["results"]] == best
    assert [score for _, score in first["results"]] == pytest.approx([scores["scores"][at] for at in best], abs=1e-5)
    assert first["texts"] == [DOCUMENTS[index] for index in best]
    assert first["units"] == 1
    second = cases["version_2"].value()
    assert second["results"] == first["results"][:2]
    assert second["id"].startswith("rerank-")
    assert cases["version_2_async"].value() == first["results"]
    assert cases["refused"].value() == "rank_fields"
