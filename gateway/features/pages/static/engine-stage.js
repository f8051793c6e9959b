// The stage: the maps of all workers, the share of memory that is wasted, the sequences of the step, and the player.
import { $ } from "/dom.js";
import { BlockMap } from "/engine-map.js";
import { theme } from "/engine-paint.js";
import { Player } from "/engine-player.js";
import { BlockList, Sequences, element, keyOf, setText } from "/engine-tables.js";

const percent = (empty, slots) => (slots ? `${Math.round((100 * empty) / slots)} %` : "–");

export class Stage {
  /** `onEnd()`: the frames have been played; `onUse()`: somebody used the player. */
  constructor({ onEnd, onUse }) {
    this.colours = theme();
    this.boxes = [];
    this.chosen = null;
    this.peeked = null;
    this.sequences = new Sequences($("sequences"), $("sequence"), $("table"), (key) => this.select(key), (key) => this.peek(key));
    this.list = new BlockList($("as-table"), $("block-list"));
    this.player = new Player(
      { play: $("play"), slider: $("time"), when: $("when"), speed: $("speed"), track: $("track") },
      { onFrame: () => this.later(), onEnd, onUse },
    );
    $("as-table").addEventListener("toggle", () => this.later());
    $("stage").addEventListener("keydown", (event) => {
      if (event.key !== " " || event.target.closest("button, select, summary, a, input")) return;
      event.preventDefault();
      this.player.toggle();
    });
    const recolour = () => {
      this.colours = theme();
      this.later();
    };
    new MutationObserver(recolour).observe(document.documentElement, { attributeFilter: ["data-theme"] });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
    addEventListener("resize", () => {
      this.measure(this.boxes.length || 1);
      this.later();
    });
  }

  /** Shows a recording. `isReserve`: beside the memory that would be reserved. */
  load(recording, isReserve = false) {
    Object.assign(this, { recording, isReserve, chosen: null, peeked: null });
    this.reserve = isReserve ? reserveFor(recording.frames) : null;
    this.player.load(recording.frames);
    this.later();
  }

  select(key) {
    this.chosen = key;
    this.later();
  }

  peek(key) {
    this.peeked = key;
    this.later();
  }

  /** Draws in the next frame of the display, once for all changes before it. */
  later() {
    if (this.isDue) return;
    this.isDue = true;
    requestAnimationFrame(() => {
      this.isDue = false;
      this.draw();
    });
  }

  draw() {
    const frame = this.recording?.frames[this.player.at];
    if (!frame) return;
    const views = this.reserve ? [[frame[0], this.reserve.get(this.player.at)], [frame[0], null]] : frame.map((state) => [state, null]);
    const rows = frame.flatMap((state) => state.rows.map((row) => [state, row]));
    if (!rows.some(([state, row]) => keyOf(state, row) === this.chosen)) this.chosen = rows.length ? keyOf(...rows[0]) : null;
    this.showBoxes(views.length);
    views.forEach(([state, reserve], index) => {
      const box = this.boxes[index];
      const title = this.reserve ? (reserve ? "Reserved in one piece" : "In pages") : state.worker;
      setText(box.title, title);
      setText(box.note, noteOf(state, reserve));
      const looked = this.peeked?.startsWith(`${state.worker} `) ? this.peeked.slice(state.worker.length + 1) : null;
      box.map.sequence = reserve ? null : looked;
      box.map.show(state, this.colours, this.recording.texts, reserve);
    });
    this.showWaste(frame);
    this.sequences.show(rows, this.peeked ?? this.chosen, this.boxes.at(-1)?.map.block ?? null, this.recording);
    this.list.show(frame, this.recording.texts, !this.player.isPlaying);
    this.player.showPlace();
    this.player.drawTrack(this.colours);
  }

  showWaste(frame) {
    const live = frame.filter((state) => !state.isGone).map((state) => state.figures);
    const sum = (name) => live.reduce((total, figures) => total + figures[name], 0);
    let [empty, slots] = [sum("reservedEmpty"), sum("reservedSlots")];
    if (this.reserve) {
      const placed = [...this.reserve.get(this.player.at).keys()];
      const rows = frame[0].rows.filter((row) => placed.includes(row.name));
      slots = placed.length * frame[0].limits.max_model_len;
      empty = slots - rows.reduce((total, row) => total + row.tokens, 0);
    }
    setText($("reserved"), percent(empty, slots));
    setText($("paged"), percent(sum("empty"), sum("slots")));
    const shared = sum("shared");
    setText($("sharing"), shared ? `${shared} shared ${shared === 1 ? "block saves" : "blocks save"} ${sum("saved")}` : "");
  }

  /** Computes the height of a map. It is the same for all chapters: the controls stay where they are. */
  measure(count) {
    this.room = roomFor(count);
    $("maps").style.minHeight = `${roomFor(1) + 30}px`;
  }

  showBoxes(count) {
    if (this.boxes.length === count) return;
    this.measure(count);
    $("maps").style.setProperty("--maps", count);
    $("maps").replaceChildren();
    this.boxes = Array.from({ length: count }, (_, index) => {
      const section = element("section", undefined, { class: "map-box", "aria-labelledby": `map-${index}` });
      const head = element("div", undefined, { class: "head" });
      const title = element("h2", "", { id: `map-${index}` });
      const note = element("p", "", { class: "quiet" });
      head.append(title, note);
      const box = element("div", undefined, {
        class: "map", role: "group", tabindex: "0", "aria-describedby": "block",
        "aria-label": "Map of the blocks. Arrow keys go from block to block; the table below says the same.",
      });
      box.append(element("canvas", undefined, { "aria-hidden": "true" }), element("canvas", undefined, { class: "arcs", "aria-hidden": "true" }));
      section.append(head, box);
      $("maps").append(section);
      const map = new BlockMap(box, {
        onBlock: (block) => {
          setText($("block"), block === null || !map.state ? "" : map.state.describe(block, this.recording.texts));
          this.later();
        },
        maxHeight: () => this.room,
      });
      return { title, note, map };
    });
  }
}

/** The height for one map, so that the controls are seen with it. */
function roomFor(count) {
  if (!matchMedia("(max-width: 46rem)").matches) return Math.min(520, Math.max(220, innerHeight - 450));
  return Math.max(130, (innerHeight - 410 - 30 * count) / Math.min(2, count));
}

function noteOf(state, reserve) {
  if (state.isGone) return "killed";
  const running = state.rows.filter((row) => row.blocks.length).length;
  const idle = state.rows.length - running;
  if (reserve) return `${reserve.size} run, ${state.rows.filter((row) => !reserve.has(row.name)).length} have no room`;
  const blocks = `${state.figures.used} of ${state.limits.num_blocks} blocks`;
  return `${running} run${idle ? `, ${idle} ${idle === 1 ? "waits" : "wait"}` : ""}; ${blocks}`;
}

/** By frame: the memory that each sequence would reserve for its maximum length, in the order of arrival. */
function reserveFor(frames) {
  const found = new Map();
  let held = new Map();
  frames.forEach((frame, index) => {
    const [state] = frame;
    const each = Math.floor(state.limits.max_model_len / state.limits.block_size);
    const places = Math.floor(state.limits.num_blocks / each);
    const names = new Set(state.rows.map((row) => row.name));
    held = new Map([...held].filter(([name]) => names.has(name)));
    for (const name of names) {
      const taken = new Set(held.values());
      const free = [...Array(places).keys()].map((place) => place * each).find((first) => !taken.has(first));
      if (!held.has(name) && free !== undefined) held.set(name, free);
    }
    found.set(index, new Map(held));
  });
  return found;
}
