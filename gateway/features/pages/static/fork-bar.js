// The bar with which the reader continues an answer differently: from a selected word, or from one that the arrows choose.

import { el, signButton } from "/dom.js";
import { highlight, wordsOf } from "/words.js";

let opened = null; // the bar that is open: one for the page

export class ForkBar {
  #view;
  #card = null;
  #words = [];
  #at = -1;

  constructor(view) {
    this.#view = view;
    this.button = el("button", {
      type: "button",
      className: "plain",
      textContent: "Continue from a word…",
      hidden: true,
      onclick: () => this.open(this.#chosenCard(), null),
    });
    this.word = el("strong", {});
    this.field = el("input", { type: "text", placeholder: "other words, if you like", autocomplete: "off" });
    this.field.setAttribute("aria-label", "Words to continue with");
    this.back = signButton("←", "The word before", () => this.#go(this.#at - 1));
    this.on = signButton("→", "The next word", () => this.#go(this.#at + 1));
    this.element = el(
      "form",
      {
        className: "fork-bar",
        hidden: true,
        onsubmit: (event) => {
          event.preventDefault();
          this.#send();
        },
        onkeydown: (event) => this.#onKey(event),
      },
      el("span", {}, "Continue differently from “", this.word, "”"),
      el("span", { className: "pair-of-steps" }, this.back, this.on),
      this.field,
      el("button", { type: "submit", className: "main", textContent: "Continue" }),
      el("button", { type: "button", className: "plain", textContent: "Cancel", onclick: () => this.#cancel() }),
    );
    this.element.setAttribute("aria-label", "Continue from a word");
  }

  // Shows the button once there is an answer with words.
  draw() {
    this.button.hidden = !this.#chosenCard();
  }

  // Opens the bar at the word of an answer that a place of the document is in; null is the last word.
  open(card, place) {
    if (!card) return;
    const words = wordsOf(card.text, card.answer.text);
    const at = place ? words.findIndex(({ range }) => range.comparePoint(place.node, place.offset) <= 0) : words.length - 1;
    if (at < 0) return;
    if (opened !== this) opened?.close();
    opened = this;
    this.#card = card;
    this.#words = words;
    this.element.hidden = false;
    this.#go(at);
    if (place) return;
    this.#view.element.scrollIntoView({ block: "end" });
    this.field.focus({ preventScroll: true });
  }

  close() {
    if (opened !== this) return;
    opened = null;
    this.element.hidden = true;
    this.field.value = "";
    highlight("fork", []);
  }

  cardOf(node) {
    return this.#view.cards.find(({ text }) => text.contains(node));
  }

  #chosenCard() {
    const { cards, turn } = this.#view;
    const [run, index] = turn.chosen;
    const found = cards.find((card) => card.record === turn.runs[run] && card.index === index) ?? cards[0];
    return found?.answer.text ? found : null;
  }

  #go(at) {
    if (!this.#words[at]) return;
    this.#at = at;
    const { word, range } = this.#words[at];
    this.word.textContent = word;
    this.back.disabled = at === 0;
    this.on.disabled = at === this.#words.length - 1;
    highlight("fork", [range]);
  }

  #onKey(event) {
    const isEmpty = event.target !== this.field || !this.field.value;
    if (event.key === "Escape") {
      event.stopPropagation();
      this.#cancel();
    } else if (isEmpty && (event.key === "ArrowLeft" || event.key === "ArrowRight")) {
      event.preventDefault();
      this.#go(this.#at + (event.key === "ArrowLeft" ? -1 : 1));
    }
  }

  #cancel() {
    this.close();
    this.button.focus();
  }

  #send() {
    const { record, index } = this.#card;
    const { at } = this.#words[this.#at];
    const words = this.field.value.trim();
    this.close();
    this.#view.continueAt(record, index, at, words);
  }
}

// Opens the bar of the turn whose answer has the selection, without taking the focus. `viewAt(node)`: the view of a turn.
export function watchSelection(viewAt) {
  document.addEventListener("selectionchange", () => {
    const selection = getSelection();
    const isEmpty = selection.isCollapsed || !selection.toString().trim();
    if (isEmpty) {
      if (opened && !opened.element.contains(document.activeElement)) opened.close();
      return;
    }
    const { startContainer: node, startOffset: offset } = selection.getRangeAt(0);
    const bar = viewAt(node)?.bar;
    bar?.open(bar.cardOf(node), { node, offset });
  });
}
