// One answer on the page: its text, its other parts, its timing figures, and its buttons.

import { AnswerParts } from "/answer-parts.js";
import { LIVE } from "/conversation.js";
import { el } from "/dom.js";
import { redraw } from "/frame.js";
import { Markdown } from "/markdown.js";
import { clock, rate, ttft } from "/meter.js";
import { Sparkline } from "/sparkline.js";

const METER_MS = 120;
const HOLDS = {
  workers: ["No worker is available. Your message is queued and will be answered.", "No worker is available. The answer waits for one and will resume."],
  redis: ["Redis does not answer. Your message waits for it.", "Redis does not answer. The answer waits for it and will resume."],
};
const TOO_LONG = "context_length_exceeded";
const FINISHES = { __proto__: null, stop: "", length: "reached its maximum length", cancelled: "was stopped" };

export class AnswerCard {
  #meterAt = 0;
  #parts = new AnswerParts(() => redraw(this));
  #sparkline = new Sparkline();
  #run = null; // the run that fills the answer; null when it has ended

  // `retry()`, `startOver()`, `choose()` and `copy(text)` are called by its buttons. `startOver`: null if the conversation
  // has only this message. `choice`: the answer's name if a run has several.
  constructor(record, index, { choice, group, isChosen, retry, startOver, choose, copy }) {
    this.record = record;
    this.answer = record.answers[index];
    this.index = index;
    this.text = el("div", { className: "text markdown" });
    this.state = el("p", { className: "state quiet" });
    this.numbers = el("span", { className: "numbers" });
    this.retry = el("button", { type: "button", textContent: "Retry", onclick: retry });
    this.message = el("span", {});
    this.startOver = startOver && el("button", { type: "button", textContent: "Ask in a new conversation", onclick: startOver });
    const buttons = [this.retry, this.startOver].filter(Boolean);
    this.trouble = el("p", { className: "trouble error", hidden: true }, this.message, ...buttons);
    const copyButton = el("button", {
      type: "button",
      className: "plain",
      textContent: "Copy",
      onclick: () => copy(this.answer.text),
    });
    this.meter = el("footer", { className: "meter quiet" }, this.numbers, this.#sparkline.element, copyButton);
    const title = choice && el("header", { className: "which quiet" }, el("span", { textContent: choice }));
    if (title) {
      const radio = el("input", { type: "radio", name: group, checked: isChosen, onchange: choose });
      title.append(el("label", {}, radio, " Continue from this answer"));
    }
    const parts = [title, this.#parts.thinking, this.text, this.#parts.calls, this.state, this.trouble, this.meter].filter(Boolean);
    this.element = el("article", { className: "answer" }, ...parts);
    this.element.setAttribute("aria-label", choice ? `Answer: ${choice}` : "Answer");
    this.markdown = new Markdown(this.text, () => redraw(this));
    this.draw();
  }

  // Schedules drawing. `run`: the run that fills the answer.
  update(run) {
    this.#run = run;
    redraw(this);
  }

  draw() {
    const { record, answer } = this;
    const isLive = LIVE.has(record.state) && answer.finish === null;
    this.markdown.draw(answer.text, !isLive);
    this.#parts.draw(answer, isLive);
    this.element.classList.toggle("live", isLive);
    put(this.state, this.#stateText(isLive));
    this.state.classList.toggle("held", isLive && Boolean(this.#run?.held));
    this.trouble.hidden = record.trouble === null;
    put(this.message, record.trouble?.message ?? "");
    // A context that is full is full at the next try, too.
    const isTooLong = record.trouble?.code === TOO_LONG;
    this.retry.hidden = isTooLong;
    if (this.startOver) this.startOver.hidden = !isTooLong;
    this.#drawMeter(isLive);
  }

  #stateText(isLive) {
    const { record, answer } = this;
    const link = isLive ? this.#run?.link : null;
    if (link) {
      const seconds = Math.max(Math.ceil((link.until - clock()) / 1000), 0);
      return link.why ? `${link.why} Again in ${seconds} s…` : "Reconnecting…";
    }
    if (isLive && this.#run?.held) return holdText(this.#run, answer);
    if (isLive) return answer.tokens ? "" : record.state === "waiting" ? "Waiting for its turn…" : "Thinking…";
    if (record.state === "stopped") return "Stopped.";
    if (answer.calls) return answer.calls.every(({ result }) => result !== undefined) ? "" : "This page does not run tools.";
    const finish = FINISHES[answer.finish] ?? "";
    if (finish) return `This answer ${finish}.`;
    return record.state === "done" && !answer.text ? "The model ended its answer without a text." : "";
  }

  // Draws the figures and the sparkline, at most once per METER_MS: tokens arrive faster than people read.
  #drawMeter(isLive) {
    const { record, answer } = this;
    const now = performance.now();
    if (isLive && now - this.#meterAt < METER_MS) return;
    this.#meterAt = answer.tokens ? now : 0;
    put(this.numbers, numbersOf(record, answer));
    const gaps = this.#run?.meters[this.index].gaps ?? [];
    this.#sparkline.element.classList.toggle("empty", gaps.length < 2);
    this.#sparkline.draw(gaps);
    if (!isLive) this.#sparkline.describe(gaps);
  }
}

// Why no token arrives, and what becomes of the answer.
export function holdText(run, answer) {
  return HOLDS[run.held][answer.tokens ? 1 : 0];
}

function put(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function numbersOf(record, answer) {
  const first = ttft(answer);
  if (first === null) return "";
  const speed = rate(answer);
  const parts = [`first token ${first < 1 ? `${(1000 * first).toFixed(0)} ms` : `${first.toFixed(1)} s`}`];
  if (speed !== null) parts.push(`${speed.toFixed(1)} tokens/s`);
  parts.push(`${answer.tokens} ${answer.tokens === 1 ? "token" : "tokens"}`);
  if (record.usage) parts.push(`${record.usage.prompt_tokens} in the prompt`);
  return parts.join(" · ");
}
