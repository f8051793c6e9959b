// The field in which a message is written: as high as its text, in its text's direction, and sent with Enter.

import { $, directionOf } from "/dom.js";

const field = $("input");

// `send()` is what Enter and the button do.
export function initInput(send) {
  $("form").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  field.addEventListener("input", resize);
  field.addEventListener("keydown", (event) => {
    // A line break is Shift+Enter. While an input method composes, Enter is its own.
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
}

export function written() {
  return field.value.trim();
}

export function clearInput() {
  field.value = "";
  resize();
}

export function focusInput() {
  field.focus();
}

function resize() {
  field.rows = Math.min(8, field.value.split("\n").length);
  field.dir = directionOf(field.value);
}
