"""Measures which architectures are served, for the tables of docs/models.md.

`python -m tests.support.served_models` makes a tiny checkpoint of each, compares its answers with those of Transformers
and writes the tables. It takes some minutes.
"""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

from quire import kernels
from quire.ops.tools.marked_tables import update_page
from quire.shared.process.errors import CheckpointError
from quire.shared.protocol.messages import SamplingParams
from quire.worker.engine.offline import generate
from quire.worker.models.choice import choose_model, load_model
from quire.worker.models.native.config import ModelConfig
from quire.worker.models.transformers.config import KINDS as OTHER_KINDS
from tests.support.architectures import ARCHITECTURES
from tests.support.parity import assert_ends, assert_greedy, make_engine, prompts, reference
from tests.support.transformers_checkpoints import make_other
from tests.support.vision_checkpoints import VISION, make_vision
from tests.support.vision_questions import KINDS as SEEING
from tests.support.vision_questions import VisionFamily, answer

OWN_DECODER, TRANSFORMERS, REFUSED = "Quire's decoder", "Transformers", "refused"
SEEN, NO_IMAGES = "images", "this worker computes no images: "
PAGE = "models.md"
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
NUM_PROMPTS = 8


class Served(NamedTuple):
    """The support of an architecture: who computes it, or why it is refused."""

    kind: str  # a key of ARCHITECTURES or VISION
    architecture: str
    by: str
    why: str = ""
    images: str = ""  # of a vision-language model: SEEN, or why its text alone is served


def measure(kind: str, folder: Path) -> Served:
    """Make a checkpoint in a folder and serve it. Raises AssertionError if answers differ from Transformers."""
    seeing = VisionFamily(kind, folder / kind) if kind in SEEING else None
    if seeing is not None:
        path = seeing.path
    elif kind in VISION:
        path = make_vision(folder / kind, kind)
    else:
        model_type, fields = ARCHITECTURES[kind]
        path = make_other(folder / kind, model_type, **fields)
    (architecture,) = json.loads((path / "config.json").read_text())["architectures"]
    try:
        config = choose_model(path)
        by = OWN_DECODER if isinstance(config, ModelConfig) else TRANSFORMERS
        ops = kernels.select_ops("cpu", torch.float32)
        model = load_model(path, config, ops, torch.device("cpu"), 0) if seeing is None else seeing.model
    except CheckpointError as error:
        return Served(kind, architecture, REFUSED, _reason(str(error), str(path), architecture))
    engine = make_engine(model, num_blocks=24, max_num_seqs=8, prefix_caching=True)
    texts = prompts()[:NUM_PROMPTS]
    found = [choices[0] for choices in generate(engine, texts, GREEDY)]
    assert engine.groups.num_preemptions > 0
    assert len({tuple(one) for one in found}) > len(found) // 4
    assert_ends(found, model.config.eos_token_ids, GREEDY.max_tokens)
    assert_greedy(reference(path), texts, found)
    hits = engine.scheduler.blocks.counters.prefix_hits
    assert [choices[0] for choices in generate(engine, texts[-2:] * 2, GREEDY)] == found[-2:] * 2
    assert engine.scheduler.blocks.counters.prefix_hits > hits, "out of the prefix cache"
    if seeing is not None:
        measure_images(seeing)
        return Served(kind, architecture, by, images=SEEN)
    assert model.tower is None
    return Served(kind, architecture, by, images=model.why_no_images.removeprefix(NO_IMAGES) if kind in VISION else "")


def measure_images(family: VisionFamily) -> None:
    """Ask a vision-language model about images. Raises AssertionError if answers differ from Transformers."""
    questions, longest = family.asked, max(len(question.prompt) for question in family.asked)
    engine = family.engine(num_blocks=longest // 8 + 6, prefix_caching=True)
    found = answer(engine, questions, n=2)
    assert found == [[expected] * 2 for expected in family.expected]
    assert len({tuple(one) for one in family.expected}) > len(found) // 4
    assert engine.groups.num_preemptions > 0
    hits = engine.scheduler.blocks.counters.prefix_hits
    assert answer(engine, questions[-1:], n=2) == found[-1:]
    assert engine.scheduler.blocks.counters.prefix_hits > hits, "out of the prefix cache"


def _reason(error: str, path: str, architecture: str) -> str:
    """The reason of a refusal, without the place and the general remedy. It may have another number of tokens."""
    reason = error.removeprefix(path).removeprefix("/config.json").removeprefix(": ")
    reason = reason.removesuffix(f"; {OTHER_KINDS}").removeprefix(f"{architecture} ")
    reason = reason.removeprefix("cannot be computed with paged attention: ")
    return re.sub(r", by \d+%$", "", reason)


def tables(rows: list[Served]) -> dict[str, str]:
    """The tables by the name in their markers."""
    served = [row for row in rows if row.by != REFUSED]
    named = {OWN_DECODER: "own-decoder", TRANSFORMERS: "transformers"}
    lists = {name: _list([row for row in served if row.by == by]) for by, name in named.items()}
    refused = ["| architecture | configurations | why |", "|---|---|---|"]
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.by == REFUSED:
            reasons.setdefault((row.architecture, row.why), []).append(row.kind)
    refused += [f"| `{name}` | {', '.join(kinds)} | {why} |" for (name, why), kinds in sorted(reasons.items())]
    vision = [row for row in served if row.kind in VISION]
    seeing = [row for row in vision if row.images == SEEN]
    lists["images"] = _list(seeing)
    alone = ["| architecture | configurations | why |", "|---|---|---|"]
    alone += sorted(f"| `{row.architecture}` | {row.kind} | {row.images} |" for row in vision if row.images != SEEN)
    count = (
        f"{len(served) - len(vision)} of {len(ARCHITECTURES)} configurations of text models and {len(vision)} of "
        f"{len(VISION)} vision-language models are served, {len(seeing)} of these with images.\n"
    )
    return {
        **lists,
        "refused": "\n".join(refused) + "\n",
        "text-alone": "\n".join(alone) + "\n",
        "count": count,
    }


def _list(rows: list[Served]) -> str:
    """Return the architectures of some rows, a line each with its configurations."""
    by_class: dict[str, list[str]] = {}
    for row in rows:
        by_class.setdefault(row.architecture, []).append(row.kind)
    return "".join(f"- `{name}`: {', '.join(kinds)}\n" for name, kinds in sorted(by_class.items()))


def main() -> None:
    """Measure all architectures and write the tables."""
    rows = []
    for kind in (*ARCHITECTURES, *VISION):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(kind, Path(folder)))
    update_page(PAGE, tables(rows))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
