// Charts of the batch of a step, of the last steps, and of the last minute.
import { colourOf } from "/engine-view.js";
import { fit } from "/engine-paint.js";
import { element, percent, setText } from "/engine-tables.js";

const SPAN_MS = 60_000;
const MAX_STEPS = 400;

export class Batch {
  constructor(lanes, note, steps) {
    Object.assign(this, { lanes, note, steps });
    this.history = [];
  }

  /** Adds the steps of a view that has arrived. */
  add(view) {
    this.history.push(...view.steps);
    if (this.history.length > MAX_STEPS) this.history.splice(0, this.history.length - MAX_STEPS);
  }

  /** `latest`: the view of the last step that ran; `isEarlier`: whether that is another view than the one shown. */
  show(view, colours, latest, isEarlier) {
    const batch = latest?.batch ?? [];
    const budget = view.limits.token_budget;
    const decodes = batch.filter((row) => !row.is_prefill);
    const prefills = batch.filter((row) => row.is_prefill);
    const width = this.lanes.clientWidth;
    const paint = fit(this.lanes, width, this.lanes.clientHeight);
    const lane = this.lanes.clientHeight / 2 - 3;
    const left = 56;
    // With a large budget, bars of one token would be invisible: then the scale ends at the tokens of this batch.
    const scale = Math.max((width - left) / budget, Math.min(3, (width - left) / Math.max(1, batch.length)));
    paint.font = `12px ${colours.font}`;
    paint.textBaseline = "middle";
    [["decode", decodes], ["prefill", prefills]].forEach(([name, rows], index) => {
      const y = index * (lane + 6);
      paint.fillStyle = colours.quiet;
      paint.fillText(name, 0, y + lane / 2);
      paint.fillStyle = colours.sunken;
      paint.fillRect(left, y, width - left, lane);
      let x = left;
      for (const row of rows) {
        const wide = Math.min(row.tokens * scale, width - x);
        paint.fillStyle = colourOf(`${row.request}/${row.choice}`);
        paint.fillRect(x, y, Math.max(1, wide - (wide > 3 ? 1 : 0)), lane);
        if (wide > 70) {
          paint.fillStyle = "#000";
          paint.fillText(`${row.tokens} tokens`, x + 6, y + lane / 2);
        }
        x += wide;
      }
    });
    const writing = decodes.length + latest.hidden_rows;
    const taken = writing + prefills.reduce((sum, row) => sum + row.tokens, 0);
    const words = [writing === 1 ? "1 sequence writes a token" : `${writing} sequences write a token each`];
    for (const row of prefills.slice(0, 3)) words.push(`${row.request}/${row.choice} takes ${row.tokens} tokens of its prompt`);
    if (prefills.length > 3) words.push(`and ${prefills.length - 3} more prompts`);
    const when = isEarlier ? " (the last step that ran)" : "";
    setText(this.note, batch.length ? `${words.join("; ")}: ${taken} of ${budget} tokens of the budget${when}.` : "No steps yet.");
    this.showSteps(colours, budget);
  }

  showSteps(colours, budget) {
    const width = this.steps.clientWidth;
    const height = this.steps.clientHeight;
    const paint = fit(this.steps, width, height);
    const shown = this.history.slice(-Math.floor(width / 3));
    const most = Math.max(8, ...shown.map(([decode, prefill]) => decode + prefill));
    shown.forEach(([decode, prefill], index) => {
      const x = width - 3 * (shown.length - index);
      const low = (decode / most) * (height - 2);
      const high = (prefill / most) * (height - 2);
      paint.fillStyle = colours.accent;
      paint.fillRect(x, height - low, 2, low);
      paint.fillStyle = colours.warn;
      paint.fillRect(x, height - low - high, 2, high);
    });
    paint.fillStyle = colours.quiet;
    paint.font = `11px ${colours.font}`;
    paint.textBaseline = "top";
    if (shown.length) paint.fillText(`${most} of ${budget} tokens`, 2, 2);
  }
}

const rate = (view, before, names) => {
  const steps = before ? view.figures.steps - before.figures.steps : 0;
  return steps > 0 ? names.reduce((sum, name) => sum + view.figures[name] - before.figures[name], 0) / steps : 0;
};

const CHARTS = [
  {
    title: "Waiting in the queue",
    caption: "Requests in Redis that no worker has taken yet, by class.",
    lines: [
      ["interactive", "good", (v) => v.queues.interactive ?? 0],
      ["standard", "accent", (v) => v.queues.standard ?? 0],
      ["batch", "warn", (v) => v.queues.batch ?? 0],
    ],
  },
  {
    title: "Sequences in the engine",
    caption: "Whoever has no place in memory waits, or is swapped out to host memory.",
    lines: [
      ["running", "accent", (v) => v.figures.sequences_running],
      ["waiting", "warn", (v) => v.figures.sequences_waiting],
      ["swapped", "error", (v) => v.figures.sequences_swapped],
    ],
  },
  {
    title: "Tokens per step",
    caption: "The more sequences share a step, the more tokens each reading of the weights gives.",
    lines: [
      ["decode", "accent", (v, before) => rate(v, before, ["decode_tokens"])],
      ["prefill", "warn", (v, before) => rate(v, before, ["prefill_tokens"])],
    ],
    format: (value) => (value < 10 ? value.toFixed(1) : String(Math.round(value))),
  },
  {
    title: "Memory wasted",
    caption: "Slots that hold no token: of blocks in use, and if each sequence reserved its maximum length.",
    lines: [
      ["with blocks", "accent", (v) => v.waste().paged],
      ["if each sequence reserved its maximum length", "error", (v) => v.waste().reserved],
    ],
    most: 1,
    format: percent,
  },
];

export class Series {
  constructor(box) {
    this.charts = CHARTS.map((chart) => {
      const panel = element("section", undefined, { class: "panel" });
      const title = element("h2", chart.title);
      const canvas = element("canvas", undefined, { class: "chart series", "aria-hidden": "true" });
      const legend = element("ul", undefined, { class: "legend quiet" });
      const values = chart.lines.map(([name], index) => {
        const item = element("li");
        const key = element("i", undefined, { class: "key line" });
        const value = element("b", "–");
        item.append(key, element("span", name), value);
        legend.append(item);
        return { key, value, index };
      });
      panel.append(title, element("p", chart.caption, { class: "quiet" }), canvas, legend);
      box.append(panel);
      return { ...chart, canvas, values };
    });
  }

  /** `views`: those of the last minute, oldest first; the last one is shown now. */
  show(views, colours) {
    const end = views[views.length - 1].at;
    for (const chart of this.charts) {
      const width = chart.canvas.clientWidth;
      const height = chart.canvas.clientHeight;
      const paint = fit(chart.canvas, width, height);
      const format = chart.format ?? String;
      const lines = chart.lines.map(([, colour, read]) => ({
        colour: colours[colour],
        points: views.map((view, index) => [width - 2 - ((end - view.at) / SPAN_MS) * (width - 4), read(view, views[index - 1])]),
      }));
      const most = chart.most ?? Math.max(4, ...lines.flatMap((line) => line.points.map(([, value]) => value)));
      paint.strokeStyle = colours.line;
      paint.lineWidth = 1;
      paint.strokeRect(0.5, 0.5, width - 1, height - 1);
      lines.forEach((line, index) => {
        paint.strokeStyle = line.colour;
        paint.lineWidth = 1.75;
        paint.setLineDash(index === 1 ? [5, 3] : index === 2 ? [2, 2] : []);
        paint.beginPath();
        for (const [x, value] of line.points) paint.lineTo(x, height - 3 - (Math.min(value, most) / most) * (height - 6));
        paint.stroke();
        chart.values[index].key.style.color = line.colour;
        setText(chart.values[index].value, format(line.points[line.points.length - 1][1]));
      });
      paint.setLineDash([]);
      paint.fillStyle = colours.quiet;
      paint.font = `11px ${colours.font}`;
      paint.textBaseline = "top";
      paint.fillText(format(most), 4, 4);
      paint.textBaseline = "bottom";
      paint.fillText("60 s ago", 4, height - 3);
    }
  }
}
