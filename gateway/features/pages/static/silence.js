// Finds out why an answer is silent. Asks the gateway only while an answer is silent.

import { status } from "/api.js";

const SILENT_MS = 1000;
const ASK_MS = 400;

const runs = new Set();
let timer = null;

/** Calls `run.hold(why)` whenever no token arrives because of `why`, until `unwatch`. `run.heardAt`: time of the last token. */
export function watch(run) {
  runs.add(run);
  timer ??= setTimeout(look, ASK_MS);
}

export function unwatch(run) {
  runs.delete(run);
}

const isSilent = (run) => performance.now() - run.heardAt > SILENT_MS;

async function look() {
  const silent = [...runs].filter(isSilent);
  if (silent.length) {
    const why = reason(await status());
    // Meanwhile a token may have arrived, or the answer may have ended.
    for (const run of silent) if (runs.has(run) && isSilent(run)) run.hold(why);
  }
  timer = runs.size ? setTimeout(look, ASK_MS) : null;
}

// Returns the cause of a silence, or null. `state`: the status of the gateway; null if the gateway does not answer: then
// the stream itself breaks, and the page shows that error.
function reason(state) {
  if (state === null || state.responding > 0) return null;
  return state.redis ? "workers" : "redis";
}
