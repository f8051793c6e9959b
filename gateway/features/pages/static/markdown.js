// The text of an answer as Markdown. The parser is loaded for the first text; until then the text is shown as it is
// written.

import { el } from "/dom.js";

let renderer = null; // the module that renders
let loading = null;
const waiting = []; // what is called when it is loaded

function load(loaded) {
  waiting.push(loaded);
  loading ??= import("/markdown-view.js").then(
    (module) => {
      renderer = module;
      for (const call of waiting.splice(0)) call();
    },
    () => (loading = null), // the next answer asks again
  );
}

export class Markdown {
  #root;
  #view = null;
  #plain = null; // the text while there is no parser
  #drawn = []; // what was drawn last

  // `loaded()` is called when the text can be drawn better than before.
  constructor(root, loaded) {
    this.#root = root;
    if (renderer === null) load(loaded);
  }

  // Shows a text. While it is not whole it only grows.
  draw(text, isWhole) {
    const state = [text, isWhole, renderer];
    if (state.every((part, index) => part === this.#drawn[index])) return;
    this.#drawn = state;
    if (renderer === null) return this.#drawPlain(text);
    if (this.#view === null) {
      this.#plain?.remove();
      this.#view = new renderer.MarkdownView(this.#root);
    }
    this.#view.draw(text, isWhole);
  }

  #drawPlain(text) {
    if (!text) return;
    this.#plain ??= this.#root.appendChild(el("p", { dir: "auto" }));
    this.#plain.textContent = text;
  }
}
