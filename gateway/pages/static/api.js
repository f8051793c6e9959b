// Calls of the gateway's API that are not streamed, and the errors of all calls.

export const CHAT = "/v1/chat/completions";
const TIMEOUT_MS = 10000;
const STATUS_TIMEOUT_MS = 2000;

// A call that was answered with an error, at once or in its stream. `retryAfter`: seconds, or null without the header.
export class Refusal extends Error {
  constructor(message, { status = 0, code = null, param = null, retryAfter = null } = {}) {
    super(message);
    this.name = "Refusal";
    this.status = status;
    this.code = code;
    this.param = param;
    this.retryAfter = retryAfter;
  }
}

export async function refusalOf(response) {
  let error = null;
  try {
    error = (await response.json()).error;
  } catch {
    // The body is not the gateway's: a proxy has answered.
  }
  const message = typeof error?.message === "string" ? error.message : `The server answered with ${response.status}.`;
  return new Refusal(message, {
    status: response.status,
    code: typeof error?.code === "string" ? error.code : null,
    param: typeof error?.param === "string" ? error.param : null,
    retryAfter: seconds(response.headers.get("Retry-After")),
  });
}

export function seconds(text) {
  return /^\d{1,6}$/.test(text ?? "") ? Number(text) : null;
}

export async function models() {
  const response = await fetch("/v1/models", { signal: AbortSignal.timeout(TIMEOUT_MS) });
  if (!response.ok) throw await refusalOf(response);
  return (await response.json()).data.map((card) => ({
    id: String(card.id),
    context: Number(card.max_model_len),
    defaults: card.sampling_defaults ?? null,
  }));
}

// The state of Redis and of the workers as {redis, responding}; null if the gateway does not answer.
export async function status() {
  try {
    const response = await fetch("/status", { signal: AbortSignal.timeout(STATUS_TIMEOUT_MS) });
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
      const response = await fetch(path, { method: "POST", keepalive: true, signal });
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
