// Finds out why an answer is silent. The gateway is asked only while one is.

import { status } from "/api.js";

const SILENT_MS = 1000;
const ASK_MS = 400;

const runs = new Set();
let timer = null;

/** Tell `run.hold(why)` whenever no token comes because of `why`, until `unwatch`. `run.heardAt`: when the last one came. */
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
    // A token may have come, or the answer may have ended, meanwhile.
    for (const run of silent) if (runs.has(run) && isSilent(run)) run.hold(why);
  }
  timer = runs.size ? setTimeout(look, ASK_MS) : null;
}

// `state`: null where the gateway does not answer; then the stream itself breaks, and says so.
function reason(state) {
  if (state === null || state.responding > 0) return null;
  return state.redis ? "workers" : "redis";
}
