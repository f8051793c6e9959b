"""Measures of a run: latencies, throughput, goodput, errors, and the lateness of the client itself.

TTFT, TPOT, ITL and E2E are defined as in `vllm bench serve`: the time to the first token; the time per token after the
first, as a mean per request; the gaps between the chunks of all requests; the time to the end. Percentiles are
interpolated linearly between ranks. Latencies are those of completed requests. Throughput is their tokens divided by
the duration of the blocks, from the first request to the end of the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from quire.ops.loadgen.client import RequestRecord
from quire.ops.loadgen.runner import Block, Run

# If the client itself is later than this, its lateness may distort the results.
MOST_LAG_S = 0.010
LAG_SHARE_OF_ITL = 0.25
MOST_SLIP_S = 0.050
# If TTFT grows by this factor and time from the first to the last quarter of a block, the queue grows. Fewer requests
# than LEAST_TO_TELL are not judged.
GROWTH, GROWTH_S, LEAST_TO_TELL = 3.0, 0.1, 20


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean, percentiles and maximum of a latency, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """The number of failures of one kind, and the message of the first."""

    kind: str
    count: int
    first_message: str


@dataclass(frozen=True, slots=True)
class Summary:
    """The results of one server, over one or more blocks.

    good, good_share, good_per_s: None if no SLO is given. cut_short: requests that were open when the run was stopped.
    """

    requests: int
    completed: int
    failed: int
    cut_short: int
    seconds: float
    asked_input_tokens: int
    asked_output_tokens: int
    input_tokens: int
    output_tokens: int
    other_length: int
    counted_by: str
    tokens_per_chunk: float
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    sent_per_s: float
    mean_concurrency: float
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    itl_ms: Distribution | None
    e2e_ms: Distribution | None
    good: int | None
    good_share: float | None
    good_per_s: float | None
    errors: tuple[ErrorKind, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One measure of two servers.

    ratio: the value of the second server divided by that of the first. least, most: the range of the ratio over single
    blocks.
    """

    name: str
    first: float
    second: float
    ratio: float
    least: float
    most: float
    blocks: int
    more_is_better: bool

    @property
    def better(self) -> str:
        """`first` or `second` if all blocks agree, else an empty text."""
        if self.blocks < 2 or self.least <= 1 <= self.most:
            return ""
        return "second" if (self.ratio > 1) == self.more_is_better else "first"


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the percentile of sorted values at `share` (0 to 1), interpolated linearly between ranks."""
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def distribution(seconds: Sequence[float]) -> Distribution | None:
    """Return the distribution of times in seconds, in milliseconds; None without values."""
    if not seconds:
        return None
    ordered = sorted(1000 * value for value in seconds)
    p50, p90, p95, p99 = (percentile(ordered, share) for share in (0.5, 0.9, 0.95, 0.99))
    return Distribution(sum(ordered) / len(ordered), p50, p90, p95, p99, ordered[-1])


def is_good(record: RequestRecord, slo: dict[str, float]) -> bool:
    """Return whether a request completed within every limit. The limit `itl` is compared with the longest gap."""
    if not record.ok:
        return False
    measured = {
        "ttft": record.ttft_s,
        "tpot": record.tpot_s or 0.0,
        "itl": max(record.gaps_s, default=0.0),
        "e2e": record.e2e_s,
    }
    return all(measured[name] <= limit for name, limit in slo.items())


def summarise(blocks: Sequence[Block], slo: dict[str, float]) -> Summary:
    """Return the results of some blocks of one server."""
    records = [record for block in blocks for record in block.records]
    cut = [record for record in records if was_cut(record)]
    finished = [record for record in records if not was_cut(record)]
    done = [record for record in finished if record.ok]
    failed = [record for record in finished if not record.ok]
    seconds = sum(block.ended - block.started for block in blocks)
    per_second = 1 / seconds if seconds else 0.0
    inputs = sum(r.input_tokens if r.prompt_tokens is None else r.prompt_tokens for r in done)
    outputs = sum(r.tokens for r in done)
    chunks = sum(len(r.chunks) for r in done)
    good = sum(is_good(record, slo) for record in finished) if slo else None
    firsts: dict[str, list[str]] = {}
    for record in failed:
        firsts.setdefault(record.error or "empty answer", []).append(record.message)
    counted = sum(r.completion_tokens is not None for r in done)
    sending_s = sum(max(r.sent for r in b.records) - b.started for b in blocks if b.records)
    sent = sum(max(0, len(b.records) - 1) for b in blocks)
    return Summary(
        requests=len(records),
        completed=len(done),
        failed=len(failed),
        cut_short=len(cut),
        seconds=seconds,
        asked_input_tokens=sum(r.input_tokens for r in done),
        asked_output_tokens=sum(r.output_tokens for r in done),
        input_tokens=inputs,
        output_tokens=outputs,
        other_length=sum(r.tokens != r.output_tokens for r in done),
        counted_by="server" if counted == len(done) else "chunks" if not counted else "server, in part chunks",
        tokens_per_chunk=outputs / chunks if chunks else 0.0,
        requests_per_s=len(done) * per_second,
        input_tokens_per_s=inputs * per_second,
        output_tokens_per_s=outputs * per_second,
        total_tokens_per_s=(inputs + outputs) * per_second,
        sent_per_s=sent / sending_s if sending_s > 0 else 0.0,
        mean_concurrency=sum(r.ended - r.sent for r in records if r.ended) * per_second,
        ttft_ms=distribution([r.ttft_s for r in done]),
        tpot_ms=distribution([value for r in done if (value := r.tpot_s) is not None]),
        itl_ms=distribution([gap for r in done for gap in r.gaps_s]),
        e2e_ms=distribution([r.e2e_s for r in done]),
        good=good,
        good_share=None if good is None else good / len(finished) if finished else 0.0,
        good_per_s=None if good is None else good * per_second,
        errors=tuple(ErrorKind(kind, len(messages), messages[0]) for kind, messages in firsts.items()),
    )


def was_cut(record: RequestRecord) -> bool:
    """Return whether the run was stopped before the request ended or was sent."""
    return record.error == "cut short" or not record.ended


def summaries(run: Run) -> list[Summary]:
    """Return the results of each server."""
    return [summarise(blocks_of(run, server), run.plan.slo) for server in range(len(run.servers))]


def blocks_of(run: Run, server: int) -> list[Block]:
    return [block for block in run.blocks if block.server == server]


def compare(run: Run) -> list[Comparison]:
    """Compare two servers, for measures that both have. A block counts if both servers finished it."""
    first, second = summaries(run)
    pairs = []
    for index in range(run.plan.rounds):
        sides = [summarise([b], run.plan.slo) for b in sorted(run.blocks, key=lambda b: b.server) if b.index == index]
        if len(sides) == 2:
            pairs.append(sides)
    comparisons = []
    for name, value, more_is_better in _COMPARED:
        a, b = value(first), value(second)
        if not a or b is None:
            continue
        ratios = [y / x for x, y in ((value(left), value(right)) for left, right in pairs) if x and y is not None]
        ratio = b / a
        least, most = min(ratios, default=ratio), max(ratios, default=ratio)
        comparisons.append(Comparison(name, a, b, ratio, least, most, len(ratios), more_is_better))
    return comparisons


def _latency(field: str, share: str) -> Callable[[Summary], float | None]:
    def value(summary: Summary) -> float | None:
        latency = getattr(summary, field)
        return None if latency is None else getattr(latency, share)

    return value


_COMPARED: tuple[tuple[str, Callable[[Summary], float | None], bool], ...] = (
    ("requests/s", lambda summary: summary.requests_per_s, True),
    ("output tokens/s", lambda summary: summary.output_tokens_per_s, True),
    ("total tokens/s", lambda summary: summary.total_tokens_per_s, True),
    ("good requests/s", lambda summary: summary.good_per_s, True),
    *(
        (f"{name} {share} ms", _latency(f"{name.lower()}_ms", share), False)
        for name in ("TTFT", "TPOT", "ITL", "E2E")
        for share in ("p50", "p99")
    ),
)


def client_figures(run: Run) -> dict[str, float]:
    """Return the lateness of the client in milliseconds: of its timers (lag), and of its requests (slip)."""
    lag = distribution(run.lag_s)
    slip = distribution([max(0.0, r.sent - r.due) for block in run.blocks for r in block.records if r.sent])
    return {
        **{f"lag_{name}_ms": value for name, value in (asdict(lag) if lag else {}).items() if name in ("p50", "p99")},
        **{
            f"slip_{name}_ms": value for name, value in (asdict(slip) if slip else {}).items() if name in ("p50", "p99")
        },
    }


def warnings(run: Run) -> list[str]:
    """Return reasons to doubt the results, as sentences."""
    reasons = []
    if run.stopped:
        reasons.append("the run was stopped; the figures cover the time until then")
    client = client_figures(run)
    sides = summaries(run)
    lag_ms, slip_ms = client.get("lag_p99_ms", 0.0), client.get("slip_p99_ms", 0.0)
    shortest = min((s.itl_ms.p50 for s in sides if s.itl_ms), default=0.0)
    if lag_ms > 1000 * MOST_LAG_S or (lag_ms > 2 and lag_ms > LAG_SHARE_OF_ITL * shortest):
        reasons.append(
            f"the client was late itself (timers by {lag_ms:.1f} ms at p99): its machine is too busy for it, and some "
            "of the latency is its own"
        )
    if slip_ms > 1000 * MOST_SLIP_S:
        reasons.append(f"requests left {slip_ms:.0f} ms after they were due (p99): the client cannot send that fast")
    for number, (server, side) in enumerate(zip(run.servers, sides, strict=True)):
        who = f"{server.label}: " if len(sides) > 1 else ""
        if run.plan.rate is not None and (growth := _growth(run, number)):
            reasons.append(f"{who}{growth}")
        if side.other_length:
            reasons.append(f"{who}{side.other_length} answers have another length than was asked for")
        if side.completed and side.counted_by != "server":
            reasons.append(f"{who}the server does not count tokens; each chunk counts as one")
        if side.tokens_per_chunk > 1.05:
            reasons.append(
                f"{who}{side.tokens_per_chunk:.2f} tokens came per chunk (several at once, or some without text): "
                "ITL is the time between chunks, TPOT that of a token"
            )
        wanted = side.asked_input_tokens
        if wanted and abs(side.input_tokens - wanted) > 0.02 * wanted:
            reasons.append(f"{who}the server counted {side.input_tokens} input tokens, not the {wanted} aimed at")
    if run.cut_lengths:
        reasons.append(
            f"{run.cut_lengths} requests were longer than the context of {run.context} tokens, and cut to it"
        )
    return reasons


def _growth(run: Run, server: int) -> str:
    """Return a warning if an open loop sends more than the server can serve; else empty."""
    firsts, lasts = [], []
    for block in blocks_of(run, server):
        done = [record for record in block.records if record.ok and not was_cut(record)]
        quarter = len(done) // 4
        firsts += [record.ttft_s for record in done[:quarter]]
        lasts += [record.ttft_s for record in done[-quarter:]] if quarter else []
    if len(firsts) < LEAST_TO_TELL // 4:
        return ""
    first_s, last_s = percentile(sorted(firsts), 0.5), percentile(sorted(lasts), 0.5)
    if last_s < GROWTH * first_s or last_s - first_s < GROWTH_S:
        return ""
    return (
        f"the median TTFT grew from {1000 * first_s:.0f} ms (first quarter) to {1000 * last_s:.0f} ms (last): the "
        "server does not keep up with the rate, and the figures depend on the length of the run"
    )
