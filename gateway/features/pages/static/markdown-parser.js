// Reads Markdown with markdown-it: CommonMark with GitHub's tables, strike-through and bare links, and with footnotes and
// math. Markup is text, but for a line break.

import MarkdownIt from "/vendor/markdown-it-15.0.3/markdown-it.esm.min.mjs";
import footnotes from "/vendor/markdown-it-footnote-4.0.0/index.mjs";
import { math } from "/math-syntax.js";

const parser = new MarkdownIt({ linkify: true, maxNesting: 50 });
// After the last "]" of a text no label ends. The library would search for an end from each "[".
const { parseLinkLabel } = parser.helpers;
let source, last;
parser.helpers.parseLinkLabel = (state, start, ...more) => {
  if (state.src !== source) [source, last] = [state.src, state.src.lastIndexOf("]")];
  return start < last ? parseLinkLabel(state, start, ...more) : -1;
};
parser.use(footnotes).use(math);
// Only whole addresses are links: `file.py` and `a@b` are none.
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false }).add("ftp:", null).add("//", null);
// A link of another scheme stays as it is written. A path is no link either, but is read as one: see `link` in markdown-dom.js.
parser.validateLink = (url) => isWeb(url) || !/^[a-z][a-z0-9+.-]*:/i.test(url);
parser.inline.ruler.push("break", (state, silent) => {
  const found = /^<br ?\/?>/i.exec(state.src.slice(state.pos, state.pos + 6));
  if (!found) return false;
  if (!silent) state.push("hardbreak", "br", 0);
  state.pos += found[0].length;
  return true;
});

export const isWeb = (url) => /^(?:https?:\/\/|mailto:)/i.test(url);

// The tokens of a text. `env` gets its definitions of links and footnotes. Only in a whole text do footnotes go to its end.
export function parse(text, env, isWhole = false) {
  parser.core.ruler[isWhole ? "enable" : "disable"]("footnote_tail");
  return parser.parse(text, env);
}
