// A view of the engine: packed as the gateway sends it, and unpacked for drawing. No part of it becomes markup.

const NOBODY = 0xffff;
const CACHED = 1;
const PINNED = 2;

const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
const words = (text) => new Uint32Array(bytes(text).buffer);

/** Colours that stay with a sequence for as long as the page is open, each far from the one before. */
const hues = new Map();
const colours = new Map();

export function colourOf(name) {
  if (!hues.has(name)) {
    if (hues.size > 20000) hues.clear();
    hues.set(name, (hues.size * 137.508 + 250) % 360);
  }
  const hue = Math.round(hues.get(name));
  if (!colours.has(hue)) colours.set(hue, `oklch(0.7 0.13 ${hue})`);
  return colours.get(hue);
}

/** A view as it arrived. The columns of blocks stay packed: a minute of unpacked views would take much memory. */
export class PackedView {
  /** `at`: arrival time in milliseconds; `length`: size in characters. */
  constructor(data, at, length) {
    Object.assign(this, data, { at, length });
  }

  open() {
    return new View(this);
  }

  /** Shares of memory that hold no token: in the blocks of this view, and if each sequence reserved its maximum length. */
  waste() {
    return (this.wasted ??= this.computeWaste());
  }

  computeWaste() {
    const { blocks_used: used, slots_waste: empty } = this.figures;
    const running = this.sequences.filter((one) => one.num_blocks > 0);
    const held = running.reduce((sum, one) => sum + one.tokens, 0);
    const reserved = running.length * this.limits.max_model_len;
    return {
      paged: used ? empty / (used * this.limits.block_size) : 0,
      reserved: reserved ? Math.max(0, 1 - held / reserved) : 0,
      isIdle: !reserved,
    };
  }
}

/** An unpacked view. Only the drawn one is kept, and all that can be pointed at on the page belongs to it. */
export class View {
  constructor(packed) {
    this.packed = packed;
    for (const name of ["at", "worker", "limits", "figures", "batch", "hidden_cells", "hidden_sequences", "hidden_rows"]) {
      this[name] = packed[name];
    }
    this.sequences = packed.sequences.map((one) => ({ ...one, name: `${one.request}/${one.choice}`, blocks: words(one.table) }));
    const { ids, owners, counts, filled, flags } = packed.cells;
    this.ids = words(ids);
    this.owners = new Uint16Array(bytes(owners).buffer);
    this.counts = bytes(counts);
    this.filled = bytes(filled);
    this.flags = bytes(flags);
    this.indexOf = new Map();
    this.ids.forEach((id, index) => this.indexOf.set(id, index));
    // By block: the sequences that own it, and the block's index in each.
    this.users = new Map();
    this.sequences.forEach((one, sequence) =>
      one.blocks.forEach((block, logical) => {
        const users = this.users.get(block);
        if (users) users.push([sequence, logical]);
        else this.users.set(block, [[sequence, logical]]);
      }),
    );
  }

  waste() {
    return this.packed.waste();
  }

  isUsed(index) {
    return this.counts[index] > 0 || (this.flags[index] & PINNED) > 0;
  }

  isCached(index) {
    return (this.flags[index] & CACHED) > 0;
  }

  isPinned(index) {
    return (this.flags[index] & PINNED) > 0;
  }

  /** The colours of a block's owners, at most `limit`. */
  colours(index, limit = 4) {
    const users = this.users.get(this.ids[index]) ?? [];
    if (users.length) return users.slice(0, limit).map(([sequence]) => colourOf(this.sequences[sequence].name));
    const owner = this.owners[index];
    return owner === NOBODY ? [] : [colourOf(this.sequences[owner].name)];
  }

  /** Describes a block in words. */
  describe(block) {
    const index = this.indexOf.get(block);
    if (index === undefined) return block < this.limits.num_blocks ? `Block ${block} is free.` : "";
    const size = this.limits.block_size;
    const users = this.users.get(block) ?? [];
    const count = this.counts[index];
    const parts = [`Block ${block}: ${this.filled[index]} of ${size} slots filled`];
    if (this.isPinned(index)) parts.push("pinned, it is never given away");
    if (!this.isUsed(index)) parts.push("cached, of nobody now, kept for prompts that begin alike");
    const named = users.slice(0, 6).map(([sequence, logical]) => {
      const first = logical * size;
      return `${this.sequences[sequence].name} as its block ${logical} (tokens ${first}–${first + size - 1})`;
    });
    if (count) parts.push(`${count > 1 ? `shared by ${count} sequences` : "of"} ${named.join(", ")}`);
    if (users.length > named.length) parts.push(`and ${users.length - named.length} more`);
    return `${parts.join("; ")}.`;
  }
}
