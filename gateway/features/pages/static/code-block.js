// A block of code: its language, a button that copies it, and its text, in colours if highlight.js knows the language.
//
// A text is coloured piece by piece, in the pauses of the page. The piece that still grows is coloured anew now and then.

import { el } from "/dom.js";

const FOLDER = "/vendor/highlight.js-11.12.0";
// Languages that are files of their own, and their other names.
const FILES = {
  clojure: "clj edn", cmake: "", dart: "", dockerfile: "docker containerfile", elixir: "ex exs", erlang: "erl",
  haskell: "hs", http: "https", julia: "jl", latex: "tex", lisp: "commonlisp elisp", matlab: "octave", nginx: "nginxconf",
  nix: "nixos", ocaml: "ml", powershell: "ps ps1 pwsh", protobuf: "proto", scala: "",
};
const FILE_OF = new Map(Object.entries(FILES).flatMap(([file, names]) => [file, ...names.split(" ")].map((name) => [name, file])));
const PIECE = 4000; // characters; a piece takes a part of a frame
const MOST = 200_000; // characters; the rest stays in one colour
const PAUSE_MS = 200;

const blocks = new WeakMap(); // element -> CodeBlock
let library = null;

export class CodeBlock {
  #language;
  #text = "";
  #code = el("code", {});
  #growing = el("span", {}); // the coloured part of the last piece
  #rest = document.createTextNode(""); // what has no colours yet
  #start = 0; // where the last piece begins
  #isAsked = false;
  #cost = 0;

  constructor(language) {
    this.#language = language.toLowerCase();
    this.#code.append(this.#growing, this.#rest);
    const button = el("button", { type: "button", className: "plain", textContent: "Copy" });
    button.ariaLabel = "Copy code";
    this.element = el(
      "div",
      { className: "code", dir: "ltr" },
      el("div", { className: "code-head quiet" }, el("span", { textContent: language }), button),
      el("pre", { tabIndex: 0 }, this.#code), // it may be wider than the page
    );
    blocks.set(this.element, this);
  }

  static of(element) {
    return blocks.get(element);
  }

  get text() {
    return this.#text;
  }

  show(text) {
    if (text === this.#text) return;
    if (text.startsWith(this.#text)) this.#rest.appendData(text.slice(this.#text.length));
    else {
      this.#start = 0;
      this.#growing.replaceChildren();
      this.#rest.data = text;
      this.#code.replaceChildren(this.#growing, this.#rest);
    }
    this.#text = text;
    this.#ask();
  }

  // Has the text coloured in a pause. The longer that takes, the longer it waits.
  #ask() {
    if (this.#isAsked || !this.#language || this.#start >= MOST) return;
    this.#isAsked = true;
    setTimeout(() => whenIdle(() => this.#colour()), this.#cost && Math.max(PAUSE_MS, 20 * this.#cost));
  }

  async #colour() {
    const highlight = await highlighter(this.#language);
    this.#isAsked = false;
    if (!highlight || !this.element.isConnected) return;
    const began = performance.now();
    const rest = this.#text.slice(this.#start);
    const piece = rest.length > PIECE ? rest.slice(0, cutOf(rest.slice(0, PIECE))) : rest;
    this.#growing.replaceChildren(...nodesOf(highlight(piece)));
    this.#rest.data = rest.slice(piece.length);
    this.#cost = performance.now() - began;
    if (piece.length === rest.length) return;
    this.#start += piece.length;
    this.#growing = el("span", {});
    this.#rest.before(this.#growing);
    this.#cost = 0;
    this.#ask();
  }
}

// The text that a button of a block copies; null for another button.
export function codeOf(button) {
  return CodeBlock.of(button.closest(".code"))?.text ?? null;
}

const whenIdle = (action) => (window.requestIdleCallback ?? setTimeout)(action);

// Where a piece may end: before a line that begins a part of its own, or any other line.
function cutOf(text) {
  const parts = [...text.matchAll(/\n\n(?=\S)/g)];
  return parts.at(-1)?.index + 2 || text.lastIndexOf("\n") + 1 || text.length;
}

// A function from a text to the tree of its parts; null for a language that is not known.
async function highlighter(language) {
  try {
    library ??= import(`${FOLDER}/highlight.min.mjs`);
    const { default: hljs } = await library;
    const file = FILE_OF.get(language);
    if (file && !hljs.getLanguage(file)) {
      hljs.registerLanguage(file, (await import(`${FOLDER}/languages/${file}.min.mjs`)).default);
    }
    const name = file ?? language;
    if (!hljs.getLanguage(name)) return null;
    return (text) => hljs.highlight(text, { language: name, ignoreIllegals: true })._emitter.rootNode;
  } catch {
    library = null; // the server may answer the next time
    return null;
  }
}

function nodesOf({ children }) {
  return children.map((child) => {
    if (typeof child === "string") return document.createTextNode(child);
    const kind = child.scope?.split(".")[0].replace(/[^a-z_-]/g, "") ?? "part";
    return el("span", { className: `hl-${kind}` }, ...nodesOf(child));
  });
}
