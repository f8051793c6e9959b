// The block map: one canvas for the squares, and one above it for the arcs of copies.
import { colourOf } from "/engine-view.js";
import { fit } from "/engine-paint.js";

const SIZES = [30, 24, 20, 16, 13, 10, 8, 6];
const MAX_HEIGHT = 460;
const GAP = 13;
const KEEP_MS = 4000; // how long a row stays after it has become empty
const ARC_MS = 1400;
const VIEW_MS = 100; // between two views
const still = matchMedia("(prefers-reduced-motion: reduce)");

export class BlockMap {
  constructor(box, base, overlay, onBlock) {
    Object.assign(this, { box, base, overlay, onBlock });
    this.size = SIZES[0];
    this.rows = [];
    this.usedAt = new Map();
    this.arcs = [];
    this.block = null;
    this.sequence = null;
    this.showsAll = false;
    this.isPast = false; // an earlier view is shown: rows that are empty in it are left out
    box.addEventListener("pointermove", (event) => this.point(event, false));
    box.addEventListener("pointerdown", (event) => this.point(event, true));
    box.addEventListener("pointerleave", () => this.choose(this.kept ?? null));
    box.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.view && this.draw()).observe(box);
  }

  /** Forgets the copies and the rows of a worker, because the views of another one follow. */
  clear() {
    this.arcs = [];
    this.usedAt.clear();
    if (this.view) this.drawArcs(0);
  }

  show(view, colours) {
    this.view = view;
    this.colours = colours;
    if (!view.figures.blocks_used) this.arcs = []; // what was copied is over
    this.draw();
  }

  /** Shows the copies of all views since the last call, one after the other until the next view arrives. */
  animate(moves, limit = 40) {
    const now = performance.now();
    const copies = moves.filter((move) => move.kind === "copy").slice(-limit);
    this.arcs.push(...copies.map((move, index) => ({ ...move, at: now + (still.matches ? 0 : (index * VIEW_MS) / copies.length) })));
    this.arcs = this.arcs.slice(-2 * limit);
    this.tick();
  }

  layout(width) {
    const { view } = this;
    const now = performance.now();
    const place = (size) => {
      let cols = Math.max(8, Math.floor(width / size));
      if (cols > 16) cols -= cols % 8;
      const rows = [];
      const last = Math.ceil(view.limits.num_blocks / cols);
      const used = new Set();
      view.ids.forEach((id, index) => {
        if (view.isUsed(index)) used.add(Math.floor(id / cols));
      });
      for (const row of used) this.usedAt.set(`${cols}:${row}`, now);
      let y = 0;
      let before = -1;
      for (let row = 0; row < last; row++) {
        const seen = this.usedAt.get(`${cols}:${row}`);
        if (!this.showsAll && row > 0 && !(seen && now - seen < (this.isPast ? 1 : KEEP_MS))) continue;
        if (row > before + 1) y += GAP;
        rows.push({ row, y });
        y += size;
        before = row;
      }
      if (before < last - 1) y += GAP;
      return { size, cols, rows, last, height: y };
    };
    if (this.usedAt.size > 20000) this.usedAt.clear();
    const start = SIZES.indexOf(this.size);
    let found = place(this.size);
    for (let i = start + 1; i < SIZES.length && found.height > MAX_HEIGHT; i++) found = place(SIZES[i]);
    for (let i = start - 1; i >= 0 && found.size === this.size; i--) {
      const larger = place(SIZES[i]);
      if (larger.height > 0.6 * MAX_HEIGHT) break;
      found = larger;
      this.size = found.size;
    }
    this.size = found.size;
    Object.assign(this, { cols: found.cols, rows: found.rows, last: found.last });
    this.rowAt = new Map(found.rows.map(({ row, y }) => [row, y]));
    return found.height;
  }

  where(block) {
    const y = this.rowAt.get(Math.floor(block / this.cols));
    return y === undefined ? null : { x: (block % this.cols) * this.size, y };
  }

  draw() {
    const { view, colours } = this;
    const width = this.box.clientWidth;
    if (!width) return;
    const height = Math.max(this.size, this.layout(width));
    this.base.style.height = `${height}px`;
    const paint = fit(this.base, width, height);
    const { size, cols } = this;
    const inner = size - (size > 9 ? 2 : 1);
    const chosen = this.sequence && view.sequences.find((one) => one.name === this.sequence);
    const mine = chosen ? new Map([...chosen.blocks].map((block, logical) => [block, logical])) : null;
    paint.font = `${Math.max(8, Math.round(size * 0.42))}px ${colours.font}`;
    paint.textAlign = "center";
    paint.textBaseline = "middle";
    let before = -1;
    for (const { row, y } of this.rows) {
      if (row > before + 1) this.gap(paint, (row - before - 1) * cols, y - GAP, width);
      before = row;
      for (let col = 0; col < cols; col++) {
        const block = row * cols + col;
        if (block >= view.limits.num_blocks) break;
        this.cell(paint, block, col * size, y, inner, mine);
      }
    }
    if (before < this.last - 1) {
      this.gap(paint, view.limits.num_blocks - (before + 1) * cols, height - GAP, width);
    }
    this.drawArcs(performance.now());
  }

  gap(paint, count, y, width) {
    paint.globalAlpha = 1;
    paint.fillStyle = this.colours.quiet;
    paint.save();
    paint.font = `10px ${this.colours.font}`;
    paint.textAlign = "left";
    paint.fillText(`⋯ ${count} unused blocks`, 2, y + GAP / 2, width);
    paint.restore();
  }

  cell(paint, block, x, y, inner, mine) {
    const { view, colours, size } = this;
    const index = view.indexOf.get(block);
    paint.globalAlpha = 1;
    if (index === undefined) {
      paint.strokeStyle = colours.line;
      paint.lineWidth = 1;
      paint.strokeRect(x + 0.5, y + 0.5, inner - 1, inner - 1);
    } else if (!view.isUsed(index)) {
      paint.strokeStyle = colours.control;
      paint.lineWidth = 0.7;
      paint.globalAlpha = mine ? 0.3 : 0.75;
      paint.beginPath();
      for (let at = 4; at < 2 * inner; at += 5) {
        paint.moveTo(x + Math.min(at, inner), y + Math.max(0, at - inner));
        paint.lineTo(x + Math.max(0, at - inner), y + Math.min(at, inner));
      }
      paint.stroke();
      paint.strokeRect(x + 0.5, y + 0.5, inner - 1, inner - 1);
    } else {
      const found = view.colours(index);
      const owners = found.length ? found : [colours.quiet];
      const logical = mine?.get(block);
      const alpha = mine && logical === undefined ? 0.3 : 1;
      const share = view.filled[index] / view.limits.block_size;
      owners.forEach((colour, band) => {
        paint.fillStyle = colour;
        const top = y + (inner * band) / owners.length;
        const tall = inner / owners.length;
        paint.globalAlpha = 0.22 * alpha;
        paint.fillRect(x, top, inner, tall);
        paint.globalAlpha = alpha;
        paint.fillRect(x, top, inner * share, tall);
      });
      if (view.isPinned(index)) {
        paint.strokeStyle = colours.text;
        paint.lineWidth = 2;
        paint.strokeRect(x + 1, y + 1, inner - 2, inner - 2);
      }
      const count = view.counts[index];
      const text = logical !== undefined ? `${logical}` : count > 1 ? `×${count}` : "";
      if (text && size >= 16) {
        paint.fillStyle = share > 0.5 && alpha === 1 ? "#000" : colours.text;
        paint.fillText(text, x + inner / 2, y + inner / 2 + 0.5);
      } else if (count > 1 && size >= 8) {
        paint.fillStyle = colours.text;
        paint.fillRect(x + inner / 2 - 1.5, y + inner / 2 - 1.5, 3, 3);
      }
    }
    if (block === this.block) {
      paint.globalAlpha = 1;
      paint.strokeStyle = colours.text;
      paint.lineWidth = 2;
      paint.strokeRect(x - 0.5, y - 0.5, inner + 1, inner + 1);
    }
  }

  tick() {
    if (this.frame) return;
    this.frame = requestAnimationFrame((now) => {
      this.frame = 0;
      this.arcs = this.arcs.filter((arc) => now - arc.at < ARC_MS);
      this.drawArcs(now);
      if (this.arcs.length) this.tick();
    });
  }

  drawArcs(now) {
    const width = this.box.clientWidth;
    const paint = fit(this.overlay, width, this.base.clientHeight);
    if (!this.view) return;
    this.drawPath(paint);
    paint.lineWidth = 2;
    paint.strokeStyle = paint.fillStyle = this.colours.error;
    const half = this.size / 2 - 1;
    for (const arc of this.arcs) {
      const [from, to] = [this.where(arc.source), this.where(arc.target)];
      if (!from || !to || now < arc.at) continue;
      const age = (now - arc.at) / ARC_MS;
      const part = still.matches ? 1 : Math.min(1, age * 3);
      const [ax, ay, bx, by] = [from.x + half, from.y + half, to.x + half, to.y + half];
      const cx = (ax + bx) / 2;
      const cy = Math.max(2, Math.min(ay, by) - 14 - Math.abs(bx - ax) * 0.15);
      paint.globalAlpha = age < 0.6 ? 1 : Math.max(0, (1 - age) / 0.4);
      paint.beginPath();
      paint.moveTo(ax, ay);
      let [x, y] = [ax, ay];
      for (let i = 1; i <= 20; i++) {
        const t = (i / 20) * part;
        x = (1 - t) * (1 - t) * ax + 2 * t * (1 - t) * cx + t * t * bx;
        y = (1 - t) * (1 - t) * ay + 2 * t * (1 - t) * cy + t * t * by;
        paint.lineTo(x, y);
      }
      paint.stroke();
      paint.beginPath();
      paint.arc(x, y, 3.5, 0, 7);
      paint.fill();
    }
    paint.globalAlpha = 1;
  }

  /** Joins the blocks of the selected sequence in its own order. */
  drawPath(paint) {
    const one = this.sequence && this.view.sequences.find((found) => found.name === this.sequence);
    if (!one || this.size < 10) return;
    paint.strokeStyle = colourOf(one.name);
    paint.lineWidth = 1.5;
    paint.globalAlpha = 0.8;
    paint.beginPath();
    let isDown = false;
    for (const block of one.blocks) {
      const at = this.where(block);
      if (at && isDown) paint.lineTo(at.x + this.size / 2 - 1, at.y + this.size - 3);
      else if (at) paint.moveTo(at.x + this.size / 2 - 1, at.y + this.size - 3);
      isDown = Boolean(at);
    }
    paint.stroke();
    paint.globalAlpha = 1;
  }

  point(event, isKept) {
    if (!this.view || !this.rows.length) return;
    const box = this.base.getBoundingClientRect();
    const y = event.clientY - box.top;
    const col = Math.floor((event.clientX - box.left) / this.size);
    const row = this.rows.find((one) => y >= one.y && y < one.y + this.size);
    const block = row && col < this.cols ? row.row * this.cols + col : null;
    if (isKept) this.kept = block;
    this.choose(block);
  }

  key(event) {
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: this.cols, ArrowUp: -this.cols };
    if (!this.view || !(event.key in steps)) return;
    event.preventDefault();
    const step = steps[event.key];
    const used = [...this.view.ids].filter((_, index) => this.view.isUsed(index));
    const there = Math.abs(step) === 1 && used.length ? used : null;
    const from = this.block ?? (step > 0 ? -1 : this.view.limits.num_blocks);
    let block = from + step;
    if (there) block = step > 0 ? there.find((id) => id > from) : there.findLast((id) => id < from);
    if (block === undefined || block < 0 || block >= this.view.limits.num_blocks) return;
    this.kept = block;
    this.choose(block);
  }

  choose(block) {
    if (block === this.block) return;
    this.block = block;
    this.draw();
    this.onBlock(block);
  }
}
