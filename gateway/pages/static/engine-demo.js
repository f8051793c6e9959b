// The demo buttons: they send requests through the public API.
import { randomId, refusalOf, request } from "/api.js";

const MAX_OPEN = 24;
const STORY = "Tell me a story about a fox who finds an old library in the woods and reads one page of every book in it.";
const BEGINNING =
  "You are the keeper of a lighthouse. You have lived on a small island in the north for forty years. You know the " +
  "names of the winds and of the ships, and you answer in a calm voice, in short sentences, and you never hurry. You " +
  "keep a diary, and you remember each storm by its date. You like tea, old maps and the sound of rain. You are " +
  "friendly to everybody who asks you something, and you say so when you do not know an answer. ";
const QUESTIONS = [
  "What do you see today?", "Who was your last guest?", "Which storm was the worst?", "What do you cook?",
  "How does the lamp work?", "What do you read?", "Do you miss the town?", "What is in your diary?",
];

const message = (content, before) => [
  ...(before ? [{ role: "system", content: before }] : []),
  { role: "user", content },
];

const DEMOS = {
  one: async (send) => send({ messages: message(STORY), temperature: 1 }),
  four: async (send) => send({ messages: message(STORY), temperature: 1, n: 4 }),
  beam: async (send) => send({ messages: message(STORY), use_beam_search: true, beam_width: 4, temperature: 0, stream: false }),
  // The first request computes the shared prefix; the others follow when it is in the cache.
  prefix: async (send) => {
    let begun;
    const first = new Promise((resolve) => (begun = resolve));
    const one = send({ messages: message(QUESTIONS[0], BEGINNING), temperature: 1 }, begun);
    await Promise.race([first, one]);
    await Promise.all([one, ...QUESTIONS.slice(1).map((text) => send({ messages: message(text, BEGINNING), temperature: 1 }))]);
  },
};

export class Demo {
  /**
   * `describe()` returns {model, context}. `pressed(key)` is called when a button was pressed, with the idempotency key of
   * its first request; `changed()` is called when `open`, `hasRun` or `failure` has changed.
   */
  constructor(buttons, { describe, pressed, changed }) {
    Object.assign(this, { describe, pressed, changed });
    this.open = 0;
    this.hasRun = false;
    this.failure = "";
    for (const button of buttons) {
      button.addEventListener("click", () => this.run(DEMOS[button.dataset.demo]));
    }
  }

  async run(demo) {
    this.failure = "";
    let key = randomId();
    try {
      if (this.open >= MAX_OPEN) throw new Error(`${this.open} requests are open. Wait until some of them have ended.`);
      this.pressed(key);
      await demo((body, onBegin) => {
        const first = key;
        key = null;
        return this.send(body, first, onBegin);
      });
    } catch (error) {
      this.failure = error.message;
    }
    this.changed();
  }

  /** Sends one request and reads it to its end; its text is not shown. `key`: its idempotency key, or null. */
  async send(body, key, onBegin = () => {}) {
    const { model, context } = this.describe();
    const max_tokens = Math.max(8, Math.min(400, Math.floor(0.4 * context)));
    this.open += 1;
    this.hasRun = true;
    this.changed();
    try {
      const response = await request("/v1/chat/completions", {
        method: "POST",
        headers: { "Content-Type": "application/json", ...(key && { "Idempotency-Key": key }) },
        body: JSON.stringify({ model, stream: true, max_tokens, ignore_eos: true, ...body }),
      });
      if (!response.ok) throw await refusalOf(response);
      const reader = response.body.getReader();
      for (;;) {
        const { done } = await reader.read();
        onBegin();
        if (done) return;
      }
    } finally {
      this.open -= 1;
      this.changed();
    }
  }
}
