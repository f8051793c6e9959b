// "Continue differently from here": a call that continues an answer from one of its words on. The server has the tokens of
// the answer for ten minutes and continues them exactly; after that the call continues the text that the page has.

import { CHAT, request } from "/api.js";
import { newRun } from "/conversation.js";
import { eventsOf } from "/sse.js";

// Errors after which the call continues the text: the server has the tokens no longer, or cannot begin there.
const GONE = new Set(["not_found", "prompt_not_kept", "not_forkable", "no_such_token", "inside_tool_call"]);

// Returns the place of a fork as {fork, answer}: `answer` has what is kept. `records`: the runs of the conversation. `at`:
// where the first word that is not kept begins in the text. `words`: those that follow instead; "" leaves them to the model.
// `bound`: the end of the text that is that of the answer.
export function forkPlace(records, record, index, at, words, text = record.answers[index].text, bound = at) {
  const answer = record.answers[index];
  const { kept = 0 } = answer;
  const origin = bound < kept ? records.find(({ id }) => id !== null && id === record.fork?.id) : null;
  if (origin) {
    // The kept beginning of a fork is an answer of another call, and the continuation that was given.
    const shared = Math.min(bound, kept - record.fork.continuation.length);
    return forkPlace(records, origin, record.fork.choice, at, words, text, shared);
  }
  const [position, length] = bound < kept ? [0, 0] : markBefore(answer, bound);
  // Without the marks that begin a bold or another word, whose end would be missing.
  const between = text.slice(length, at).replace(/[*_~`]+$/, "");
  // Tokens begin with the space before their word.
  const continuation = words ? between + words : between.trimEnd();
  const begun = text.slice(0, length) + continuation;
  const id = bound < kept || !answer.marks?.length ? null : record.id;
  const fork = { id, at: String(position), choice: index, continuation };
  return { fork, answer: { ...answer, text: begun, kept: begun.length }, origin: { record, answer, bound: Math.min(bound, length + between.length), length, words } };
}

// Returns the same place with as many tokens as possible. An event may bring several tokens, and the server knows where
// each of them ends; text that is given to it instead may become other tokens. `place`: the result of `forkPlace`.
export async function exactPlace({ fork, answer, origin }) {
  const { record, answer: first, bound, length, words } = origin;
  const isOver = record.state === "done" && record.answers.length === 1;
  const next = first.marks?.findIndex((position, at) => at % 2 === 0 && position > Number(fork.at)) ?? -1;
  if (fork.id === null || !isOver || next < 0 || !/[\p{L}\p{N}]/u.test(fork.continuation.slice(0, -words.length || undefined))) {
    return { fork, answer };
  }
  let [low, lowLength, high] = [Number(fork.at), length, first.marks[next]];
  while (high - low > 1) {
    const middle = Math.floor((low + high) / 2);
    const rest = await restAfter(fork.id, middle);
    if (rest === null) break;
    if (first.text.length - rest <= bound) [low, lowLength] = [middle, first.text.length - rest];
    else high = middle;
  }
  const continuation = fork.continuation.slice(lowLength - length);
  return { fork: { ...fork, at: String(low), continuation }, answer };
}

// The length of the text after this number of tokens; null if the server does not tell.
async function restAfter(id, tokens) {
  try {
    const headers = { Accept: "text/event-stream", "Last-Event-ID": String(tokens) };
    const response = await request(`${CHAT}/${encodeURIComponent(id)}/stream`, { headers });
    if (!response.ok) return null;
    let length = 0;
    for await (const events of eventsOf(response)) {
      for (const { data } of events) {
        if (data === "[DONE]") return length;
        length += JSON.parse(data).choices?.[0]?.delta?.content?.length ?? 0;
      }
    }
  } catch {
    // The page has the text.
  }
  return null;
}

// The last event whose text ends before `bound`, as [position, length].
function markBefore({ marks = [], kept = 0 }, bound) {
  let found = [0, kept];
  for (let pair = 0; pair < marks.length && marks[pair + 1] <= bound; pair += 2) found = [marks[pair], marks[pair + 1]];
  return found;
}

// Returns a run that continues an answer. `kept`: what it has of the answer.
export function forkOf(options, fork, { text, kept, reasoning, thoughtAt, thoughtTo }) {
  const { n, ...others } = options;
  // The same seed would draw the same words, and temperature 0 knows no others.
  const seed = crypto.getRandomValues(new Uint32Array(1))[0];
  const run = newRun({ ...others, seed, ...(others.temperature === 0 && { temperature: 1 }) });
  const thought = reasoning && kept ? { reasoning, thoughtAt, thoughtTo } : {};
  Object.assign(run.answers[0], { text: text.slice(0, kept), kept, ...thought });
  run.fork = fork;
  return run;
}

export const canBeText = ({ state, trouble, fork }) => state === "failed" && Boolean(fork?.id) && GONE.has(trouble?.code);

// The same run as a call that continues the text.
export function againAsText({ options, fork, answers: [answer] }) {
  return forkOf(options, { ...fork, id: null }, answer);
}
