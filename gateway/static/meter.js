// What a reader of an answer feels, measured where the tokens arrive: time to the first token, tokens per second, gaps.

const KEPT = 96;

// Milliseconds since 1970 that do not jump while the page is open, and go on over a reload.
export const clock = () => performance.timeOrigin + performance.now();

// Keeps its times in `answer` {tokens, sentAt, firstAt, lastAt}, which is stored; the gaps are of this page alone.
export class Meter {
  gaps = []; // milliseconds between tokens as they came, the last ones
  #answer;

  constructor(answer) {
    this.#answer = answer;
  }

  // `count` tokens have come together.
  count(count, now = clock()) {
    const answer = this.#answer;
    if (answer.firstAt === null) answer.firstAt = now;
    else this.gaps.push(now - answer.lastAt);
    for (let extra = 1; extra < Math.min(count, KEPT); extra += 1) this.gaps.push(0);
    if (this.gaps.length > KEPT) this.gaps.splice(0, this.gaps.length - KEPT);
    answer.lastAt = now;
    answer.tokens += count;
  }
}

// Seconds; null before the first token.
export function ttft(answer) {
  return answer.firstAt === null ? null : Math.max(answer.firstAt - answer.sentAt, 0) / 1000;
}

// Tokens per second after the first one; null where there is nothing to divide.
export function rate(answer) {
  const seconds = (answer.lastAt - answer.firstAt) / 1000;
  return answer.tokens > 1 && seconds > 0 ? (answer.tokens - 1) / seconds : null;
}
