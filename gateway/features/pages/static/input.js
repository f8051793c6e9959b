// The field for a message: as high as its text, in the direction of its text, and sent with Enter.

import { $, directionOf } from "/dom.js";

const field = $("input");

// `send()` is called by Enter and by the button.
export function initInput(send) {
  $("form").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  field.addEventListener("input", resize);
  field.addEventListener("keydown", (event) => {
    // Shift+Enter is a line break. While an input method composes a character, Enter belongs to the input method.
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
}

export function written() {
  return field.value.trim();
}

export function write(text) {
  field.value = text;
  resize();
}

export function focusInput() {
  field.focus();
}

function resize() {
  field.rows = Math.min(8, field.value.split("\n").length);
  field.dir = directionOf(field.value);
}
