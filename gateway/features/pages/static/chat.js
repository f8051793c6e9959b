// The chat page: the form for a message, the conversations, and what the page says about them.

import { addressed, onAddress, showAddress } from "/address.js";
import { dropChanges, hasChanges, save, saveChanges } from "/autosave.js";
import { isBegun, newConversation, touch } from "/conversation.js";
import { $ } from "/dom.js";
import { Drawer } from "/drawer.js";
import { watchSelection } from "/fork-bar.js";
import { around } from "/frame.js";
import { drawGauge } from "/gauge.js";
import { focusInput, initInput, write, written } from "/input.js";
import { initKey } from "/key.js";
import { Killer } from "/kill.js";
import { notice, tell } from "/notice.js";
import * as session from "/session.js";
import { contextOfModel, imagesOfModel, initSettings, loadModels, onModel, optionsOfRuns, wrongField } from "/settings.js";
import { drawShelf, initShelf } from "/shelf.js";
import { initStarters } from "/starters.js";
import { current, drafts, loadConversation, loadPicture, picturesOf, sidebar } from "/store.js";
import { exportAll, exportConversation, importFile } from "/transfer.js";
import { drawAttach, drawTray, emptyTray, initTray, trayed } from "/tray.js";
import { path } from "/tree.js";

const settingsDrawer = new Drawer("settings", "settings-button");
const shelfDrawer = new Drawer("shelf", "shelf-button", { onToggle: toggled });
const log = $("log");

// Returns the options of the next runs. If a field is wrong, shows that field and returns null.
function checkedOptions() {
  const options = optionsOfRuns();
  if (options === null) {
    settingsDrawer.toggle(true);
    wrongField().reportValidity();
  }
  return options;
}

// The sidebar is open again at the next visit.
function toggled(isOpen) {
  sidebar.set(isOpen);
  drawShelf();
}

// --- conversations --------------------------------------------------------------------------------------------------

function open(next) {
  session.open(next);
  write(drafts.get(draftKey()));
  drawTray();
}

// Closes a panel that covers the chat.
function uncover() {
  for (const drawer of [settingsDrawer, shelfDrawer]) if (drawer.isCovering) drawer.toggle(false);
}

// Opens a stored conversation, or says why that is not possible.
async function openStored(id) {
  const found = await loadConversation(id);
  uncover();
  if (found) return open(found);
  missed(found);
  showAddress(draftKey() || null, false);
}

function missed(found) {
  if (found === null) notice("This page cannot read that conversation.");
  else notice("This browser has no conversation with this address.");
}

function openNew() {
  open(newConversation());
  uncover();
  focusInput();
}

// Loads the changes that another tab, or an import, has stored. Not while an answer is being written: at its end.
async function refresh() {
  const shown = session.shown();
  const kept = session.isIdle() && (await loadConversation(shown.id));
  const isIdle = session.shown() === shown && session.isIdle() && !hasChanges();
  if (isIdle && kept?.changed > shown.changed) open(kept);
}

// The message that is being written belongs to its conversation; one that is not begun is "".
function draftKey() {
  const conversation = session.shown();
  return isBegun(conversation) ? conversation.id : "";
}

async function summarise() {
  const { shown } = session;
  const old = shown();
  $("summarise").disabled = true;
  tell("The model sums up the conversation…");
  try {
    const { summarised } = await import("/summary.js");
    const next = await summarised(old, $("model").value, contextOfModel());
    if (shown() !== old) return;
    const last = session.lastTurn();
    const isUnanswered = last?.runs.every(({ state }) => state === "failed");
    if (isUnanswered) await Promise.all((last.pictures ?? []).map(({ id }) => loadPicture(old.id, id)));
    tell("");
    open(next);
    save(next).then(drawShelf);
    if (isUnanswered) session.say(last.said, last.pictures);
    focusInput();
  } catch (error) {
    notice(`There is no summary. ${error.message}`);
  } finally {
    $("summarise").disabled = false;
  }
}

// --- what the page says ---------------------------------------------------------------------------------------------

// `isOther`: another conversation is shown than before.
function showState(isOther) {
  const conversation = session.shown();
  const isRunning = session.isAnswering();
  $("stop").hidden = !isRunning;
  $("send").hidden = isRunning;
  $("export").disabled = !isBegun(conversation);
  document.title = conversation.title ? `${conversation.title} · Quire` : "Quire";
  $("title").textContent = conversation.title || "New conversation";
  $("before").hidden = !conversation.summary;
  $("before").firstElementChild.textContent = "Summary of the conversation before";
  $("before").lastElementChild.textContent = conversation.summary ?? "";
  if (conversation.summary) $("hint").hidden = true;
  showAddress(draftKey() || null, isOther);
  drawGauge(conversation, contextOfModel());
  killer.draw();
  drawShelf();
  if (!isOther) refresh();
}

function scrollToEnd() {
  log.scrollTop = log.scrollHeight;
}

// Scrolls with a single answer while it grows. With several answers their beginnings matter, so the page stays.
function scroll(turn) {
  if (turn === null || session.isSingle(turn)) scrollToEnd();
  else session.viewOf(turn).element.scrollIntoView();
}

// --- the form -------------------------------------------------------------------------------------------------------

async function send() {
  const pictures = await trayed();
  const text = written();
  if ((!text && !pictures.length) || session.isAnswering()) return;
  ask(text, pictures);
}

function ask(text, pictures = []) {
  if (!$("model").value) return loadModels();
  if (pictures.length && !imagesOfModel()) {
    return notice(`${$("model").value} reads text alone: remove the pictures, or choose another model.`);
  }
  const key = draftKey();
  if (!session.say(text, pictures)) return;
  write("");
  drafts.set(key, "");
  emptyTray(key);
  showState(false);
}

around(
  () => session.isSingle(session.lastTurn()) && log.scrollHeight - log.scrollTop - log.clientHeight < 80,
  (isFollowed) => isFollowed && scrollToEnd(),
);

const killer = new Killer(session.written);
session.initSession({ options: checkedOptions, changed: showState, ran: () => killer.draw(), scroll, write });
initInput(send);
initStarters(ask);
initTray({
  key: draftKey,
  limits: imagesOfModel,
  model: () => $("model").value,
  used: () => picturesOf({ turns: path(session.shown()) }).length,
});
initShelf({
  currentId: () => session.shown().id,
  open: async (id) => {
    await openStored(id);
    focusInput();
  },
  removed: (id) => {
    drafts.set(id, "");
    if (id !== session.shown().id) return;
    session.stop();
    dropChanges();
    open(newConversation());
  },
  renamed: (id, title) => {
    const conversation = session.shown();
    if (id !== conversation.id) return false;
    conversation.title = title;
    touch(conversation);
    save(conversation).then(() => showState(false));
    return true;
  },
});
watchSelection((node) => {
  const turn = node.parentElement?.closest(".turn");
  return session.viewAt(turn);
});
$("input").addEventListener("input", () => drafts.set(draftKey(), $("input").value));
document.addEventListener("keydown", (event) => {
  const isFree = !event.isComposing && !document.querySelector("dialog[open]");
  if (event.key === "Escape" && isFree && session.isAnswering()) session.stop();
});
$("stop").addEventListener("click", () => {
  session.stop();
  focusInput();
});
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address is that of the conversation
  focusInput();
});
$("new").addEventListener("click", openNew);
$("export").addEventListener("click", () => exportConversation(session.shown()));
$("export-all").addEventListener("click", exportAll);
$("import").addEventListener("click", () => importFile(() => showState(false)));
$("summarise").addEventListener("click", summarise);
addEventListener("pagehide", () => saveChanges(true));
document.addEventListener("visibilitychange", () => document.hidden && saveChanges());
addEventListener("focus", refresh);
onAddress((id) => (id === null ? openNew() : id !== session.shown().id && openStored(id)));
onModel(() => {
  drawGauge(session.shown(), contextOfModel());
  drawAttach();
});

initKey(() => {
  loadModels();
  session.retryWithKey();
});
initSettings();
loadModels();
const named = addressed();
const found = await loadConversation(named ?? current.get());
open(found || newConversation());
if (sidebar.get()) shelfDrawer.show();
if (named !== null && !found) missed(found);
