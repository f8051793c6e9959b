// One turn on the page: the message, the answers to it next to each other, and what can be done with them.

import { AnswerCard } from "/answer.js";
import { directionOf, el } from "/dom.js";
import { ForkBar } from "/fork-bar.js";
import { ResumedMark } from "/kill.js";
import { releasePictures, thumbnail } from "/pictures.js";

export class TurnView {
  #actions;

  // `home`: the id of the conversation. `actions`: {retry(run), startOver() or null, choose(run, answer), copy(text), edit(text), regenerate(),
  // continueAt(run, index, place, words), versions, go(version)}. `go` returns the view of that version.
  constructor(turn, home, actions) {
    this.turn = turn;
    this.pictures = el("ul", { className: "pictures" }, ...(turn.pictures ?? []).map((picture) => thumbnail(picture, home)));
    this.pictures.setAttribute("aria-label", "Pictures");
    this.#actions = actions;
    this.answers = el("div", { className: "answers" });
    this.said = el("div", { className: "said" });
    this.bar = new ForkBar(this);
    const again = button("Regenerate", () => actions.regenerate());
    this.foot = el("div", { className: "turn-actions" }, ...this.#versions(), again, this.bar.button);
    const heading = el("h2", { className: "unseen", textContent: "Message and answers" });
    this.element = el("section", { className: "turn" }, heading, this.said, this.answers, this.foot, this.bar.element);
    this.#showSaid();
    this.showAnswers();
  }

  get continueAt() {
    return this.#actions.continueAt;
  }

  showAnswers() {
    const { turn } = this;
    const answers = turn.runs.flatMap((run, runIndex) => run.answers.map((_, index) => ({ run, runIndex, index })));
    const isOne = answers.length === 1;
    const group = `chosen-${crypto.getRandomValues(new Uint32Array(1))[0]}`;
    this.cards = answers.map(({ run, runIndex, index }) => {
      const isChosen = turn.chosen[0] === runIndex && turn.chosen[1] === index;
      return new AnswerCard(run, index, {
        choice: isOne ? null : nameOf(turn, run, index),
        group,
        isChosen,
        retry: () => this.#actions.retry(run),
        startOver: this.#actions.startOver,
        choose: () => this.#actions.choose(runIndex, index),
        copy: (text) => this.#actions.copy(text),
      });
    });
    for (const mark of this.marks ?? []) mark.remove();
    this.marks = this.cards.map((card) => new ResumedMark(card));
    this.cards.forEach((card, at) => card.meter.before(this.marks[at].element));
    this.answers.classList.toggle("several", !isOne);
    this.answers.replaceChildren(...this.cards.map((card) => card.element));
    this.bar.draw();
  }

  update(run) {
    for (const card of this.cards) if (card.record === run.record) card.update(run);
    for (const mark of this.marks) if (mark.card.record === run.record) mark.update();
    this.bar.draw();
  }

  remove() {
    for (const mark of this.marks) mark.remove();
    this.bar.close();
    releasePictures(this.pictures);
    this.element.remove();
  }

  // ‹ 1/2 ›, if there are several versions of this turn.
  #versions() {
    const { versions, go } = this.#actions;
    if (versions.length < 2) return [];
    const at = versions.indexOf(this.turn);
    const step = (sign, name, to, className) => {
      const made = button(sign, () => {
        const { element } = go(versions[to]);
        // The same button of the other version, or the one that can be pressed there.
        element.querySelector(`.${className}:enabled, .step:enabled`).focus();
      });
      made.classList.add("step", className);
      made.disabled = !versions[to];
      made.setAttribute("aria-label", name);
      return made;
    };
    const count = el("span", { className: "quiet count", textContent: `${at + 1}/${versions.length}` });
    count.setAttribute("aria-label", `Version ${at + 1} of ${versions.length}`);
    count.setAttribute("role", "img");
    return [step("‹", "Earlier version", at - 1, "back"), count, step("›", "Later version", at + 1, "on")];
  }

  #showSaid() {
    const text = el("p", { className: "bubble", dir: "auto", textContent: this.turn.said });
    const edit = button("Edit", () => this.#showEditor());
    this.said.replaceChildren(...this.#shownPictures(), ...(this.turn.said ? [text] : []), edit);
    return edit;
  }

  #shownPictures() {
    return this.turn.pictures ? [this.pictures] : [];
  }

  #showEditor() {
    const box = el("textarea", { dir: directionOf(this.turn.said), value: this.turn.said, rows: Math.min(this.turn.said.split("\n").length + 1, 10) });
    box.setAttribute("aria-label", "Edit what you said");
    const close = () => this.#showSaid().focus();
    const form = el(
      "form",
      {
        className: "editor",
        onsubmit: (event) => {
          event.preventDefault();
          const text = box.value.trim();
          if (text || this.turn.pictures) this.#actions.edit(text);
        },
        onkeydown: (event) => {
          if (event.key === "Escape") {
            event.stopPropagation();
            close();
          } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
            event.preventDefault();
            form.requestSubmit();
          }
        },
      },
      box,
      el(
        "div",
        { className: "row" },
        el("button", { type: "button", textContent: "Cancel", onclick: close }),
        el("button", { type: "submit", className: "main", textContent: "Send again" }),
      ),
    );
    this.said.replaceChildren(...this.#shownPictures(), form);
    box.focus();
  }
}

function button(text, onclick) {
  return el("button", { type: "button", className: "plain", textContent: text, onclick });
}

function nameOf(turn, run, index) {
  const parts = [];
  if (turn.runs.length > 1) parts.push(`temperature ${run.options.temperature}`);
  if (run.answers.length > 1) parts.push(`${index + 1} of ${run.answers.length}`);
  return parts.join(", ");
}
