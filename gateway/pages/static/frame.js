// All that changes on the page because of tokens is drawn here, together, at most once per frame.

const BUDGET_MS = 7;
const dirty = new Set();
let before = () => null;
let after = () => {};
let isAsked = false;

// Have `view.draw()` called in the next frame.
export function redraw(view) {
  dirty.add(view);
  if (isAsked) return;
  isAsked = true;
  requestAnimationFrame(flush);
}

// `measure()` runs before anything is drawn, `adjust(measured)` after it.
export function around(measure, adjust) {
  before = measure;
  after = adjust;
}

function flush() {
  isAsked = false;
  const measured = before();
  const began = performance.now();
  for (const view of dirty) {
    dirty.delete(view);
    view.draw();
    if (performance.now() - began > BUDGET_MS) break; // the others keep their turn, in the next frame
  }
  after(measured);
  for (const view of dirty) {
    redraw(view);
    break;
  }
}
