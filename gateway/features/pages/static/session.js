// The conversation that the page shows: its turns, and the runs of its requests. Streams are resumed after a reload, after
// the death of a gateway or a worker, and when a conversation with a run that has not ended is opened again.

import { holdText } from "/answer.js";
import { WRONG_KEY } from "/api.js";
import { save, saveChanges, saveSoon } from "/autosave.js";
import { LIVE, callOf, newConversation, newRun, newTurn, touch } from "/conversation.js";
import { $ } from "/dom.js";
import { againAsText, canBeText, exactPlace, forkOf, forkPlace } from "/fork.js";
import { focusInput } from "/input.js";
import { noteResumed, saw } from "/kill.js";
import { announce, copy, notice } from "/notice.js";
import { Run } from "/run.js";
import { current, loadPicture } from "/store.js";
import { above, path, show, versions } from "/tree.js";
import { TurnView } from "/turn.js";

const SPOKEN_LENGTH = 600;
// Failures after which the server may still have the request, and its answer.
const RESUMABLE = new Set(["unreachable", WRONG_KEY]);

let conversation = newConversation();
const views = [];
const running = new Map(); // record of a run -> Run
// `options()`: those of the next runs, or null if a field is wrong. `changed(isOther)`: the page shows another state, or
// another conversation. `ran()`: a run has new events. `write(text)`: into the message field. `scroll(turn)`: there is a new turn to see.
let page = { options: () => null, changed: () => {}, ran: () => {}, scroll: () => {}, write: () => {} };

export function initSession(given) {
  page = given;
}

export const shown = () => conversation;
export const lastTurn = () => views.at(-1)?.turn;
export const isIdle = () => !running.size;

// True while an answer is being written. A stopped run that is still telling the server so does not count.
export function isAnswering() {
  return [...running.keys()].some((record) => LIVE.has(record.state));
}

// The record of a run that is being written, if there is one.
export function written() {
  return [...running.keys()].find(({ state, id }) => LIVE.has(state) && id !== null);
}

export function isSingle(turn) {
  return turn?.runs.length === 1 && turn.runs[0].answers.length === 1;
}

export function viewOf(turn) {
  return views.find((view) => view.turn === turn);
}

// The view whose element this is.
export function viewAt(element) {
  return views.find((view) => view.element === element);
}

// --- turns ----------------------------------------------------------------------------------------------------------

// Says something, with pictures, after the last turn, or after another one. Returns false if the settings are wrong.
export function say(text, pictures = [], after = lastTurn() ?? null) {
  const options = page.options();
  if (options === null) return false;
  notice("");
  answer(newTurn(conversation, text, options, after, pictures), "Answering.");
  return true;
}

// Adds another version of a turn: nothing that was said is lost.
function sayInstead(turn, text) {
  const running = views.slice(views.indexOf(viewOf(turn))).flatMap((view) => view.turn.runs);
  if (say(text, turn.pictures, above(conversation, turn))) stopRuns(running);
}

// Shows a new turn, and begins its runs.
function answer(turn, said) {
  touch(conversation);
  drawTurns();
  // The button that was pressed may be gone.
  if (document.activeElement === document.body || document.activeElement.closest("[hidden]")) focusInput();
  for (const record of turn.runs) start(turn, record);
  announce(said);
  page.scroll(turn);
}

// Draws the turns that are shown and have no view yet, and removes the views of others.
function drawTurns() {
  const turns = path(conversation);
  const isKept = (view, at) => view.turn === turns[at];
  const common = views.findIndex((view, at) => !isKept(view, at));
  for (const gone of common < 0 ? [] : views.splice(common)) gone.remove();
  for (const turn of turns.slice(views.length)) {
    const view = new TurnView(turn, conversation.id, actionsOf(turn));
    views.push(view);
    $("turns").append(view.element);
    for (const record of turn.runs) if (running.has(record)) view.update(running.get(record));
  }
  $("hint").hidden = views.length > 0;
}

function actionsOf(turn) {
  return {
    retry: (record) => retry(turn, record),
    startOver: turn.parent < 0 ? null : () => startOver(turn),
    choose: (run, answer) => {
      turn.chosen = [run, answer];
      touch(conversation);
      save(conversation);
      page.changed(false);
    },
    copy,
    edit: (text) => sayInstead(turn, text),
    regenerate: () => sayInstead(turn, turn.said),
    continueAt: (record, index, at, words) => fork(turn, record, index, at, words),
    versions: versions(conversation, turn),
    go: (version) => {
      show(conversation, version);
      touch(conversation);
      drawTurns();
      save(conversation);
      page.changed(false);
      return viewOf(version);
    },
  };
}

function start(turn, record) {
  const home = conversation;
  const run = new Run(record, callOf(home, turn, record), {
    changed: (run) => {
      viewOf(turn)?.update(run);
      saw(run, () => ask(home, turn, run));
      page.ran();
      if (home === conversation) saveSoon(home);
    },
    held: (run) => announce(holdText(run, record.answers[0])),
    ended: (run) => {
      running.delete(record);
      if (canBeText(record)) return again(turn, record, againAsText(record));
      announceEnd(run);
      // A run that was stopped ends later than the reader's next step: the conversation may have been removed by then.
      if (home === conversation) save(home);
      page.changed(false);
      ask(home, turn, run);
    },
  });
  running.set(record, run);
  page.changed(false);
  // The message is stored before it is sent: a reload must not lose it.
  save(home).then(() => running.get(record) === run && run.go());
}

// Asks where another worker has resumed the answer.
async function ask(home, turn, run) {
  if (!(await noteResumed(run.record))) return;
  viewOf(turn)?.update(run);
  if (home === conversation) saveSoon(home);
}

// Retries a run: resumes its stream if that is possible, and sends its request again after any other failure.
function retry(turn, record) {
  if (running.has(record)) return;
  touch(conversation);
  if (RESUMABLE.has(record.trouble?.code)) {
    record.trouble = null;
    record.state = "waiting";
    start(turn, record);
    viewOf(turn)?.update(running.get(record));
  } else again(turn, record, record.fork ? forkOf(record.options, record.fork, record.answers[0]) : newRun(record.options));
}

// Puts a run in the place of one that has failed.
function again(turn, record, next) {
  turn.runs[turn.runs.indexOf(record)] = next;
  viewOf(turn)?.showAnswers();
  start(turn, next);
  viewOf(turn)?.update(running.get(next));
}

// Retries what failed for want of a key.
export function retryWithKey() {
  for (const { turn } of views) {
    for (const record of turn.runs) if (record.trouble?.code === WRONG_KEY) retry(turn, record);
  }
}

// Asks the same in a conversation of its own, because this one has become too long for the model.
async function startOver({ said, pictures = [] }) {
  const home = conversation;
  await Promise.all(pictures.map(({ id }) => loadPicture(home.id, id)));
  if (home !== conversation) return;
  open(newConversation());
  if (!say(said, pictures)) page.write(said);
}

// Adds a version of a turn whose answer continues another answer of it from a word on.
async function fork(turn, record, index, at, words) {
  const options = page.options()?.[0];
  if (!options) return;
  const home = conversation;
  const records = home.turns.flatMap(({ runs }) => runs);
  const { fork, answer: kept } = await exactPlace(forkPlace(records, record, index, at, words));
  if (home !== conversation) return;
  const next = newTurn(conversation, turn.said, [options], above(conversation, turn), turn.pictures);
  // A call that says no temperature has that of the first one.
  next.runs = [forkOf({ temperature: record.options.temperature, ...options }, fork, kept)];
  answer(next, "Continuing from there.");
}

function stopRuns(records) {
  for (const record of records) running.get(record)?.stop();
}

export function stop() {
  for (const run of running.values()) run.stop();
  announce("Stopped.");
  page.changed(false);
}

// --- conversations --------------------------------------------------------------------------------------------------

export function open(next) {
  saveChanges();
  // The runs continue on the server, and are resumed when this conversation is opened again.
  for (const run of running.values()) run.leave();
  running.clear();
  conversation = next;
  current.set(next.id);
  for (const gone of views.splice(0)) gone.remove();
  drawTurns();
  for (const turn of next.turns) for (const record of turn.runs) if (LIVE.has(record.state)) start(turn, record);
  page.changed(true);
  page.scroll(null);
}

function announceEnd({ record }) {
  if (record.state === "failed") announce(`No answer: ${record.trouble.message}`);
  else if (record.state === "done" && !isAnswering()) {
    const spoken = `Answer: ${record.answers[0].text.slice(0, SPOKEN_LENGTH) || "no text"}`;
    announce(isSingle(lastTurn()) ? spoken : "All answers are complete.");
  }
}
