// The demo buttons: they send requests through the public API.
import { CHAT, randomId, refusalOf, request } from "/api.js";

const MAX_OPEN = 24;
const STORY = "Tell me a story about a fox who finds an old library in the woods and reads one page of every book in it.";
const messages = [{ role: "user", content: STORY }];
const BEGINNING =
  "You are the keeper of a lighthouse. You have lived on a small island in the north for forty years. You know the " +
  "names of the winds and of the ships, and you answer in a calm voice, in short sentences, and you never hurry. You " +
  "keep a diary, and you remember each storm by its date. You like tea, old maps and the sound of rain. You are " +
  "friendly to everybody who asks you something, and you say so when you do not know an answer. ";
const QUESTIONS = [
  "What do you see today?", "Who was your last guest?", "Which storm was the worst?", "What do you cook?",
  "How does the lamp work?", "What do you read?", "Do you miss the town?", "What is in your diary?",
];

const DEMOS = {
  one: { messages, temperature: 1 },
  four: { messages, temperature: 1, n: 4 },
  beam: { messages, use_beam_search: true, beam_width: 4, temperature: 0, stream: false },
  // One call, because a browser opens six connections at most. Each prompt is a request of its own.
  prefix: { prompt: QUESTIONS.map((text) => BEGINNING + text), temperature: 1 },
};

export class Demo {
  /**
   * `describe()` returns {model, context}. `pressed(key)` is called when a button was pressed, with the idempotency key of
   * its call; `changed()` is called when `open`, `hasRun` or `failure` has changed.
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

  async run(body) {
    this.failure = "";
    const key = randomId();
    try {
      if (this.open >= MAX_OPEN) throw new Error(`${this.open} requests are open. Wait until some of them have ended.`);
      this.pressed(key);
      await this.send(body, key);
    } catch (error) {
      this.failure = error.message;
    }
    this.changed();
  }

  /** Sends a call and reads it to its end; its text is not shown. `key`: its idempotency key. */
  async send(body, key) {
    const { prompt } = body;
    const { model, context } = this.describe();
    const max_tokens = Math.max(8, Math.min(400, Math.floor(0.4 * context)));
    this.open += prompt?.length ?? 1;
    this.hasRun = true;
    this.changed();
    try {
      const response = await request(prompt ? "/v1/completions" : CHAT, {
        method: "POST",
        headers: { "Content-Type": "application/json", "Idempotency-Key": key },
        body: JSON.stringify({ model, stream: true, max_tokens, ignore_eos: true, ...body }),
      });
      if (!response.ok) throw await refusalOf(response);
      const reader = response.body.getReader();
      while (!(await reader.read()).done);
    } finally {
      this.open -= prompt?.length ?? 1;
      this.changed();
    }
  }
}
