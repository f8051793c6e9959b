// Draws everything that tokens change on the page, together, at most once per frame.

const BUDGET_MS = 7;
const dirty = new Set();
let before = () => null;
let after = () => {};
let isAsked = false;

// Has `view.draw()` called in the next frame.
export function redraw(view) {
  dirty.add(view);
  if (isAsked) return;
  isAsked = true;
  requestAnimationFrame(flush);
}

// Has `measure()` called before anything is drawn, and `adjust(measured)` after it.
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
    if (performance.now() - began > BUDGET_MS) break; // the other views are drawn in the next frame
  }
  after(measured);
  for (const view of dirty) {
    redraw(view);
    break;
  }
}
