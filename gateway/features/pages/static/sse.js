// Parses server-sent events from text that arrives in pieces (WHATWG HTML, 9.2.6): any line ends, cut at any place.

const MAX_LINE = 1 << 20;

export class SseParser {
  #rest = "";
  #isAfterCr = false;
  #data = [];
  #id = "";
  #event = "message";

  // Returns the events that `text` completes, each as {id, event, data}, without comments and unknown fields.
  push(text) {
    if (!text) return [];
    const isSplit = this.#isAfterCr && text[0] === "\n"; // the second half of a CRLF
    this.#isAfterCr = text.endsWith("\r");
    const lines = (this.#rest + (isSplit ? text.slice(1) : text)).split(/\r\n|\n|\r/);
    this.#rest = lines.pop();
    if (this.#rest.length > MAX_LINE) throw new Error("A line of the stream is too long.");
    const events = [];
    for (const line of lines) {
      if (line === "") {
        if (this.#data.length) events.push({ id: this.#id, event: this.#event, data: this.#data.join("\n") });
        this.#data = [];
        this.#event = "message";
      } else this.#field(line);
    }
    return events;
  }

  #field(line) {
    const colon = line.indexOf(":");
    if (colon === 0) return; // a comment
    const name = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(line[colon + 1] === " " ? colon + 2 : colon + 1);
    if (name === "data") this.#data.push(value);
    else if (name === "event") this.#event = value || "message";
    else if (name === "id" && !value.includes("\0")) this.#id = value;
  }
}

// The events of a response, an array for each piece that arrives: empty for a piece that completes no event.
export async function* eventsOf(response) {
  const parser = new SseParser();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    yield parser.push(value);
  }
}

// Ids of events are `P` or `P.k`, and increase.
export function isAfter(id, other) {
  if (!other) return true;
  const [tokens, step = 0] = id.split(".").map(Number);
  const [otherTokens, otherStep = 0] = other.split(".").map(Number);
  return tokens > otherTokens || (tokens === otherTokens && step > otherStep);
}
