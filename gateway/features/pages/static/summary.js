// Goes on in a new conversation when the context of the model is full: the model sums up the old one.

import { CHAT, refusalOf, request } from "/api.js";
import { messagesOf, newConversation } from "/conversation.js";
import { TOO_LONG, usedBy } from "/gauge.js";
import { path } from "/tree.js";

const ASK = "Sum up our conversation so far in at most five sentences, with the names and facts that matter.";
const TIMEOUT_MS = 300000;
const LONGEST = 256;
// The part of the context that the messages to be summed up take. The estimate of their tokens has an error.
const PART = 0.6;
// Characters: less would be a summary of nothing.
const LEAST = 40;

// Returns a new conversation with a summary of this one. `context`: tokens that the model can take. Throws Refusal, or
// TypeError without a connection.
export async function summarised(conversation, model, context) {
  const turns = path(conversation);
  const messages = messagesOf(conversation, turns, "").map(({ role, content }) => ({ role, content: content || "(a picture)" }));
  const size = messages.reduce((sum, { content }) => sum + content.length, 0);
  let room = (PART * context * size) / (usedBy(turns) || size / 3); // in characters
  for (;;) {
    try {
      const text = await ask(model, latest(messages, room), Math.min(LONGEST, Math.floor(context / 5)));
      return { ...newConversation(), title: `${conversation.title}, continued`, summary: text };
    } catch (error) {
      if (error.code !== TOO_LONG || room < LEAST) throw error;
      room /= 2;
    }
  }
}

// The last messages, in about this number of characters; the first one of them may be cut.
function latest(messages, room) {
  const found = [];
  for (let at = messages.length - 1; at >= 0 && room > 0; at -= 1) {
    const content = messages[at].content.slice(-Math.ceil(room));
    found.unshift({ ...messages[at], content });
    room -= content.length;
  }
  while (found.length > 1 && found[0].role === "assistant") found.shift(); // a chat begins with its user
  return found;
}

async function ask(model, messages, length) {
  const body = JSON.stringify({ model, messages: [...messages, { role: "user", content: ASK }], max_tokens: length });
  const headers = { "Content-Type": "application/json" };
  const response = await request(CHAT, { method: "POST", headers, body, signal: AbortSignal.timeout(TIMEOUT_MS) });
  if (!response.ok) throw await refusalOf(response);
  return String((await response.json()).choices[0].message.content ?? "").trim();
}
