// Plays frames, one after the other: play and pause, a speed in steps per second, and a slider over the steps.
import { setText } from "/engine-tables.js";
import { fit } from "/engine-paint.js";

const SPEEDS = [1, 2, 4, 8, 12, 20];
const END_MS = 1800; // the last frame of a chapter stays
const FREEZE_MS = 1000; // the first copy, the first swap and a death stay

export class Player {
  /**
   * `elements`: {play, slider, when, speed, track}; `onFrame(index)`: a frame is shown; `onEnd()`: the last frame has
   * been shown for a while; `onUse()`: somebody used the controls.
   */
  constructor(elements, { onFrame, onEnd, onUse }) {
    Object.assign(this, elements, { onFrame, onEnd, onUse });
    this.frames = [];
    this.at = 0;
    this.isPlaying = false;
    for (const value of SPEEDS) this.speed.append(new Option(`${value} ${value === 1 ? "step" : "steps"}/s`, value));
    this.speed.value = "4";
    this.size = null; // of the track
    new ResizeObserver(([{ contentRect }]) => {
      this.size = contentRect;
      this.onFrame(this.at);
    }).observe(this.track);
    this.play.addEventListener("click", () => this.toggle());
    this.slider.addEventListener("input", () => {
      this.onUse();
      this.pause();
      this.go(Number(this.slider.value));
    });
    this.slider.addEventListener("keydown", (event) => {
      if (event.key !== " ") return;
      event.preventDefault();
      this.toggle();
    });
    this.speed.addEventListener("change", () => this.isPlaying && this.schedule());
  }

  /** Shows other frames from their beginning. `frames` may grow while they are played. */
  load(frames) {
    this.frames = frames;
    this.seen = new Set(); // kinds of moves that have been shown
    this.go(0);
    if (this.isPlaying) this.schedule();
  }

  toggle() {
    this.onUse();
    if (this.isPlaying) this.pause();
    else this.start();
  }

  start() {
    if (this.at >= this.frames.length - 1) this.go(0);
    this.isPlaying = true;
    this.label();
    this.schedule();
  }

  pause() {
    this.isPlaying = false;
    clearTimeout(this.timer);
    this.label();
  }

  label() {
    setText(this.play.lastElementChild, this.isPlaying ? "Pause" : "Play");
    this.play.classList.toggle("playing", this.isPlaying);
  }

  schedule() {
    clearTimeout(this.timer);
    const isLast = this.at >= this.frames.length - 1;
    const stay = isLast ? END_MS : this.isNews() ? FREEZE_MS : 0;
    this.timer = setTimeout(() => this.next(), Math.max(stay, 1000 / Number(this.speed.value)));
  }

  /** Whether the frame has the first move of its kind, or a death. */
  isNews() {
    const frame = this.frames[this.at] ?? [];
    const kinds = frame.flatMap((state) => state.moves.map(([kind]) => kind)).filter((kind) => !this.seen.has(kind));
    kinds.forEach((kind) => this.seen.add(kind));
    return kinds.length > 0 || isDying(frame, this.frames[this.at - 1]);
  }

  next() {
    if (this.at < this.frames.length - 1) this.go(this.at + 1);
    else this.onEnd();
    if (this.isPlaying) this.schedule();
  }

  go(index) {
    this.at = Math.max(0, Math.min(index, this.frames.length - 1));
    this.onFrame(this.at);
    this.showPlace();
  }

  showPlace() {
    const last = Math.max(0, this.frames.length - 1);
    this.slider.max = String(last);
    this.slider.value = String(this.at);
    const text = `step ${this.at} of ${last}`;
    this.slider.setAttribute("aria-valuetext", text);
    setText(this.when, text);
  }

  /** Draws the blocks in use over the steps, and marks copies, swaps and deaths. */
  drawTrack(colours) {
    if (!this.size?.width) return;
    const { width, height } = this.size;
    const paint = fit(this.track, width, height);
    const count = this.frames.length;
    const [left, room] = [8, width - 16]; // as the thumb of a slider moves
    const x = (index) => left + (index / Math.max(1, count - 1)) * room;
    const step = Math.max(1, Math.floor(count / width));
    const used = (frame) => frame.reduce((sum, state) => sum + (state.isGone ? 0 : state.figures.used), 0);
    let most = 1;
    const points = [];
    for (let index = 0; index < count; index += step) {
      const value = used(this.frames[index]);
      most = Math.max(most, value);
      points.push([x(index), value]);
    }
    paint.fillStyle = colours.accent;
    paint.globalAlpha = 0.22;
    paint.beginPath();
    paint.moveTo(x(0), height);
    for (const [at, value] of points) paint.lineTo(at, height - (value / most) * (height - 6));
    paint.lineTo(points.at(-1)?.[0] ?? left, height);
    paint.fill();
    paint.globalAlpha = 1;
    this.frames.forEach((frame, index) => {
      const isDeath = isDying(frame, this.frames[index - 1]);
      const moves = frame.some((state) => state.moves.length);
      if (!moves && !isDeath) return;
      paint.fillStyle = isDeath ? colours.error : colours.accent;
      paint.fillRect(x(index) - 1, 0, 2, height);
    });
  }
}

const isDying = (frame, before) => Boolean(before) && frame.some((state) => state.isGone && !before.find((one) => one.worker === state.worker)?.isGone);
