// Calls of the gateway's API that are not streamed, and the errors of all calls.

import { authorization, keyRefused } from "/key.js";

export const CHAT = "/v1/chat/completions";
const TIMEOUT_MS = 10000;
const STATUS_TIMEOUT_MS = 2000;

export const WRONG_KEY = "invalid_api_key";
// What a status means, for answers without words of their own, such as those of a proxy.
const MEANINGS = {
  401: "It is not known.",
  403: "The server does not allow this call.",
  429: "The server gets more calls than it allows.",
};

// A call that was answered with an error, at once or in its stream. `retryAfter`: seconds, or null without the header;
// `isFinal`: the same call would be refused again.
export class Refusal extends Error {
  constructor(message, { status = 0, code = null, retryAfter = null, isFinal = false } = {}) {
    super(message);
    this.name = "Refusal";
    this.status = status;
    this.code = code;
    this.retryAfter = retryAfter;
    this.isFinal = isFinal;
  }
}

// Calls the server with the key of this tab.
export function request(path, { headers = {}, ...options } = {}) {
  return fetch(path, { ...options, headers: { ...headers, ...authorization() } });
}

// Reads the error of an answer. Asks for a key if the server needs another one.
export async function refusalOf(response) {
  const { status, headers } = response;
  let error = null;
  try {
    error = (await response.json()).error;
  } catch {
    // The body is not the gateway's: a proxy has answered.
  }
  const words = typeof error?.message === "string" ? error.message : null;
  const message = words ?? MEANINGS[status] ?? `The server answered with ${status}.`;
  return new Refusal(status === 401 ? keyRefused(message) : message, {
    status,
    code: status === 401 ? WRONG_KEY : typeof error?.code === "string" ? error.code : null,
    retryAfter: seconds(headers.get("Retry-After")),
    isFinal: headers.get("X-Should-Retry") === "false",
  });
}

export function seconds(text) {
  return /^\d{1,6}$/.test(text ?? "") ? Number(text) : null;
}

export async function models() {
  const response = await request("/v1/models", { signal: AbortSignal.timeout(TIMEOUT_MS) });
  if (!response.ok) throw await refusalOf(response);
  return (await response.json()).data.map((card) => ({
    id: String(card.id),
    parent: card.parent ?? null, // of an adapter
    context: Number(card.max_model_len),
    defaults: card.sampling_defaults ?? null,
    images: card.capabilities?.includes("images")
      ? { count: Number(card.max_images), bytes: Number(card.max_image_bytes), pixels: Number(card.max_image_pixels) }
      : null,
  }));
}

// The state of Redis and of the workers as {redis, responding}; null if the gateway does not answer.
export async function status() {
  try {
    const response = await request("/status", { signal: AbortSignal.timeout(STATUS_TIMEOUT_MS) });
    return response.ok ? await response.json() : null;
  } catch {
    return null;
  }
}

// Cancels a request that runs in the background. Retries a few times, since the gateway may be restarting.
export async function cancel(id) {
  for (let wait = 500; wait <= 8000; wait *= 2) {
    try {
      const signal = AbortSignal.timeout(TIMEOUT_MS);
      const path = `${CHAT}/${encodeURIComponent(id)}/cancel`;
      const response = await request(path, { method: "POST", keepalive: true, signal });
      if (response.status < 500) return;
    } catch {
      // The gateway cannot be reached now.
    }
    await new Promise((resolve) => setTimeout(resolve, wait));
  }
}

// 32 random hexadecimal digits. crypto.randomUUID is missing if the page was loaded over plain HTTP from another machine.
export function randomId() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}
