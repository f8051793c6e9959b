"""A mock model whose every token depends on all tokens before it, and helpers to drive an engine over it.

The model reads earlier tokens through the block tables, as attention does. A cache slot holds a token and a state. The
state is a hash of the sequence's tokens up to this one, because keys and values depend on all these tokens. A step that
reads a stale or unwritten slot, or a slot of another sequence, fails at once. A sequence that reads another sequence's
whole context gets another text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from quire.kernels.reference import penalise
from quire.shared.protocol.messages import Delta, GenerationRequest, SamplingParams, StepItem
from quire.worker.device.cuda.graph_capture import graph_buckets
from quire.worker.device.cuda.graphs import Graph, Record
from quire.worker.device.cuda.runner import DeviceRunner
from quire.worker.engine.engine import Engine
from quire.worker.engine.features.grammars import Grammars, Matcher
from quire.worker.engine.features.spill.blocks import SpillingBlockManager
from quire.worker.engine.forward_batch import ForwardBatch
from quire.worker.engine.input_batch import InputBatch
from quire.worker.engine.limits import EngineLimits
from quire.worker.engine.runner import NOWHERE, Runner
from quire.worker.engine.sampler import token_mask

VOCAB = 97
EOS = 0
START, PRIME = 7, 1_000_003
UNWRITTEN = -1


def advance(state: int, token: int) -> int:
    """Return the state after one more token."""
    return (state * 31 + token + 1) % PRIME


def hidden_state(state: int) -> tuple[float, float]:
    """Return the hidden state of a token: the state after it, in two halves."""
    return float(state % 1009), float(state // 1009)


def next_token(token_ids: list[int]) -> int:
    """Return the token that the mock model gives after `token_ids`: a hash of all of them, in order."""
    state = START
    for token in token_ids:
        state = advance(state, token)
    return state % VOCAB


def continuation(prompt: tuple[int, ...], max_tokens: int, ignore_eos: bool = False) -> list[int]:
    """Return the output that the engine must give greedily: up to EOS or `max_tokens`."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] == EOS and not ignore_eos:
            break
    return tokens[len(prompt) :]


def log_softmax(logits: torch.Tensor) -> np.ndarray:
    """Compute torch.log_softmax without torch's threads, which cost more here than they save."""
    values = logits.numpy()
    values = values - values.max(axis=-1, keepdims=True)
    return values - np.log(np.exp(values).sum(axis=-1, keepdims=True))


@cache
def spread_logits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return random logits by the two halves of a state. The end token is a little likelier than other tokens."""
    draw = torch.Generator().manual_seed(1)
    low, high = (torch.randn(1009, VOCAB, generator=draw) * 1.5 for _ in range(2))
    low[:, EOS] += 3.0
    return low, high


class MockOps:
    """The operations of a sampler. `sample` draws evenly from the greedy token and the two after it.

    The greedy token takes the place of a token that is banned.
    """

    name = "mock"
    device = torch.device("cpu")
    penalise = staticmethod(penalise)

    def top_logprobs(self, logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = log_softmax(logits)
        ids = np.argsort(-logprobs, axis=-1, kind="stable")[:, :count]
        return torch.from_numpy(np.take_along_axis(logprobs, ids, -1)), torch.from_numpy(ids.astype(np.int32))

    def logprobs_of(self, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.take_along_axis(log_softmax(logits), ids.long().numpy()[:, None], -1)[:, 0])

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.argmax(dim=-1).to(torch.int32)

    def sample(self, logits: torch.Tensor, temperature: Any, top_k: Any, top_p: Any, min_p: Any, uniform: Any) -> Any:
        greedy = logits.argmax(dim=-1)
        drawn = (greedy + (uniform * 3).long()) % VOCAB
        is_banned = logits.gather(1, drawn[:, None])[:, 0] == float("-inf")
        return torch.where(is_banned, greedy, drawn).to(torch.int32)


class MockCache:
    """Blocks of (token, state), on the device and on the host. Freed blocks keep their contents, as memory does."""

    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int) -> None:
        self.device = np.full((num_blocks, block_size, 2), UNWRITTEN, dtype=np.int64)
        self.host = np.full((num_host_blocks, block_size, 2), UNWRITTEN, dtype=np.int64)
        self.num_swapped = 0

    def copy_blocks(self, src: list[int], dst: list[int]) -> None:
        assert len(set(dst)) == len(dst)
        assert not set(src) & set(dst)
        self.device[dst] = self.device[src]

    def swap_out(self, src: list[int], dst: list[int]) -> None:
        assert len(set(dst)) == len(dst)
        self.host[dst] = self.device[src]

    def swap_in(self, src: list[int], dst: list[int]) -> None:
        assert len(set(dst)) == len(dst)
        self.device[dst] = self.host[src]
        self.num_swapped += len(dst)


class MockModel:
    """Stands in for a decoder, and counts the tokens that it computes and writes.

    branches: logits are spread over all tokens at random by context instead of being one-hot, so that beams branch and
    scores differ. fits: the largest step, in tokens, for which there is memory.
    """

    vocab_size = VOCAB
    weights_digest = ""
    state_bytes = 0
    # A hidden state is the state after the token, in two halves: all numbers are exact in float32.
    hidden_size = 2

    def __init__(self, ops: Any = None, branches: bool = False, fits: int = 1 << 30) -> None:
        self.ops = ops or MockOps()
        self.fits = fits
        self.num_computed = 0
        self.num_written = 0
        self.branches = branches

    def alloc_kv_cache(self, num_blocks: int, block_size: int, num_host_blocks: int = 0) -> MockCache:
        return MockCache(num_blocks, block_size, num_host_blocks)

    def check(self) -> None:
        """Never raise: the mock device is never lost."""

    def forward(self, batch: ForwardBatch, cache: MockCache) -> torch.Tensor:
        return self.logits_of(self._states(batch, cache, batch.logits_rows))

    def forward_pooled(self, batch: ForwardBatch, cache: MockCache) -> tuple[torch.Tensor, torch.Tensor]:
        assert batch.pooled_rows is not None
        states = self._states(batch, cache, torch.cat([batch.logits_rows, batch.pooled_rows]))
        count = len(batch.logits_rows)
        return self.logits_of(states[:count]), torch.tensor(list(map(hidden_state, states[count:])))

    def _states(self, batch: ForwardBatch, cache: MockCache, rows: torch.Tensor) -> list[int]:
        """Compute a step. Returns the states after the tokens `rows`."""
        if len(batch.token_ids) > self.fits:
            raise torch.OutOfMemoryError
        size = cache.device.shape[1]
        slots_of_cache = cache.device.reshape(-1, 2)
        slots, token_ids = batch.slot_mapping.tolist(), batch.token_ids.tolist()
        written = [slot for slot in slots if slot >= 0]
        assert len(set(written)) == len(written), "two tokens of a step share a slot"
        self.num_written += len(written)
        starts, lengths = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
        # Padding up to the size of a graph: tokens of no sequence, and sequences without tokens; in a step that only
        # decodes, sequences of one token that is not written.
        fillers = len(token_ids) - starts[-1]
        assert slots[starts[-1] :] == [NOWHERE] * fillers, "a token of no sequence is kept"
        is_padding = [one == 1 and slots[at] == NOWHERE for one, at in zip(lengths, starts, strict=False)]
        self.num_computed += starts[-1] - sum(is_padding)
        contexts = []
        for index, length in enumerate(lengths):
            blocks = batch.block_tables[index, : -(-length // size)].numpy().astype(np.int64)
            contexts.append(((blocks[:, None] * size + np.arange(size)).ravel())[:length])
        # The loop computes the states of all tokens before it writes any, because all tokens read the cache first.
        states: list[int] = []
        for index, length in enumerate(lengths):
            first = length - (starts[index + 1] - starts[index])
            state = self._check(slots_of_cache[contexts[index][:first]])
            assert batch.positions[starts[index] : starts[index + 1]].tolist() == list(range(first, length))
            for at in range(starts[index], starts[index + 1]):
                state = advance(state, token_ids[at])
                states.append(state)
        states += [START] * fillers
        for slot, token, state in zip(slots, token_ids, states, strict=True):
            if slot >= 0:
                slots_of_cache[slot] = token, state
        for index, length in enumerate(lengths):
            if not length or is_padding[index]:
                continue
            state = self._check(slots_of_cache[contexts[index]])
            assert state == states[starts[index + 1] - 1], "reads the context of another sequence"
        return [states[row] for row in rows.tolist()]

    @staticmethod
    def _check(slots: np.ndarray) -> int:
        """Return the state after these slots. Each must continue the slot before it."""
        tokens, states = slots[:, 0], slots[:, 1]
        before = np.concatenate([[START], states[:-1]])
        assert ((before * 31 + tokens + 1) % PRIME == states).all(), "a slot does not continue the slot before it"
        return int(states[-1]) if len(states) else START

    def logits_of(self, states: list[int]) -> torch.Tensor:
        if not self.branches:
            logits = torch.zeros(len(states), VOCAB)
            logits[range(len(states)), [state % VOCAB for state in states]] = 1.0
            return logits
        low, high = spread_logits()
        return low[[state % 1009 for state in states]] + high[[state // 1009 for state in states]]


# --- an engine over it ------------------------------------------------------------------------------------------------


class Letters:
    """A tokenizer with one letter per token."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(97 + token % 26) for token in ids)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> SimpleNamespace:
        return SimpleNamespace(ids=[ord(character) - 97 for character in text])


class CalledAgain:
    """Stands in for a CUDA graph: a replay repeats the launch, and reads the static buffers again."""

    def __init__(self, launch: Callable[[], None]) -> None:
        self._launch = launch
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1
        with torch.inference_mode():
            self._launch()


def record(launch: Callable[[], None], pool: Any) -> tuple[Graph, Any]:
    launch()
    return CalledAgain(launch), pool


def graphed(model: Any, limits: EngineLimits, input_batch: InputBatch, record: Record = record) -> DeviceRunner:
    """Return a runner for a device that has captured all its graphs."""
    buckets = graph_buckets(limits.max_num_seqs, limits.max_num_batched_tokens)
    runner = DeviceRunner(model, limits, input_batch, buckets, record)
    while runner.capture_next():
        pass
    return runner


def make_engine(
    branches: bool = False,
    runner: Any = Runner,
    model: MockModel | None = None,
    tokenizer: Callable[[], Any] | None = None,
    spills: bool = False,
    **limits: Any,
) -> Engine:
    """Return a small engine that checks itself after every step. limits: fields of EngineLimits.

    spills: blocks that the prefix cache evicts may be kept (tests/support/spills.py).
    """
    roomy = {
        "num_blocks": 64,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 16,
        "max_model_len": 128,
        "prefix_caching": False,
    }
    model = model or MockModel(branches=branches)
    limits = roomy | limits
    sizes, letters = EngineLimits(**limits), (tokenizer or Letters)()
    blocks = SpillingBlockManager.of(sizes) if spills else None
    engine = Engine(model, sizes, (EOS,), letters, blocks=blocks, runner=runner, grammars=MockGrammars())
    engine.checks_itself = True
    return engine


def request(name: str, prompt: Iterable[int], salt: str = "", **params: Any) -> GenerationRequest:
    """Return a request, greedy and of 8 tokens by default. params: fields of SamplingParams."""
    sampling = SamplingParams(**({"temperature": 0.0, "max_tokens": 8} | params))
    return GenerationRequest(name, "mock", tuple(prompt), sampling, salt)


def steps(engine: Engine, count: int) -> list[StepItem]:
    return [item for _ in range(count) for item in engine.step()]


def run(engine: Engine) -> list[StepItem]:
    """Step until the engine is idle, and check that it holds only pinned blocks."""
    items = []
    for _ in range(10_000):
        if not engine.has_work:
            break
        items += engine.step()
    assert not engine.has_work, "the engine does not come to an end"
    assert_idle(engine)
    return items


def assert_idle(engine: Engine) -> None:
    """Check that the engine holds only pinned blocks."""
    blocks = engine.scheduler.blocks
    engine.check_integrity()
    assert blocks.num_free + blocks.num_pinned == engine.limits.num_blocks
    assert blocks.num_free_host == engine.limits.num_host_blocks
    assert engine.input_batch.num_free == engine.limits.max_num_seqs


def final(items: list[StepItem], name: str) -> list[Delta]:
    """Return the last delta of each choice of a request, with all tokens and log-probabilities of the choice.

    Checks that the request's items are contiguous and that the last item, and no other, has an outcome.
    """
    mine = [item for item in items if item.request_id == name]
    at = 0
    tokens: dict[int, tuple[int, ...]] = defaultdict(tuple)
    logprobs: dict[int, bytes] = defaultdict(bytes)
    last: dict[int, Delta] = {}
    for item in mine:
        assert item.start == at
        at = item.end
        for delta in item.deltas:
            assert delta.choice not in last or last[delta.choice].finish_reason is None
            tokens[delta.choice] += delta.token_ids
            logprobs[delta.choice] += delta.logprobs or b""
            last[delta.choice] = delta
    assert [item.outcome is not None for item in mine] == [False] * (len(mine) - 1) + [True]
    whole = {choice: None if last[choice].logprobs is None else logprobs[choice] for choice in last}
    return [last[choice]._replace(token_ids=tokens[choice], logprobs=whole[choice]) for choice in sorted(last)]


def text(items: list[StepItem], name: str, choice: int = 0) -> list[int]:
    """Return the tokens of a choice; none if it got no token."""
    return [token for delta in final(items, name) if delta.choice == choice for token in delta.token_ids]


def alone(asked: GenerationRequest, branches: bool = False) -> list[Delta]:
    """Return the result of a request that runs alone in a large engine without prefix caching."""
    engine = make_engine(
        branches, num_blocks=512, max_num_seqs=16, max_num_batched_tokens=512, max_model_len=256, block_size=8
    )
    engine.add(asked)
    return final(run(engine), asked.id)


# --- mock grammars ----------------------------------------------------------------------------------------------------
# Grammars for the mock model: which tokens are allowed depends on all tokens before, as in a real grammar.

# An answer to DEAD_ENDS may come to a point from which the grammar does not continue; an answer to ENDLESS does not.
ENDLESS, DEAD_ENDS = "endless", "dead ends"


class MockMatcher(Matcher):
    """Allows the end token, and half of all other tokens."""

    def __init__(self, grammar: str) -> None:
        self._grammar, self._state, self._has_ended = grammar, START, False

    def copy(self) -> MockMatcher:
        copied = MockMatcher(self._grammar)
        copied._state, copied._has_ended = self._state, self._has_ended
        return copied

    def allowed(self) -> np.ndarray:
        assert not self._has_ended, "an answer that has ended needs no mask"
        assert self.error is None, "an answer without continuation needs no mask"
        return token_mask([EOS, *(token for token in range(VOCAB) if (token * 7 + self._state) % 2)], VOCAB)

    def forced(self) -> list[int]:
        """Claim a token that may not even be allowed."""
        return [self._state % VOCAB] if self._state % 3 == 0 else []

    def consume(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            assert token_id == EOS or (token_id * 7 + self._state) % 2, "the token was not allowed"
            self._state, self._has_ended = advance(self._state, token_id), token_id == EOS

    @property
    def error(self) -> str | None:
        return "stuck" if self._grammar == DEAD_ENDS and self._state % 7 == 3 else None


class MockGrammars(Grammars):
    """Grammars of MockMatcher."""

    def __init__(self) -> None:
        super().__init__(None, VOCAB, ())

    def matcher(self, grammar: str) -> Matcher:
        return MockMatcher(grammar)


# --- stateful model ---------------------------------------------------------------------------------------------------
# A mock model with a recurrent state: it computes from the state in a slot, and checks it against the KV cache.


class MockStates:
    """A slot holds the state of the mock model after some tokens. Freed slots keep their contents."""

    def __init__(self, num_slots: int) -> None:
        self.slots = [UNWRITTEN] * num_slots

    def copy(self, source: int, target: int) -> None:
        self.slots[target] = self.slots[source]


class StatefulModel(MockModel):
    """A mock model whose state in a slot must be that of the tokens in the KV cache.

    num_continued: the number of chunks and decodes that began with a state.
    """

    state_bytes = 8

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.num_continued = 0

    def alloc_states(self, cache: MockCache, num_slots: int) -> MockCache:
        cache.states = MockStates(num_slots)  # type: ignore[attr-defined]
        return cache

    def _states(self, batch: ForwardBatch, cache: MockCache, rows: torch.Tensor) -> list[int]:
        assert batch.state_slots is not None
        assert batch.snapshots is not None
        starts, own = batch.query_start_loc.tolist(), batch.state_slots.tolist()
        pool = cache.states.slots  # type: ignore[attr-defined]
        wanted = {(index, count): slot for index, count, slot in batch.snapshots.tolist()}
        targets = [*own, *wanted.values()]
        assert len(set(targets)) == len(targets), "two states of a step share a slot"
        tokens, positions = batch.token_ids.tolist(), batch.positions.tolist()
        afterwards = []
        for index, slot in enumerate(own):
            first, end = starts[index], starts[index + 1]
            is_fresh = positions[first] == 0
            self.num_continued += not is_fresh
            state = START if is_fresh else pool[slot]
            assert state != UNWRITTEN, "a slot without a state is used"
            for count, at in enumerate(range(first, end), 1):
                state = advance(state, tokens[at])
                if (index, count) in wanted:
                    pool[wanted.pop((index, count))] = state
            pool[slot] = state
            afterwards.append(state)
        assert not wanted, "a snapshot lies outside of its chunk"
        ends = torch.tensor([end - 1 for end in starts[1:]])
        found = super()._states(batch, cache, torch.cat([rows, ends]))
        assert found[len(rows) :] == afterwards, "the state is not that of the tokens in the KV cache"
        return found[: len(rows)]
