// A conversation as data, and the part of it that a request sends.
//
//   conversation {version, id, title, changed, turns, shown}      turns: a tree, see tree.js
//                with a summary of another conversation: summary
//   turn         {id, said, runs, chosen, parent, shown}      with pictures: pictures, see pictures.js; chosen: [run, answer], the answer that the next turn continues
//   run          {key, id, last, position, state, trouble, usage, options, answers}      one request
//                that continues another answer: fork {id, at, choice, continuation}; without `id` the call continues a text
//   answer       {text, finish, tokens, firstTokens, sentAt, firstAt, lastAt, marks}      firstTokens: tokens that arrived first
//                kept: the length of the text that the answer has from another one; resumed: [[position, length]...]
//                together with reasoning: {reasoning, thoughtAt, thoughtTo}; with tool calls: {calls: [{id, name, given}]}, and a
//                {result} in each whose result is known
//
// The texts of the answers, `last` (the last event) and `position` (the tokens up to it) change together and are stored
// together, so that a stream can be resumed exactly where its text ends. `marks` has pairs of numbers, one pair for an event:
// its position, and the length of the text with it.

import { CHAT, randomId } from "/api.js";
import { withPictures } from "/pictures.js";
import { add, before, path } from "/tree.js";

export const VERSION = 2;
export const LIVE = new Set(["waiting", "running"]);
const TITLE_LENGTH = 60;
const MOST_CALLS = 128;

export function newConversation() {
  return { version: VERSION, id: randomId(), title: "", changed: Date.now(), turns: [], shown: -1 };
}

// False for one that has nothing to store.
export const isBegun = ({ turns, summary }) => turns.length > 0 || Boolean(summary);

// Notes that the reader has changed something. Every change has a later time than the one before it.
export function touch(conversation) {
  conversation.changed = Math.max(Date.now(), conversation.changed + 1);
}

// Adds a turn after the last one that is shown, or after another one (null: as a version of the first).
export function newTurn(conversation, said, optionsOfRuns, after = path(conversation).at(-1) ?? null, pictures = []) {
  const turn = { id: randomId(), said, runs: optionsOfRuns.map(newRun), chosen: [0, 0], ...(pictures.length && { pictures }) };
  add(conversation, turn, after);
  conversation.title ||= (said || pictures[0].name).replace(/\s+/g, " ").slice(0, TITLE_LENGTH);
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
    marks: [],
  }));
  return { key: randomId(), id: null, last: "", position: 0, state: "waiting", trouble: null, usage: null, options, answers };
}

// Adds what one event says to an answer. `position`: that of the event.
export function addDelta(answer, delta, now, position) {
  const { content, reasoning, reasoning_content: thought = reasoning, tool_calls: calls } = delta;
  if (typeof thought === "string") {
    answer.thoughtAt ??= now;
    answer.reasoning = (answer.reasoning ?? "") + thought;
  }
  // The token that ends the reasoning has no text; the time until the text follows is part of the reasoning.
  if (answer.reasoning && !answer.text && !answer.calls) answer.thoughtTo = now;
  if (typeof content === "string") {
    answer.text += content;
    mark(answer, position);
  }
  for (const { index, id, function: called } of calls ?? []) {
    if (!(index >= 0 && index < MOST_CALLS)) continue;
    answer.calls ??= [];
    while (answer.calls.length <= index) answer.calls.push({ id: "", name: "", given: "" });
    if (typeof id === "string") answer.calls[index].id = id;
    answer.calls[index].name += called?.name ?? "";
    answer.calls[index].given += called?.arguments ?? "";
  }
}

function mark(answer, position) {
  const marks = (answer.marks ??= []);
  if (marks.at(-2) === position) marks[marks.length - 1] = answer.text.length;
  else marks.push(position, answer.text.length);
}

export function chosenAnswer(turn) {
  return turn.runs[turn.chosen[0]]?.answers[turn.chosen[1]] ?? turn.runs[0].answers[0];
}

// The path of a run's request, and a function that makes its body. A run always has the same ones, because its idempotency
// key stands for them.
export function callOf(conversation, turn, run) {
  const stream = { stream: true, stream_options: { include_usage: true }, background: true };
  const { fork } = run;
  if (fork?.id) {
    const { temperature, top_p, seed, max_tokens } = run.options;
    const { at, choice, continuation } = fork;
    const body = { at, choice, continuation, temperature, top_p, seed, max_tokens, ...stream };
    return { path: `${CHAT}/${encodeURIComponent(fork.id)}/fork`, body: () => JSON.stringify(body) };
  }
  const { system, ...parameters } = run.options;
  const messages = messagesOf(conversation, before(conversation, turn), system);
  messages.push(messageOf(turn));
  let form = {};
  if (fork) {
    messages.push({ role: "assistant", content: run.answers[0].text.slice(0, run.answers[0].kept) });
    form = { continue_final_message: true, add_generation_prompt: false };
  }
  // The request runs in the background, so that a reload of the page does not end it; `stop` cancels it.
  const body = async () =>
    JSON.stringify({ ...parameters, messages: await withPictures(messages, conversation.id), ...form, ...stream });
  return { path: CHAT, body };
}

const messageOf = ({ said, pictures }) => ({ role: "user", content: said, ...(pictures && { pictures }) });

// What was said in these turns, with `pictures`, and the instructions: the settings of the run, and the summary of an earlier conversation.
export function messagesOf({ summary }, turns, system) {
  const parts = [system, summary && `Summary of the conversation so far: ${summary}`].filter(Boolean);
  const messages = parts.length ? [{ role: "system", content: parts.join("\n\n") }] : [];
  for (const turn of turns) {
    const { text } = chosenAnswer(turn);
    if (!text) continue; // a question without an answer would confuse the model
    messages.push(messageOf(turn), { role: "assistant", content: text });
  }
  return messages;
}
