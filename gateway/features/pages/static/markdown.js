// A small part of Markdown as DOM nodes: paragraphs, headings, lists, code, bold, italic. Everything else that a model
// writes, markup, links and images included, stays text: nodes are made by name, text is set as text, and no attribute
// gets any of it. Text is appended as it arrives, and only the block that is still open is drawn again.

// The level of a turn's heading; headings in its answers are below it.
const PAGE_LEVEL = 2;
const FENCE = /^ {0,9}(`{3,})[^`]*$/;
const HEADING = /^(#{1,6}) +(.*)$/;
const ITEM = /^ {0,9}([-*+]|\d{1,9}[.)]) +(.*)$/;

export class Markdown {
  #root;
  #tail = ""; // the source of the blocks that may still change
  #open = []; // the nodes of those blocks
  #level = PAGE_LEVEL; // the level of the last heading that cannot change any more

  constructor(root) {
    this.#root = root;
  }

  append(text) {
    this.#tail += text;
    for (const node of this.#open) node.remove();
    this.#open = [];
    // An unfinished line may turn out to be of another kind, so only complete lines can close a block.
    const end = this.#tail.lastIndexOf("\n") + 1;
    const closed = blocksOf(this.#tail.slice(0, end)).slice(0, -1);
    if (closed.length) {
      const { nodes, level } = nodesOf(closed, this.#level);
      this.#root.append(...nodes);
      this.#level = level;
      this.#tail = this.#tail.slice(closed.at(-1).end);
    }
    this.#open = nodesOf(blocksOf(this.#tail), this.#level).nodes;
    this.#root.append(...this.#open);
  }
}

// Splits text into blocks {kind, lines, end}; `end`: the position in `text` after the block.
export function blocksOf(text) {
  const blocks = [];
  let block = null;
  let end = 0;
  const begin = (kind, extra = {}) => {
    block = { kind, lines: [], end, ...extra };
    blocks.push(block);
  };
  for (const line of linesOf(text)) {
    end += line.length;
    const content = line.replace(/\r?\n$/, "");
    let found;
    if (block?.kind === "code") {
      const mark = content.trim();
      if (mark.startsWith(block.fence) && /^`+$/.test(mark)) {
        block.end = end;
        block = null;
      } else block.lines.push(content);
    } else if ((found = FENCE.exec(content))) begin("code", { fence: found[1] });
    else if (content.trim() === "") block = null;
    else if ((found = HEADING.exec(content))) {
      begin("heading", { level: found[1].length });
      block.lines.push(withoutMarks(found[2].trim()));
      block.end = end;
      block = null;
    } else if ((found = ITEM.exec(content))) {
      const kind = /\d/.test(found[1]) ? "ol" : "ul";
      if (block?.kind !== kind) begin(kind, { start: parseInt(found[1], 10) });
      block.lines.push(found[2]);
    } else if (block?.kind === "ul" || block?.kind === "ol") block.lines[block.lines.length - 1] += `\n${content.trim()}`;
    else {
      if (block === null) begin("p");
      block.lines.push(content);
    }
    if (block) block.end = end;
  }
  return blocks;
}

// The text of a heading without its closing marks.
function withoutMarks(title) {
  let end = title.length;
  while (title[end - 1] === "#") end -= 1;
  return end === 0 || /\s/.test(title[end - 1]) ? title.slice(0, end).trimEnd() : title;
}

function linesOf(text) {
  return text.match(/[^\n]*\n|[^\n]+$/g) ?? [];
}

// `level`: the level of the last heading before the blocks; it becomes that of the last heading in them. A heading is at
// most one level below the heading before it, whatever the model writes.
function nodesOf(blocks, level) {
  const nodes = blocks.map((block) => {
    if (block.kind === "heading") level = Math.min(block.level + PAGE_LEVEL, level + 1, 6);
    return nodeOf(block, level);
  });
  return { nodes, level };
}

function nodeOf(block, level) {
  if (block.kind === "code") {
    const code = element("code");
    code.textContent = block.lines.join("\n");
    const pre = element("pre", code);
    pre.tabIndex = 0; // it may be wider than the page, and must be scrollable with the keyboard
    return pre;
  }
  if (block.kind === "ul" || block.kind === "ol") {
    const list = inItsDirection(element(block.kind, ...block.lines.map((line) => element("li", ...inline(line)))));
    if (block.kind === "ol" && block.start !== 1) list.start = block.start;
    return list;
  }
  const node = element(block.kind === "heading" ? `h${level}` : "p");
  node.append(...inline(block.lines.join("\n")));
  return inItsDirection(node);
}

// The direction of an element, from the first letter of its text.
function inItsDirection(node) {
  node.dir = "auto";
  return node;
}

function element(name, ...children) {
  const node = document.createElement(name);
  node.append(...children);
  return node;
}

// Splits a line into strings and nodes: `code`, **bold**, *italic*. A mark without its end is text, found in one pass.
export function inline(text, depth = 0) {
  const parts = [];
  const endless = new Set();
  let plain = 0;
  let at = 0;
  while (at < text.length) {
    const run = runAt(text, at);
    // Three stars are two and one; more are text.
    const mark = run[0] === "*" && run.length === 3 ? "**" : run;
    if (!run || (run[0] === "*" && run.length > 3)) {
      at += run.length || 1;
      continue;
    }
    const isText = endless.has(mark) || (mark[0] === "*" && (depth > 2 || /\s/.test(text[at + mark.length] ?? " ")));
    const end = isText ? -1 : endOf(text, at + mark.length, mark);
    if (end < 0) {
      if (!isText) endless.add(mark);
      at += mark.length;
      continue;
    }
    if (plain < at) parts.push(text.slice(plain, at));
    const inner = text.slice(at + mark.length, end);
    if (mark[0] === "`") {
      const code = element("code");
      code.textContent = inner;
      parts.push(code);
    } else parts.push(element(mark === "**" ? "strong" : "em", ...inline(inner, depth + 1)));
    at = plain = end + mark.length;
  }
  if (plain < text.length) parts.push(text.slice(plain));
  return parts;
}

// The run of stars or backticks that begins at this position, or an empty string.
function runAt(text, at) {
  const first = text[at];
  let end = at;
  if (first === "`" || first === "*") while (text[end] === first) end += 1;
  return text.slice(at, end);
}

// Returns the position of the next run of exactly this mark, not directly after the opening one, or -1.
function endOf(text, from, mark) {
  for (let at = text.indexOf(mark, from + 1); at >= 0; at = text.indexOf(mark, at)) {
    let end = at;
    while (text[end] === mark[0]) end += 1;
    if (mark[0] === "`" ? end - at === mark.length : (end - at) % 2 === mark.length % 2 && !/\s/.test(text[at - 1])) {
      return mark === "**" ? end - 2 : at;
    }
    at = end;
  }
  return -1;
}
