// The parts of an answer besides its text: the reasoning above the text, open while it is written, and the calls of tools
// below it with their results. This page runs no tools; a conversation from elsewhere may have results.

import { el } from "/dom.js";
import { Markdown } from "/markdown.js";
import { clock } from "/meter.js";

export class AnswerParts {
  calls = el("div", { hidden: true });
  #summary = el("summary", {});
  #thoughts = el("div", { className: "thoughts markdown" });
  #markdown = null;
  #isChosen = false; // whether the reader has opened or closed the reasoning
  #loaded;
  #shown = [];

  // `loaded()` is called when the parts can be drawn better than before.
  constructor(loaded) {
    this.#loaded = loaded;
    this.thinking = el("details", { className: "thinking", hidden: true }, this.#summary, this.#thoughts);
    this.#summary.addEventListener("click", () => (this.#isChosen = true));
  }

  draw(answer, isLive) {
    const { reasoning = "", calls = [] } = answer;
    this.thinking.hidden = !reasoning;
    this.calls.hidden = !calls.length;
    if (reasoning) this.#drawThinking(answer, isLive && !answer.text && !calls.length);
    calls.forEach((call, index) => this.#drawCall(index, call));
  }

  #drawThinking({ reasoning, thoughtAt, thoughtTo }, isThinking) {
    if (!this.#isChosen) this.thinking.open = isThinking;
    this.#markdown ??= new Markdown(this.#thoughts, this.#loaded);
    this.#markdown.draw(reasoning, !isThinking);
    const seconds = ((isThinking ? clock() : thoughtTo) - thoughtAt) / 1000;
    const text = `${isThinking ? "Thinking" : "Thought"} for ${seconds.toFixed(1)} s`;
    if (this.#summary.textContent !== text) this.#summary.textContent = text;
  }

  #drawCall(index, call) {
    const shown = (this.#shown[index] ??= this.#addCall());
    const { id = "", name, given, result } = call;
    const key = JSON.stringify([id, name, given, result]);
    if (shown.key !== key) {
      shown.key = key;
      shown.name.textContent = name;
      shown.id.textContent = id;
      shown.result.hidden = result === undefined;
      shown.texts = [given && fenced(given), fenced(result ?? "")];
    }
    shown.given.draw(shown.texts[0], true);
    if (result !== undefined) shown.returned.draw(shown.texts[1], true);
  }

  #addCall() {
    const name = el("code", {});
    const id = el("span", { className: "call-id" });
    const given = el("div", {});
    const returned = el("div", {});
    const caption = el("div", { className: "call-head quiet", textContent: "Result" });
    const result = el("div", { className: "result", hidden: true }, caption, returned);
    const title = el("div", { className: "call-head quiet" }, el("span", { className: "call-name" }, "Calls the tool ", name), id);
    this.calls.append(el("div", { className: "call markdown" }, title, given, result));
    return { name, id, given: new Markdown(given, this.#loaded), returned: new Markdown(returned, this.#loaded), result, key: "" };
  }
}

// Text as a block of code: JSON indented, if it is whole.
function fenced(text) {
  let shown = text;
  let language = /^\s*[[{"]/.test(text) ? "json" : "";
  try {
    shown = JSON.stringify(JSON.parse(text), null, 2);
    language = "json";
  } catch {
    // The rest is to come, or it is no JSON.
  }
  const longest = Math.max(2, ...(shown.match(/`+/g) ?? []).map((marks) => marks.length));
  const fence = "`".repeat(longest + 1);
  return `${fence}${language}\n${shown}\n${fence}`;
}
