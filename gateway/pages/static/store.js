// The browser's storage: a bounded number of conversations, and the settings. Without storage all is kept until the reload.

import { VERSION } from "/conversation.js";

const PREFIX = "quire.chat.";
const CURRENT = "quire.current";
const SETTINGS = "quire.settings";
const MOST_CONVERSATIONS = 50;
const MOST_CHARACTERS = 3_000_000;

function attempt(action, otherwise = null) {
  try {
    return action();
  } catch {
    return otherwise; // storage is forbidden or full, or another program wrote this value
  }
}

// Newest first: {id, title, changed}.
export function listConversations() {
  return entries().map(({ id, title, changed }) => ({ id, title, changed }));
}

export function loadConversation(id) {
  return id === null ? null : attempt(() => read(localStorage.getItem(PREFIX + id)));
}

export function saveConversation(conversation) {
  if (!conversation.turns.length) return;
  const text = JSON.stringify(conversation);
  if (text.length > MOST_CHARACTERS) return; // it would displace all other conversations
  const kept = entries().filter((entry) => entry.id !== conversation.id);
  let characters = text.length + kept.reduce((sum, entry) => sum + entry.size, 0);
  while (kept.length && (kept.length >= MOST_CONVERSATIONS || characters > MOST_CHARACTERS)) {
    const oldest = kept.pop();
    characters -= oldest.size;
    forgetConversation(oldest.id);
  }
  const write = () => (localStorage.setItem(PREFIX + conversation.id, text), true);
  while (!attempt(write, false) && kept.length) forgetConversation(kept.pop().id);
}

export function forgetConversation(id) {
  attempt(() => localStorage.removeItem(PREFIX + id));
}

// The conversation that this tab shows; a new tab begins a new one.
export const current = {
  get: () => attempt(() => sessionStorage.getItem(CURRENT)),
  set: (id) => attempt(() => sessionStorage.setItem(CURRENT, id)),
};

export const settings = {
  get: () => attempt(() => JSON.parse(localStorage.getItem(SETTINGS)), null) ?? {},
  set: (values) => attempt(() => localStorage.setItem(SETTINGS, JSON.stringify(values))),
};

function entries() {
  const found = [];
  attempt(() => {
    for (let index = 0; index < localStorage.length; index += 1) {
      const key = localStorage.key(index);
      if (!key.startsWith(PREFIX)) continue;
      const text = localStorage.getItem(key);
      const conversation = attempt(() => read(text));
      // Conversations that cannot be read are the first to be removed when room is needed.
      const { title = "?", changed = 0 } = conversation ?? {};
      found.push({ id: key.slice(PREFIX.length), title, changed, size: text.length });
    }
  });
  return found.sort((a, b) => b.changed - a.changed);
}

// Throws TypeError or SyntaxError for data that another version wrote.
function read(text) {
  const conversation = JSON.parse(text);
  if (conversation === null) return null;
  const isWhole =
    conversation.version === VERSION &&
    typeof conversation.id === "string" &&
    typeof conversation.title === "string" &&
    Number.isFinite(conversation.changed) &&
    conversation.turns.every(
      (turn) =>
        typeof turn.said === "string" &&
        turn.chosen.length === 2 &&
        turn.runs.length > 0 &&
        turn.runs.every((run) => run.answers.length > 0 && run.answers.every(({ text }) => typeof text === "string")),
    );
  if (!isWhole) throw new TypeError("not a conversation of this version");
  return conversation;
}
