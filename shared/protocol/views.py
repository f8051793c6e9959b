"""The view of an engine that a worker publishes for `/engine`, and its strict msgpack form.

A view holds counts and ids only: neither text, nor token ids, nor whole request ids. The size of a view is bounded; a
view counts the entries that were left out. Figures of each block are packed in columns, so that neither end needs a
loop over the blocks.

    cells     one entry per block that is not free: id u32, owner u16, owners u8, filled slots u8, flags u8
    sequence  [request, choice, state, class, prompt tokens, tokens, tokens in the cache, blocks, host blocks, table]
    member    [request, choice, prompt tokens]          a sequence of the steps since the previous view
    step      [rows, moves]
    row       [member, kind, tokens, tokens in the cache, computed, accepted, start, table]
    move      [kind, source block, target block]        a copy on write, or a swap

`owner` is an index into the sequences; requests are named by the beginning of their id and the number of their prompt.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, NamedTuple

import msgpack

from quire.shared.config.validators import Integer, InvalidValue, OneOf, Text, fixed_array, short_array
from quire.shared.protocol.keys import PRIORITY_CLASSES
from quire.shared.protocol.messages import MAX_CHOICES, MAX_PROMPT_TOKENS, decode

VERSION = 3
# Bounds of one view.
MAX_CELLS = 4096
MAX_SEQUENCES = 256
MAX_TABLE_ENTRIES = 8192  # of all block tables together
MAX_MEMBERS = 256
MAX_STEPS = 256
MAX_ROWS = 2048  # of all steps together
MAX_STEP_ENTRIES = 8192  # of the tables of all rows together
MAX_MOVES = 256  # of all steps together
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
# What a step did with a sequence. `held`: it runs, and the step computed none of its tokens.
KINDS = ("decode", "prefill", "held", "waiting", "swapped")
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
_row_kind = OneOf(KINDS)
_kind = OneOf(MOVES)


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


class Member(NamedTuple):
    """A sequence of the steps that a view tells; it may have ended."""

    request: str
    choice: int
    prompt_tokens: int


class Row(NamedTuple):
    """A sequence in a step.

    member: an index into the members. tokens: the known ones. filled: tokens in the cache after the step. computed:
    positions that the step computed; of a decode these are one and its drafted tokens. accepted: drafted tokens that
    were accepted. table: u32 per block, from block number `start` of the member on; before it, the table is that of the
    member's previous row in the same view.
    """

    member: int
    kind: str
    tokens: int
    filled: int
    computed: int = 0
    accepted: int = 0
    start: int = 0
    table: bytes = b""


class Move(NamedTuple):
    """A block that was copied to another. In a swap one of the two is in host memory."""

    kind: str
    source: int
    target: int


class StepView(NamedTuple):
    """A step: the sequences that were unfinished when it began, and the blocks that it moved first."""

    rows: tuple[Row, ...]
    moves: tuple[Move, ...] = ()


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
    # The steps since the previous view. Steps of many sequences are left out, but for the latest step.
    members: tuple[Member, ...] = ()
    steps: tuple[StepView, ...] = ()
    hidden_steps: int = 0

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
                self.members,
                self.steps,
                self.hidden_steps,
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
        value = fixed_array("view", message, 12)
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
        members = tuple(map(_member, short_array("members", value[9], MAX_MEMBERS)))
        steps = tuple(_step(step, len(members)) for step in short_array("steps", value[10], MAX_STEPS))
        rows = [row for step in steps for row in step.rows]
        if len(rows) > MAX_ROWS or sum(len(row.table) for row in rows) > 4 * MAX_STEP_ENTRIES:
            raise InvalidValue("the steps", f"have more than {MAX_ROWS} rows or {MAX_STEP_ENTRIES} blocks")
        if sum(len(step.moves) for step in steps) > MAX_MOVES:
            raise InvalidValue("the steps", f"have more than {MAX_MOVES} moves")
        return cls(
            _worker("worker", value[1]),
            _count("number", value[2]),
            limits,
            dict(zip(FIGURES, figures, strict=True)),
            _cells(value[5], limits, len(sequences)),
            _blocks("hidden_cells", value[6]),
            sequences,
            _blocks("hidden_sequences", value[8]),
            members,
            steps,
            _count("hidden_steps", value[11]),
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
    if len(_packed_table(table)) // 4 > _blocks("blocks", blocks):
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


def _packed_table(table: Any) -> bytes:
    if type(table) is not bytes or len(table) % 4:
        raise InvalidValue("a block table", "must be packed 32-bit numbers")
    return table


def _member(value: Any) -> Member:
    request, choice, prompt = fixed_array("member", value, 3)
    return Member(_request("request", request), _choice("choice", choice), _prompt_tokens("prompt tokens", prompt))


def _step(value: Any, num_members: int) -> StepView:
    rows, moves = fixed_array("step", value, 2)
    return StepView(
        tuple(_row(row, num_members) for row in short_array("rows", rows, MAX_ROWS)),
        tuple(map(_move, short_array("moves", moves, MAX_MOVES))),
    )


def _row(value: Any, num_members: int) -> Row:
    member, kind, tokens, filled, computed, accepted, start, table = fixed_array("row", value, 8)
    drafted = max(0, _tokens("computed", computed) - 1) if kind == "decode" else 0
    return Row(
        Integer(0, num_members - 1)("member", member),
        _row_kind("kind", kind),
        _tokens("tokens", tokens),
        _tokens("tokens in the cache", filled),
        computed,
        Integer(0, drafted)("accepted", accepted),
        _blocks("start", start),
        _packed_table(table),
    )


def _move(value: Any) -> Move:
    kind, source, target = fixed_array("move", value, 3)
    return Move(
        _kind("kind", kind),
        _blocks("source", source),
        _blocks("target", target),
    )
