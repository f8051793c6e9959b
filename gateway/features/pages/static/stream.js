// Reads one streamed answer to its end. After a broken connection it asks for the events after the last one.
//
//   POST, with an idempotency key  ->  events  ->  [DONE]
//        ^ broke before its id was known    |
//        |                                  v broke
//        +-- the same call, once            GET .../{id}/stream, Last-Event-ID  ->  the events after it

import { CHAT, Refusal, refusalOf, request } from "/api.js";
import { eventsOf, isAfter } from "/sse.js";

const FIRST_PAUSE_MS = 250;
const LONGEST_PAUSE_MS = 5000;
// The gateway sends a keepalive every 15 s.
const SILENCE_MS = 45000;
// Time without any event after which the stream is given up.
const PATIENCE_MS = 180000;

// `call`: {path, body(), key, id, last}; `id` and `last` (the last event) are set as they become known. `take(events)` gets the
// parsed events in order, each once. `tell(state)` gets "open", or {why, wait} while the connection is broken. Returns at
// [DONE]. Throws Refusal, or AbortError.
export async function follow(call, { signal, take, tell }) {
  let pause = FIRST_PAUSE_MS;
  let heardAt = performance.now();
  for (;;) {
    try {
      for await (const events of deliveries(call, signal, () => tell("open"))) {
        pause = FIRST_PAUSE_MS;
        heardAt = performance.now();
        if (deliver(call, events, take)) return;
      }
      throw new TypeError("The stream broke off.");
    } catch (error) {
      signal.throwIfAborted();
      const isLate = performance.now() - heardAt > PATIENCE_MS;
      if (error instanceof Refusal ? isLate || !isPassing(error) : isLate) throw unreachable(error);
      const wait = waitFor(error, pause);
      pause = Math.min(2 * pause, LONGEST_PAUSE_MS);
      tell({ why: error instanceof Refusal ? withoutWait(error.message) : null, wait });
      await sleep(wait, signal);
    }
  }
}

// Passes on the events that are new. Returns whether the stream is at its end.
function deliver(call, events, take) {
  const fresh = [];
  let isDone = false;
  for (const { id, data } of events) {
    if (id && !isAfter(id, call.last)) continue;
    if (data === "[DONE]") isDone = true;
    else {
      const chunk = JSON.parse(data);
      if (chunk.error) {
        take(fresh);
        if (chunk.error.code === "shutting_down") throw new TypeError("The gateway ends; another one has the rest.");
        throw new Refusal(String(chunk.error.message), { code: String(chunk.error.code) });
      }
      call.id ??= String(chunk.id);
      fresh.push({ id, chunk });
    }
    if (id) call.last = id;
  }
  take(fresh);
  return isDone;
}

async function* deliveries(call, signal, opened) {
  const headers = { Accept: "text/event-stream" };
  // A signal of its own, so that a silent connection can be closed without ending the answer.
  const silence = new AbortController();
  const either = AbortSignal.any([signal, silence.signal]);
  let timer = setTimeout(() => silence.abort(), SILENCE_MS);
  try {
    let response;
    if (call.id) {
      if (call.last) headers["Last-Event-ID"] = call.last;
      response = await request(`${CHAT}/${encodeURIComponent(call.id)}/stream`, { headers, signal: either });
    } else {
      headers["Content-Type"] = "application/json";
      headers["Idempotency-Key"] = call.key;
      response = await request(call.path, { method: "POST", headers, body: await call.body(), signal: either });
    }
    if (!response.ok) throw await refusalOf(response);
    // Not x-request-id: a proxy may have chosen that one.
    const requestId = response.headers.get("x-quire-request-id") ?? "";
    if (/^[0-9a-f]{32}$/.test(requestId)) call.id ??= `chatcmpl-${requestId}`;
    opened();
    for await (const events of eventsOf(response)) {
      clearTimeout(timer);
      timer = setTimeout(() => silence.abort(), SILENCE_MS);
      if (events.length) yield events;
    }
  } finally {
    clearTimeout(timer);
    silence.abort(); // leave no connection open after an early return
  }
}

// True if a retry may succeed before the stream is given up.
function isPassing(error) {
  if (error.isFinal || 1000 * error.retryAfter > PATIENCE_MS) return false;
  if (error.status === 429 || error.status === 503) return true;
  return error.code === null && (error.status === 502 || error.status === 504); // from a proxy that has no gateway
}

// A refusal's words without the wait at their end: the page shows how much of it is left.
function withoutWait(message) {
  return message.replace(/[;,.]? try again in [\d.]+ s\.?$/i, ".");
}

function waitFor(error, pause) {
  if (error.retryAfter != null) return 1000 * Math.max(error.retryAfter, 1);
  return pause * (0.5 + Math.random() / 2);
}

function unreachable(error) {
  if (error instanceof Refusal) return error;
  return new Refusal("The server cannot be reached.", { code: "unreachable" });
}

// Waits; returns early when the machine is online again.
function sleep(ms, signal) {
  return new Promise((resolve, reject) => {
    const end = () => {
      clearTimeout(timer);
      removeEventListener("online", end);
      signal.removeEventListener("abort", end);
      if (signal.aborted) reject(signal.reason);
      else resolve();
    };
    const timer = setTimeout(end, ms);
    addEventListener("online", end);
    signal.addEventListener("abort", end);
  });
}

// A browser opens at most six connections to a server (HTTP/1.1), shared by all tabs: one is left for other calls.
export class Pool {
  #free;
  #waiting = [];

  constructor(size = 5) {
    this.#free = size;
  }

  // Resolves to the function that returns the place. Rejects with AbortError.
  async enter(signal) {
    signal.throwIfAborted();
    if (this.#free > 0) this.#free -= 1;
    else {
      await new Promise((resolve, reject) => {
        const entry = { resolve };
        this.#waiting.push(entry);
        signal.addEventListener("abort", () => {
          const at = this.#waiting.indexOf(entry);
          if (at < 0) return; // it has been given its place already, and returns it
          this.#waiting.splice(at, 1);
          reject(signal.reason);
        });
      });
    }
    return () => {
      const next = this.#waiting.shift();
      if (next) next.resolve();
      else this.#free += 1;
    };
  }
}
