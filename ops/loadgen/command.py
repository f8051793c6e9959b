"""`quire bench`: connects to the servers, warms them up, sends the load, and prints the result."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import uvloop

from quire.ops.loadgen import table
from quire.ops.loadgen.client import new_session
from quire.ops.loadgen.html_report import page
from quire.ops.loadgen.measures import summaries
from quire.ops.loadgen.plan import Plan, make_plan
from quire.ops.loadgen.prompts import IdPrompts
from quire.ops.loadgen.result import as_json
from quire.ops.loadgen.runner import Run
from quire.ops.loadgen.server import connect, load_tokenizer, make_prompts
from quire.ops.loadgen.settings import BenchSettings
from quire.ops.local.progress import Progress
from quire.shared.config.command_line import CommandError
from quire.shared.process.interrupts import raise_at_ctrl_c

BAR = 24
# Prompts of calibrated words can be too long: 1/16 of the context is kept free for that.
CALIBRATION_MARGIN = 16


def bench(settings: BenchSettings, environ: Mapping[str, str]) -> int:
    """Run a benchmark. Return the exit code: 0, 1 if a request failed, 130 after Ctrl-C.

    Raise SettingError and CommandError.
    """
    raise_at_ctrl_c()
    plan = make_plan(settings)
    count = load_tokenizer(settings.tokenizer) if settings.tokenizer else None
    api_key = settings.api_key or environ.get("OPENAI_API_KEY", "")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        run = runner.run(_run(settings, plan, count, api_key))
    print(table.render(run))
    result = as_json(run, settings)
    if settings.json:
        _write(settings.json, json.dumps(result, indent=1) + "\n")
    if settings.html:
        _write(settings.html, page(run, result))
    if run.stopped:
        return 130
    failed = any(side.failed for side in summaries(run))
    return 1 if failed and not settings.allow_errors else 0


async def _run(settings: BenchSettings, plan: Plan, count: Callable[[str], int] | None, api_key: str) -> Run:
    progress = Progress(sys.stderr)
    moves = sys.stderr.isatty()
    async with new_session(settings.timeout_s, api_key) as session:
        servers = [await connect(session, settings, "--url", settings.model)]
        if settings.against:
            wanted = settings.against_model or servers[0].model
            required = bool(settings.against_model or settings.model)
            servers.append(await connect(session, settings, "--against", wanted, required))
            for server, place in zip(servers, ("first", "second"), strict=True):
                server.label = f"{place}: {server.name}"
        prompts = await make_prompts(session, servers, settings, plan.shape.shared_prefix, count)
        context = settings.context or min((server.context for server in servers if server.context), default=None)
        if context is not None and not isinstance(prompts, IdPrompts) and count is None:
            context -= context // CALIBRATION_MARGIN
        _check_context(plan, context)
        run = Run(plan, servers, prompts, context)
        if moves:
            progress.update("warming up")
        await run.warm_up(session, settings.warmup)
        progress.say(f"measuring {' and '.join(server.name for server in servers)}; Ctrl-C ends it early")
        try:
            await run.measure(session, (lambda run: progress.update(_status(run))) if moves else None)
        finally:
            progress.clear()
    return run


def _check_context(plan: Plan, context: int | None) -> None:
    """Refuse fixed lengths that exceed the context: only lengths drawn from a distribution are cut."""
    shape = plan.shape
    longest = shape.shared_prefix + shape.prompt.mean + shape.answer.mean
    if context is not None and not shape.prompt.sigma and longest > context:
        raise CommandError(
            f"prompts and answers of {longest:g} tokens together do not fit into the context of {context}; give a "
            "smaller --input-tokens, --output-tokens or --prefix-tokens"
        )


def _status(run: Run) -> str:
    """Return a progress bar, with the numbers of finished, open and failed requests."""
    plan = run.plan
    if plan.requests is not None:
        share, total = run.ended / (plan.requests * len(run.servers)), f"/{plan.requests * len(run.servers)}"
    else:
        spent_s = sum((block.ended or run.now) - block.started for block in run.blocks)
        share, total = spent_s / ((plan.duration_s or 1) * len(run.servers)), ""
    filled = min(BAR, int(BAR * share))
    errors = f", {run.failed} failed" if run.failed else ""
    where = f" at {run.servers[run.blocks[-1].server].label}" if len(run.servers) > 1 and run.blocks else ""
    return f"[{'#' * filled}{'.' * (BAR - filled)}] {run.ended}{total} done, {run.sent - run.ended} open{errors}{where}"


def _write(name: str, text: str) -> None:
    try:
        Path(name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"cannot write {name}: {error.strerror}; give another file") from error
    print(f"written: {name}")
