// The list of the conversations that this browser stores, with a button to remove each.

import { $, el } from "/dom.js";
import { forgetConversation, listConversations } from "/store.js";

const when = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });

// `open(id)` shows a conversation; `removed(id)` is called after one was removed.
export function showShelf(actions) {
  const rows = listConversations().map(({ id, title, changed }) => {
    const name = title || "Untitled";
    const link = el(
      "button",
      { type: "button", className: "plain conversation", onclick: () => actions.open(id) },
      el("span", { className: "title", dir: "auto", textContent: name }),
      el("time", { className: "quiet", textContent: changed ? when.format(changed) : "" }),
    );
    if (id === actions.currentId) link.setAttribute("aria-current", "true");
    const remove = el("button", {
      type: "button",
      className: "plain icon",
      textContent: "✕",
      onclick: () => {
        forgetConversation(id);
        actions.removed(id);
        showShelf({ ...actions, currentId: id === actions.currentId ? null : actions.currentId });
        $("shelf").querySelector("h2").focus();
      },
    });
    remove.setAttribute("aria-label", `Forget “${name}”`);
    return el("li", {}, link, remove);
  });
  $("conversations").replaceChildren(...rows);
  $("no-conversations").hidden = rows.length > 0;
}

export function exportConversation(conversation) {
  const url = URL.createObjectURL(new Blob([JSON.stringify(conversation, null, 2)], { type: "application/json" }));
  el("a", { href: url, download: `quire-${conversation.id.slice(0, 8)}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}
