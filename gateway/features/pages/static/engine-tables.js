// The sequences, the block table of one of them, and the map as a table.
import { colourOf } from "/engine-paint.js";

const MAX_ROWS = 16;
const MAX_TABLE = 256;
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

/** The sequences of a frame, what the step did with each, and the block table of the selected one. */
export class Sequences {
  /** `onChoose(name)`: a sequence was selected; `onPeek(name | null)`: the pointer or the focus is on a sequence. */
  constructor(list, note, table, onChoose, onPeek) {
    Object.assign(this, { list, note, onChoose, onPeek });
    this.body = table.tBodies[0];
    this.items = new Map();
    this.rows = [];
  }

  /** `found`: [state, row] of each sequence; `chosen`: the key of the selected one; `block`: the one pointed at. */
  show(found, chosen, block, recording) {
    const shown = found.slice(0, MAX_ROWS);
    const keys = new Set(shown.map(([state, row]) => keyOf(state, row)));
    for (const [key, item] of this.items) {
      if (keys.has(key)) continue;
      item.node.remove();
      this.items.delete(key);
    }
    for (const [state, row] of shown) {
      const key = keyOf(state, row);
      let item = this.items.get(key);
      if (!item) {
        item = this.item(key, row.name);
        this.items.set(key, item);
        this.list.append(item.node);
      }
      setText(item.text, `${row.name} · ${row.tokens}`);
      item.button.setAttribute("aria-pressed", String(key === chosen));
      const told = tellStep(row, state, recording);
      if (told.key !== item.told) {
        item.told = told.key;
        item.step.replaceChildren(...told.parts.map(([text, kind]) => element("span", text, { class: kind })));
      }
    }
    const more = found.length - shown.length;
    this.more ??= this.list.parentNode.insertBefore(element("p", "", { class: "quiet" }), this.list.nextSibling);
    setText(this.more, more ? `and ${more} more` : "");
    const one = found.find(([state, row]) => keyOf(state, row) === chosen);
    this.showTable(...(one ?? []), block);
  }

  item(key, name) {
    const node = element("li");
    const button = element("button", undefined, { type: "button" });
    const dot = document.createElementNS(SVG, "svg");
    dot.setAttribute("viewBox", "0 0 10 10");
    dot.setAttribute("aria-hidden", "true");
    const circle = document.createElementNS(SVG, "circle");
    for (const [attribute, value] of Object.entries({ cx: 5, cy: 5, r: 5, fill: colourOf(name) })) circle.setAttribute(attribute, value);
    dot.append(circle);
    const text = element("span", name);
    const step = element("span", undefined, { class: "did" });
    button.append(dot, text);
    node.append(button, " ", step);
    button.addEventListener("click", () => this.onChoose(key));
    for (const kind of ["pointerenter", "focus"]) button.addEventListener(kind, () => this.onPeek(key));
    for (const kind of ["pointerleave", "blur"]) button.addEventListener(kind, () => this.onPeek(null));
    return { node, button, text, step, told: "" };
  }

  showTable(state, one, block) {
    if (!one) {
      setText(this.note, "No sequence is in this step.");
      this.trim(0);
      return;
    }
    const size = state.limits.block_size;
    const last = one.blocks.length * size - one.tokens;
    const empty = one.blocks.length && last > 0 ? `; ${last} empty ${last === 1 ? "slot" : "slots"}` : "";
    setText(this.note, `${one.name}: ${one.prompt} tokens of prompt and ${Math.max(0, one.tokens - one.prompt)} written, in ${one.blocks.length} blocks${empty}.`);
    this.trim(Math.min(one.blocks.length, MAX_TABLE));
    this.rows.forEach(({ node, cells, slots }, logical) => {
      const physical = one.blocks[logical];
      const filled = Math.min(size, Math.max(0, one.filled - logical * size));
      setText(cells[0], String(logical));
      slots.show(size, filled, colourOf(one.name));
      setText(cells[1].lastChild, `${filled} of ${size}`);
      setText(cells[2], String(physical));
      const shared = state.blocks.get(physical)?.users.length ?? 0;
      setText(cells[3], shared > 1 ? `×${shared}` : "");
      node.className = physical === block ? "on" : "";
    });
  }

  /** Has the table of blocks this many rows. */
  trim(count) {
    while (this.rows.length > count) this.rows.pop().node.remove();
    while (this.rows.length < count) {
      const node = element("tr");
      const cells = Array.from({ length: 4 }, () => node.insertCell());
      const slots = new Slots();
      cells[1].append(slots.node, element("span", "", { class: "unseen" }));
      this.body.append(node);
      this.rows.push({ node, cells, slots });
    }
  }
}

export const keyOf = (state, row) => `${state.worker} ${row.name}`;

/** What a step did with a sequence, as parts with their kinds. */
function tellStep(row, state, { texts, drafts }) {
  const known = texts.get(row.name) ?? [];
  const parts = [];
  if (row.kind === "swapped") parts.push(["swapped out to host memory"]);
  else if (row.kind === "waiting") parts.push(["waits for memory"]);
  else if (row.kind === "prefill") {
    parts.push([`reads ${row.computed} tokens`]);
    const text = known.slice(row.filled - row.computed, row.filled).join("").trim();
    if (text) parts.push([text, "token read"]);
  } else if (row.kind === "decode") {
    const before = row.filled - row.accepted;
    const drafted = drafts.get(row.name)?.[before] ?? [];
    for (let at = before; at < row.filled; at++) parts.push([known[at] ?? "·", "token good"]);
    if (row.computed - 1 > row.accepted) {
      const refused = drafted.slice(row.accepted, row.computed - 1);
      const more = row.computed - 1 - row.accepted - Math.min(4, refused.length || 4);
      for (const text of refused.length ? refused.slice(0, 4) : Array(Math.min(4, row.computed - 1 - row.accepted)).fill("·")) parts.push([text || "·", "token bad"]);
      if (more > 0) parts.push([`and ${more} more`, "quiet"]);
      if (known[row.filled]) parts.push([known[row.filled], "token"]);
      parts.push([`${row.computed - 1} drafted, ${row.accepted} accepted`, "quiet"]);
    } else {
      parts.push(known[row.filled] ? [known[row.filled], "token"] : ["writes a token"]);
      if (row.accepted) parts.push([`${row.accepted} drafted, all accepted`, "quiet"]);
    }
  }
  const shown = parts.map(([text, kind = ""]) => [kind.startsWith("token") ? text.replaceAll("\n", "↵").trim() || "␣" : text, kind]);
  return { key: JSON.stringify(shown), parts: shown };
}

/** The blocks of a frame in words, for people who cannot see the map. */
export class BlockList {
  constructor(details, table) {
    this.details = details;
    this.body = table.tBodies[0];
    this.shownAt = -Infinity;
  }

  show(states, texts, isForced) {
    if (!this.details.open || (!isForced && performance.now() - this.shownAt < 1000)) return;
    this.shownAt = performance.now();
    const all = states.flatMap((state) => [...state.blocks].sort(([a], [b]) => a - b).map(([block, one]) => [state, block, one]));
    const rows = all.slice(0, MAX_TABLE).map(([state, block, one]) => {
      const names = one.users.slice(0, 8).map(([row, logical]) => `${row.name} block ${logical}`);
      if (one.users.length > 8) names.push(`${one.users.length - 8} more`);
      const row = element("tr");
      const is = [one.users.length > 1 && "shared", state.isCached(block) && "cached", state.base.pinned.has(block) && "pinned"];
      for (const text of [`${state.worker} ${block}`, `${one.filled} of ${state.limits.block_size}`, names.join(", "), is.filter(Boolean).join(", "), state.textOf(one, texts)]) {
        row.append(element("td", text));
      }
      return row;
    });
    this.body.replaceChildren(...rows);
  }
}
