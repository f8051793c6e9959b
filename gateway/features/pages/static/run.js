// One request while it runs: its stream fills the stored record, and its view is told about each change.

import { Refusal, cancel } from "/api.js";
import { LIVE, addDelta } from "/conversation.js";
import { Meter, clock } from "/meter.js";
import { unwatch, watch } from "/silence.js";
import { Pool, follow } from "/stream.js";

const pool = new Pool();

export class Run {
  link = null; // {why, until} while the connection is broken
  held = null; // why no token arrives: "workers" if none responds, "redis" if Redis does not answer
  heardAt = 0; // when the last token arrived
  #abort = new AbortController();
  #isStopping = false;
  #isSent = false;
  #call;
  #changed;
  #ended;
  #held;

  // `call`: {path, body()}. `changed(run)` is called for each change to draw, `held(run)` when the run must wait, `ended(run)` once.
  constructor(record, call, { changed, held, ended }) {
    this.record = record;
    this.meters = record.answers.map((answer) => new Meter(answer));
    this.#call = call;
    this.#changed = changed;
    this.#ended = ended;
    this.#held = held;
  }

  // Runs, or resumes, until the end. Never throws.
  async go() {
    const { record } = this;
    let leave = () => {};
    try {
      leave = await pool.enter(this.#abort.signal);
      this.#isSent = true;
      for (const answer of record.answers) answer.sentAt ??= clock();
      this.heardAt = performance.now();
      watch(this);
      const call = new Call(record, this.#call);
      await follow(call, {
        signal: this.#abort.signal,
        take: (events) => this.#take(events),
        tell: (state) => this.#tell(state),
      });
      this.#end("done");
    } catch (error) {
      if (this.#isStopping) this.#end("stopped");
      else if (this.#abort.signal.aborted) return; // the run was left, not stopped: it continues on the server
      else this.#fail(error);
    } finally {
      unwatch(this);
      leave();
    }
    this.#changed(this);
    this.#ended(this);
  }

  // Notes why no token arrives; null if no reason is known.
  hold(why) {
    if (why === this.held) return;
    this.held = why;
    this.#changed(this);
    if (why) this.#held(this);
  }

  // Stops the run, also on the server.
  stop() {
    if (this.#isStopping || !LIVE.has(this.record.state)) return;
    this.#isStopping = true;
    this.record.state = "stopped";
    // A request without a known id cannot be cancelled; it is cancelled as soon as its id is known.
    if (this.record.id !== null || !this.#isSent || this.link !== null) this.#stopNow();
    this.#changed(this);
  }

  // Closes the stream. The request continues on the server, and another `Run` of the same record can resume it.
  leave() {
    this.#abort.abort();
  }

  #stopNow() {
    this.#abort.abort();
    if (this.record.id !== null) cancel(this.record.id);
  }

  #tell(state) {
    if (state === "open") {
      this.link = null;
      if (this.#isStopping) return this.#stopNow();
      this.record.state = "running";
    } else {
      const link = (this.link = { why: state.why, until: clock() + state.wait });
      setTimeout(() => this.#countDown(link), 1000);
    }
    this.#changed(this);
  }

  // Draws the rest of a wait once a second.
  #countDown(link) {
    if (this.link !== link || clock() > link.until) return;
    this.#changed(this);
    setTimeout(() => this.#countDown(link), 1000);
  }

  #take(events) {
    if (this.#isStopping) return;
    const { record } = this;
    const now = clock(); // all these tokens have arrived together
    for (const { id, chunk } of events) {
      const position = Math.max(Number.parseInt(id, 10) || 0, record.position);
      const count = position - record.position;
      record.position = position;
      if (count) {
        this.heardAt = performance.now();
        this.held = null;
      }
      if (chunk.usage) record.usage = chunk.usage;
      for (const choice of chunk.choices ?? []) {
        const answer = record.answers[choice.index];
        if (!answer) continue;
        if (count) this.meters[choice.index].count(count, now);
        if (choice.delta) addDelta(answer, choice.delta, now, position);
        if (choice.finish_reason) answer.finish = String(choice.finish_reason);
      }
    }
    if (events.length) this.#changed(this);
  }

  #fail(error) {
    const isRefusal = error instanceof Refusal;
    this.record.trouble = { message: error.message, code: isRefusal ? error.code : "page" };
    this.#end("failed");
  }

  #end(state) {
    this.link = this.held = null;
    this.record.state = state;
  }
}

// Adapts the record to the form that `follow` takes; `follow` sets the ids of the record through it.
class Call {
  #record;

  constructor(record, { path, body }) {
    this.#record = record;
    this.path = path;
    this.body = body;
    this.key = record.key;
  }

  get id() {
    return this.#record.id;
  }

  set id(id) {
    this.#record.id = id;
  }

  get last() {
    return this.#record.last;
  }

  set last(last) {
    this.#record.last = last;
  }
}
