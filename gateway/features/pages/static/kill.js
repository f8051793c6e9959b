// What becomes of an answer when its worker is killed. On a loopback server without API keys, `quire serve` can kill the
// worker of an answer for this page, and tells where another worker, or the restarted one, has resumed the answer.

import { request } from "/api.js";
import { $, el } from "/dom.js";
import { redraw } from "/frame.js";
import { notice, tell } from "/notice.js";
import { highlight, wordsOf } from "/words.js";

// A pause between tokens after which the answer may come from another worker.
const PAUSE_MS = 800;
const SENT_MS = 500;
const LOOPBACK = new Set(["localhost", "127.0.0.1", "[::1]"]);

let isOn = null; // a promise of whether this server has the endpoint
const pauses = new WeakMap(); // Run -> {position, at}

const pathOf = (id) => `/worker-of/${encodeURIComponent(id)}`;

async function isThere() {
  if (!LOOPBACK.has(location.hostname)) return false;
  isOn ??= request("/worker-of").then(({ status }) => status === 200, () => false);
  return isOn;
}

// Calls `whenResumed()` when tokens arrive after a pause.
export function saw(run, whenResumed) {
  const { position } = run.record;
  const before = pauses.get(run);
  if (before?.position === position) return;
  const now = performance.now();
  pauses.set(run, { position, at: now });
  if (before && now - before.at > PAUSE_MS) whenResumed();
}

// Notes in the answers of a run where they were resumed. Returns whether there is something new.
export async function noteResumed(record) {
  if (record.id === null || !(await isThere())) return false;
  const found = await read(record.id);
  let isNew = false;
  for (const answer of found ? record.answers : []) {
    const places = found.resumed.map((position) => [position, lengthAt(answer, position)]);
    isNew ||= places.length > (answer.resumed?.length ?? 0);
    if (places.length) answer.resumed = places;
  }
  return isNew;
}

async function read(id) {
  try {
    const response = await request(pathOf(id));
    return response.ok ? await response.json() : null;
  } catch {
    return null;
  }
}

function lengthAt({ marks = [], kept = 0 }, position) {
  let length = kept;
  for (let pair = 0; pair < marks.length && marks[pair] <= position; pair += 2) length = marks[pair + 1];
  return length;
}

// The button below the message field. While an answer is being written it kills its worker; before, it has the worker of the
// next answer killed at the first token: a small model has ended its answer before one can press a button.
export class Killer {
  #button = $("kill");
  #run;
  #isArmed = false;
  #isOn = false;
  #killedAt = -1; // the position of the run whose worker was killed
  #said = "";

  // `run()`: the record of a run that is being written, or undefined.
  constructor(run) {
    this.#run = run;
    this.#button.addEventListener("click", () => this.#press());
    isThere().then((isOn) => {
      this.#isOn = isOn;
      this.draw();
    });
  }

  draw() {
    if (!this.#isOn) return;
    const record = this.#run();
    const isLive = record !== undefined;
    if (isLive && this.#isArmed) {
      this.#isArmed = false;
      this.#kill(record);
    }
    const button = this.#button;
    button.hidden = false;
    if (this.#said && !(record?.position <= this.#killedAt)) {
      if ($("notice").textContent === this.#said) tell("");
      this.#said = "";
    }
    // A worker that dies again and again without a token between would be taken for a victim of this answer.
    button.disabled = isLive && record.position <= this.#killedAt;
    const text = isLive ? "Kill the worker that writes this" : "Kill the worker of the next answer";
    if (button.textContent !== text) button.textContent = text;
    if (isLive) button.removeAttribute("aria-pressed");
    else button.setAttribute("aria-pressed", String(this.#isArmed));
  }

  #press() {
    const record = this.#run();
    if (record) this.#kill(record);
    else this.#isArmed = !this.#isArmed;
    this.draw();
  }

  async #kill({ id }) {
    this.#killedAt = Infinity;
    try {
      const response = await request(`${pathOf(id)}/kill`, { method: "POST" });
      const { worker, error } = await response.json();
      if (response.ok) tell((this.#said = `${worker} is killed. The answer will be resumed where it stopped.`));
      else notice(error.message);
    } catch {
      notice("The server cannot be reached, so no worker was killed.");
    }
    // What the worker has sent may still be on its way.
    setTimeout(() => {
      this.#killedAt = this.#run()?.position ?? -1;
      this.draw();
    }, SENT_MS);
  }
}

// Shows in an answer where it was resumed: a line, and a mark at the word that came first.
export class ResumedMark {
  element = el("p", { className: "resumed quiet", hidden: true });
  words = [];
  #shown = "";
  #redrawn = null; // watches whether the text of the card is drawn anew

  constructor(card) {
    this.card = card;
    this.draw();
  }

  draw() {
    const { answer, text } = this.card;
    const places = answer.resumed ?? [];
    const key = JSON.stringify(places);
    if (key === this.#shown && !this.#isOld()) return;
    this.#shown = key;
    if (places.length && !this.#redrawn) {
      this.#redrawn = new MutationObserver(() => this.#isOld() && this.update());
      this.#redrawn.observe(text, { childList: true, subtree: true });
    }
    const words = places.length ? wordsOf(text, answer.text) : [];
    const found = places.map(([, length]) => words.find(({ word, at }) => at + word.length > length));
    this.words = found.filter(Boolean);
    const names = places.map(([position], at) => `token ${position}${found[at] ? ` at “${found[at].word}”` : ""}`);
    this.element.textContent = `The worker died; the answer was resumed after ${names.join(" and ")}.`;
    this.element.hidden = !places.length;
    marks.set(this, this.words);
    highlight("resumed", [...marks.values()].flat().map(({ range }) => range));
  }

  // Draws after the text of the card.
  update() {
    redraw(this);
  }

  // The word may not be there yet, or the text may have been drawn anew.
  #isOld() {
    const { answer } = this.card;
    if (!answer.resumed?.length) return false;
    const isMissing = this.words.length < answer.resumed.length;
    return isMissing || this.words.some(({ range }) => range.collapsed || !range.startContainer.isConnected);
  }

  remove() {
    this.#redrawn?.disconnect();
    if (marks.delete(this)) highlight("resumed", [...marks.values()].flat().map(({ range }) => range));
  }
}

const marks = new Map(); // ResumedMark -> words
