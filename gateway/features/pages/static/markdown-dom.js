// Writes the tokens of a Markdown text as elements. Elements are made by name, text is set as text, and the attributes that
// get a part of the text are: the address of a link, the number of a list's first item, and labels.

import { CodeBlock } from "/code-block.js";
import { el } from "/dom.js";
import { isWeb } from "/markdown-parser.js";
import { mathOf } from "/math.js";

// The level of a turn's heading; headings in its answers are below it.
export const PAGE_LEVEL = 2;
const TASK = /^\[([ xX])\] /;
// Elements without properties.
const PLAIN = { strong: "strong", em: "em", s: "s", thead: "thead", tbody: "tbody", tr: "tr" };
// The direction of these is that of the first letter of their texts.
const DIRECTED = { paragraph: "p", blockquote: "blockquote", bullet_list: "ul" };

// `level`: the level of the last heading before the tokens. Returns that of the last heading in them. `isWhole`: they are
// those of a text that has ended.
export function writeTokens(writer, tokens, level, isWhole = false) {
  const state = { level, isWhole };
  tokens.forEach((token, index) => write(writer, token, tokens, index, state));
  return state.level;
}

function write(writer, token, tokens, index, state) {
  const { type } = token;
  if (type === "inline") {
    token.children.forEach((child, at) => write(writer, child, token.children, at, state));
  } else if (token.nesting < 0) {
    if (!token.hidden) close(writer, type);
  } else if (token.nesting > 0) {
    if (!token.hidden) open(writer, token, tokens[index + 1], tokens[index + 2], state);
  } else if (type === "softbreak") writer.text("\n");
  else if (type === "hardbreak") writer.add("br", () => el("br", {}));
  else if (type === "hr") writer.add("hr", () => el("hr", {}));
  else if (type === "code_inline") {
    writer.open("code", {});
    writer.text(token.content);
    writer.close();
  } else if (type === "fence" || type === "code_block") writeCode(writer, token);
  else if (type === "math_inline") writeMath(writer, token.content, token.meta.isDisplay);
  else if (type === "math_block") {
    if (token.meta.isClosed) writeMath(writer, token.content, true);
    else writeCode(writer, { content: token.content, info: "latex" }); // the rest of it is to come
  } else if (type === "image") writeImage(writer, token);
  else if (type === "footnote_ref") writeReference(writer, token.meta, state.isWhole);
  else if (type === "footnote_anchor") writeReturn(writer, token.meta);
  else writer.text(token.content);
}

function open(writer, token, next, afterNext, state) {
  const name = token.type.slice(0, -"_open".length);
  if (PLAIN[name]) writer.open(PLAIN[name], {});
  else if (DIRECTED[name]) writer.open(DIRECTED[name], { dir: "auto" });
  else if (name === "heading") {
    // A heading is at most one level below the heading before it, whatever the model writes.
    state.level = Math.min(Number(token.tag[1]) + PAGE_LEVEL, state.level + 1, 6);
    writer.open(`h${state.level}`, { dir: "auto" });
  } else if (name === "ordered_list") {
    const start = Number(token.attrGet("start") ?? 1);
    writer.open("ol", { dir: "auto", ...(start !== 1 && { start }) }, `ol ${start}`);
  } else if (name === "list_item") openItem(writer, next, afterNext);
  else if (name === "table") {
    writer.open("div", { className: "table", tabIndex: 0 }, "table"); // it may be wider than the page
    writer.open("table", { dir: "auto" });
  } else if (name === "th" || name === "td") {
    const side = /center|right/.exec(token.attrGet("style") ?? "")?.[0] ?? "";
    const element = next.content ? name : "td"; // a heading without words is none
    writer.open(element, { className: side, ...(element === "th" && { scope: "col" }) }, `${element} ${side}`);
  } else if (name === "link") openLink(writer, token.attrGet("href"), token.attrGet("title"));
  else if (name === "footnote_block") writer.open("ol", { className: "footnotes" }, "footnotes");
  else if (name === "footnote") {
    writer.open("li", { tabIndex: -1 }, `footnote ${token.meta.id}`).dataset.footnote = token.meta.id;
  } else if (name === "footnote_reference") {
    writer.open("div", { className: "footnote" }, "footnote");
    writer.open("sup", {});
    writer.text(token.meta.label);
    writer.close();
  } else writer.open("div", {});
}

function close(writer, type) {
  writer.close();
  if (type === "table_close") writer.close();
}

// Opens an item. One that begins with [ ] or [x] is a task.
function openItem(writer, next, afterNext) {
  const words = next.type === "paragraph_open" ? afterNext.children[0] : null;
  const found = words?.type === "text" && TASK.exec(words.content);
  if (!found) return writer.open("li", {});
  words.content = words.content.slice(found[0].length);
  const isDone = found[1] !== " ";
  writer.open("li", { className: "task" }, "task");
  writer.add(`task ${isDone}`, () => {
    const box = el("span", { role: "img", className: "box", textContent: isDone ? "☑" : "☐" });
    box.ariaLabel = isDone ? "done:" : "to do:";
    return box;
  });
}

function writeCode(writer, { content, info }) {
  const language = info.trim().split(/\s/)[0].slice(0, 30);
  const node = writer.add(`code ${language}`, () => new CodeBlock(language).element);
  CodeBlock.of(node).show(content.replace(/\n$/, ""));
}

function writeMath(writer, source, isDisplay) {
  writer.add(`math ${isDisplay} ${source}`, () => mathOf(source, isDisplay));
}

// A link to the web opens a tab of its own. A path is shown beside its words: it belongs to no page of this server.
function openLink(writer, href, title) {
  const key = `link ${JSON.stringify([href, title])}`;
  if (isWeb(href)) {
    return writer.open("a", { href, ...(title && { title }), target: "_blank", rel: "noopener noreferrer" }, key);
  }
  return writer.open("span", { className: "path", title: href }, key);
}

// No picture is loaded: its server would learn who reads the answer.
function writeImage(writer, token) {
  openLink(writer, token.attrGet("src"), token.attrGet("title"));
  writer.text(`Image: ${wordsOf(token) || "no description"}`);
  writer.close();
}

// The text of a token without its marks.
function wordsOf({ children, content }) {
  return children ? children.map(wordsOf).join("") : content;
}

// Before a text has ended its footnotes have no numbers yet.
function writeReference(writer, { id, subId = 0, label = "…" }, isWhole) {
  writer.open("sup", {});
  const number = isWhole ? String(id + 1) : label;
  writer.add(`reference ${number} ${subId}`, () => {
    const button = el("button", { type: "button", className: "plain", textContent: number });
    button.ariaLabel = `Footnote ${number}`;
    button.dataset.refers = `${id} ${subId}`;
    return button;
  });
  writer.close();
}

function writeReturn(writer, { id, subId = 0 }) {
  writer.text(" ");
  writer.add(`return ${id} ${subId}`, () => {
    const button = el("button", { type: "button", className: "plain", textContent: "↩" });
    button.ariaLabel = `Back to the text of footnote ${id + 1}`;
    button.dataset.returns = `${id} ${subId}`;
    return button;
  });
}
