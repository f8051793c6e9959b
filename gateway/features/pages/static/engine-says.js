// The state of the requests in words: the line next to the buttons and the note at the block table, from the same facts.

/**
 * `open`: requests of this page that have not ended; `hasRun`: there were some; `failure`: why the last one failed;
 * `owner`: the worker that has claimed most of the followed ones, or null; `worker`: the one that is shown, or "";
 * `isAlone`: no other worker is live; `isPast`: an earlier view is shown; `wasShown`: a block table is still shown.
 * Returns {status, note}; the note is for a view in which no sequence can be shown.
 */
export function tell(facts) {
  return { status: statusOf(facts), note: noteOf(facts) };
}

function statusOf({ open, hasRun, failure, owner, worker, isAlone }) {
  if (failure) return `It failed: ${failure}`;
  if (!open) return hasRun ? "Done. Drag the slider to look again." : "";
  const requests = open === 1 ? "1 request" : `${open} requests`;
  if (!worker) return `${requests} queued: no worker is available.`;
  if (!owner) return `${requests} sent…`;
  if (isAlone) return `${requests} running…`;
  const took = open === 1 ? "took it" : "took most of them";
  return owner === worker ? `${requests} running. ${owner} ${took} and is shown.` : `${requests} running. ${owner} ${took}; ${worker} is shown.`;
}

function noteOf({ open, owner, worker, isPast, wasShown }) {
  if (!worker) return "No worker is available.";
  if (isPast) return "Nothing ran at this moment.";
  if (!open) return wasShown ? "It has ended; its blocks are free or cached." : "Nothing runs. Press one of the buttons above.";
  if (!owner) return "The request waits for a worker.";
  if (owner !== worker) return `The request runs on ${owner}, not on ${worker}.`;
  return `${worker} has the request; no block of it is shown at this moment.`;
}
