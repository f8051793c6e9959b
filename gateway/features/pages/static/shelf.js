// The sidebar: the conversations that this browser stores, with a search, and buttons to rename and to remove each.

import { addressOf } from "/address.js";
import { isDate } from "/checks.js";
import { touch } from "/conversation.js";
import { $, el, signButton } from "/dom.js";
import { tell } from "/notice.js";
import { forgetConversation, listConversations, loadConversation, loadPicture, picturesOf, saveConversation, searchConversations } from "/store.js";

const SEARCH_MS = 150;
const when = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });
const list = $("conversations");

let actions = null;
let draws = 0;
let timer = null;

// `currentId()`: of the conversation that is shown; `open(id)` shows another one; `removed(id)` and `renamed(id, title)`
// are called after it was done.
export function initShelf(given) {
  actions = given;
  $("search").addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(drawShelf, SEARCH_MS);
  });
  $("search").addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown") focus(event, list.querySelector(".conversation"));
    if (event.key === "Escape" && event.target.value) {
      event.stopPropagation(); // the first Escape empties the search, the second one closes the sidebar
      event.target.value = "";
      drawShelf();
    }
  });
  list.addEventListener("keydown", onKey);
}

// Draws the list anew, if the sidebar is open.
export async function drawShelf() {
  if ($("shelf").hidden) return;
  const number = (draws += 1);
  const text = $("search").value.trim();
  const all = await listConversations();
  const found = text ? await searchConversations(text) : null;
  if (number !== draws) return; // a later call draws
  const rows = found ? all.filter(({ id }) => found.has(id)) : all;
  const held = document.activeElement?.closest?.("#conversations li")?.dataset.id;
  list.replaceChildren(...rows.map(row));
  list.querySelector(`[data-id="${held}"] .conversation`)?.focus();
  $("no-conversations").hidden = rows.length > 0;
  $("no-conversations").textContent = text ? "No conversation has these words." : "No conversations yet.";
  $("export-all").disabled = !all.length;
}

function row({ id, title, changed }) {
  const name = title || "Untitled";
  const link = el(
    "a",
    { href: addressOf(id), className: "conversation" },
    el("span", { className: "title", dir: "auto", textContent: name }),
    el("time", { className: "quiet", textContent: isDate(changed) ? when.format(changed) : "" }),
  );
  link.addEventListener("click", (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return; // a tab or a window of its own
    event.preventDefault();
    actions.open(id);
  });
  if (id === actions.currentId()) link.setAttribute("aria-current", "true");
  const item = el("li", {}, link);
  item.dataset.id = id;
  item.append(
    signButton("✎", `Rename “${name}”`, () => edit(item, id, title)),
    signButton("✕", `Forget “${name}”`, () => remove(id, name)),
  );
  return item;
}

function edit(item, id, title) {
  const field = el("input", { type: "text", value: title, maxLength: 200 });
  field.setAttribute("aria-label", "Name of the conversation");
  let isOver = false;
  const end = async (isKept) => {
    if (isOver) return;
    isOver = true;
    const given = field.value.trim();
    if (isKept && given && given !== title) await rename(id, given);
    await drawShelf();
    list.querySelector(`[data-id="${id}"] .conversation`)?.focus();
  };
  field.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== "Escape") return;
    event.preventDefault();
    event.stopPropagation();
    end(event.key === "Enter");
  });
  field.addEventListener("blur", () => end(true));
  item.replaceChildren(field);
  field.select();
}

async function rename(id, title) {
  if (actions.renamed(id, title)) return;
  const conversation = await loadConversation(id);
  if (!conversation) return;
  conversation.title = title;
  touch(conversation);
  await saveConversation(conversation).catch(() => {});
}

async function remove(id, name) {
  const conversation = await loadConversation(id);
  // "Undo" stores them again.
  if (conversation) await Promise.all(picturesOf(conversation).map((picture) => loadPicture(id, picture.id)));
  const next = list.querySelector(`[data-id="${id}"]`)?.nextElementSibling?.dataset.id;
  await forgetConversation(id);
  actions.removed(id);
  await drawShelf();
  (list.querySelector(`[data-id="${next}"] .conversation`) ?? $("shelf").querySelector("h2")).focus();
  if (!conversation) return tell(`“${name}” is removed.`);
  const undo = el("button", { type: "button", textContent: "Undo" });
  undo.addEventListener("click", async () => {
    tell("");
    await saveConversation(conversation).catch(() => {});
    actions.open(id);
  });
  tell(`“${name}” is removed.`, undo);
}

function onKey(event) {
  const item = event.target.closest("li");
  if (!item || event.target.matches("input")) return;
  const links = [...list.querySelectorAll(".conversation")];
  const at = links.indexOf(item.querySelector(".conversation"));
  const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: links.length - 1 }[event.key];
  if (to !== undefined) return focus(event, links[to] ?? (to < 0 ? $("search") : null));
  if (!event.target.matches(".conversation")) return;
  const [again, gone] = item.querySelectorAll("button");
  if (event.key === "F2") again.click();
  if (event.key === "Delete") gone.click();
}

function focus(event, element) {
  event.preventDefault();
  element?.focus();
}
