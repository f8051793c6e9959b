"""GGUF files of the Hub: which file a name means, and that the hub's own client fetches this file alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire.shared.model.gguf.downloads import NoSuchFile, choose_files, split_tag
from quire.shared.model.hub import find_folder
from quire.shared.model.model_argument import resolve_model
from quire.shared.model.naming import served_name
from tests.support.hub_server import hub_server

# The files of repositories as people publish them.
ONE_EACH = [
    "README.md",
    "config.json",
    "m-Q4_K_M.gguf",
    "m-Q8_0.gguf",
    "m-BF16.gguf",
    "mmproj-F16.gguf",
    "m.imatrix.gguf",
]
DYNAMIC = ["m-UD-Q4_K_XL.gguf", "m-Q4_K_M.gguf", "m-UD-IQ1_S.gguf", "m-IQ4_XS.gguf", "mtp-m-Q8_0.gguf"]
SPLIT = [f"BF16/m-BF16-{at:05}-of-00002.gguf" for at in (1, 2)] + ["m-Q6_K.gguf"]
SMALL_LETTERS = ["qwen2-0_5b-instruct-fp16.gguf", "qwen2-0_5b-instruct-q5_k_m.gguf", "qwen2-0_5b-instruct-q5_0.gguf"]


@pytest.mark.parametrize(
    ("names", "tag", "files"),
    [
        (ONE_EACH, "", ["m-Q4_K_M.gguf"]),
        (ONE_EACH, "q8_0", ["m-Q8_0.gguf"]),
        (ONE_EACH, "bf16", ["m-BF16.gguf"]),
        (ONE_EACH, "m-Q8_0.gguf", ["m-Q8_0.gguf"]),
        (DYNAMIC, "UD-Q4_K_XL", ["m-UD-Q4_K_XL.gguf"]),
        (DYNAMIC, "Q4_K_XL", ["m-UD-Q4_K_XL.gguf"]),
        (DYNAMIC, "IQ4_XS", ["m-IQ4_XS.gguf"]),
        (SPLIT, "BF16", SPLIT[:2]),
        (SPLIT, "", SPLIT[:1] + SPLIT[1:2]),
        (SMALL_LETTERS, "Q5_K_M", ["qwen2-0_5b-instruct-q5_k_m.gguf"]),
        (SMALL_LETTERS, "fp16", ["qwen2-0_5b-instruct-fp16.gguf"]),
        (["a/gpt-oss-20b-mxfp4.gguf"], "MXFP4", ["a/gpt-oss-20b-mxfp4.gguf"]),
    ],
)
def test_a_quantisation_means_the_files_of_one_model(names: list[str], tag: str, files: list[str]) -> None:
    assert choose_files(names, tag) == files


@pytest.mark.parametrize(
    ("names", "tag", "said"),
    [
        (ONE_EACH, "Q5_K_M", "has no GGUF file for 'Q5_K_M'; BF16, Q4_K_M, Q8_0"),
        (["x/a-Q4_0.gguf", "y/b-Q4_0.gguf"], "Q4_0", "has 2 GGUF files for 'Q4_0'; x/a-Q4_0.gguf, y/b-Q4_0.gguf"),
        (SPLIT[:1], "BF16", "has no file BF16/m-BF16-00002-of-00002.gguf, a part of BF16/m-BF16-00001-of-00002.gguf;"),
        (["model.safetensors"], "Q4_0", "has no GGUF file of a model"),
        (["mmproj-Q4_0.gguf"], "", "has no GGUF file of a model"),
    ],
)
def test_a_missing_or_ambiguous_quantisation_lists_the_choices(names: list[str], tag: str, said: str) -> None:
    with pytest.raises(NoSuchFile) as caught:
        choose_files(names, tag)
    text = f"{caught.value}; {caught.value.remedy}".replace("give one of these after the colon: ", "")
    assert text.startswith(said)


def test_a_name_with_a_quantisation_is_a_model_and_a_served_name() -> None:
    assert resolve_model("owner/name:Q4_K_M") == "owner/name:Q4_K_M"
    assert served_name("owner/name:Q4_K_M") == "owner/name:Q4_K_M"
    assert split_tag("owner/name:sub/m-Q8_0.gguf") == ("owner/name", "sub/m-Q8_0.gguf")
    assert split_tag("owner/name") == ("owner/name", "")


PROGRAM = """
import sys
from quire.shared.model.hub import HubError, find_folder
for model in sys.argv[1:]:
    try:
        print(find_folder(model, ["*.json", "*.safetensors"]))
    except HubError as error:
        print(error)
"""


def found(home: Path, endpoint: str, *models: str, **environ: str) -> list[str]:
    """Return what `find_folder` returns or says for models, in a process with this cache and this hub."""
    own = {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-c", PROGRAM, *models]
    run = subprocess.run(command, env=os.environ | own | environ, capture_output=True, text=True, timeout=120)
    assert not run.returncode, run.stderr
    return run.stdout.splitlines()


def test_the_hubs_client_downloads_one_quantisation(tmp_path: Path) -> None:
    files = {name: name.encode() for name in [*ONE_EACH, *SPLIT]}
    plain = {"config.json": b"{}", "model.safetensors": b"x", "model-Q4_0.gguf": b"y"}
    with hub_server({"owner/name": files, "owner/plain": plain}) as (url, sent):
        models = "owner/name:Q8_0", "owner/name:BF16", "owner/name", "owner/plain", "owner/name:Q2_K", "owner/none:Q8_0"
        paths = found(tmp_path, url, *models)
        assert paths[0].endswith("/m-Q8_0.gguf")
        assert Path(paths[0]).read_bytes() == b"m-Q8_0.gguf"
        assert "2 GGUF files for 'BF16'" in paths[1]
        assert paths[2].endswith("/m-Q4_K_M.gguf")
        assert (Path(paths[3]) / "model.safetensors").exists()
        assert paths[4].startswith("the repository owner/name has no GGUF file for 'Q2_K'; give one of these")
        assert "'owner/none' is not a folder" in paths[5]
        assert "is unknown or private" in paths[5]
        assert sorted(set(sent)) == ["config.json", "m-Q4_K_M.gguf", "m-Q8_0.gguf", "model.safetensors"]
        whole = found(tmp_path, url, f"owner/name:{SPLIT[0]}")[0]
        assert whole.endswith(SPLIT[0])
        assert whole.removesuffix(SPLIT[0]) == paths[0].removesuffix("m-Q8_0.gguf")
        assert (Path(whole).parent / Path(SPLIT[1]).name).read_bytes() == SPLIT[1].encode()
    # The server has ended: the cache answers.
    again = found(tmp_path, url, "owner/name:Q8_0", "owner/name", "owner/name:Q6_K", HF_HUB_OFFLINE="1")
    assert again[:2] == [paths[0], paths[2]]
    assert "has no GGUF file for 'Q6_K'" in again[2]


def test_a_name_is_no_path_on_this_machine() -> None:
    with pytest.raises(Exception, match="there is no folder"):
        find_folder("a/b/c:Q8_0", ["*.json"])
