// What the page says outside of an answer.

import { $ } from "/dom.js";

// Announces a sentence to screen readers; an answer is announced when it is complete, not token by token.
export function announce(text) {
  $("status").textContent = text;
}

// Shows what went wrong above the message field, or at the end of the panel that covers it, until the next sentence, and
// announces it; an empty one removes it. `buttons`: what can be done about it.
export function notice(text, ...buttons) {
  put(text, buttons, true);
}

// Shows what was done, in the same way.
export function tell(text, ...buttons) {
  put(text, buttons, false);
}

function put(text, buttons, isError) {
  const box = $("notice");
  if (box.firstChild?.textContent === text && !buttons.length) return;
  box.classList.toggle("error", isError);
  // On a narrow page an open panel covers the chat.
  const cover = $("chat").inert ? document.querySelector(".drawer:not([hidden])") : null;
  if (cover) cover.append(box);
  else $("form").prepend(box);
  box.replaceChildren(...(text ? [text, ...buttons] : []));
  box.hidden = !text;
  if (text) announce(text);
}

// Copies a text, says whether that was possible, and returns it.
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    announce("Copied.");
    return true;
  } catch {
    notice("Copying is not allowed here; select the text instead."); // the page was loaded over plain HTTP from another machine
    return false;
  }
}
