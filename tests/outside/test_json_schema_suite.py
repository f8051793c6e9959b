"""The JSON Schema Test Suite, which the source package of `jsonschema` carries: no grammar accepts an invalid value."""

from __future__ import annotations

import tarfile

import pytest

from quire.ops.tools.json_schema_suite import Case, cases, run
from tests.outside.environments import downloaded

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PACKAGE = "jsonschema==4.26.0"


@pytest.fixture(scope="module")
def suite(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    archive = downloaded(request.config, PACKAGE, "--no-binary", "jsonschema")
    folder = tmp_path_factory.mktemp("suite")
    with tarfile.open(archive) as source:
        source.extractall(folder, filter="data")
    (root,) = folder.iterdir()
    return list(cases(root / "json"))


def test_no_grammar_accepts_more_than_its_schema(suite: list[Case]) -> None:
    results = [run(case, draws=3) for case in suite]
    assert [(one.case.name, one.wrong) for one in results if one.wrong] == []
    accepted = [one for one in results if not one.refused]
    assert len(accepted) >= 0.8 * len(suite) > 200
    assert sum(one.answers for one in accepted) > len(accepted)
