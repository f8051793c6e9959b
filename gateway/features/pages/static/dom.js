// Makes elements by name. Text is set as text, never as markup.

export const $ = (id) => document.getElementById(id);

// `properties`: properties of the element (className, textContent, onclick...), not attributes.
export function el(name, properties, ...children) {
  const element = Object.assign(document.createElement(name), properties);
  element.append(...children);
  return element;
}

// A button that shows a sign, and has a name for screen readers.
export function signButton(sign, name, onclick) {
  const made = el("button", { type: "button", className: "plain icon", textContent: sign, title: name, onclick });
  made.setAttribute("aria-label", name);
  return made;
}

// The `dir` of a field with this text. `auto` is the direction of the first letter; for megabytes of text it takes
// Chromium seconds of layout, so a long text has no direction of its own.
export const directionOf = (text) => (text.length < 20_000 ? "auto" : "");
