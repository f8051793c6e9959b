// The list of the conversations that this browser stores, with a button to remove each, and their export.

import { $, el } from "/dom.js";
import { allConversations, forgetConversation, listConversations } from "/store.js";

const when = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });

// `open(id)` shows a conversation; `removed(id)` is called after one was removed.
export async function showShelf(actions) {
  const rows = (await listConversations()).map(({ id, title, changed }) => {
    const name = title || "Untitled";
    const link = el(
      "button",
      { type: "button", className: "plain conversation", onclick: () => actions.open(id) },
      el("span", { className: "title", dir: "auto", textContent: name }),
      el("time", { className: "quiet", textContent: when.format(changed) }),
    );
    if (id === actions.currentId) link.setAttribute("aria-current", "true");
    const remove = el("button", {
      type: "button",
      className: "plain icon",
      textContent: "✕",
      onclick: async () => {
        await forgetConversation(id);
        actions.removed(id);
        await showShelf({ ...actions, currentId: id === actions.currentId ? null : actions.currentId });
        $("shelf").querySelector("h2").focus();
      },
    });
    remove.setAttribute("aria-label", `Forget “${name}”`);
    return el("li", {}, link, remove);
  });
  $("conversations").replaceChildren(...rows);
  $("no-conversations").hidden = rows.length > 0;
  $("export-all").disabled = !rows.length;
}

export function exportConversation(conversation) {
  download(conversation, `quire-${conversation.id.slice(0, 8)}.json`);
}

export async function exportAll() {
  download(await allConversations(), "quire-conversations.json");
}

function download(value, name) {
  const url = URL.createObjectURL(new Blob([JSON.stringify(value, null, 2)], { type: "application/json" }));
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}
