// What the page says outside of an answer.

import { $ } from "/dom.js";

// Announces a sentence to screen readers; an answer is announced when it is complete, not token by token.
export function announce(text) {
  $("status").textContent = text;
}

// Shows a sentence above the message field until the next one, and announces it; an empty one removes it. `buttons`:
// what can be done about it.
export function notice(text, ...buttons) {
  const box = $("notice");
  if (box.firstChild?.textContent === text) return;
  box.replaceChildren(...(text ? [text, ...buttons] : []));
  box.hidden = !text;
  if (text) announce(text);
}

// Copies a text, and says whether that was possible.
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    announce("Copied.");
  } catch {
    notice("Copying is not allowed here; select the text instead."); // the page was loaded over plain HTTP from another machine
  }
}
