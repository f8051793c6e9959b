"""Starts the speculation of an engine, if it changes no token there, and measures the time of steps for it."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable

from quire.shared.process.errors import StartError
from quire.shared.protocol.messages import GenerationRequest, SamplingParams
from quire.worker.engine.engine import Engine
from quire.worker.engine.features.drafts.costs import StepCosts
from quire.worker.engine.features.drafts.drafts import Drafts
from quire.worker.engine.paged_model import PagedModel
from quire.worker.engine.step import DecodeBatch, Step, Verification

log = logging.getLogger(__name__)

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
REPEATS = 5
# Seconds after which no larger step is measured, and after which none is measured again.
FIRST_S = 0.5
BOUND_S = 2.0
NAME = "measured"
OWN = "quire"  # of `PagedModel.implementation`


def start_drafts(mode: str, engine: Engine) -> Drafts | None:
    """Return the drafts of an engine; None for `off`, and for `auto` if speculation could change tokens.

    mode: of --speculation. The engine must be idle. Raises StartError for `suffix` if it could change tokens.
    """
    if mode == "off":
        return None
    if why := why_none(engine.runner.model):
        if mode == "suffix":
            raise StartError(f"--speculation suffix: {why}, or leave speculation off")
        log.info("no speculation: %s", why)
        return None
    costs = measure_costs(engine)
    if costs is None:
        return None
    if mode == "suffix":
        return Drafts(engine.groups, None)
    log.info("time of a step by its number of positions, for speculation: %s", costs)
    return Drafts(engine.groups, costs)


def why_none(model: PagedModel) -> str:
    """Return why drafts could change the tokens of a model, with the remedy; "" if they cannot."""
    if model.state_bytes:
        return "the model keeps recurrent states, which cannot go back behind a rejected token; take another model"
    if model.implementation != OWN:
        return "torch computes parts of this model, with other bits beside others; take a model of Quire's own decoder"
    if model.is_row_invariant or (model.ops.device.type == "cuda" and model.ops.row_invariant):
        return ""
    return "the kernels give a token other bits beside others; add --batch-invariant on a GPU, or take --kernels auto"


def measure_costs(engine: Engine, clock: Callable[[], float] = time.perf_counter) -> StepCosts | None:
    """Measure steps of one sequence, each the median of REPEATS. The engine must be idle.

    Returns None if the engine has no room for a step of two positions.
    """
    limits = engine.limits
    most = min(
        ROWS[-1], limits.max_num_batched_tokens, limits.max_model_len - 2, (limits.num_blocks - 2) * limits.block_size
    )
    rows = [count for count in ROWS if count <= most]
    if len(rows) < 2:
        return None
    request = GenerationRequest(
        NAME, engine.name, (0,), SamplingParams(max_tokens=REPEATS + 3, ignore_eos=True, temperature=0.0)
    )
    engine.add(request)
    try:
        whole: list[float] = []
        while len(whole) < REPEATS + 1:
            began = clock()
            engine.step()
            whole.append(clock() - began)
        began = clock()
        times: dict[int, list[float]] = {}
        for count in rows:
            if len(times) >= 2 and clock() - began > FIRST_S:
                break
            _time(engine, count, clock)  # the first step of a size takes longer
            times[count] = []
        # In turns, so that a disturbance of the machine does not fall on one number alone.
        for _ in range(REPEATS):
            for count, seconds in times.items():
                seconds.append(_time(engine, count, clock))
            if clock() - began > BOUND_S:
                break
    finally:
        engine.finish(NAME, "cancelled")
    measured = {count: statistics.median(seconds) for count, seconds in times.items()}
    return StepCosts(measured, max(0.0, statistics.median(whole[1:]) - measured[1]))


def _time(engine: Engine, count: int, clock: Callable[[], float]) -> float:
    """Return the seconds of a step that verifies `count` positions of the only sequence."""
    (group,) = engine.requests.values()
    sequence = group.sequences[0]
    step = Step(DecodeBatch.of([]), verifications=[Verification(sequence, _tokens(count - 1, engine.vocab_size))])
    engine.groups.extend(sequence, count - 1)
    try:
        began = clock()
        output = engine.runner.execute(step)
        if output is not None:
            output.logits.argmax(dim=-1).cpu()
        return clock() - began
    finally:
        engine.groups.trim(sequence)


def _tokens(count: int, vocab_size: int) -> tuple[int, ...]:
    """Return tokens that differ, so that experts of a model are used as in a text."""
    return tuple(997 * (index + 1) % vocab_size for index in range(count))
