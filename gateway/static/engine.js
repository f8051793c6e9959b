// The engine page: views come from the gateway, some ten per second; the newest is shown, or one of the last minute.
import { View } from "/engine-view.js";
import { BlockMap } from "/engine-map.js";
import { theme } from "/engine-paint.js";
import { BlockList, Figures, Sequences, setText } from "/engine-tables.js";
import { Batch, Series } from "/engine-charts.js";
import { Demo } from "/engine-demo.js";

const KEPT_MS = 60_000;
const KEPT_BYTES = 32_000_000;
const WORKERS_MS = 3_000;
const SILENT_MS = 3_000;
const $ = (id) => document.getElementById(id);

const state = {
  views: [],
  bytes: 0,
  drawn: null,
  shown: null, // null: live
  worker: new URLSearchParams(location.search).get("worker"),
  source: null,
  model: "",
  chosen: null,
  isFollowing: true,
  peeked: null,
  problem: "",
};
let colours = theme();
let isDue = false;

const map = new BlockMap($("map"), $("blocks"), $("arcs"), (block) => {
  $("block").textContent = block === null || !current() ? "" : current().describe(block);
  later();
});
const figures = new Figures($("figures"));
const list = new BlockList($("as-table"), $("block-list"));
const batch = new Batch($("lanes"), $("step"), $("steps"));
const series = new Series($("series"));
const sequences = new Sequences($("sequences"), $("sequence"), $("table"), choose, peek);
new Demo(document.querySelectorAll("[data-demo]"), $("try-status"), () => ({
  model: state.model,
  context: state.views.at(-1)?.limits.max_model_len ?? 256,
}));

function current() {
  return state.shown ?? state.views.at(-1);
}

function choose(name) {
  state.isFollowing = false;
  state.chosen = name;
  later();
}

function peek(name) {
  state.peeked = name;
  later();
}

/** Draw with the next frame, however much changes before it. */
function later() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    draw();
  });
}

function draw() {
  const found = current();
  if (!found) return;
  if (state.drawn !== found) state.drawn?.close();
  state.drawn = found;
  const view = found.open();
  const running = view.sequences.filter((one) => one.num_blocks);
  if (!view.sequences.some((one) => one.name === state.chosen) && running.length) {
    state.isFollowing = true;
    state.chosen = running[0].name;
  }
  const at = state.views.indexOf(found);
  const looked = state.peeked ?? (state.isFollowing ? null : state.chosen);
  map.sequence = looked;
  map.isPast = state.shown !== null;
  map.show(view, colours);
  if (map.block !== null) setText($("block"), view.describe(map.block));
  else if (view.hidden_cells) setText($("block"), `${view.hidden_cells} more cached blocks are not drawn.`);
  figures.show(view);
  sequences.show(view, state.peeked ?? state.chosen, map.block);
  list.show(view, state.shown !== null);
  let latest = view;
  for (let i = at; i >= 0 && !latest.batch.length; i--) latest = state.views[i];
  batch.show(view, colours, latest);
  const end = view.at;
  series.show(state.views.slice(0, at + 1).filter((one) => end - one.at < KEPT_MS), colours);
  clock();
}

function clock() {
  const slider = $("time");
  const count = state.views.length;
  slider.max = String(Math.max(0, count - 1));
  slider.value = String(state.shown ? state.views.indexOf(state.shown) : count - 1);
  const last = state.views.at(-1);
  const silent = last ? performance.now() - last.at : 0;
  let text = "live";
  if (state.problem) text = state.problem;
  else if (!last) text = "waiting for the engine…";
  else if (state.shown) text = `${((last.at - state.shown.at) / 1000).toFixed(1)} s ago`;
  else if (silent > SILENT_MS) text = `silent for ${Math.round(silent / 1000)} s`;
  setText($("when"), text);
  $("pause").setAttribute("aria-pressed", String(state.shown !== null));
  setText($("pause"), state.shown ? "Go live" : "Pause");
}

function receive(event) {
  const view = new View(JSON.parse(event.data), performance.now(), event.data.length);
  state.problem = "";
  state.views.push(view);
  state.bytes += view.length;
  const isOld = (one) => view.at - one.at > KEPT_MS || state.bytes > KEPT_BYTES;
  while (state.views.length > 1 && isOld(state.views[0])) {
    const gone = state.views.shift();
    state.bytes -= gone.length;
    if (gone === state.shown) state.shown = state.views[0];
  }
  batch.add(view);
  if (state.shown) return clock();
  map.animate(view.moves);
  return later();
}

function connect() {
  state.source?.close();
  state.source = null;
  if (!state.worker || document.hidden) return;
  const source = new EventSource(`/engine/stream?worker=${encodeURIComponent(state.worker)}`);
  state.source = source;
  source.onmessage = receive;
  source.onerror = () => {
    state.problem = "the gateway does not answer";
    clock();
    // A browser tries again by itself, but not after an answer that is an error.
    if (source.readyState === EventSource.CLOSED) setTimeout(() => state.source === source && connect(), WORKERS_MS);
  };
}

async function findWorkers() {
  try {
    const response = await fetch("/engine/workers");
    const found = await response.json();
    state.model = found.model;
    const ids = found.workers.map((worker) => worker.id);
    const picker = $("worker");
    if ([...picker.options].map((option) => option.value).join("\n") !== ids.join("\n")) {
      picker.replaceChildren(...ids.map((id) => new Option(id, id)));
    }
    if (!ids.length) state.problem = "no worker lives";
    else if (!ids.includes(state.worker)) look(ids[0]);
    else if (!state.source) connect();
    picker.value = state.worker ?? "";
  } catch {
    state.problem = "the gateway does not answer";
  }
  clock();
}

function look(worker) {
  Object.assign(state, { worker, views: [], bytes: 0, shown: null, chosen: null, isFollowing: true });
  batch.history = [];
  connect();
}

$("worker").addEventListener("change", (event) => look(event.target.value));
$("pause").addEventListener("click", () => {
  state.shown = state.shown ? null : (state.views.at(-1) ?? null);
  later();
});
$("time").addEventListener("input", (event) => {
  const at = Number(event.target.value);
  state.shown = at >= state.views.length - 1 ? null : state.views[at];
  later();
  if (state.shown) map.animate(state.shown.moves);
});
$("all").addEventListener("change", (event) => {
  map.showsAll = event.target.checked;
  later();
});
$("as-table").addEventListener("toggle", () => current() && list.show(current().open(), true));
// Nobody looks at a page in the background: the worker need not show anything.
document.addEventListener("visibilitychange", connect);
const recolour = () => {
  colours = theme();
  later();
};
new MutationObserver(recolour).observe(document.documentElement, { attributeFilter: ["data-theme"] });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
addEventListener("resize", later);
setInterval(() => document.hidden || findWorkers(), WORKERS_MS);
setInterval(clock, 1000);
findWorkers();
