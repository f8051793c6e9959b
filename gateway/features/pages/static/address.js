// The address of a conversation in this browser: /#/c/ID.

const FORM = /^#\/c\/([0-9a-f]{32})$/;

// The id of the conversation that the address names, or null.
export function addressed() {
  return FORM.exec(location.hash)?.[1] ?? null;
}

export const addressOf = (id) => `#/c/${id}`;

// Shows the address of a conversation, null for a new one. `isStep`: the browser's Back leads to the address before.
export function showAddress(id, isStep) {
  if (id === addressed() && (id !== null || !location.hash)) return;
  const url = location.pathname + location.search + (id === null ? "" : addressOf(id));
  if (isStep) history.pushState(null, "", url);
  else history.replaceState(null, "", url);
}

// Calls `go(id)` when the user goes to another address of a conversation; null is a new one.
export function onAddress(go) {
  addEventListener("popstate", () => {
    if (!location.hash || addressed() !== null) go(addressed());
  });
}
