"""Checks of the invariants I1 to I8 of docs/protocol.md, over Redis, the clients and the processes, after all requests.

Each test checks I3 (the same tokens as without faults) itself, since it knows the expected text. Tests of the worker's
service count I6 in steps; here every block must be free.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer

from quire.gateway.stream.call_metadata import request_id
from quire.shared.protocol.keys import GROUP, PRIORITY_CLASSES, QUEUES, WAITING_QUEUES, LaneKeys
from quire.shared.protocol.logprobs import read_prompt_records, read_records
from quire.shared.protocol.messages import OUTCOMES, PromptReport, StepItem, WorkerCard, decode_items
from quire.shared.text.detokenizer import IncrementalDetokenizer, context_of

if TYPE_CHECKING:
    from tests.support.faults.stack import FaultStack, Stream

# Limit of open file descriptors of an idle process. A gateway starts with 26; its connection pool fills under load.
MAX_FILES = 64
# Log texts of exceptions that were never retrieved or not expected.
UNEXPECTED = ("Traceback", "never retrieved", "never awaited", "Task was destroyed")


def assert_invariants(stack: FaultStack) -> None:
    """Wait until all requests have ended, then check. A stack can be checked again after more requests."""
    stack.wait(lambda: is_drained(stack))
    assert_counted_once(stack)
    logs = {key: read_log(stack, key) for key in stack.redis.scan_iter(stack.keys.prefix + "out:*")}
    assert_logs(stack, logs)
    assert_no_key_stays(stack)
    streams, stack.streams[:] = list(stack.streams), []
    for stream in streams:
        assert_client(stack, stream)
    wait_blocks(stack)
    assert_processes(stack)


def is_drained(stack: FaultStack) -> bool:
    """Return whether no request is queued, running or pending."""
    for name in QUEUES:
        queue = stack.keys.queue(name)
        if stack.redis.exists(queue) and (stack.redis.xlen(queue) or stack.redis.xpending(queue, GROUP)["pending"]):
            return False
    lines = sum(stack.redis.xlen(stack.keys.queue(name)) for name in WAITING_QUEUES)
    if lines or stack.redis.exists(stack.keys.waiting):
        return False
    return all(int(count) == 0 for count in stack.redis.hvals(stack.keys.load))


def assert_counted_once(stack: FaultStack) -> None:
    """I1: the accepted requests are the sum of the outcomes, so each request has exactly one outcome."""
    totals = stack.totals()
    accepted = totals.pop("accepted", 0)
    assert set(totals) <= set(OUTCOMES)
    assert accepted == sum(totals.values()), totals
    seen = dict.fromkeys(OUTCOMES, 0)
    for key in stack.redis.scan_iter(stack.keys.prefix + "req:*"):
        state, outcome = stack.redis.hmget(key, "state", "outcome")
        assert (key, state) == (key, b"done")
        seen[outcome.decode()] += 1
    assert all(count <= totals.get(name, 0) for name, count in seen.items()), (seen, totals)


def read_log(stack: FaultStack, key: bytes) -> list[tuple[str, list[StepItem]]]:
    """Return the entries of an output log as (id, items)."""
    return [(entry.decode(), list(decode_items(fields[b"item"]))) for entry, fields in stack.redis.xrange(key)]


def assert_logs(stack: FaultStack, logs: dict[bytes, list[tuple[str, list[StepItem]]]]) -> None:
    """I2 and I4: every log holds the tokens from 0 without gap or overlap, then one end, and nothing after the end."""
    for key, entries in logs.items():
        items = [item for _, found in entries for item in found]
        assert items[0].start == 0, key
        assert all(a.end == b.start for a, b in pairwise(items)), f"{key!r} has a gap, or a token twice"
        assert [item.outcome is not None for item in items] == [False] * (len(items) - 1) + [True], key
        assert [entry for entry, _ in entries] == [
            f"{found[-1].end}-{int(found[-1].outcome is not None)}" for _, found in entries
        ]
        request = stack.keys.request(key.decode().removeprefix(stack.keys.output("")))
        emitted, outcome = stack.redis.hmget(request, "emitted", "outcome")
        assert (int(emitted), outcome.decode()) == (items[-1].end, items[-1].outcome.name)  # type: ignore[union-attr]


def assert_no_key_stays(stack: FaultStack) -> None:
    """I5: every key of a request expires."""
    of_lane = {str(value.__get__(stack.keys)) for value in vars(LaneKeys).values() if isinstance(value, property)}
    lasting = {*of_lane, *map(stack.keys.queue, (*QUEUES, *WAITING_QUEUES)), *map(stack.keys.served, PRIORITY_CLASSES)}
    for key in stack.redis.scan_iter(f"{stack.keys.prefix}*"):
        # TTL is -1 for a key without expiry, -2 for a key that is gone, and 0 in the last half second.
        assert key.decode() in lasting or stack.redis.ttl(key) != -1, key


def assert_client(stack: FaultStack, stream: Stream) -> None:
    """I2 and I7: a client has exactly the tokens of the log, in order, and its `usage` counts exactly these."""
    stream.wait_end()
    if stream.status != 200 or stream.method != "POST" or not (stream.events or stream.text_body):
        return
    if stream.path == "/v1/embeddings":  # the log has no tokens of it
        return
    prompt, n = stream.body.get("prompt", ""), stream.body.get("n", 1)
    count = len(prompt) if type(prompt) is list and type(prompt[0]) is not int else 1
    tokens: dict[int, list[int]] = {}
    logprobs: dict[int, list[float | None]] = {}
    echoed: dict[int, str] = {}
    for index in range(count):
        call_id = request_id(stream.response_headers["x-request-id"], index)
        entries = read_log(stack, stack.keys.output(call_id).encode())
        if not entries:  # Redis came back without it
            return
        items = [item for _, found in entries for item in found]
        assert all(item.report is None for item in items[1:]), "two reports about one prompt"
        for choice in range(n * index, n * index + n) if stream.body.get("echo") else ():
            echoed[choice], logprobs[choice] = echo_of(stack.tokenizer, items[0].report)
        for delta in (delta for item in items for delta in item.deltas):
            choice = n * index + delta.choice
            tokens.setdefault(choice, []).extend(delta.token_ids)
            if delta.logprobs is not None:
                found = read_records(delta.logprobs, len(delta.token_ids))
                logprobs.setdefault(choice, []).extend(one.logprob for one in found)
    if stream.body.get("stream"):
        places = [tuple(map(int, event.id.split("."))) for event in stream.events if event.id]
        assert all(a < b for a, b in pairwise(places)), "events in the wrong order, or twice"
        texts = {index: stream.text(index) for index in {*tokens, *echoed}}
        scored = {index: token_logprobs(stream.choices(index)) for index in texts}
        is_whole = stream.is_complete
        usages = [event["usage"] for event in stream.parsed if event.get("usage")]
    else:
        texts = {choice["index"]: text_of(choice) for choice in stream.answer["choices"]}
        scored = {choice["index"]: token_logprobs([choice]) for choice in stream.answer["choices"]}
        is_whole = True
        usages = [stream.answer["usage"]]
    for index, text in texts.items():
        if stream.body.get("tools"):  # the text is divided into parts; tests of tools compare these
            continue
        whole = echoed.get(index, "") + decode(stack.tokenizer, tokens.get(index, []))
        if is_whole and not stream.body.get("stop"):
            assert text == whole
        assert whole.startswith(text)
        logged = logprobs.get(index, [])
        wanted = logged if is_whole else logged[: len(scored[index])]
        assert [one is None for one in scored[index]] == [one is None for one in wanted]
        numbers = [[one for one in found if one is not None] for found in (scored[index], wanted)]
        assert numbers[0] == pytest.approx(numbers[1], rel=1e-7)
    for usage in usages:
        assert usage["completion_tokens"] == sum(map(len, tokens.values()))


def echo_of(tokenizer: Tokenizer, report: PromptReport | None) -> tuple[str, list[float | None]]:
    """Return the text of an echoed prompt, and the log-probabilities of its tokens if it was scored."""
    if report is None:
        return "", []
    token_ids = report.token_ids
    scores = read_prompt_records(report.records, len(token_ids) - 1) if report.records else ()
    first: list[float | None] = [None] if report.records else []
    return tokenizer.decode(list(token_ids)), first + [one.logprob for one in scores]


def text_of(choice: dict[str, Any]) -> str:
    text: str | None = choice["text"] if "text" in choice else choice["message"]["content"]
    return text or ""


def token_logprobs(pieces: Sequence[dict[str, Any]]) -> list[float | None]:
    """Return the token log-probabilities in the pieces of one choice."""
    found = [piece["logprobs"] for piece in pieces if piece["logprobs"] is not None]
    return [logprob for one in found for logprob in one["token_logprobs"]]


def decode(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer, context_of(tokenizer))
    return detokenizer.push(token_ids) + detokenizer.flush()


def wait_blocks(stack: FaultStack) -> None:
    """I5 and I6: wait until every live worker reports that all its blocks are free."""

    def are_free() -> bool:
        for name in stack.live_workers():
            data = stack.redis.hget(stack.keys.worker(name), "card")
            if data is None:
                return False
            card = WorkerCard.decode(data)
            if card.free_blocks != card.total_blocks or card.running or card.waiting:
                return False
        return True

    stack.wait(are_free)


def assert_processes(stack: FaultStack) -> None:
    """I8: no exception was left unretrieved, and no connection or file is left open."""
    for process in stack.processes:
        found = [word for word in UNEXPECTED if word in process.stderr]
        assert not found, process.stderr[-6000:]

    def are_closed() -> bool:
        living = [process.pid for process in stack.processes if process.process.poll() is None]
        return all(len(list(Path(f"/proc/{pid}/fd").iterdir())) <= MAX_FILES for pid in living)

    stack.wait(are_closed)
