// The marks of math in Markdown, as rules of markdown-it: $...$ and \(...\) in a line; $$...$$ and \[...\] in a line, or
// alone on the lines before and after it.

const ENDS = { "\\(": "\\)", "\\[": "\\]", $$: "$$", $: "$" };
const MOST = 2000; // characters between marks in a line

export function math(parser) {
  parser.inline.ruler.before("escape", "math", inLine);
  parser.block.ruler.before("fence", "math_block", onLines, { alt: ["paragraph", "reference", "blockquote", "list"] });
}

function inLine(state, silent) {
  const { src, pos } = state;
  if (src[pos] !== "$" && src[pos] !== "\\") return false;
  const mark = ENDS[src.slice(pos, pos + 2)] ? src.slice(pos, pos + 2) : src[pos];
  const end = ENDS[mark];
  if (!end) return false;
  const start = pos + mark.length;
  const at = endAfter(state, end, start);
  if (at < 0 || at - start > MOST || at + end.length > state.posMax) return false;
  const content = src.slice(start, at);
  if (!content.trim() || (mark === "$" && !isMath(content, src[at + 1] ?? ""))) return false;
  if (!silent) {
    const token = state.push("math_inline", "math", 0);
    token.content = content;
    token.meta = { isDisplay: mark === "$$" || mark === "\\[" };
  }
  state.pos = at + end.length;
  return true;
}

// The position of the next end mark, or -1. It is looked for once, and not for each mark before it.
function endAfter(state, end, start) {
  const known = ((state.mathEnds ??= {})[end] ??= { start: Infinity, at: -1 });
  if (start < known.start || (known.at >= 0 && start > known.at)) {
    let at = state.src.indexOf(end, start);
    while (end[0] === "$" && at > 0 && state.src[at - 1] === "\\") at = state.src.indexOf(end, at + 1);
    Object.assign(known, { start, at });
  }
  return known.at;
}

// Dollars are money if there is a space inside of them, or a digit behind them.
function isMath(content, next) {
  return !/^\s|\s$|`/.test(content) && !/\d/.test(next);
}

function onLines(state, first, last, silent) {
  if (state.sCount[first] - state.blkIndent >= 4) return false;
  const lineAt = (line) => state.src.slice(state.bMarks[line] + state.tShift[line], state.eMarks[line]);
  const mark = lineAt(first).trim();
  if (mark !== "$$" && mark !== "\\[") return false;
  if (silent) return true;
  const lines = [];
  let line = first + 1;
  let isClosed = false;
  for (; line < last && !isClosed; line += 1) {
    const text = lineAt(line).trimEnd();
    if (text && state.sCount[line] < state.blkIndent) break; // it is outside of the list or the quote
    isClosed = text.endsWith(ENDS[mark]);
    lines.push(isClosed ? text.slice(0, -2) : text);
  }
  state.line = line;
  const token = state.push("math_block", "math", 0);
  token.content = lines.join("\n").trim();
  token.map = [first, line];
  token.meta = { isClosed };
  return true;
}
