// The browser's storage: conversations and their pictures in IndexedDB, which has room for thousands, and the settings. The
// page removes no conversation by itself; if there is no room for another one, `saveConversation` says so.

import { checked } from "/checks.js";
import { isBegun } from "/conversation.js";
import { merged } from "/tree.js";

const STORE = "conversations";
const PICTURES = "pictures"; // {conversation, id, file}
const BY_TIME = "by time";
const CURRENT = "quire.current";
const SIDEBAR = "quire.sidebar";
const DRAFTS = "quire.drafts";
// Where earlier versions of the page kept each conversation, in localStorage. They are moved when the database is made.
const EARLIER = "quire.chat.";

let opening = null;
let saved = null; // the conversation that this tab has stored last
const files = new Map(); // of pictures that this tab has taken or read, by their ids
let kept = new Set(); // the ids of the pictures that were stored with it before that

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

// Returns null for one that cannot be read, and undefined for one that is not there.
export async function loadConversation(id) {
  if (id === null) return null;
  return attempt(async () => {
    const found = await transact("readonly", (store) => store.get(id));
    return found && checked(found);
  });
}

// Those of this version, the newest last.
export async function allConversations() {
  const all = await transact("readonly", (store) => store.index(BY_TIME).getAll());
  return all.map((one) => attempt(() => checked(one))).filter(Boolean);
}

// The ids of the conversations in which `text` occurs, in a title, a message or an answer. Reads one after the other.
export async function searchConversations(text) {
  const found = new Set();
  const isThere = (words) => String(words).toLocaleLowerCase().includes(text.toLocaleLowerCase());
  await transact("readonly", (store) => {
    store.openCursor().onsuccess = ({ target: { result: cursor } }) => {
      if (!cursor) return;
      const one = attempt(() => checked(cursor.value));
      const words = (one?.turns ?? []).flatMap(({ said, runs }) => [said, ...runs.flatMap((run) => run.answers.map((answer) => answer.text))]);
      if ([cursor.value.title, ...words].some(isThere)) found.add(cursor.primaryKey);
      cursor.continue();
    };
  }).catch(() => {});
  return found;
}

// Stores a conversation with what another tab has added to it. `isClosing`: the page is being closed and has no time to
// read, so it takes what was stored when it saved the last time. Throws DOMException if the browser has no room, or allows
// no storage.
export async function saveConversation(conversation, isClosing = false) {
  if (!isBegun(conversation)) return;
  await transact("readwrite", (store, pictures) => {
    const put = (stored, known) => {
      saved = stored ? checked(merged(conversation, stored)) : conversation;
      kept = known;
      store.put(saved);
      for (const { id } of picturesOf(conversation)) {
        if (files.has(id) && !known.has(id)) pictures.put({ conversation: conversation.id, id, file: files.get(id) });
      }
      store.transaction.commit();
    };
    if (isClosing) return saved?.id === conversation.id ? put(saved, kept) : put(null, new Set());
    const keys = pictures.getAllKeys(keysOf(conversation.id));
    store.get(conversation.id).onsuccess = ({ target: { result } }) =>
      put(result && attempt(() => checked(result)), new Set(keys.result.map(([, id]) => id)));
  });
}

// Its pictures are removed with it. This tab still has the files of those that it has read.
export async function forgetConversation(id) {
  await transact("readwrite", (store, pictures) => {
    store.delete(id);
    pictures.delete(keysOf(id));
  }).catch(() => {});
}

// --- pictures -------------------------------------------------------------------------------------------------------

// The keys of all pictures of a conversation.
const keysOf = (id) => IDBKeyRange.bound([id], [id, []]);

export const picturesOf = ({ turns }) => turns.flatMap(({ pictures = [] }) => pictures);

// Keeps the file of a picture, which is stored together with a conversation that has the picture.
export function holdPicture(id, file) {
  files.set(id, file);
}

// Returns the file of a picture, or null if the browser has it no longer.
export async function loadPicture(conversation, id) {
  if (files.has(id)) return files.get(id);
  const found = await transact("readonly", (_, pictures) => pictures.get([conversation, id])).catch(() => null);
  if (!(found?.file instanceof Blob)) return null;
  files.set(id, found.file);
  return found.file;
}

// --- the rest -------------------------------------------------------------------------------------------------------

// The conversation that this tab shows; a new tab begins a new one.
export const current = {
  get: () => attempt(() => sessionStorage.getItem(CURRENT)),
  set: (id) => attempt(() => sessionStorage.setItem(CURRENT, id)),
};

// What was written and not sent, by the id of its conversation; "" is a new one. Kept until the tab is closed.
export const drafts = {
  get: (id) => readDrafts()[id] ?? "",
  set: (id, text) => {
    const { [id]: _, ...others } = readDrafts();
    attempt(() => sessionStorage.setItem(DRAFTS, JSON.stringify(text ? { ...others, [id]: text } : others)));
  },
};

const readDrafts = () => attempt(() => JSON.parse(sessionStorage.getItem(DRAFTS))) ?? {};

// Whether the sidebar is open.
export const sidebar = {
  get: () => attempt(() => localStorage.getItem(SIDEBAR)) === "open",
  set: (isOpen) => attempt(() => localStorage.setItem(SIDEBAR, isOpen ? "open" : "closed")),
};

// Named sets of settings: {name: values}.
export const presets = valuesAt("quire.presets");
export const settings = valuesAt("quire.settings");

function valuesAt(key) {
  return {
    get: () => attempt(() => JSON.parse(localStorage.getItem(key))) ?? {},
    set: (values) => attempt(() => localStorage.setItem(key, JSON.stringify(values))),
  };
}

// Storage may be forbidden or full, and another program may have written a value.
function attempt(action) {
  try {
    const result = action();
    return result instanceof Promise ? result.catch(() => null) : result;
  } catch {
    return null;
  }
}

// Runs `action(conversations, pictures)` in one transaction. Resolves to the result of the request that it returns, when all is stored.
async function transact(mode, action) {
  opening ??= open().catch((error) => {
    opening = null;
    throw error;
  });
  const transaction = (await opening).transaction([STORE, PICTURES], mode);
  const asked = action(transaction.objectStore(STORE), transaction.objectStore(PICTURES));
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve(asked?.result);
    transaction.onabort = () => reject(transaction.error);
  });
}

async function open() {
  const earlier = attempt(() => Object.keys(localStorage).filter((key) => key.startsWith(EARLIER))) ?? [];
  const asked = indexedDB.open("quire", 2);
  asked.onupgradeneeded = () => {
    const { objectStoreNames: names } = asked.result;
    if (!names.contains(PICTURES)) asked.result.createObjectStore(PICTURES, { keyPath: ["conversation", "id"] });
    if (names.contains(STORE)) return;
    const store = asked.result.createObjectStore(STORE, { keyPath: "id" });
    store.createIndex(BY_TIME, ["changed", "title"]);
  };
  const database = await new Promise((resolve, reject) => {
    asked.onsuccess = () => {
      // The browser closes it when its user deletes the data of the page; a newer page in another tab needs it closed.
      asked.result.onclose = asked.result.onversionchange = () => {
        asked.result.close();
        opening = null;
      };
      resolve(asked.result);
    };
    asked.onerror = () => reject(asked.error);
    asked.onblocked = () => reject(new DOMException("An older page keeps it open.", "BlockedError"));
  });
  if (earlier.length) await move(earlier, database).catch(() => null);
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
