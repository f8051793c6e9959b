// The words of a shown answer and their places in its text, which has Markdown's marks, too.

const WORD = /[\p{L}\p{N}]+/gu;
// Words of the text that may be missing on the page, such as the address of a link.
const MOST_HIDDEN = 64;

// Returns the words that are shown as [{word, range, at}]: `at` is the place of the word in `text`. A word that is found
// nowhere in the text is left out.
export function wordsOf(element, text) {
  const source = [...text.matchAll(WORD)];
  const found = [];
  let next = 0;
  for (const { word, node, at } of shown(element)) {
    const last = Math.min(source.length, next + MOST_HIDDEN);
    let place = next;
    while (place < last && source[place][0] !== word) place += 1;
    if (place >= last) continue;
    const range = document.createRange();
    range.setStart(node, at);
    range.setEnd(node, at + word.length);
    found.push({ word, range, at: source[place].index });
    next = place + 1;
  }
  return found;
}

function* shown(element) {
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT, ({ parentElement }) =>
    parentElement.closest("button, math, [aria-hidden=true]") ? NodeFilter.FILTER_REJECT : NodeFilter.FILTER_ACCEPT,
  );
  while (walker.nextNode()) {
    const node = walker.currentNode;
    for (const match of node.data.matchAll(WORD)) yield { word: match[0], node, at: match.index };
  }
}

// Marks ranges with a colour of the style sheet (`::highlight(name)`), without a change of the document.
export function highlight(name, ranges) {
  if (!globalThis.Highlight) return;
  if (ranges.length) CSS.highlights.set(name, new Highlight(...ranges));
  else CSS.highlights.delete(name);
}
