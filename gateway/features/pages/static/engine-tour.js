// The tour: the chapters of a recording, one after the other.
import { $ } from "/dom.js";
import { Recording } from "/engine-recording.js";
import { element, setText } from "/engine-tables.js";

const CHAPTERS = {
  reserve: ["Reserve", "Each request reserves memory for the longest answer that it may get, in one piece. Most of it stays empty, and later requests have no room."],
  pages: ["Pages", "The same memory in small blocks: a request takes a block only when its last one is full, so all of them run, and almost nothing is wasted."],
  share: ["Share", "Four answers to one prompt share its blocks (×4). Whoever writes into a shared block gets a copy of that block first: copy on write."],
  full: ["Full", "Memory is full: the newest request is swapped out to host memory, and comes back when another one has ended."],
  kill: ["Kill", "A worker is killed. The other one rebuilds its blocks from the prompts and the tokens written so far, and continues at the next token."],
  draft: ["Draft", "A draft guesses the next tokens, and one step checks them all: right ones are kept (green), the others are thrown away (struck out)."],
};

export class Tour {
  /** `data`: the recording; `onChoose()`: somebody chose a chapter. Chapters are read when they are shown. */
  constructor(stage, data, onChoose) {
    Object.assign(this, { stage, data });
    this.at = -1;
    this.buttons = data.chapters.map(({ id }, index) => {
      const button = element("button", undefined, { type: "button", "data-chapter": id, "aria-pressed": "false" });
      button.append(element("b", String(index + 1), { "aria-hidden": "true" }), " ", CHAPTERS[id][0]);
      button.addEventListener("click", () => {
        onChoose();
        this.show(index);
        stage.player.start();
      });
      $("chapters").append(button);
      return button;
    });
  }

  show(index) {
    this.at = index;
    const { id, events, texts, drafts } = this.data.chapters[index];
    const recording = new Recording(events.map(({ worker }) => worker));
    events.forEach((event) => recording.add(event));
    recording.flush();
    recording.texts = new Map(Object.entries(texts));
    recording.drafts = new Map(Object.entries(drafts ?? {}));
    this.mark(index);
    setText($("caption"), CHAPTERS[id][1]);
    this.stage.load(recording, id === "reserve");
  }

  /** Shows the next chapter; after the last one, the first. */
  next() {
    this.show((this.at + 1) % this.data.chapters.length);
  }

  /** Marks the button of a chapter; -1: none. */
  mark(index) {
    this.buttons.forEach((button, at) => button.setAttribute("aria-pressed", String(at === index)));
    const chosen = this.buttons[index];
    // On a phone the row of chapters scrolls; the page itself must not.
    if (chosen) chosen.parentNode.scrollLeft = chosen.offsetLeft - chosen.parentNode.offsetLeft - 16;
  }
}

/** Whether the page may move by itself. */
export const mayMove = () => !matchMedia("(prefers-reduced-motion: reduce)").matches;
