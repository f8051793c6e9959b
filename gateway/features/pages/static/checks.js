// Checks of a conversation that another version of the page, another program or another computer wrote.

import { LIVE, VERSION } from "/conversation.js";

const isText = (value) => typeof value === "string";
const isCount = (value) => Number.isSafeInteger(value) && value >= 0;
const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
// The milliseconds that a Date can have.
export const isDate = (value) => Number.isFinite(value) && value >= 0 && value <= 8.64e15;

// Returns the conversation in the form of this version, whose turns have ids. Throws TypeError for one that this page cannot show.
export function checked(conversation) {
  const isWhole =
    isObject(conversation) &&
    (conversation.version === VERSION || conversation.version === 1) &&
    isText(conversation.id) &&
    isText(conversation.title) &&
    isDate(conversation.changed) &&
    Array.isArray(conversation.turns) &&
    conversation.turns.every(isTurn);
  if (!isWhole) throw new TypeError("not a conversation of this version");
  // Version 1 had a list of turns.
  if (conversation.version === 1) return { ...conversation, version: VERSION, ...chain(conversation.turns) };
  if (!isTree(conversation)) throw new TypeError("not a tree of turns");
  return { ...conversation, turns: conversation.turns.map(named) };
}

const named = (turn) => ({ ...turn, id: turn.id ?? turn.runs[0].key });

function chain(turns) {
  const linked = turns.map((turn, at) => ({ ...named(turn), parent: at - 1, shown: at + 1 < turns.length ? at + 1 : -1 }));
  return { turns: linked, shown: turns.length ? 0 : -1 };
}

// A turn comes after its parent in the list, so there is no circle.
function isTree({ turns, shown }) {
  const shows = (child, parent) => child === -1 || turns[child]?.parent === parent;
  return (
    shows(shown, -1) &&
    turns.every(({ parent, shown: next }, at) => Number.isInteger(parent) && parent >= -1 && parent < at && shows(next, at))
  );
}

function isTurn(turn) {
  return (
    isObject(turn) &&
    isText(turn.said) &&
    isText(turn.id ?? "") &&
    Array.isArray(turn.chosen) &&
    turn.chosen.length === 2 &&
    Array.isArray(turn.runs) &&
    turn.runs.length > 0 &&
    (turn.pictures === undefined || (Array.isArray(turn.pictures) && turn.pictures.length > 0 && turn.pictures.every(isPicture))) &&
    turn.runs.every(
      ({ answers, usage, options }) =>
        Array.isArray(answers) &&
        answers.length > 0 &&
        answers.every(({ text }) => isText(text)) &&
        Number.isFinite(usage?.prompt_tokens ?? 0) &&
        Object.values(options ?? {}).every((value) => typeof (value ?? 0) !== "object"),
    )
  );
}

function isPicture(picture) {
  return isObject(picture) && [picture.id, picture.name, picture.type].every(isText) && [picture.width, picture.height].every(isCount);
}

// The same for one from a file. It is as complete as one that this page wrote, and sends nothing when it is opened.
export function imported(given) {
  const conversation = checked(given);
  if (!/^[0-9a-f]{32}$/.test(conversation.id) || (conversation.summary !== undefined && !isText(conversation.summary))) {
    throw new TypeError("not of this page");
  }
  if (!conversation.turns.every(({ runs }) => runs.every(isRun))) throw new TypeError("not a run of this version");
  if (new Set(conversation.turns.map(({ id }) => id)).size < conversation.turns.length) throw new TypeError("not a tree of turns");
  conversation.changed = Math.min(conversation.changed, Date.now()); // the clock of another computer
  for (const { runs } of conversation.turns) {
    for (const run of runs) if (LIVE.has(run.state)) run.state = "stopped";
  }
  return conversation;
}

function isRun({ key, id, last, position, state, trouble, usage, options, answers, fork }) {
  return (
    isText(key) &&
    (id === null || isText(id)) &&
    isText(last) &&
    isCount(position) &&
    [...LIVE, "done", "failed", "stopped"].includes(state) &&
    (trouble === null || (isObject(trouble) && isText(trouble.message))) &&
    (usage === null || isObject(usage)) &&
    isObject(options) &&
    (fork === undefined || isObject(fork)) &&
    answers.every(isAnswer)
  );
}

function isAnswer({ finish, tokens, sentAt, firstAt, lastAt, marks = [], resumed = [], reasoning, calls = [], kept = 0 }) {
  const isTime = (value) => value === null || Number.isFinite(value);
  return (
    (finish === null || isText(finish)) &&
    isCount(tokens) &&
    isCount(kept) &&
    [sentAt, firstAt, lastAt].every(isTime) &&
    Array.isArray(marks) &&
    marks.every(isCount) &&
    Array.isArray(resumed) &&
    resumed.every((at) => Array.isArray(at) && at.every(isCount)) &&
    (reasoning === undefined || isText(reasoning)) &&
    Array.isArray(calls) &&
    calls.every((call) => isObject(call) && isText(call.name) && isText(call.given) && [call.id ?? "", call.result ?? ""].every(isText))
  );
}
