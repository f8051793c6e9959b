"""One run of `schemathesis` against the API of `/openapi.json`. Arguments: a seed, and cases per operation."""

import subprocess
import sys
import tempfile
from pathlib import Path

from cases import run

# The document describes the answers. It cannot state some facts, such as which ids exist; those are no fault of an
# answer.
CHECKS = "status_code_conformance,content_type_conformance,response_headers_conformance,allow_header_conformance"


def fuzz(url):
    seed, examples = sys.argv[2:]
    base = url.removesuffix("/v1")
    command = [str(Path(sys.executable).with_name("schemathesis")), "run", f"{base}/openapi.json"]
    command += ["--phases", "coverage,fuzzing", "--checks", CHECKS, "--seed", seed, "--max-examples", examples]
    # The events of an engine do not end.
    command += ["--exclude-path", "/engine/stream", "--request-timeout", "60"]
    command += ["--suppress-health-check", "all", "--warnings", "off", "--no-shrink", "--no-color"]
    with tempfile.TemporaryDirectory() as folder:  # it keeps a database of examples there
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return {"code": done.returncode, "output": done.stdout + done.stderr}


run(fuzz)
