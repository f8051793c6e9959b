"""The view of an engine that a worker publishes for `/engine`, and its strict msgpack form.

A view holds counts and ids only: neither text, nor token ids, nor whole request ids. The size of a view is bounded; a
view counts the entries that were left out. Figures of each block are packed in columns, so that neither end needs a
loop over the blocks.

    cells     one entry per block that is not free: id u32, owner u16, owners u8, filled slots u8, flags u8
    sequence  [request, choice, state, class, prompt tokens, tokens, tokens in the cache, blocks, host blocks, table]
    row       [request, choice, tokens, is prefill]     a sequence that took part in a step
    step      [decode tokens, prefill tokens]
    move      [kind, source block, target block]        a copy on write, or a swap

`owner` is an index into the sequences; requests are named by the beginning of their id.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, NamedTuple

import msgpack

from quire.shared.keys import PRIORITY_CLASSES
from quire.shared.messages import MAX_CHOICES, MAX_PROMPT_TOKENS, MessageError, unpack

VERSION = 1
# Bounds of one view.
MAX_CELLS = 4096
MAX_SEQUENCES = 256
MAX_TABLE_ENTRIES = 8192  # of all block tables together
MAX_ROWS = 256
MAX_STEPS = 64
MAX_MOVES = 256
MAX_BYTES = 256 * 1024
MAX_NAME_LENGTH = 12
MAX_WORKER_LENGTH = 256
MAX_BLOCKS = 2**31
MAX_COUNT = 2**62

# Flags of a block: the prefix cache finds it; a pinned prefix holds it.
CACHED, PINNED = 1, 2
# The owner of a block that is in no table of the listed sequences.
NOBODY = 0xFFFF
STATES = ("running", "waiting", "swapped")
MOVES = ("copy", "swap_out", "swap_in")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFigures:
    """Figures of an engine, in the order in which a view sends them.

    Counters start with the process; they include warm-up and pinned prefixes.
    """

    # Blocks of the device: total = used + cached + free. Pinned and shared blocks are among the used ones.
    blocks_used: int
    blocks_cached: int  # in no block table, kept for the prefix cache
    blocks_free: int
    blocks_pinned: int
    blocks_shared: int  # in the tables of two sequences or more
    # Slots of the used blocks. A slot holds a token, is promised to a token that is not computed yet, or is wasted.
    slots_filled: int
    slots_promised: int
    slots_waste: int
    # Entries of all block tables less the distinct blocks in them.
    sharing_saved_blocks: int
    host_blocks_used: int
    # Unfinished sequences by state. Sequences that will fork from the first one of their group count as one with it.
    sequences_running: int
    sequences_waiting: int
    sequences_swapped: int
    # Counters.
    forks: int
    copies: int
    swapped_out_blocks: int
    swapped_in_blocks: int
    evictions: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    preemptions_recompute: int
    preemptions_swap: int
    steps: int
    prefill_tokens: int
    decode_tokens: int


FIGURES = tuple(field.name for field in fields(EngineFigures))


class ViewLimits(NamedTuple):
    """The capacity of the engine, and the token budget of a step."""

    block_size: int
    num_blocks: int
    num_host_blocks: int
    max_model_len: int
    max_num_seqs: int
    token_budget: int


class Cells(NamedTuple):
    """Little-endian columns with one entry per block that is not free, by ascending id."""

    ids: bytes = b""  # u32
    owners: bytes = b""  # u16: index of the first sequence with the block in its table, or NOBODY
    counts: bytes = b""  # u8: number of sequences with the block in their tables, at most 255
    filled: bytes = b""  # u8: slots that hold tokens
    flags: bytes = b""  # u8: CACHED | PINNED

    def __len__(self) -> int:
        return len(self.flags)


class SequenceView(NamedTuple):
    """A sequence and its block table, or the beginning of a long one."""

    request: str
    choice: int
    state: str
    priority: int
    prompt_tokens: int
    tokens: int
    filled: int
    num_blocks: int
    num_host_blocks: int
    table: bytes  # u32 per block


class Row(NamedTuple):
    """A sequence that took part in a step."""

    request: str
    choice: int
    tokens: int
    is_prefill: bool


class Move(NamedTuple):
    """A block that was copied to another one. In a swap one of the two is in host memory."""

    kind: str
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class View:
    """An engine between two steps, and what its steps did since the previous view."""

    worker: str
    number: int
    limits: ViewLimits
    figures: dict[str, int]  # by FIGURES
    cells: Cells
    hidden_cells: int
    sequences: tuple[SequenceView, ...]
    hidden_sequences: int
    # The latest step with a prompt in it, else the latest step; empty without a step since the previous view.
    batch: tuple[Row, ...] = ()
    hidden_rows: int = 0
    steps: tuple[tuple[int, int], ...] = ()
    moves: tuple[Move, ...] = ()
    hidden_moves: int = 0

    def encode(self) -> bytes:
        figures = [self.figures[name] for name in FIGURES]
        packed: bytes = msgpack.packb(
            [
                VERSION,
                self.worker,
                self.number,
                self.limits,
                figures,
                self.cells,
                self.hidden_cells,
                self.sequences,
                self.hidden_sequences,
                self.batch,
                self.hidden_rows,
                self.steps,
                self.moves,
                self.hidden_moves,
            ],
            use_bin_type=True,
        )
        return packed

    @classmethod
    def decode(cls, data: bytes) -> View:
        """Read a view. Raises MessageError for data that `encode` cannot have written."""
        value = _array("view", unpack(data, MAX_BYTES), 14)
        if value[0] != VERSION or type(value[0]) is not int:
            raise MessageError(f"a view must have version {VERSION}, not {value[0]!r:.80}")
        numbers = [_integer("limit", one, 0, MAX_BLOCKS) for one in _array("limits", value[3], len(ViewLimits._fields))]
        limits = ViewLimits(*numbers)
        if not 1 <= limits.block_size <= 255:
            raise MessageError(f"block_size must be from 1 to 255, not {limits.block_size}")
        figures = [_integer("figure", one, 0, MAX_COUNT) for one in _array("figures", value[4], len(FIGURES))]
        sequences = tuple(map(_sequence, _list("sequences", value[7], MAX_SEQUENCES)))
        if sum(len(one.table) for one in sequences) > 4 * MAX_TABLE_ENTRIES:
            raise MessageError(f"the block tables have more than {MAX_TABLE_ENTRIES} entries")
        return cls(
            _text("worker", value[1], MAX_WORKER_LENGTH),
            _integer("number", value[2], 0, MAX_COUNT),
            limits,
            dict(zip(FIGURES, figures, strict=True)),
            _cells(value[5], limits, len(sequences)),
            _integer("hidden_cells", value[6], 0, MAX_BLOCKS),
            sequences,
            _integer("hidden_sequences", value[8], 0, MAX_BLOCKS),
            tuple(map(_row, _list("batch", value[9], MAX_ROWS))),
            _integer("hidden_rows", value[10], 0, MAX_BLOCKS),
            tuple(map(_step, _list("steps", value[11], MAX_STEPS))),
            tuple(map(_move, _list("moves", value[12], MAX_MOVES))),
            _integer("hidden_moves", value[13], 0, MAX_COUNT),
        )


def unpack_table(table: bytes) -> list[int]:
    """The ids of the physical blocks in a packed table."""
    ids = array("I")
    ids.frombytes(table)
    return ids.tolist()


def _cells(value: Any, limits: ViewLimits, num_sequences: int) -> Cells:
    columns = _array("cells", value, len(Cells._fields))
    if any(type(column) is not bytes for column in columns):
        raise MessageError("cells must be packed columns")
    cells = Cells(*columns)
    count = len(cells.flags)
    widths = (4, 2, 1, 1, 1)
    if count > MAX_CELLS or [len(column) for column in columns] != [width * count for width in widths]:
        raise MessageError(f"cells must be columns of one length, at most {MAX_CELLS}")
    ids, owners = unpack_table(cells.ids), array("H")
    owners.frombytes(cells.owners)
    if any(left >= right for left, right in pairwise(ids)) or (ids and ids[-1] >= limits.num_blocks):
        raise MessageError(f"cells must be ascending blocks below {limits.num_blocks}")
    if set(owners) - {*range(num_sequences), NOBODY}:
        raise MessageError(f"owners must be among the {num_sequences} sequences")
    if max(cells.filled, default=0) > limits.block_size:
        raise MessageError(f"filled slots must be at most {limits.block_size}")
    if max(cells.flags, default=0) > CACHED | PINNED:
        raise MessageError(f"flags must be at most {CACHED | PINNED}")
    return cells


def _sequence(value: Any) -> SequenceView:
    request, choice, state, priority, prompt, tokens, filled, blocks, host_blocks, table = _array("sequence", value, 10)
    if type(table) is not bytes or len(table) % 4:
        raise MessageError("a block table must be packed 32-bit numbers")
    if len(table) // 4 > _integer("blocks", blocks, 0, MAX_BLOCKS):
        raise MessageError(f"a block table must have at most its {blocks} entries")
    return SequenceView(
        _text("request", request, MAX_NAME_LENGTH),
        _integer("choice", choice, 0, MAX_CHOICES - 1),
        _one_of("state", state, STATES),
        _integer("class", priority, 0, len(PRIORITY_CLASSES) - 1),
        _integer("prompt tokens", prompt, 0, MAX_PROMPT_TOKENS),
        _integer("tokens", tokens, 0, 2 * MAX_PROMPT_TOKENS),
        _integer("tokens in the cache", filled, 0, 2 * MAX_PROMPT_TOKENS),
        blocks,
        _integer("host blocks", host_blocks, 0, MAX_BLOCKS),
        table,
    )


def _row(value: Any) -> Row:
    request, choice, tokens, is_prefill = _array("row", value, 4)
    if type(is_prefill) is not bool:
        raise MessageError(f"is prefill must be true or false, not {is_prefill!r:.80}")
    return Row(
        _text("request", request, MAX_NAME_LENGTH),
        _integer("choice", choice, 0, MAX_CHOICES - 1),
        _integer("tokens", tokens, 0, MAX_PROMPT_TOKENS),
        is_prefill,
    )


def _step(value: Any) -> tuple[int, int]:
    decode, prefill = _array("step", value, 2)
    return _integer("decode tokens", decode, 0, MAX_BLOCKS), _integer("prefill tokens", prefill, 0, MAX_BLOCKS)


def _move(value: Any) -> Move:
    kind, source, target = _array("move", value, 3)
    return Move(
        _one_of("kind", kind, MOVES),
        _integer("source", source, 0, MAX_BLOCKS),
        _integer("target", target, 0, MAX_BLOCKS),
    )


def _list(name: str, value: Any, limit: int) -> list[Any]:
    if type(value) is not list or len(value) > limit:
        raise MessageError(f"{name} must be an array of at most {limit}")
    return value


def _array(name: str, value: Any, length: int) -> list[Any]:
    if type(value) is not list or len(value) != length:
        raise MessageError(f"{name} must be an array of {length}")
    return value


def _integer(name: str, value: Any, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise MessageError(f"{name} must be an integer from {low} to {high}, not {value!r:.80}")
    return value


def _text(name: str, value: Any, limit: int) -> str:
    if type(value) is not str or len(value) > limit:
        raise MessageError(f"{name} must be a string of at most {limit} characters")
    return value


def _one_of(name: str, value: Any, choices: tuple[str, ...]) -> str:
    if type(value) is not str or value not in choices:
        raise MessageError(f"{name} must be one of {', '.join(choices)}, not {value!r:.80}")
    return value
