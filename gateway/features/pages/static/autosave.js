// Stores a conversation while it changes, and says if the browser does not.

import { el } from "/dom.js";
import { notice } from "/notice.js";
import { exportAll } from "/shelf.js";
import { saveConversation } from "/store.js";

const SAVE_MS = 400;
let timer = null;
let changed = null; // the conversation with changes that are not stored yet

export function saveSoon(conversation) {
  changed = conversation;
  timer ??= setTimeout(saveChanges, SAVE_MS);
}

export async function save(conversation) {
  dropChanges();
  try {
    await saveConversation(conversation);
  } catch (error) {
    if (error?.name !== "QuotaExceededError") {
      return notice("This browser does not let the page store conversations: they end with this tab.");
    }
    const button = el("button", { type: "button", textContent: "Export all as JSON", onclick: exportAll });
    notice("This browser has no room for this conversation: it is not stored. Export what you need, and remove some.", button);
  }
}

// Saves only what this tab has changed: another tab may have added turns to the conversation that both show.
export function saveChanges() {
  if (changed) save(changed);
}

export const hasChanges = () => changed !== null;

export function dropChanges() {
  clearTimeout(timer);
  timer = changed = null;
}
