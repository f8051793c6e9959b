// The turns of a conversation as a tree: an edit, a new answer or a continuation from another word is another turn after
// the same one. Nothing is removed, and every turn knows which of the turns after it is shown.
//
// The tree is a list, so that a long conversation is not a deep object: `parent` and `shown` are places in `turns`, or -1.
// `conversation.shown` is the first turn that is shown. A turn has an `id`, because its place differs between two tabs.

// The states of a run, in the order in which they follow each other.
const STATES = ["waiting", "running", "failed", "stopped", "done"];

// The turns that are shown, the first one first.
export function path({ turns, shown }) {
  const found = [];
  for (let at = shown; at >= 0; at = turns[at].shown) found.push(turns[at]);
  return found;
}

// The turns before this one.
export function before({ turns }, turn) {
  const found = [];
  for (let at = turn.parent; at >= 0; at = turns[at].parent) found.unshift(turns[at]);
  return found;
}

// The versions of a turn: the turns that follow the same one, the oldest first.
export function versions({ turns }, turn) {
  return turns.filter(({ parent }) => parent === turn.parent);
}

// Has a turn shown, instead of its other versions.
export function show(conversation, turn) {
  const above = turn.parent < 0 ? conversation : conversation.turns[turn.parent];
  above.shown = conversation.turns.indexOf(turn);
}

// Adds a turn after another one, null for the first place, and shows it.
export function add(conversation, turn, after) {
  turn.parent = after === null ? -1 : conversation.turns.indexOf(after);
  turn.shown = -1;
  conversation.turns.push(turn);
  show(conversation, turn);
}

// The turn before this one; null for the first.
export function above({ turns }, { parent }) {
  return parent < 0 ? null : turns[parent];
}

// Returns a conversation as this tab and another one have left it: the turns of both, and the state of each run that is
// further. The name and what is shown and chosen are those of the tab in which the reader has changed something last.
export function merged(mine, stored) {
  const isLater = stored.changed > mine.changed;
  const others = new Map(stored.turns.map((turn) => [turn.id, turn]));
  const turns = [...stored.turns, ...mine.turns.filter(({ id }) => !others.has(id))];
  const places = new Map(turns.map(({ id }, at) => [id, at]));
  const placeOf = (at) => places.get(mine.turns[at]?.id) ?? -1;
  const own = new Map(mine.turns.map((turn) => [turn.id, { ...turn, parent: placeOf(turn.parent), shown: placeOf(turn.shown) }]));
  const latest = (one, other) => {
    const [first, second] = isLater ? [other, one] : [one, other];
    return { ...first, shown: first.shown < 0 ? second.shown : first.shown };
  };
  const both = ({ id }) => {
    const [one, other] = [own.get(id), others.get(id)];
    if (!one || !other) return one ?? other;
    return { ...latest(one, other), runs: one.runs.map((run, at) => further(run, other.runs[at])) };
  };
  const head = latest({ ...mine, shown: placeOf(mine.shown) }, stored);
  // With turns that this tab has not seen it is later, so that this tab loads it.
  if (!isLater && turns.length > mine.turns.length) head.changed += 1;
  return { ...head, turns: turns.map(both) };
}

function further(mine, other) {
  if (!other) return mine;
  // A run that has failed may have been tried again.
  if (mine.key !== other.key) return mine.state === "failed" ? other : mine;
  const lead = other.position - mine.position || STATES.indexOf(other.state) - STATES.indexOf(mine.state);
  return lead > 0 ? other : mine;
}
