// Writes nodes below an element, and keeps those that are there already and would be the same: what the reader has
// selected, scrolled or focused stays so while a text grows.

import { el } from "/dom.js";

const MOST_SKIPPED = 3; // nodes that are no longer there, before one that is
const keys = new WeakMap(); // node -> what it was made for

export class NodeWriter {
  last; // the last node that was written
  #parent;
  #at; // the next node that may be kept
  #text = "";
  #open = [];

  // Writes below `root`, after the node `last`; null for its beginning.
  constructor(root, last) {
    this.last = last;
    this.#parent = root;
    this.#at = last ? last.nextSibling : root.firstChild;
  }

  text(text) {
    this.#text += text;
  }

  // Opens an element; what follows is written into it. `key`: all that its properties are made of.
  open(name, { dir = "", ...properties }, key = name) {
    const node = this.#place(key, () => el(name, properties));
    this.#open.push([this.#parent, dir]);
    this.#parent = node;
    this.#at = node.firstChild;
    return node;
  }

  close() {
    this.end();
    const node = this.#parent;
    const [parent, dir] = this.#open.pop();
    this.#parent = parent;
    // Last: for each child that an element gets while it has a direction, Chromium looks at all its children.
    if (node.dir !== dir) node.dir = dir;
    this.#pass(node);
  }

  // Writes a node whose content is not written here.
  add(key, make) {
    const node = this.#place(key, make);
    this.#pass(node);
    return node;
  }

  // Removes what is left in the open element.
  end() {
    this.flush();
    while (this.#at) this.#drop();
  }

  // Writes the text that was collected.
  flush() {
    const text = this.#text;
    this.#text = "";
    if (!text) return;
    const node = this.#at?.nodeType === Node.TEXT_NODE ? this.#at : document.createTextNode("");
    if (node !== this.#at) this.#parent.insertBefore(node, this.#at);
    if (text.startsWith(node.data)) {
      if (text.length > node.length) node.appendData(text.slice(node.length));
    } else node.data = text;
    this.#pass(node);
  }

  #place(key, make) {
    this.flush();
    let kept = this.#at;
    for (let skipped = 0; kept && keys.get(kept) !== key; skipped += 1) kept = skipped < MOST_SKIPPED ? kept.nextSibling : null;
    if (kept) {
      while (this.#at !== kept) this.#drop();
      return kept;
    }
    const node = make();
    keys.set(node, key);
    this.#parent.insertBefore(node, this.#at);
    return node;
  }

  #drop() {
    const gone = this.#at;
    this.#at = gone.nextSibling;
    gone.remove();
  }

  #pass(node) {
    this.last = node;
    this.#at = node.nextSibling;
  }
}
