// Figures, the sequences, the block table of one sequence, and the map as a table.
import { colourOf } from "/engine-view.js";

const MAX_CHIPS = 48;
const MAX_ROWS = 256;
const SVG = "http://www.w3.org/2000/svg";

export function element(name, text, attributes = {}) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export const percent = (share) => `${(100 * share).toFixed(share && share < 0.0995 ? 1 : 0)} %`;

const FIGURES = [
  ["blocks_used", "Blocks in use", "of all that there are", (v) => [v.figures.blocks_used, `of ${v.limits.num_blocks}`]],
  ["blocks_shared", "Shared blocks", "blocks with two owners or more", (v) => [v.figures.blocks_shared, `${v.figures.sharing_saved_blocks} saved`]],
  ["copies", "Copies on write", "since the worker started", (v) => [v.figures.copies, `${v.figures.forks} forks`]],
  ["blocks_cached", "Cached blocks", "of nobody, kept for prompts that begin alike", (v) => [v.figures.blocks_cached, `${v.figures.evictions} evicted`]],
  ["blocks_pinned", "Pinned blocks", "never given away", (v) => [v.figures.blocks_pinned, ""]],
  ["sequences", "Sequences", "that run; and that wait or are swapped out", (v) => [v.figures.sequences_running, `${v.figures.sequences_waiting + v.figures.sequences_swapped} waiting`]],
  ["prefix", "Prefix cache hits", "of the prompt tokens that were looked up", (v) => [percent(v.figures.prefix_hit_tokens / Math.max(1, v.figures.prefix_query_tokens)), ""]],
  ["waste", "Memory wasted", "slots of blocks in use that hold no token", (v) => [percent(v.waste().paged), v.waste().isIdle ? "" : `reserved: ${percent(v.waste().reserved)}`]],
];

export class Figures {
  constructor(list) {
    this.rows = FIGURES.map(([name, title, hint, read]) => {
      const box = element("div", undefined, { title: hint });
      const value = element("dd");
      const number = element("span", "–", { "data-figure": name });
      const more = element("small", "");
      value.append(number, " ", more);
      box.append(element("dt", title), value);
      list.append(box);
      return { number, more, read };
    });
  }

  show(view) {
    for (const { number, more, read } of this.rows) {
      const [value, extra] = read(view);
      setText(number, String(value));
      setText(more, extra);
    }
  }
}

/** A bar of `size` slots, `filled` of them with tokens, in SVG. */
class Slots {
  constructor() {
    this.node = document.createElementNS(SVG, "svg");
    this.node.setAttribute("aria-hidden", "true");
    this.node.setAttribute("preserveAspectRatio", "none");
    this.key = "";
  }

  show(size, filled, colour) {
    const key = `${size} ${filled} ${colour}`;
    if (key === this.key) return;
    this.key = key;
    this.node.setAttribute("viewBox", `0 0 ${size} 1`);
    const bar = document.createElementNS(SVG, "rect");
    bar.setAttribute("width", filled);
    bar.setAttribute("height", 1);
    bar.setAttribute("fill", colour);
    const cells = Array.from({ length: size <= 32 ? size : 1 }, (_, index, all = size <= 32 ? 1 : size) => {
      const cell = document.createElementNS(SVG, "rect");
      cell.setAttribute("x", index);
      cell.setAttribute("width", all);
      cell.setAttribute("height", 1);
      cell.setAttribute("class", "cell");
      return cell;
    });
    this.node.replaceChildren(bar, ...cells);
  }
}

export class Sequences {
  /** `onChoose(name)`: a sequence was selected; `onPeek(name | null)`: the pointer or the focus is on a sequence. */
  constructor(chips, note, table, onChoose, onPeek) {
    Object.assign(this, { chips, note, onChoose, onPeek });
    this.body = table.tBodies[0];
    this.buttons = new Map();
    this.rows = [];
  }

  show(view, chosen, block) {
    this.showChips(view, chosen);
    const one = view.sequences.find((found) => found.name === chosen);
    if (one) this.showTable(view, one, block);
  }

  /** Removes the block table: the views of another worker follow. */
  clear() {
    for (const { node } of this.rows) node.remove();
    this.rows = [];
  }

  showChips(view, chosen) {
    const shown = view.sequences.slice(0, MAX_CHIPS);
    const names = new Set(shown.map((one) => one.name));
    for (const [name, button] of this.buttons) {
      if (!names.has(name)) {
        button.node.remove();
        this.buttons.delete(name);
      }
    }
    for (const one of shown) {
      let button = this.buttons.get(one.name);
      if (!button) {
        button = this.chip(one.name);
        this.buttons.set(one.name, button);
        this.chips.append(button.node);
      }
      const state = one.state === "running" ? "" : ` ${one.state}`;
      setText(button.text, `${one.name} · ${one.tokens}${state}`);
      button.node.setAttribute("aria-pressed", String(one.name === chosen));
    }
    const more = view.sequences.length - shown.length + view.hidden_sequences;
    this.more ??= this.chips.parentNode.insertBefore(element("p", "", { class: "quiet" }), this.chips.nextSibling);
    setText(this.more, more ? `and ${more} more` : "");
  }

  chip(name) {
    const node = element("button", undefined, { type: "button", title: "tokens; look at its block table" });
    const dot = document.createElementNS(SVG, "svg");
    dot.setAttribute("viewBox", "0 0 10 10");
    dot.setAttribute("aria-hidden", "true");
    const circle = document.createElementNS(SVG, "circle");
    for (const [key, value] of Object.entries({ cx: 5, cy: 5, r: 5, fill: colourOf(name) })) circle.setAttribute(key, value);
    dot.append(circle);
    const text = element("span", name);
    node.append(dot, text);
    node.addEventListener("click", () => this.onChoose(name));
    for (const kind of ["pointerenter", "focus"]) node.addEventListener(kind, () => this.onPeek(name));
    for (const kind of ["pointerleave", "blur"]) node.addEventListener(kind, () => this.onPeek(null));
    return { node, text };
  }

  showTable(view, one, block) {
    const size = view.limits.block_size;
    const where = one.num_host_blocks ? `, swapped out to ${one.num_host_blocks} blocks of host memory` : "";
    const last = one.num_blocks * size - one.tokens;
    const empty = one.num_blocks && last > 0 ? `; ${last} empty slots` : "";
    setText(this.note, `${one.name}: ${one.prompt_tokens} tokens of prompt and ${one.tokens - one.prompt_tokens} written, in ${one.num_blocks} blocks${empty}${where}.`);
    const count = Math.min(one.blocks.length, MAX_ROWS);
    while (this.rows.length > count) this.rows.pop().node.remove();
    while (this.rows.length < count) {
      const node = element("tr");
      const cells = Array.from({ length: 4 }, () => node.insertCell());
      const slots = new Slots();
      cells[1].append(slots.node, element("span", "", { class: "unseen" }));
      this.body.append(node);
      this.rows.push({ node, cells, slots });
    }
    this.rows.forEach(({ node, cells, slots }, logical) => {
      const physical = one.blocks[logical];
      const filled = Math.min(size, Math.max(0, one.filled - logical * size));
      setText(cells[0], String(logical));
      slots.show(size, filled, colourOf(one.name));
      setText(cells[1].lastChild, `${filled} of ${size}`);
      setText(cells[2], String(physical));
      const shared = view.counts[view.indexOf.get(physical)] ?? 0;
      setText(cells[3], shared > 1 ? `×${shared}` : "");
      node.className = physical === block ? "on" : "";
    });
  }
}

/** The map in words, for people who cannot see it. */
export class BlockList {
  constructor(details, table) {
    this.details = details;
    this.body = table.tBodies[0];
    this.shownAt = -Infinity;
  }

  show(view, isForced) {
    if (!this.details.open || (!isForced && performance.now() - this.shownAt < 1000)) return;
    this.shownAt = performance.now();
    const indexes = [...view.ids.keys()].sort((a, b) => view.isUsed(b) - view.isUsed(a) || a - b).slice(0, MAX_ROWS);
    const rows = indexes.map((index) => {
      const row = element("tr");
      const block = view.ids[index];
      const users = view.users.get(block) ?? [];
      const is = [view.counts[index] > 1 && "shared", view.isCached(index) && "cached", view.isPinned(index) && "pinned"];
      const names = users.slice(0, 8).map(([sequence, logical]) => `${view.sequences[sequence].name} block ${logical}`);
      if (users.length > 8) names.push(`${users.length - 8} more`);
      for (const text of [block, `${view.filled[index]} of ${view.limits.block_size}`, names.join(", "), is.filter(Boolean).join(", ")]) {
        row.append(element("td", String(text)));
      }
      return row;
    });
    const more = view.ids.length - indexes.length + view.hidden_cells;
    if (more > 0) {
      const row = element("tr");
      row.append(element("td", `and ${more} more`, { colspan: 4 }));
      rows.push(row);
    }
    this.body.replaceChildren(...rows);
  }
}
