// Requests of this page through the public API, and the texts of their tokens.
import { CHAT, randomId, refusalOf, request } from "/api.js";
import { nameOf } from "/engine-recording.js";
import { eventsOf } from "/sse.js";

const BEGINNING =
  "You are the keeper of a lighthouse. You have lived on a small island in the north for forty years. You know the " +
  "names of the winds and of the ships, and you answer in a calm voice, in short sentences, and you never hurry. You " +
  "keep a diary, and you remember each storm by its date. You like tea, old maps and the sound of rain. ";
const QUESTIONS = [
  "What do you see today?", "Who was your last guest?", "Which storm was the worst?", "What do you cook?",
  "How does the lamp work?", "What do you read?", "Do you miss the town?", "What is in your diary?",
];

export class Demo {
  /** `describe()` returns {model, context}; `changed()` is called when `open` or `failure` has changed. */
  constructor({ describe, changed }) {
    Object.assign(this, { describe, changed });
    this.open = 0;
    this.hasRun = false;
    this.failure = "";
  }

  /** Runs four answers to one prompt. `texts`: gets the tokens of each sequence. */
  four(text, texts) {
    const messages = [{ role: "user", content: text }];
    return this.run([messages], texts, () => [CHAT, { messages, n: 4, logprobs: true }]);
  }

  /** Runs eight conversations that begin alike, in one call: a browser opens six connections at most. */
  eight(texts) {
    const all = QUESTIONS.map((content) => [{ role: "system", content: BEGINNING }, { role: "user", content }]);
    return this.run(all, texts, (prompts) => ["/v1/completions", { prompt: prompts.map(({ tokens }) => tokens), logprobs: 0 }]);
  }

  /** `call(prompts)`: returns the path and the body of a call with these conversations. */
  async run(conversations, texts, call) {
    const { model, context } = this.describe();
    const max_tokens = Math.max(8, Math.min(80, Math.floor(0.4 * context)));
    const min_tokens = Math.floor(max_tokens / 2);
    Object.assign(this, { failure: "", hasRun: true });
    this.open += conversations.length;
    this.changed();
    try {
      const prompts = await Promise.all(conversations.map((messages) => tokenize(model, messages)));
      const [path, body] = call(prompts);
      const response = await post(path, { model, stream: true, max_tokens, min_tokens, temperature: 1, ...body });
      let last = "";
      for await (const events of eventsOf(response)) {
        for (const { data } of events) if ((last = data) !== "[DONE]") keep(JSON.parse(data), prompts, texts);
      }
      if (last !== "[DONE]") throw new TypeError("The stream broke off.");
    } catch (error) {
      this.failure = error.message;
    } finally {
      this.open -= conversations.length;
      this.changed();
    }
  }
}

async function post(path, body) {
  const headers = { "Content-Type": "application/json", "Idempotency-Key": randomId() };
  const response = await request(path, { method: "POST", headers, body: JSON.stringify(body) });
  if (!response.ok) throw await refusalOf(response);
  return response;
}

/** Returns the tokens of a conversation, and the text of each. */
async function tokenize(model, messages) {
  const response = await post("/tokenize", { model, messages, return_token_strs: true });
  const { tokens, token_strs: found } = await response.json();
  return { tokens, texts: found.map((text) => shown(text.replaceAll("Ġ", " ").replaceAll("Ċ", "\n"))) };
}

/** Special tokens have no text; the beginning of an answer is marked. */
const shown = (text) => (text === "<|assistant|>" ? " » " : /^<\|.*\|>$/.test(text) ? "" : text);

/** Adds the tokens of a chunk. A view names a request by the beginning of its id and the number of its prompt. */
function keep(chunk, prompts, texts) {
  if (chunk.error) throw new TypeError(chunk.error.message);
  const id = chunk.id?.split("-").at(-1).slice(0, 8);
  for (const { index, logprobs } of chunk.choices ?? []) {
    const isBatch = prompts.length > 1;
    const name = isBatch ? nameOf(index ? `${id}-${index}` : id, 0) : nameOf(id, index);
    if (!texts.has(name)) texts.set(name, [...prompts[isBatch ? index : 0].texts]);
    const tokens = logprobs?.tokens ?? logprobs?.content?.map(({ token }) => token) ?? [];
    texts.get(name).push(...tokens.map(shown));
  }
}
