// The parts of an answer besides its text: the reasoning, folded, which stands above the text, and the calls of tools
// below it. This page runs no tools.

import { el } from "/dom.js";
import { clock } from "/meter.js";

export class AnswerParts {
  calls = el("div", { hidden: true });
  #thoughts = document.createTextNode("");
  #summary = el("summary", {});
  thinking = el("details", { className: "thinking", hidden: true }, this.#summary, el("p", { dir: "auto" }, this.#thoughts));
  #shown = [];

  draw(answer, isLive) {
    const { reasoning = "", calls = [] } = answer;
    this.thinking.hidden = !reasoning;
    this.calls.hidden = !calls.length;
    if (reasoning) this.#drawThinking(answer, isLive && !answer.text && !calls.length);
    calls.forEach((call, index) => this.#drawCall(index, call));
  }

  #drawThinking({ reasoning, thoughtAt, thoughtTo }, isThinking) {
    const known = this.#thoughts.length;
    if (reasoning.length > known) this.#thoughts.appendData(reasoning.slice(known));
    const seconds = ((isThinking ? clock() : thoughtTo) - thoughtAt) / 1000;
    const text = `${isThinking ? "Thinking" : "Thought"} for ${seconds.toFixed(1)} s`;
    if (this.#summary.textContent !== text) this.#summary.textContent = text;
  }

  #drawCall(index, { name, given }) {
    const key = `${name}(${given})`;
    const shown = (this.#shown[index] ??= this.#addCall());
    if (shown.key === key) return;
    shown.key = key;
    shown.name.textContent = name;
    shown.given.textContent = indented(given);
  }

  #addCall() {
    const name = el("code", {});
    const given = el("code", {});
    const pre = el("pre", { tabIndex: 0 }, given); // it may be wider than the page
    this.calls.append(el("div", { className: "call" }, el("p", { className: "quiet" }, "Calls the tool ", name), pre));
    return { name, given, key: "" };
  }
}

// Arguments are JSON, whole or cut off.
function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
