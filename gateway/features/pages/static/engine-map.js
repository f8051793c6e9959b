// The map of the blocks of one worker: one canvas for the blocks, and one above it for the moves of the step.
import { arc, colourOf, fit, hatch, writeLines } from "/engine-paint.js";

// Numbers of columns, and from which width and height on a block shows the text of its tokens.
const COLUMNS = [6, 8, 12, 16, 24, 32, 48, 64, 96];
const TEXT = { width: 56, height: 27 };
const TALLEST = 64;
const GAP = 13;
// In a larger pool, rows without a block in use are left out.
const WHOLE = 192;
const HOST_TITLE = 20;
const still = matchMedia("(prefers-reduced-motion: reduce)");

export class BlockMap {
  /** `onBlock(block | null)`: the pointer or the keys are on a block. `maxHeight()`: of the map, in pixels. */
  constructor(box, { onBlock, maxHeight }) {
    Object.assign(this, { box, onBlock, maxHeight });
    [this.base, this.overlay] = box.querySelectorAll("canvas");
    this.rows = [];
    this.block = null;
    this.sequence = null; // the one whose blocks are joined
    this.columns = 0;
    this.began = 0;
    box.addEventListener("pointermove", (event) => this.point(event, false));
    box.addEventListener("pointerdown", (event) => this.point(event, true));
    box.addEventListener("pointerleave", () => this.choose(this.kept ?? null));
    box.addEventListener("keydown", (event) => this.key(event));
    // The width is kept, because reading it after a change of the page would compute the layout at once.
    this.width = 0;
    new ResizeObserver(([{ contentRect }]) => {
      if (contentRect.width === this.width) return;
      this.width = contentRect.width;
      if (this.state) this.draw();
    }).observe(box);
  }

  /** `reserve`: by sequence, the first block of the memory reserved for it; null: the blocks as they are. */
  show(state, colours, texts, reserve = null) {
    const isNew = state !== this.state;
    Object.assign(this, { state, colours, texts, reserve });
    this.draw();
    if (isNew) this.began = performance.now();
    this.animate();
  }

  /** Chooses the columns: blocks as large as the height allows. */
  layout(width) {
    const { num_blocks: count, num_host_blocks: host } = this.state.limits;
    const room = this.maxHeight();
    const used = count > WHOLE ? new Set([0]) : null;
    const place = (cols) => {
      const w = width / cols;
      const last = Math.ceil(count / cols);
      const hosts = host && host <= WHOLE ? { y: 0, count: host, rows: Math.ceil(host / cols) } : null;
      let rows = [...Array(last).keys()];
      if (used) rows = [...new Set([0, ...[...this.state.blocks.keys()].map((block) => Math.floor(block / cols))])].sort((a, b) => a - b);
      const fitting = (room - (hosts ? HOST_TITLE : 0)) / (rows.length + (hosts?.rows ?? 0));
      const h = w >= TEXT.width ? Math.min(TALLEST, w * 0.6, Math.max(TEXT.height, fitting)) : Math.max(6, Math.min(w, 34, Math.max(14, fitting)));
      let y = 0;
      let before = -1;
      rows = rows.map((row) => {
        if (row > before + 1) y += GAP;
        before = row;
        y += h;
        return { row, y: y - h };
      });
      if (before < last - 1) y += GAP;
      if (hosts) {
        hosts.y = y + HOST_TITLE;
        y = hosts.y + hosts.rows * h;
      }
      return { cols, w, h, rows, last, height: y, hosts };
    };
    let found = null;
    for (const cols of COLUMNS) {
      if (cols > count && found) break;
      found = place(Math.min(cols, count));
      if (found.height <= room + 1 || found.w < 8) break;
    }
    Object.assign(this, found);
    this.rowAt = new Map(found.rows.map(({ row, y }) => [row, y]));
  }

  where(block, isHost = false) {
    if (isHost) return this.hosts && { x: (block % this.cols) * this.w, y: this.hosts.y + Math.floor(block / this.cols) * this.h };
    const y = this.rowAt.get(Math.floor(block / this.cols));
    return y === undefined ? null : { x: (block % this.cols) * this.w, y };
  }

  draw() {
    const { state, colours, width } = this;
    if (!width) return;
    this.layout(width);
    this.base.style.height = `${this.height}px`;
    const paint = fit(this.base, width, this.height);
    paint.textBaseline = "middle";
    const chosen = this.sequence && !this.reserve && state.rows.find((row) => row.name === this.sequence);
    this.mine = chosen ? new Map(chosen.blocks.map((block, logical) => [block, logical])) : null;
    let before = -1;
    for (const { row, y } of this.rows) {
      if (row > before + 1) this.gap(paint, (row - before - 1) * this.cols, y - GAP);
      before = row;
      for (let block = row * this.cols; block < Math.min((row + 1) * this.cols, state.limits.num_blocks); block++) {
        this.cell(paint, block, (block % this.cols) * this.w, y);
      }
    }
    if (before < this.last - 1) this.gap(paint, state.limits.num_blocks - (before + 1) * this.cols, this.height - GAP);
    if (this.hosts) this.drawHost(paint);
    if (state.isGone) this.cross(paint, width);
    this.drawMoves(1);
  }

  gap(paint, count, y) {
    paint.fillStyle = this.colours.quiet;
    paint.font = `10px ${this.colours.font}`;
    paint.textAlign = "left";
    paint.fillText(`⋯ ${count} unused blocks`, 2, y + GAP / 2);
  }

  drawHost(paint) {
    paint.fillStyle = this.colours.quiet;
    paint.font = `12px ${this.colours.font}`;
    paint.textAlign = "left";
    paint.fillText("Host memory", 1, this.hosts.y - HOST_TITLE / 2);
    for (let block = 0; block < this.hosts.count; block++) {
      const { x, y } = this.where(block, true);
      const name = this.state.host.get(block);
      this.frame(paint, x, y, name ? this.colours.control : this.colours.line);
      if (name) this.fill(paint, x, y, [colourOf(name)], 1, 0.5);
    }
  }

  cross(paint, width) {
    paint.fillStyle = this.colours.back;
    paint.fillRect(width / 2 - 90, this.height / 2 - 32, 180, 64);
    paint.fillStyle = this.colours.error;
    paint.textAlign = "center";
    paint.font = `700 34px ${this.colours.font}`;
    paint.fillText("killed", width / 2, this.height / 2);
  }

  frame(paint, x, y, colour, lineWidth = 1) {
    paint.globalAlpha = 1;
    paint.strokeStyle = colour;
    paint.lineWidth = lineWidth;
    paint.strokeRect(x + 0.5, y + 0.5, this.inner - 1, this.tall - 1);
  }

  get inner() {
    return this.w - (this.w > 10 ? 3 : 1);
  }

  get tall() {
    return this.h - (this.h > 10 ? 3 : 1);
  }

  /** Fills a share of a block, with a band for each owner. */
  fill(paint, x, y, owners, share, alpha = 1) {
    const hasText = this.w >= TEXT.width;
    owners.forEach((colour, band) => {
      paint.fillStyle = colour;
      const top = y + (this.tall * band) / owners.length;
      const height = this.tall / owners.length;
      paint.globalAlpha = 0.16 * alpha;
      paint.fillRect(x, top, this.inner, height);
      paint.globalAlpha = (hasText ? 0.42 : 1) * alpha;
      paint.fillRect(x, top, this.inner * share, height);
      paint.globalAlpha = alpha;
      if (hasText) paint.fillRect(x, top, 3, height);
    });
    paint.globalAlpha = 1;
  }

  cell(paint, block, x, y) {
    const { state, colours } = this;
    if (this.reserve) this.reservedCell(paint, block, x, y);
    else {
      const one = state.isGone ? undefined : state.blocks.get(block);
      if (!one) {
        this.frame(paint, x, y, colours.line);
        if (!state.isGone && state.isCached(block)) hatch(paint, { x, y, width: this.inner, height: this.tall }, colours.control, this.mine ? 0.2 : 0.5);
      } else this.used(paint, block, one, x, y);
    }
    if (block === this.block) this.frame(paint, x - 0.5, y - 0.5, colours.text, 2);
  }

  used(paint, block, one, x, y) {
    const { state, colours } = this;
    const names = one.users.slice(0, 4).map(([row]) => colourOf(row.name));
    const logical = this.mine?.get(block);
    const alpha = this.mine && logical === undefined ? 0.3 : 1;
    this.fill(paint, x, y, names.length ? names : [colours.quiet], one.filled / state.limits.block_size, alpha);
    if (state.base.pinned.has(block)) this.frame(paint, x, y, colours.text, 2);
    const text = state.textOf(one, this.texts);
    const label = logical !== undefined ? `${logical}` : one.users.length > 1 ? `×${one.users.length}` : "";
    paint.globalAlpha = alpha;
    if (text && this.w >= TEXT.width) writeLines(paint, text, { x, y, width: this.inner, height: this.tall, corner: label ? 20 : 0 }, this.colours);
    if (label && this.h >= 14) {
      paint.fillStyle = colours.text;
      paint.font = `600 ${this.w >= TEXT.width ? 11 : Math.max(8, this.h * 0.45)}px ${colours.font}`;
      paint.textAlign = this.w >= TEXT.width ? "right" : "center";
      paint.fillText(label, this.w >= TEXT.width ? x + this.inner - 4 : x + this.inner / 2, this.w >= TEXT.width ? y + 8 : y + this.tall / 2);
    }
    paint.globalAlpha = 1;
  }

  /** A block of memory that is reserved for one sequence at its maximum length. */
  reservedCell(paint, block, x, y) {
    const size = this.state.limits.block_size;
    const each = Math.floor(this.state.limits.max_model_len / size);
    const found = [...this.reserve].find(([, first]) => block >= first && block < first + each);
    if (!found) return this.frame(paint, x, y, this.colours.line);
    const row = this.state.rows.find((one) => one.name === found[0]);
    const filled = row ? Math.min(size, Math.max(0, row.filled - (block - found[1]) * size)) : 0;
    this.fill(paint, x, y, [colourOf(found[0])], filled / size);
    const text = (this.texts.get(found[0]) ?? []).slice((block - found[1]) * size, (block - found[1]) * size + filled).join("");
    if (text && this.w >= TEXT.width) writeLines(paint, text, { x, y, width: this.inner, height: this.tall, corner: 0 }, this.colours);
  }

  /** Draws the moves of the step from their beginning to their end. */
  animate() {
    cancelAnimationFrame(this.ticking);
    if (!this.state.moves.length || still.matches) return;
    const tick = (now) => {
      const part = Math.min(1, Math.max(0.02, (now - this.began) / 320));
      this.drawMoves(part);
      if (part < 1) this.ticking = requestAnimationFrame(tick);
    };
    tick(performance.now());
  }

  drawMoves(part) {
    if (!this.width) return;
    const paint = fit(this.overlay, this.width, this.height);
    if (this.reserve || this.state.isGone) return;
    this.drawPath(paint);
    for (const [kind, source, target] of this.state.moves.slice(0, 48)) {
      const [from, to] = [this.where(source, kind === "swap_in"), this.where(target, kind === "swap_out")];
      if (!from || !to) continue;
      const owner = kind === "swap_out" ? this.state.host.get(target) : this.state.blocks.get(target)?.users[0]?.[0].name;
      const centre = ({ x, y }) => [x + this.w / 2, y + this.h / 2];
      arc(paint, centre(from), centre(to), owner ? colourOf(owner) : this.colours.quiet, this.colours.raised, part);
    }
  }

  /** Joins the blocks of the selected sequence in its own order. */
  drawPath(paint) {
    const one = this.sequence && this.state.rows.find((row) => row.name === this.sequence);
    if (!one || this.h < 10) return;
    paint.strokeStyle = colourOf(one.name);
    paint.lineWidth = 2;
    paint.beginPath();
    one.blocks.map((block) => this.where(block)).filter(Boolean).forEach(({ x, y }) => paint.lineTo(x + this.w / 2, y + this.h - 4));
    paint.stroke();
  }

  point(event, isKept) {
    if (!this.state || this.reserve) return;
    const box = this.base.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const row = this.rows.find((one) => y >= one.y && y < one.y + this.h);
    const block = row && x < this.cols * this.w ? row.row * this.cols + Math.floor(x / this.w) : null;
    if (isKept) this.kept = block;
    this.choose(block);
  }

  key(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: this.cols, ArrowUp: -this.cols }[event.key];
    if (!step || !this.state || this.reserve) return;
    event.preventDefault();
    const block = (this.block ?? (step > 0 ? -1 : this.state.limits.num_blocks)) + step;
    if (block < 0 || block >= this.state.limits.num_blocks) return;
    this.kept = block;
    this.choose(block);
  }

  choose(block) {
    if (block === this.block) return;
    this.block = block;
    if (this.state) this.draw();
    this.onBlock(block);
  }
}
