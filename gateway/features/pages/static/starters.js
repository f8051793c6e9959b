// Questions to begin with. The demonstration model, which tells stories and knows Quire, can answer each of them.

import { $, el } from "/dom.js";

const STARTERS = [
  "Tell me a story about a fox and a lighthouse",
  "Tell me a story about a dragon",
  "What is a block table?",
  "What happens if a worker dies?",
];

export function initStarters(ask) {
  $("starters").append(...STARTERS.map((text) => el("button", { type: "button", textContent: text, onclick: () => ask(text) })));
}
