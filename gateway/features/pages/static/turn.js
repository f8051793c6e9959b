// One turn on the page: the message, and the answers to it next to each other.

import { AnswerCard } from "/answer.js";
import { directionOf, el } from "/dom.js";

export class TurnView {
  #actions;

  // `actions`: {retry(run), startOver() or null, choose(run, answer), copy(text), edit(text), regenerate()}.
  constructor(turn, actions) {
    this.turn = turn;
    this.#actions = actions;
    this.answers = el("div", { className: "answers" });
    this.again = el("button", {
      type: "button",
      className: "plain",
      textContent: "Regenerate",
      onclick: () => actions.regenerate(),
    });
    this.said = el("div", { className: "said" });
    this.foot = el("div", { className: "turn-actions" }, this.again);
    const heading = el("h2", { className: "unseen", textContent: "Message and answers" });
    this.element = el("section", { className: "turn" }, heading, this.said, this.answers, this.foot);
    this.#showSaid();
    this.showAnswers();
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
    this.answers.classList.toggle("several", !isOne);
    this.answers.replaceChildren(...this.cards.map((card) => card.element));
  }

  // Only the last turn can be answered again.
  setLast(isLast) {
    this.foot.hidden = !isLast;
  }

  update(run) {
    for (const card of this.cards) if (card.record === run.record) card.update(run);
  }

  #showSaid() {
    const text = el("p", { className: "bubble", dir: "auto", textContent: this.turn.said });
    const edit = el("button", {
      type: "button",
      className: "plain",
      textContent: "Edit",
      onclick: () => this.#showEditor(),
    });
    this.said.replaceChildren(text, edit);
    return edit;
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
          if (box.value.trim()) this.#actions.edit(box.value.trim());
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
    this.said.replaceChildren(form);
    box.focus();
  }
}

function nameOf(turn, run, index) {
  const parts = [];
  if (turn.runs.length > 1) parts.push(`temperature ${run.options.temperature}`);
  if (run.answers.length > 1) parts.push(`${index + 1} of ${run.answers.length}`);
  return parts.join(", ");
}
