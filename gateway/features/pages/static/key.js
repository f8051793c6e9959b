// The API key of this tab, and the panel that asks for it.
//
// The key comes from the panel, or from #key=KEY in the address. It is kept until the tab is closed, and is sent to the
// server of the page only.

import { $, el, signButton } from "/dom.js";

const STORED = "quire.key";
let key = readKey();
let changed = () => {};
let panel = null;

// Takes a key from the address. `whenChanged()` is called after each later change of the key.
export function initKey(whenChanged = () => {}) {
  changed = whenChanged;
  takeFromAddress();
  addEventListener("hashchange", () => takeFromAddress() && changed());
}

// The header that authorises a call; none without a key.
export function authorization() {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

// Says what a 401 means, and shows the panel. `said`: the words of the server.
export function keyRefused(said) {
  const why = key
    ? `The server refuses this tab’s API key: ${said.replace(/ Send one as .*$/, "")}`
    : "This server needs an API key. Ask whoever runs it for one.";
  showPanel(why, true);
  return why;
}

// Shows the panel for a user who wants another key, or none.
export function changeKey() {
  showPanel(key ? "This tab uses an API key." : "This tab uses no API key.", false);
}

function showPanel(text, isError) {
  panel ??= makePanel();
  const { box, note, field, forget } = panel;
  note.textContent = text;
  note.classList.toggle("error", isError);
  forget.hidden = !key;
  box.hidden = false;
  // Whoever is writing something goes on writing.
  if (!isError || !document.activeElement?.value) field.focus();
}

function makePanel() {
  const note = el("p", { id: "key-note" });
  const field = el("input", { id: "key", type: "password", autocomplete: "off", spellcheck: false });
  field.setAttribute("aria-describedby", "key-note key-stays");
  const forget = el("button", { type: "button", textContent: "Forget the key", onclick: () => use("") });
  const close = signButton("✕", "Close", () => (box.hidden = true));
  const form = el(
    "form",
    {
      onsubmit: (event) => {
        event.preventDefault();
        use(field.value);
      },
    },
    el("label", { htmlFor: "key", textContent: "API key" }),
    field,
    el("button", { type: "submit", className: "main", textContent: "Use this key" }),
    forget,
    close,
  );
  const stays = el("p", { id: "key-stays", className: "quiet", textContent: "The key stays in this tab until you close it." });
  const box = el("aside", { className: "key-panel" }, note, form, stays);
  box.setAttribute("aria-label", "API key");
  document.querySelector("header.top").after(box);
  return { box, note, field, forget };
}

function use(text) {
  const given = text.trim();
  if (/[^!-~]/.test(given)) return showPanel("An API key has no spaces, and only ASCII characters. Copy it again.", true);
  setKey(given);
  panel.field.value = "";
  panel.box.hidden = true;
  changed();
}

// Returns whether the address had a key. Removes it from the address, so that nobody reads it there.
function takeFromAddress() {
  const found = /^#key=(.*)$/.exec(location.hash);
  if (!found) return false;
  history.replaceState(history.state, "", location.pathname + location.search);
  const before = key;
  setKey(found[1].trim());
  if (panel) panel.box.hidden = true;
  if (before && before !== key) showPanel("The link brought another API key, and this tab uses it now.", false);
  return true;
}

function readKey() {
  try {
    return sessionStorage.getItem(STORED) ?? "";
  } catch {
    return ""; // storage is forbidden: the key is kept until the reload
  }
}

function setKey(given) {
  key = given;
  try {
    sessionStorage.setItem(STORED, key);
  } catch {
    // See readKey.
  }
}
