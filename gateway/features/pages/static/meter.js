// The timing of an answer as its reader sees it: time to the first token, tokens per second, gaps between tokens.

const KEPT = 96;
// Arrivals within this time are one burst, which does not show the pace of the tokens.
const BURST_MS = 20;

// Milliseconds since 1970 that do not jump while the page is open, and continue after a reload.
export const clock = () => performance.timeOrigin + performance.now();

// Measures one answer. The counts and times are fields of `answer` {tokens, firstTokens, sentAt, firstAt, lastAt}, which
// the page stores. The gaps are not stored.
export class Meter {
  gaps = []; // the last milliseconds between arrivals; tokens that arrive together are one arrival
  #answer;

  constructor(answer) {
    this.#answer = answer;
  }

  // `count` tokens have arrived together.
  count(count, now = clock()) {
    const answer = this.#answer;
    if (answer.firstAt === null) answer.firstAt = now;
    else if (now > answer.lastAt) this.gaps.push(now - answer.lastAt);
    if (now === answer.firstAt) answer.firstTokens = (answer.firstTokens ?? 0) + count;
    if (this.gaps.length > KEPT) this.gaps.shift();
    answer.lastAt = now;
    answer.tokens += count;
  }
}

// Seconds from sending to the first token; null before it.
export function ttft(answer) {
  return answer.firstAt === null ? null : Math.max(answer.firstAt - answer.sentAt, 0) / 1000;
}

// Tokens per second after the first arrival; null if all tokens came in one burst.
export function rate(answer) {
  const milliseconds = answer.lastAt - answer.firstAt;
  return milliseconds >= BURST_MS ? (1000 * (answer.tokens - (answer.firstTokens ?? 1))) / milliseconds : null;
}
