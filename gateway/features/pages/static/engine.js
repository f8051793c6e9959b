// The engine page: the tour while the engine is idle, and every step of the live workers while it is not.
import { Refusal, WRONG_KEY, refusalOf, request } from "/api.js";
import { $ } from "/dom.js";
import { initKey } from "/key.js";
import { eventsOf } from "/sse.js";
import { Demo } from "/engine-demo.js";
import { Recording } from "/engine-recording.js";
import { Stage } from "/engine-stage.js";
import { setText } from "/engine-tables.js";
import { Tour, mayMove } from "/engine-tour.js";

const WORKERS_MS = 3_000;
const IDLE_MS = 12_000;
const USED_MS = 60_000;
const LIVE = "Every step of the workers of this server, as it happens.";
const OWN = "The requests of this page, step by step. Their text is known to this page only.";

const state = {
  live: new Recording(),
  isLive: false, // the stage shows `live`, not the tour
  isFollowing: true, // it shows the newest step
  busyAt: -Infinity, // when a worker had a request last
  usedAt: -Infinity, // when somebody used the page last: what is shown stays for a while
  workers: null, // the ids of the live workers; null until the gateway has answered
  model: "",
  context: 256, // the longest context that all workers take
  source: null, // the AbortController of the stream
  problem: "",
  needsKey: false, // the server has refused the key, and is asked again when there is another one
};
let tour = null;

const used = (more) => Object.assign(state, { usedAt: performance.now(), ...more });
const stage = new Stage({ onEnd: ended, onUse: () => used({ isFollowing: false }) });
const demo = new Demo({ describe: () => ({ model: state.model, context: state.context }), changed: say });

function ended() {
  if (!state.isLive) tour.next();
  else if (!demo.open && !state.isFollowing) stage.player.pause();
}

function showLive(caption, isFollowing) {
  Object.assign(state, { isLive: true, isFollowing });
  tour?.mark(-1);
  $("live").setAttribute("aria-pressed", "true");
  setText($("caption"), caption);
  stage.load(state.live);
  if (isFollowing) {
    stage.player.pause();
    stage.player.go(state.live.frames.length - 1);
  } else stage.player.start();
  say();
}

function showTour() {
  state.isLive = false;
  $("live").setAttribute("aria-pressed", "false");
  tour.next();
  if (mayMove()) stage.player.start();
}

/** Starts a recording of requests of this page, which is played from its beginning. */
function record() {
  const { last } = state.live;
  state.live = new Recording();
  for (const one of last.values()) {
    state.live.last.set(one.worker, one);
    state.live.waiting.set(one.worker, [one]);
  }
  state.live.flush();
  used();
  showLive(OWN, false);
  $("stage").scrollIntoView();
  return state.live.texts;
}

function receive(data) {
  const view = JSON.parse(data);
  state.problem = "";
  state.live.add(view);
  const isBusy = [...state.live.last.values()].some((one) => one.rows.length);
  if (isBusy) state.busyAt = performance.now();
  if (!state.isLive) {
    if (isBusy && !isUsed()) showLive(LIVE, true);
  } else if (state.isFollowing) stage.player.go(state.live.frames.length - 1);
  else stage.later();
  $("live").classList.toggle("busy", isBusy);
}

const isUsed = () => performance.now() - state.usedAt < USED_MS;

/** Returns to the tour when the engine has been idle for a while, and nobody uses the page. */
function rest() {
  const isIdle = performance.now() - state.busyAt > IDLE_MS;
  if (tour && state.isLive && isIdle && !isUsed() && !stage.player.isPlaying) showTour();
}

/** Opens the stream of the views, and opens it again when it has broken. */
async function connect() {
  state.source?.abort();
  state.source = null;
  if (document.hidden || state.needsKey) return;
  const source = (state.source = new AbortController());
  try {
    const response = await request("/engine/stream", { signal: source.signal });
    if (!response.ok) throw await refusalOf(response);
    for await (const events of eventsOf(response)) {
      if (state.source !== source) return;
      for (const { data } of events) receive(data);
    }
    throw new TypeError("The stream has ended.");
  } catch (error) {
    if (state.source !== source) return;
    failed(error);
    setTimeout(() => state.source === source && connect(), WORKERS_MS);
  }
}

function failed(error) {
  state.needsKey = error.code === WRONG_KEY;
  if (state.needsKey) state.problem = "The server needs an API key.";
  else state.problem = error instanceof Refusal ? error.message : "The gateway does not answer.";
  say();
}

async function findWorkers() {
  if (state.needsKey) return;
  try {
    const response = await request("/engine/workers");
    if (!response.ok) throw await refusalOf(response);
    const found = await response.json();
    state.model = found.model;
    const ids = found.workers.map((worker) => worker.id);
    for (const { worker, isGone } of [...state.live.last.values()]) {
      if (isGone) state.live.forget(worker);
      else if (!ids.includes(worker)) state.live.add({ worker, gone: true });
    }
    state.workers = ids;
    if (ids.length) state.context = Math.min(...found.workers.map((worker) => worker.max_model_len));
    state.problem = "";
    if (!state.source) connect();
  } catch (error) {
    failed(error);
  }
  say();
}

function say() {
  for (const button of [$("eight"), $("four").lastElementChild]) button.disabled = !state.model;
  const requests = demo.open === 1 ? "1 request runs" : `${demo.open} requests run`;
  let text = "";
  if (demo.failure) text = `It failed: ${demo.failure}`;
  else if (state.problem) text = state.problem;
  else if (state.workers && !state.workers.length) text = demo.open ? `${requests.split(" runs")[0]} queued: no worker is available.` : "No worker is available.";
  else if (demo.open) text = `${requests}…`;
  else if (demo.hasRun) text = "Done. Drag the slider to look at each step.";
  setText($("try-status"), text);
}

$("live").addEventListener("click", () => {
  used();
  if (state.isLive && tour) showTour();
  else showLive(LIVE, true);
});
$("four").addEventListener("submit", (event) => {
  event.preventDefault();
  demo.four($("prompt").value.trim() || $("prompt").placeholder, record());
});
$("eight").addEventListener("click", () => demo.eight(record()));
// A page in the background is not seen: end the stream, so that the workers need not publish views.
document.addEventListener("visibilitychange", connect);
initKey(() => {
  Object.assign(state, { needsKey: false, problem: "" });
  state.source?.abort();
  state.source = null;
  findWorkers();
});
setInterval(() => document.hidden || findWorkers(), WORKERS_MS);
setInterval(rest, 1000);
findWorkers();
try {
  const response = await request("/tour.json");
  tour = new Tour(stage, await response.json(), () => {
    used({ isLive: false });
    $("live").setAttribute("aria-pressed", "false");
  });
  if (!state.isLive) showTour();
} catch (error) {
  failed(error);
}
