"""`local-completions` of lm-evaluation-harness on three tasks with data of their own: what it asks, gets and reports.

The harness takes the tokenizer from the server (`/tokenizer_info`, `/tokenize`), and sends token ids.
"""

import json
import tempfile
from pathlib import Path

import lm_eval
from cases import run
from lm_eval.tasks import TaskManager

ANIMALS = ("fox", "heron", "boat", "lamp")
CHOICES = [
    {"question": "Once upon a time there was a", "choices": [f" {animal}.", " qzx.", " of and."], "gold": index % 3}
    for index, animal in enumerate(ANIMALS)
]
TEXTS = [{"text": f"Once upon a time there was a {animal}. It was happy."} for animal in ANIMALS]
STORIES = [{"text": f"Once upon a time there was a {animal} who"} for animal in ANIMALS]
TASKS = {
    "pick": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{gold}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
    "story": {
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "x",
        "generation_kwargs": {"until": [".", "\n"], "max_gen_toks": 24, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def write_tasks(folder):
    for name, docs in (("pick", CHOICES), ("rolling", TEXTS), ("story", STORIES)):
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
        kwargs = {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")}
        task = {"task": name, "dataset_path": "json", "dataset_kwargs": kwargs}
        task |= {"test_split": "test", "num_fewshot": 0, **TASKS[name]}
        (folder / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML


def evaluate(url, folder, **more):
    arguments = {"model": "demo", "base_url": f"{url}/completions", "num_concurrent": 2, "max_retries": 1, **more}
    found = lm_eval.simple_evaluate(
        model="local-completions",
        model_args=arguments,
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=folder, include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
    samples = {
        name: [{"asked": one["arguments"], "got": one["filtered_resps"], "target": one["target"]} for one in samples]
        for name, samples in found["samples"].items()
    }
    return {"samples": samples, "results": found["results"]}


with tempfile.TemporaryDirectory(prefix="lm-eval-") as made:
    write_tasks(Path(made))

    def evaluated(url):
        """One sequence in a call."""
        return evaluate(url, made)

    def evaluated_in_batches(url):
        """Several sequences in a call."""
        return evaluate(url, made, batch_size=4)

    run(evaluated, evaluated_in_batches)
