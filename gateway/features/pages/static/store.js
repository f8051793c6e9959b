// The browser's storage: conversations in IndexedDB, which has room for thousands, and the settings. The page removes no
// conversation by itself; if there is no room for another one, `saveConversation` says so.

import { VERSION } from "/conversation.js";

const STORE = "conversations";
const BY_TIME = "by time";
const CURRENT = "quire.current";
const SETTINGS = "quire.settings";
// Where earlier versions of the page kept each conversation, in localStorage. They are moved when the database is made.
const EARLIER = "quire.chat.";

let opening = null;

// Newest first: {id, title, changed}, without reading the conversations. Empty without storage.
export async function listConversations() {
  const rows = [];
  await transact("readonly", (store) => {
    store.index(BY_TIME).openKeyCursor(null, "prev").onsuccess = ({ target: { result: cursor } }) => {
      if (!cursor) return;
      const [changed, title] = cursor.key;
      rows.push({ id: cursor.primaryKey, title, changed });
      cursor.continue();
    };
  }).catch(() => {});
  return rows;
}

// Returns null for one that is unknown, or that another version wrote.
export async function loadConversation(id) {
  if (id === null) return null;
  return attempt(async () => checked(await transact("readonly", (store) => store.get(id))));
}

// Those of this version, the newest last.
export async function allConversations() {
  const all = await transact("readonly", (store) => store.index(BY_TIME).getAll());
  return all.filter((one) => attempt(() => checked(one)));
}

// Throws DOMException if the browser has no room, or allows no storage.
export async function saveConversation(conversation) {
  if (conversation.turns.length) await transact("readwrite", (store) => store.put(conversation));
}

export function forgetConversation(id) {
  return transact("readwrite", (store) => store.delete(id)).catch(() => {});
}

// The conversation that this tab shows; a new tab begins a new one.
export const current = {
  get: () => attempt(() => sessionStorage.getItem(CURRENT)),
  set: (id) => attempt(() => sessionStorage.setItem(CURRENT, id)),
};

export const settings = {
  get: () => attempt(() => JSON.parse(localStorage.getItem(SETTINGS))) ?? {},
  set: (values) => attempt(() => localStorage.setItem(SETTINGS, JSON.stringify(values))),
};

// Storage may be forbidden or full, and another program may have written a value.
function attempt(action) {
  try {
    const result = action();
    return result instanceof Promise ? result.catch(() => null) : result;
  } catch {
    return null;
  }
}

// Runs `action(store)` in one transaction. Resolves to the result of the request that it returns, when all is stored.
async function transact(mode, action) {
  opening ??= open();
  const transaction = (await opening).transaction(STORE, mode);
  const asked = action(transaction.objectStore(STORE));
  // At once: the page may be closing.
  if (mode === "readwrite") transaction.commit();
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve(asked?.result);
    transaction.onabort = () => reject(transaction.error);
  });
}

async function open() {
  const earlier = attempt(() => Object.keys(localStorage).filter((key) => key.startsWith(EARLIER))) ?? [];
  const asked = indexedDB.open("quire", 1);
  asked.onupgradeneeded = () => {
    const store = asked.result.createObjectStore(STORE, { keyPath: "id" });
    store.createIndex(BY_TIME, ["changed", "title"]);
  };
  const database = await new Promise((resolve, reject) => {
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });
  if (earlier.length) await move(earlier, database).catch(() => null);
  // The browser closes it when its user deletes the data of the page.
  database.onclose = () => (opening = null);
  return database;
}

// Moves conversations that an earlier page kept elsewhere. What cannot be stored stays where it is.
async function move(keys, database) {
  const transaction = database.transaction(STORE, "readwrite");
  const moved = keys.filter((key) =>
    attempt(() => transaction.objectStore(STORE).put(checked(JSON.parse(localStorage.getItem(key))))),
  );
  await new Promise((resolve, reject) => {
    transaction.oncomplete = resolve;
    transaction.onabort = () => reject(transaction.error);
  });
  for (const key of moved) attempt(() => localStorage.removeItem(key));
}

// Throws TypeError for data that another version wrote.
function checked(conversation) {
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
