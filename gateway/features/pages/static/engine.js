// The engine page. The gateway sends some ten views per second; the page shows the newest, or one of the last minute.
// All views are of one worker: the selected one or, after a demo button was pressed, the one that has its request.
import { Refusal, WRONG_KEY, refusalOf, request } from "/api.js";
import { initKey } from "/key.js";
import { eventsOf } from "/sse.js";
import { PackedView } from "/engine-view.js";
import { BlockMap } from "/engine-map.js";
import { theme } from "/engine-paint.js";
import { BlockList, Figures, Sequences, setText } from "/engine-tables.js";
import { Batch, Series } from "/engine-charts.js";
import { Demo } from "/engine-demo.js";
import { tell } from "/engine-says.js";

const KEPT_MS = 60_000;
const KEPT_BYTES = 32_000_000;
const WORKERS_MS = 3_000;
const SILENT_MS = 2_000;
const $ = (id) => document.getElementById(id);
const picker = $("worker");

const state = {
  views: [], // packed, oldest first
  bytes: 0,
  drawn: null, // the unpacked view that is on the page
  shown: null, // the packed view that was selected; null: the newest
  workers: null, // the live workers; null until the gateway has answered
  worker: new URLSearchParams(location.search).get("worker"),
  follow: null, // the idempotency key of the call to whose worker the page switches
  owner: null, // the worker that has claimed most of its requests
  source: null, // the AbortController of the stream
  model: "",
  context: 256, // the longest context that all workers take
  chosen: null,
  isFollowing: true,
  peeked: null,
  problem: "",
  needsKey: false, // the server has refused the key, and is asked again when there is another one
};
let colours = theme();
let isDue = false;

const map = new BlockMap($("map"), $("blocks"), $("arcs"), (block) => {
  setText($("block"), block === null || !state.drawn ? "" : state.drawn.describe(block));
  later();
});
const figures = new Figures($("figures"));
const list = new BlockList($("as-table"), $("block-list"));
const batch = new Batch($("lanes"), $("step"), $("steps"));
const series = new Series($("series"));
const sequences = new Sequences($("sequences"), $("sequence"), $("table"), choose, peek);
const demo = new Demo(document.querySelectorAll("[data-demo]"), {
  describe: () => ({ model: state.model, context: state.context }),
  pressed: (key) => {
    Object.assign(state, { follow: key, owner: null, shown: null });
    connect();
  },
  changed: say,
});

function choose(name) {
  state.isFollowing = false;
  state.chosen = name;
  later();
}

function peek(name) {
  state.peeked = name;
  later();
}

/** Draws in the next frame, once for all changes before it. */
function later() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    draw();
  });
}

function draw() {
  const found = state.shown ?? state.views.at(-1);
  if (!found) return;
  if (state.drawn?.packed !== found) state.drawn = found.open();
  const view = state.drawn;
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
  let latest = found;
  for (let i = at; i >= 0 && !latest.batch.length; i--) latest = state.views[i];
  batch.show(view, colours, latest, latest !== found);
  const end = view.at;
  series.show(state.views.slice(0, at + 1).filter((one) => end - one.at < KEPT_MS), colours);
  say();
  clock();
}

/** Shows the state of the requests next to the buttons and at the block table, from the same facts. */
function say() {
  const { owner, drawn, workers } = state;
  if (workers === null) return;
  const worker = workers.length ? state.worker : "";
  const { status, note } = tell({
    open: demo.open,
    hasRun: demo.hasRun,
    failure: demo.failure,
    owner,
    worker,
    isAlone: workers.length < 2,
    isPast: state.shown !== null,
    wasShown: sequences.rows.length > 0,
  });
  setText($("try-status"), status);
  if (!drawn?.sequences.length || drawn.worker !== worker) setText($("sequence"), note);
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

function receive(data) {
  const view = new PackedView(JSON.parse(data), performance.now(), data.length);
  state.problem = "";
  if (view.worker !== state.worker) show(view.worker);
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

/** Opens the stream of the views, and opens it again when it has broken. */
async function connect() {
  state.source?.abort();
  state.source = null;
  if (!state.worker || document.hidden || state.needsKey) return;
  const source = (state.source = new AbortController());
  const query = new URLSearchParams({ worker: state.worker });
  if (state.follow) query.set("follow", state.follow);
  try {
    const response = await request(`/engine/stream?${query}`, { signal: source.signal });
    if (!response.ok) throw await refusalOf(response);
    for await (const events of eventsOf(response)) {
      if (state.source !== source) return;
      for (const { event, data } of events) {
        if (event === "claimed") claimed(JSON.parse(data).worker);
        else receive(data);
      }
    }
    throw new TypeError("The stream has ended.");
  } catch (error) {
    if (state.source !== source) return;
    failed(error);
    setTimeout(() => state.source === source && connect(), WORKERS_MS);
  }
}

function claimed(owner) {
  state.owner = owner;
  if (owner !== state.worker) show(owner);
  say();
}

function failed(error) {
  state.needsKey = error.code === WRONG_KEY;
  if (state.needsKey) state.problem = "needs an API key";
  else state.problem = error instanceof Refusal ? error.message : "the gateway does not answer";
  clock();
}

async function findWorkers() {
  if (state.needsKey) return;
  try {
    const response = await request("/engine/workers");
    if (!response.ok) throw await refusalOf(response);
    const found = await response.json();
    state.model = found.model;
    const ids = found.workers.map((worker) => worker.id);
    state.workers = ids;
    if (ids.length) state.context = Math.min(...found.workers.map((worker) => worker.max_model_len));
    if ([...picker.options].map((option) => option.value).join("\n") !== ids.join("\n")) {
      picker.replaceChildren(...ids.map((id) => new Option(id, id)));
    }
    if (!ids.length) state.problem = "no worker is available";
    else if (!ids.includes(state.worker)) {
      show(ids[0]);
      connect();
    } else if (!state.source) connect();
    picker.value = state.worker ?? "";
  } catch (error) {
    failed(error);
  }
  say();
  clock();
}

/** Begins with the views of another worker. */
function show(worker) {
  Object.assign(state, { worker, views: [], bytes: 0, shown: null, chosen: null, isFollowing: true });
  batch.history = [];
  sequences.clear();
  map.clear();
  if (!state.workers?.includes(worker)) findWorkers();
  picker.value = worker;
}

picker.addEventListener("change", (event) => {
  state.follow = null; // a worker that was selected by hand stays until the next press
  show(event.target.value);
  connect();
  say();
});
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
$("as-table").addEventListener("toggle", () => state.drawn && list.show(state.drawn, true));
// A page in the background is not seen: end the stream, so that the worker need not publish views.
document.addEventListener("visibilitychange", connect);
const recolour = () => {
  colours = theme();
  later();
};
new MutationObserver(recolour).observe(document.documentElement, { attributeFilter: ["data-theme"] });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
addEventListener("resize", later);
initKey(() => {
  Object.assign(state, { needsKey: false, problem: "" });
  state.source?.abort();
  state.source = null;
  findWorkers();
});
setInterval(() => document.hidden || findWorkers(), WORKERS_MS);
setInterval(clock, 1000);
findWorkers();
