// How full the context of the model is, after the last answer of the conversation.

import { chosenAnswer } from "/conversation.js";
import { $ } from "/dom.js";
import { path } from "/tree.js";

// From this part on the page offers a new conversation with a summary.
const NEARLY_FULL = 0.8;
export const TOO_LONG = "context_length_exceeded";
const number = new Intl.NumberFormat();

// Draws the gauge. `context`: tokens that the model can take; NaN if that is unknown.
export function drawGauge(conversation, context) {
  const turns = path(conversation);
  const used = usedBy(turns);
  const isRefused = turns.at(-1)?.runs.some(({ trouble }) => trouble?.code === TOO_LONG) ?? false;
  const isKnown = used > 0 && context > 0;
  const isFull = isRefused || (isKnown && used / context >= NEARLY_FULL);
  $("gauge").hidden = !isKnown && !isRefused;
  const part = isKnown ? Math.min(used / context, 1) : 1;
  $("used").setAttribute("aria-valuenow", String(Math.round(100 * part)));
  $("used").firstElementChild.style.width = `${100 * part}%`;
  $("used-text").textContent = isKnown ? `${number.format(used)} of ${number.format(context)} tokens` : "The context is full.";
  $("gauge").classList.toggle("full", isFull);
  // A first message that is too long is too long in any conversation.
  $("summarise").hidden = !isFull || (isRefused && turns.length === 1);
}

// The tokens of the conversation up to its last answer; 0 if they are unknown.
export function usedBy(turns) {
  const counted = turns.findLast((turn) => turn.runs[turn.chosen[0]]?.usage);
  return counted ? counted.runs[counted.chosen[0]].usage.prompt_tokens + chosenAnswer(counted).tokens : 0;
}
