// Markdown that grows. What is settled is not parsed or drawn again: a block is settled when another one has begun after it
// on a line of its own. Definitions of links and footnotes may change blocks before them, so a text that has any is
// drawn once more when it has ended.

import { codeOf } from "/code-block.js";
import { PAGE_LEVEL, writeTokens } from "/markdown-dom.js";
import { parse } from "/markdown-parser.js";
import { NodeWriter } from "/node-writer.js";
import { copy } from "/notice.js";

// Marks at the end of a text that has not ended may turn out to be of another kind: they are not shown until more has
// arrived. These begin a line.
const MARKS = /^[\s>]*(?:[-+*=_~#|:`]+|`{3,}[^`]*|\d{1,9}[.)]|\$\$?|\\\[?)?\s*$/;
const MOST = 60; // characters of a line that is looked at

export class MarkdownView {
  #root;
  #settled; // the length of the settled text
  #last; // its last node
  #lines; // the length of the text whose lines were looked at
  #level; // the level of its last heading
  #links; // its definitions of links
  #hasDefinitions;
  #isWhole = false;

  constructor(root) {
    this.#root = root;
    root.addEventListener("click", onClick);
    this.#begin();
  }

  // Shows a text. While it is not whole it only grows.
  draw(text, isWhole) {
    if (this.#isWhole) this.#begin(); // an answer that had ended was resumed
    this.#isWhole = isWhole;
    if (!isWhole || this.#settled > 0) this.#drawMore(text, isWhole);
    if (isWhole && (this.#hasDefinitions || this.#settled === 0)) this.#drawWhole(text);
  }

  #begin() {
    this.#settled = this.#lines = 0;
    this.#last = null;
    this.#level = PAGE_LEVEL;
    this.#links = Object.create(null);
    this.#hasDefinitions = false;
  }

  #drawMore(text, isWhole) {
    const end = text.lastIndexOf("\n") + 1;
    // An unfinished line may turn out to be of another kind, so only complete lines can settle a block.
    if (end > this.#lines) {
      this.#lines = end;
      const lines = text.slice(this.#settled, end);
      const length = lengthOf(lines, settledLines(parse(lines, {})));
      if (length > 0) this.#settle(lines.slice(0, length));
    }
    let rest = text.slice(this.#settled);
    if (!isWhole) {
      const isMarks = text.length - end < MOST && MARKS.test(text.slice(end));
      rest = isMarks ? text.slice(this.#settled, end) : withoutLastMarks(rest);
    }
    const writer = new NodeWriter(this.#root, this.#last);
    writeTokens(writer, this.#parse(rest).tokens, this.#level);
    writer.end();
  }

  #settle(text) {
    const { tokens, links } = this.#parse(text);
    Object.assign(this.#links, links);
    const writer = new NodeWriter(this.#root, this.#last);
    this.#level = writeTokens(writer, tokens, this.#level);
    writer.flush();
    this.#last = writer.last;
    this.#settled += text.length;
  }

  #parse(text) {
    const links = Object.create(this.#links);
    const env = { references: links };
    const tokens = parse(text, env);
    if (Object.keys(links).length || env.footnotes) this.#hasDefinitions = true;
    return { tokens, links };
  }

  #drawWhole(text) {
    const writer = new NodeWriter(this.#root, null);
    writeTokens(writer, parse(text, {}, true), PAGE_LEVEL, true);
    writer.end();
  }
}

// The number of lines of all blocks but the last.
function settledLines(tokens) {
  let depth = 0;
  let line = 0;
  const ends = [0, 0];
  for (const { map, nesting } of tokens) {
    if (map) line = Math.max(line, map[1]);
    depth += nesting;
    if (depth === 0) ends.push(line);
  }
  return ends.at(-2);
}

function lengthOf(text, lines) {
  const ends = /\r\n?|\n/g;
  for (let line = 0; line < lines; line += 1) ends.exec(text);
  return ends.lastIndex;
}

function withoutLastMarks(text) {
  let end = text.length;
  while ("*_~`".includes(text[end - 1] ?? " ")) end -= 1;
  return text.slice(0, end);
}

function onClick({ target, currentTarget: root }) {
  const button = target.closest("button");
  if (!button) return;
  const { refers, returns } = button.dataset;
  if (refers) go(root.querySelector(`[data-footnote="${refers.split(" ")[0]}"]`));
  else if (returns) go(root.querySelector(`[data-refers="${returns}"]`));
  else if (codeOf(button) !== null) copyCode(button);
}

function go(element) {
  element?.focus({ preventScroll: true });
  element?.scrollIntoView({ block: "nearest" });
}

async function copyCode(button) {
  if (!(await copy(codeOf(button)))) return;
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = "Copy"), 1500);
}
