// Elements, made by name. Text goes in as text.

export const $ = (id) => document.getElementById(id);

// `properties` are those of the element (className, textContent, onclick...), not attributes.
export function el(name, properties, ...children) {
  const element = Object.assign(document.createElement(name), properties);
  element.append(...children);
  return element;
}

// Of a field with this text: that of its first letter. Chromium takes seconds to lay out megabytes so, and with any other
// value does not.
export const directionOf = (text) => (text.length < 20_000 ? "auto" : "");
