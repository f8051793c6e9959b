"""`vllm bench serve` against completions and chat: the figures that it saves for each endpoint.

    python vllm_bench_program.py URL TOKENIZER

TOKENIZER: a folder with the tokenizer of the served model. Calls the command as `vllm bench serve` does: that program
itself also imports vLLM's server, with all its packages.
"""

import argparse
import json
import shlex
import sys
import tempfile
from pathlib import Path

from vllm.benchmarks.serve import add_cli_args, main

ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
COMMON = shlex.split("""--model demo --dataset-name random --random-input-len 24 --random-output-len 128
--num-prompts 12 --max-concurrency 4 --ignore-eos --temperature 0 --seed 1
--disable-tqdm --save-result --save-detailed""")

for backend, endpoint in ENDPOINTS.items():
    with tempfile.TemporaryDirectory(prefix="vllm-bench-") as folder:
        parser = argparse.ArgumentParser()
        add_cli_args(parser)
        where = ["--base-url", sys.argv[1], "--backend", backend, "--endpoint", endpoint, "--tokenizer", sys.argv[2]]
        main(parser.parse_args([*COMMON, *where, "--result-dir", folder, "--result-filename", "result.json"]))
        result = json.loads((Path(folder) / "result.json").read_text())
    print(json.dumps({"case": backend, "result": result}), flush=True)
