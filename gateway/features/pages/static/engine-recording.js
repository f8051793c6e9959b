// A recording of engines: what their views tell, as frames, one for each step. No part of a view becomes markup.

const CACHED = 1;
const PINNED = 2;
const KINDS = ["decode", "prefill", "held", "waiting", "swapped"];
const MAX_FRAMES = 4000;

const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
const words = (text) => new Uint32Array(bytes(text).buffer);
export const nameOf = (request, choice) => `${request}/${choice}`;

/** The state of one engine in a step. `rows`: its sequences; `moves`: [kind, source, target] of the step. */
export class EngineState {
  constructor(worker, limits, facts) {
    Object.assign(this, { worker, limits, rows: [], moves: [], base: EMPTY, host: new Map(), isGone: false, isStep: false }, facts);
  }

  /** By block in use: {users: [[row, logical]...], filled, known}. */
  get blocks() {
    return (this.computed ??= this.computeBlocks());
  }

  computeBlocks() {
    const size = this.limits.block_size;
    const found = new Map();
    for (const row of this.rows) {
      row.blocks.forEach((block, logical) => {
        const slots = (tokens) => Math.min(size, Math.max(0, tokens - logical * size));
        const one = found.get(block) ?? { users: [], filled: 0, known: 0 };
        one.users.push([row, logical]);
        one.filled = Math.max(one.filled, slots(row.filled));
        one.known = Math.max(one.known, slots(row.tokens), one.filled);
        found.set(block, one);
      });
    }
    // Blocks of sequences that the view leaves out, and pinned blocks.
    for (const [block, { filled, isUsed }] of this.base.cells) {
      if (isUsed && !found.has(block) && (this.base.isCut || this.base.pinned.has(block))) found.set(block, { users: [], filled, known: filled });
    }
    return found;
  }

  isCached(block) {
    return this.base.cached.has(block);
  }

  /** {used, shared, saved, paged, reserved}: blocks, and shares of memory that hold no token. */
  get figures() {
    return (this.summed ??= this.sum());
  }

  sum() {
    const { block_size: size, max_model_len: longest } = this.limits;
    const [used, entries] = [this.blocks.size, [...this.blocks.values()].reduce((sum, one) => sum + one.users.length, 0)];
    const running = this.rows.filter((row) => row.blocks.length);
    const held = running.reduce((sum, row) => sum + row.tokens, 0);
    const known = [...this.blocks.values()].reduce((sum, one) => sum + one.known, 0);
    return {
      used,
      slots: used * size,
      empty: used * size - known,
      shared: [...this.blocks.values()].filter((one) => one.users.length > 1).length,
      saved: Math.max(0, entries - used),
      reservedSlots: running.length * longest,
      reservedEmpty: Math.max(0, running.length * longest - held),
    };
  }

  /** Describes a block in words. */
  describe(block, texts) {
    if (block === null || block >= this.limits.num_blocks) return "";
    const one = this.blocks.get(block);
    if (!one) return `Block ${block} is ${this.isCached(block) ? "cached: of nobody now, kept for prompts that begin alike" : "free"}.`;
    const size = this.limits.block_size;
    const parts = [`Block ${block}: ${one.filled} of ${size} slots filled`];
    if (this.base.pinned.has(block)) parts.push("pinned");
    const named = one.users.slice(0, 6).map(([row, logical]) => `${row.name} as its block ${logical}`);
    if (named.length) parts.push(`${one.users.length > 1 ? `shared by ${one.users.length} sequences` : "of"} ${named.join(", ")}`);
    const text = this.textOf(one, texts);
    return `${parts.join("; ")}.${text ? ` “${text.trim()}”` : ""}`;
  }

  /** The text of a block's tokens, if it is known. */
  textOf(one, texts) {
    const found = one.users.find(([row]) => texts.has(row.name));
    if (!found) return "";
    const first = found[1] * this.limits.block_size;
    return texts.get(found[0].name).slice(first, first + one.filled).join("");
  }
}

const EMPTY = { cells: new Map(), cached: new Set(), pinned: new Set(), isCut: false };

/** What a view says of its blocks. */
function readCells(view) {
  const { ids, counts, filled, flags } = view.cells;
  const base = { cells: new Map(), cached: new Set(), pinned: new Set(), isCut: view.hidden_sequences > 0 };
  const [count, fill, flag] = [counts, filled, flags].map(bytes);
  words(ids).forEach((block, index) => {
    const isPinned = (flag[index] & PINNED) > 0;
    base.cells.set(block, { filled: fill[index], isUsed: count[index] > 0 || isPinned });
    if (flag[index] & CACHED) base.cached.add(block);
    if (isPinned) base.pinned.add(block);
  });
  return base;
}

export class Recording {
  /** `workers`: the names of all that are recorded, if they are known before. */
  constructor(workers = []) {
    this.workers = workers;
    this.frames = []; // each: the states of all workers, by their names
    this.texts = new Map(); // by sequence: the text of each of its tokens
    this.drafts = new Map(); // by sequence and number of tokens before: the text of each drafted token
    this.last = new Map(); // by worker: its newest state
    this.waiting = new Map(); // by worker: states that are not frames yet
    this.dropped = 0;
  }

  /** Adds a view, or {worker, gone: true}. Steps of several workers at the same time become the same frames. */
  add(view) {
    if (this.waiting.has(view.worker) || view.gone) this.flush();
    this.waiting.set(view.worker, this.statesOf(view));
    const known = [...this.workers, ...this.last.keys()];
    if (view.gone || known.every((worker) => this.last.get(worker)?.isGone || this.waiting.has(worker))) this.flush();
  }

  statesOf(view) {
    const before = this.last.get(view.worker);
    if (view.gone) return this.keep([new EngineState(view.worker, before.limits, { isGone: true })]);
    const { worker, limits } = view;
    const base = readCells(view);
    const listed = view.sequences.map((one) => ({
      ...one,
      name: nameOf(one.request, one.choice),
      kind: one.state === "running" ? "held" : one.state,
      prompt: one.prompt_tokens,
      blocks: [...words(one.table)],
      computed: 0,
      accepted: 0,
    }));
    const tables = new Map(listed.map((one) => [one.name, one.blocks]));
    let host = before?.host ?? new Map();
    let owners = before?.blocks ?? new Map();
    const told = new Map();
    const states = view.steps.map(([rows, moves]) => {
      const named = rows.map(([member, kind, tokens, filled, computed, accepted, start, table]) => {
        const [request, choice, prompt] = view.members[member];
        const name = nameOf(request, choice);
        if (table) told.set(name, [...(told.get(name) ?? []).slice(0, start), ...table]);
        const hasBlocks = kind < 3;
        const blocks = hasBlocks ? (told.get(name) ?? tables.get(name) ?? []) : [];
        return { name, request, choice, prompt, kind: KINDS[kind], tokens, filled, computed, accepted, blocks };
      });
      host = hostAfter(host, owners, named, moves);
      const state = new EngineState(worker, limits, { rows: named, moves, host, base: before?.base ?? base, isStep: true });
      owners = state.blocks;
      return state;
    });
    // The state after the last step, if nothing runs any more; and that of a view without steps.
    if (!states.length || !listed.length) states.push(new EngineState(worker, limits, { rows: listed, base, host: listed.length ? host : new Map() }));
    const isSame = !view.steps.length && !listed.length && before && !before.rows.length && !before.isGone;
    this.keep(states, base);
    return isSame ? [] : states;
  }

  keep(states, base) {
    const last = states.at(-1);
    this.last.set(last.worker, base ? new EngineState(last.worker, last.limits, { ...last, base, computed: undefined, summed: undefined }) : last);
    return states;
  }

  /** Makes frames of the states that wait. */
  flush() {
    const count = Math.max(0, ...[...this.waiting.values()].map((states) => states.length));
    const kept = this.frames.at(-1)?.filter((state) => this.last.has(state.worker)) ?? [];
    const before = new Map(kept.map((state) => [state.worker, state]));
    for (let at = 0; at < count; at++) {
      const now = new Map([...before].map(([worker, state]) => [worker, state.still()]));
      for (const [worker, states] of this.waiting) {
        if (!states.length) continue; // nothing has changed
        const index = Math.floor((at * states.length) / count);
        const isNew = at === 0 || index !== Math.floor(((at - 1) * states.length) / count);
        now.set(worker, isNew ? states[index] : states[index].still());
      }
      this.frames.push([...now.values()].sort((a, b) => (a.worker < b.worker ? -1 : 1)));
    }
    this.waiting.clear();
    if (this.frames.length > MAX_FRAMES) {
      this.dropped += this.frames.length - MAX_FRAMES;
      this.frames.splice(0, this.frames.length - MAX_FRAMES);
    }
  }

  forget(worker) {
    this.last.delete(worker);
    this.waiting.delete(worker);
  }
}

/** The same state without the moves of its step, which are over. */
EngineState.prototype.still = function still() {
  if (!this.moves.length) return this;
  const { worker, limits, ...facts } = this;
  return new EngineState(worker, limits, { ...facts, moves: [] });
};

/** The blocks of host memory after the moves of a step: by block, the sequence that is swapped out to it. */
function hostAfter(host, owners, rows, moves) {
  const swapped = new Set(rows.filter((row) => row.kind === "swapped").map((row) => row.name));
  const now = new Map([...host].filter(([, name]) => swapped.has(name)));
  for (const [kind, source, target] of moves) {
    if (kind === "swap_out") now.set(target, owners.get(source)?.users.find(([row]) => swapped.has(row.name))?.[0].name ?? "");
  }
  return now;
}
