// A conversation as data, and the part of it that a request sends.
//
//   conversation {version, id, title, changed, turns}
//   turn         {said, runs, chosen}       chosen: [run, answer], the answer that the next turn continues
//   run          {key, id, last, position, state, trouble, usage, options, answers}      one request
//   answer       {text, finish, tokens, firstTokens, sentAt, firstAt, lastAt}      firstTokens: tokens that arrived first, together
//                with reasoning: {reasoning, thoughtAt, thoughtTo}; with tool calls: {calls: [{name, given}]}
//
// The texts of the answers, `last` (the last event) and `position` (the tokens up to it) change together and are stored
// together, so that a stream can be resumed exactly where its text ends.

import { randomId } from "/api.js";

export const VERSION = 1;
export const LIVE = new Set(["waiting", "running"]);
const TITLE_LENGTH = 60;
const MOST_CALLS = 128;

export function newConversation() {
  return { version: VERSION, id: randomId(), title: "", changed: Date.now(), turns: [] };
}

export function newTurn(conversation, said, optionsOfRuns) {
  const turn = { said, runs: optionsOfRuns.map(newRun), chosen: [0, 0] };
  conversation.turns.push(turn);
  conversation.title ||= said.replace(/\s+/g, " ").slice(0, TITLE_LENGTH);
  return turn;
}

export function newRun(options) {
  const answers = Array.from({ length: options.n ?? 1 }, () => ({
    text: "",
    finish: null,
    tokens: 0,
    firstTokens: 0,
    sentAt: null,
    firstAt: null,
    lastAt: null,
  }));
  return { key: randomId(), id: null, last: "", position: 0, state: "waiting", trouble: null, usage: null, options, answers };
}

// Adds what one event says to an answer.
export function addDelta(answer, { content, reasoning_content: thought, tool_calls: calls }, now) {
  if (typeof thought === "string") {
    answer.thoughtAt ??= now;
    answer.reasoning = (answer.reasoning ?? "") + thought;
  }
  // The token that ends the reasoning has no text; the time until the text follows is part of the reasoning.
  if (answer.reasoning && !answer.text && !answer.calls) answer.thoughtTo = now;
  if (typeof content === "string") answer.text += content;
  for (const { index, function: called } of calls ?? []) {
    if (!(index >= 0 && index < MOST_CALLS)) continue;
    answer.calls ??= [];
    while (answer.calls.length <= index) answer.calls.push({ name: "", given: "" });
    answer.calls[index].name += called?.name ?? "";
    answer.calls[index].given += called?.arguments ?? "";
  }
}

export function chosenAnswer(turn) {
  return turn.runs[turn.chosen[0]]?.answers[turn.chosen[1]] ?? turn.runs[0].answers[0];
}

// The body of a run's request: all turns before `turn`, and `turn` itself. A run always has the same body, because its
// idempotency key stands for that body.
export function bodyOf(conversation, turn, run) {
  const { system, ...parameters } = run.options;
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const earlier of conversation.turns) {
    if (earlier === turn) break;
    const { text } = chosenAnswer(earlier);
    if (!text) continue; // a question without an answer would confuse the model
    messages.push({ role: "user", content: earlier.said }, { role: "assistant", content: text });
  }
  messages.push({ role: "user", content: turn.said });
  // The request runs in the background, so that a reload of the page does not end it; `stop` cancels it.
  return JSON.stringify({
    ...parameters,
    messages,
    stream: true,
    stream_options: { include_usage: true },
    background: true,
  });
}
