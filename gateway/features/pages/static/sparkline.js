// A line of the last gaps between tokens, as one SVG path.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 96;
const HEIGHT = 18;

export class Sparkline {
  constructor() {
    this.element = document.createElementNS(SVG, "svg");
    this.element.setAttribute("class", "sparkline");
    this.element.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    this.element.setAttribute("role", "img");
    this.element.setAttribute("aria-label", "Time between arrivals of tokens");
    this.path = document.createElementNS(SVG, "path");
    this.element.append(this.path);
  }

  // `gaps`: in milliseconds, oldest first. The largest sets the scale, so that a stall is visible at once.
  draw(gaps) {
    this.path.setAttribute("d", pathOf(gaps));
  }

  describe(gaps) {
    if (gaps.length < 2) return;
    const sorted = [...gaps].sort((a, b) => a - b);
    const median = sorted[sorted.length >> 1];
    this.element.setAttribute(
      "aria-label",
      `Time between arrivals of tokens: median ${milliseconds(median)}, longest ${milliseconds(sorted.at(-1))}`,
    );
  }
}

const milliseconds = (time) => (time < 1 ? "under 1 ms" : `${time.toFixed(0)} ms`);

export function pathOf(gaps) {
  if (gaps.length < 2) return "";
  const highest = Math.max(...gaps, 1);
  const step = WIDTH / (gaps.length - 1);
  return gaps
    .map((gap, at) => `${at ? "L" : "M"}${(at * step).toFixed(1)},${(HEIGHT - 1 - (gap / highest) * (HEIGHT - 2)).toFixed(1)}`)
    .join("");
}
