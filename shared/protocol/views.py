"""The view of an engine that a worker publishes for `/engine`, and its strict msgpack form.

A view holds counts and ids only: neither text, nor token ids, nor whole request ids. The size of a view is bounded; a
view counts the entries that were left out. Figures of each block are packed in columns, so that neither end needs a
loop over the blocks.

    cells     one entry per block that is not free: id u32, owner u16, owners u8, filled slots u8, flags u8
    sequence  [request, choice, state, class, prompt tokens, tokens, tokens in the cache, blocks, host blocks, table]
    row       [request, choice, tokens, is prefill]     a sequence that took part in a step
    step      [decode tokens, prefill tokens]
    move      [kind, source block, target block]        a copy on write, or a swap

`owner` is an index into the sequences; requests are named by the beginning of their id and the number of their prompt.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, NamedTuple

import msgpack

from quire.shared.config.validators import Flag, Integer, InvalidValue, OneOf, Text, fixed_array, short_array
from quire.shared.protocol.keys import PRIORITY_CLASSES
from quire.shared.protocol.messages import MAX_CHOICES, MAX_PROMPT_TOKENS, decode

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

_blocks = Integer(0, MAX_BLOCKS)
_count = Integer(0, MAX_COUNT)
_choice = Integer(0, MAX_CHOICES - 1)
_prompt_tokens = Integer(0, MAX_PROMPT_TOKENS)
_tokens = Integer(0, 2 * MAX_PROMPT_TOKENS)
_class = Integer(0, len(PRIORITY_CLASSES) - 1)
_worker = Text(0, MAX_WORKER_LENGTH)
_request = Text(0, MAX_NAME_LENGTH)
_state = OneOf(STATES)
_kind = OneOf(MOVES)
_flag = Flag()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFigures:
    """Figures of an engine, in the order in which a view sends them.

    Counters start with the process; they include warm-up and pinned prefixes.
    """

    # Blocks of the device: total = used + cached + free. Pinned and shared blocks are among the used blocks.
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
    # Unfinished sequences by state. Sequences that will fork from the first of their group count as one with it.
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
    """A sequence and its block table, or the beginning of a long table."""

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
    """A block that was copied to another. In a swap one of the two is in host memory."""

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
        """Read a view. Raise MessageError for data that `encode` cannot have written."""
        return decode(data, MAX_BYTES, cls._read)

    @classmethod
    def _read(cls, message: Any) -> View:
        value = fixed_array("view", message, 14)
        if value[0] != VERSION or type(value[0]) is not int:
            raise InvalidValue("a view", f"must have version {VERSION}, not {value[0]!r:.80}")
        numbers = [_blocks("limit", limit) for limit in fixed_array("limits", value[3], len(ViewLimits._fields))]
        limits = ViewLimits(*numbers)
        if not 1 <= limits.block_size <= 255:
            raise InvalidValue("block_size", f"must be from 1 to 255, not {limits.block_size}")
        figures = [_count("figure", figure) for figure in fixed_array("figures", value[4], len(FIGURES))]
        sequences = tuple(map(_sequence, short_array("sequences", value[7], MAX_SEQUENCES)))
        if sum(len(sequence.table) for sequence in sequences) > 4 * MAX_TABLE_ENTRIES:
            raise InvalidValue("the block tables", f"have more than {MAX_TABLE_ENTRIES} entries")
        return cls(
            _worker("worker", value[1]),
            _count("number", value[2]),
            limits,
            dict(zip(FIGURES, figures, strict=True)),
            _cells(value[5], limits, len(sequences)),
            _blocks("hidden_cells", value[6]),
            sequences,
            _blocks("hidden_sequences", value[8]),
            tuple(map(_row, short_array("batch", value[9], MAX_ROWS))),
            _blocks("hidden_rows", value[10]),
            tuple(map(_step, short_array("steps", value[11], MAX_STEPS))),
            tuple(map(_move, short_array("moves", value[12], MAX_MOVES))),
            _count("hidden_moves", value[13]),
        )


def unpack_table(table: bytes) -> list[int]:
    """Return the ids of the physical blocks in a packed table."""
    ids = array("I")
    ids.frombytes(table)
    return ids.tolist()


def _cells(value: Any, limits: ViewLimits, num_sequences: int) -> Cells:
    columns = fixed_array("cells", value, len(Cells._fields))
    if any(type(column) is not bytes for column in columns):
        raise InvalidValue("cells", "must be packed columns")
    cells = Cells(*columns)
    count = len(cells.flags)
    widths = (4, 2, 1, 1, 1)
    if count > MAX_CELLS or [len(column) for column in columns] != [width * count for width in widths]:
        raise InvalidValue("cells", f"must be columns of one length, at most {MAX_CELLS}")
    ids, owners = unpack_table(cells.ids), array("H")
    owners.frombytes(cells.owners)
    if any(left >= right for left, right in pairwise(ids)) or (ids and ids[-1] >= limits.num_blocks):
        raise InvalidValue("cells", f"must be ascending blocks below {limits.num_blocks}")
    if set(owners) - {*range(num_sequences), NOBODY}:
        raise InvalidValue("owners", f"must be among the {num_sequences} sequences")
    if max(cells.filled, default=0) > limits.block_size:
        raise InvalidValue("filled slots", f"must be at most {limits.block_size}")
    if max(cells.flags, default=0) > CACHED | PINNED:
        raise InvalidValue("flags", f"must be at most {CACHED | PINNED}")
    return cells


def _sequence(value: Any) -> SequenceView:
    request, choice, state, priority, prompt, tokens, filled, blocks, host_blocks, table = fixed_array(
        "sequence", value, 10
    )
    if type(table) is not bytes or len(table) % 4:
        raise InvalidValue("a block table", "must be packed 32-bit numbers")
    if len(table) // 4 > _blocks("blocks", blocks):
        raise InvalidValue("a block table", f"must have at most its {blocks} entries")
    return SequenceView(
        _request("request", request),
        _choice("choice", choice),
        _state("state", state),
        _class("class", priority),
        _prompt_tokens("prompt tokens", prompt),
        _tokens("tokens", tokens),
        _tokens("tokens in the cache", filled),
        blocks,
        _blocks("host blocks", host_blocks),
        table,
    )


def _row(value: Any) -> Row:
    request, choice, tokens, is_prefill = fixed_array("row", value, 4)
    return Row(
        _request("request", request),
        _choice("choice", choice),
        _prompt_tokens("tokens", tokens),
        _flag("is prefill", is_prefill),
    )


def _step(value: Any) -> tuple[int, int]:
    decode, prefill = fixed_array("step", value, 2)
    return _blocks("decode tokens", decode), _blocks("prefill tokens", prefill)


def _move(value: Any) -> Move:
    kind, source, target = fixed_array("move", value, 3)
    return Move(
        _kind("kind", kind),
        _blocks("source", source),
        _blocks("target", target),
    )
