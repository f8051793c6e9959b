// The chat: conversations, their turns, and the runs of their requests. Streams are resumed after a reload, after the
// death of a gateway or a worker, and when a conversation with a run that has not ended is opened again.

import { holdText } from "/answer.js";
import { WRONG_KEY } from "/api.js";
import { dropChanges, hasChanges, save, saveChanges, saveSoon } from "/autosave.js";
import { LIVE, bodyOf, newConversation, newRun, newTurn } from "/conversation.js";
import { $ } from "/dom.js";
import { Drawer } from "/drawer.js";
import { around } from "/frame.js";
import { focusInput, initInput, write, written } from "/input.js";
import { initKey } from "/key.js";
import { announce, copy, notice } from "/notice.js";
import { Run } from "/run.js";
import { initSettings, loadModels, optionsOfRuns, wrongField } from "/settings.js";
import { exportAll, exportConversation, showShelf } from "/shelf.js";
import { current, loadConversation } from "/store.js";
import { TurnView } from "/turn.js";

const SPOKEN_LENGTH = 600;

let conversation = newConversation();
let views = [];
const running = new Map(); // record of a run -> Run

const settingsDrawer = new Drawer("settings", "settings-button");
const shelfDrawer = new Drawer("shelf", "shelf-button", { onOpen: drawShelf });

// --- turns ----------------------------------------------------------------------------------------------------------

function say(text) {
  const options = checkedOptions();
  if (options === null) return false;
  notice("");
  const turn = newTurn(conversation, text, options);
  addView(turn);
  for (const record of turn.runs) start(turn, record);
  announce("Answering.");
  showTurn(turn);
  return true;
}

// Returns the options of the next runs. If a field is wrong, shows that field and returns null.
function checkedOptions() {
  const options = optionsOfRuns();
  if (options === null) {
    settingsDrawer.toggle(true);
    wrongField().reportValidity();
  }
  return options;
}

function addView(turn) {
  const view = new TurnView(turn, {
    retry: (record) => retry(view, record),
    startOver: turn === conversation.turns[0] ? null : () => startOver(turn),
    choose: (run, answer) => {
      turn.chosen = [run, answer];
      save(conversation);
    },
    copy,
    edit: (text) => edit(view, text),
    regenerate: () => regenerate(view),
  });
  views.at(-1)?.setLast(false);
  views.push(view);
  $("turns").append(view.element);
  $("hint").hidden = true;
  return view;
}

function start(turn, record) {
  const home = conversation;
  const run = new Run(record, bodyOf(home, turn, record), {
    changed: (run) => {
      viewOf(turn)?.update(run);
      if (home === conversation) saveSoon(home);
    },
    held: (run) => announce(holdText(run, record.answers[0])),
    ended: (run) => {
      running.delete(record);
      announceEnd(run);
      // A run that was stopped ends later than the reader's next step: the conversation may have been removed by then.
      if (home === conversation) save(home);
      showState();
    },
  });
  home.changed = Date.now();
  running.set(record, run);
  showState();
  // The message is stored before it is sent: a reload must not lose it.
  save(home).then(() => running.get(record) === run && run.go());
}

function viewOf(turn) {
  return views.find((view) => view.turn === turn);
}

// Failures after which the server may still have the request, and its answer.
const RESUMABLE = new Set(["unreachable", WRONG_KEY]);

// Retries a run: resumes its stream if that is possible, and sends its request again after any other failure.
function retry(view, record) {
  const { turn } = view;
  if (running.has(record)) return;
  if (RESUMABLE.has(record.trouble?.code)) {
    record.trouble = null;
    record.state = "waiting";
  } else {
    turn.runs[turn.runs.indexOf(record)] = record = newRun(record.options);
    view.showAnswers();
  }
  start(turn, record);
  viewOf(turn)?.update(running.get(record));
}

// Retries what failed for want of a key.
function retryWithKey() {
  for (const view of views) {
    for (const record of view.turn.runs) if (record.trouble?.code === WRONG_KEY) retry(view, record);
  }
}

// Asks the same in a conversation of its own, because this one has become too long for the model.
function startOver({ said }) {
  open(newConversation());
  if (!say(said)) write(said);
}

function regenerate(view) {
  const { turn } = view;
  const options = checkedOptions();
  if (options === null) return;
  stopTurn(turn);
  turn.runs = options.map(newRun);
  turn.chosen = [0, 0];
  view.showAnswers();
  for (const record of turn.runs) start(turn, record);
  announce("Answering again.");
  showTurn(turn);
}

// Removes the turns after an edited one: they answer a conversation that no longer exists.
function edit(view, text) {
  if (checkedOptions() === null) return;
  const at = views.indexOf(view);
  for (const gone of views.splice(at)) {
    stopTurn(gone.turn);
    gone.element.remove();
  }
  conversation.turns.splice(at);
  say(text);
  focusInput();
}

function stopTurn(turn) {
  for (const record of turn.runs) running.get(record)?.stop();
}

function stop() {
  for (const run of running.values()) run.stop();
  announce("Stopped.");
  showState();
}

// True while an answer is being written. A stopped run that is still telling the server so does not count.
function isAnswering() {
  return [...running.keys()].some((record) => LIVE.has(record.state));
}

// --- conversations --------------------------------------------------------------------------------------------------

function open(next) {
  saveChanges();
  // The runs continue on the server, and are resumed when this conversation is opened again.
  for (const run of running.values()) run.leave();
  running.clear();
  conversation = next;
  current.set(next.id);
  views = [];
  $("turns").replaceChildren();
  $("hint").hidden = next.turns.length > 0;
  for (const turn of next.turns) addView(turn);
  for (const turn of next.turns) for (const record of turn.runs) if (LIVE.has(record.state)) start(turn, record);
  showState();
  scrollToEnd();
}

function drawShelf() {
  showShelf({
    currentId: conversation.id,
    open: async (id) => {
      const found = await loadConversation(id);
      if (found) open(found);
      else notice("Another version of this page has written that conversation.");
      shelfDrawer.toggle(false);
      focusInput();
    },
    removed: (id) => {
      if (id !== conversation.id) return;
      stop();
      dropChanges();
      open(newConversation());
    },
  });
}

// Loads the changes that another tab has stored.
async function refresh() {
  const shown = conversation;
  const kept = await loadConversation(shown.id);
  const isIdle = conversation === shown && !running.size && !hasChanges();
  if (isIdle && kept?.changed > shown.changed) open(kept);
}

// --- what the page says ---------------------------------------------------------------------------------------------

function announceEnd({ record }) {
  if (record.state === "failed") announce(`No answer: ${record.trouble.message}`);
  else if (record.state === "done" && !isAnswering()) {
    const [answer] = record.answers;
    const spoken = `Answer: ${answer.text.slice(0, SPOKEN_LENGTH) || "no text"}`;
    announce(isSingle(conversation.turns.at(-1)) ? spoken : "All answers are complete.");
  }
}

function showState() {
  const isRunning = isAnswering();
  $("stop").hidden = !isRunning;
  $("send").hidden = isRunning;
  $("export").disabled = !conversation.turns.length;
  document.title = conversation.title ? `${conversation.title} · Quire` : "Quire";
  $("title").textContent = conversation.title || "New conversation";
}

// --- the form -------------------------------------------------------------------------------------------------------

function send() {
  const text = written();
  if (!text || isAnswering()) return;
  if (!$("model").value) return loadModels();
  if (say(text)) {
    write("");
    showState();
  }
}

const log = $("log");

function scrollToEnd() {
  log.scrollTop = log.scrollHeight;
}

// Scrolls with a single answer while it grows. With several answers their beginnings matter, so the page stays.
function showTurn(turn) {
  if (isSingle(turn)) scrollToEnd();
  else viewOf(turn).element.scrollIntoView();
}

function isSingle(turn) {
  return turn?.runs.length === 1 && turn.runs[0].answers.length === 1;
}

around(
  () => isSingle(conversation.turns.at(-1)) && log.scrollHeight - log.scrollTop - log.clientHeight < 80,
  (isFollowed) => isFollowed && scrollToEnd(),
);

initInput(send);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !event.isComposing && isAnswering()) stop();
});
$("stop").addEventListener("click", () => {
  stop();
  focusInput();
});
$("new").addEventListener("click", () => {
  open(newConversation());
  focusInput();
});
$("export").addEventListener("click", () => exportConversation(conversation));
$("export-all").addEventListener("click", exportAll);
addEventListener("pagehide", saveChanges);
document.addEventListener("visibilitychange", () => document.hidden && saveChanges());
addEventListener("focus", refresh);

initKey(() => {
  loadModels();
  retryWithKey();
});
initSettings();
loadModels();
open((await loadConversation(current.get())) ?? newConversation());
