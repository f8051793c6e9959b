// Stores a conversation while it changes, and says if the browser does not.

import { el } from "/dom.js";
import { notice } from "/notice.js";
import { saveConversation } from "/store.js";
import { exportAll } from "/transfer.js";

const SAVE_MS = 400;
const FORBIDDEN = "This browser does not let the page store conversations: they end with this tab.";
const REASONS = {
  BlockedError: "An older version of this page keeps it from storing conversations: close the other tabs of this page.",
  VersionError: "A newer version of this page is in use: reload this one, because it cannot store conversations.",
};
let timer = null;
let changed = null; // the conversation with changes that are not stored yet

export function saveSoon(conversation) {
  changed = conversation;
  timer ??= setTimeout(saveChanges, SAVE_MS);
}

export async function save(conversation, isClosing = false) {
  dropChanges();
  try {
    await saveConversation(conversation, isClosing);
  } catch (error) {
    if (error?.name !== "QuotaExceededError") return notice(REASONS[error?.name] ?? FORBIDDEN);
    const button = el("button", { type: "button", textContent: "Export all as JSON", onclick: exportAll });
    notice("This browser has no room for this conversation: it is not stored. Export what you need, and remove some.", button);
  }
}

export function saveChanges(isClosing = false) {
  if (changed) save(changed, isClosing);
}

export const hasChanges = () => changed !== null;

export function dropChanges() {
  clearTimeout(timer);
  timer = changed = null;
}
