// Canvases, and the page's colours for them.

/** Fits a canvas to its CSS size on any display. Returns its context, in CSS pixels. */
export function fit(canvas, width, height) {
  const scale = devicePixelRatio || 1;
  const w = Math.round(width * scale);
  const h = Math.round(height * scale);
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

export function theme() {
  const style = getComputedStyle(document.documentElement);
  const probe = document.createElement("span");
  document.body.append(probe);
  const read = (name) => {
    probe.style.color = `var(${name})`;
    return getComputedStyle(probe).color;
  };
  const names = ["text", "quiet", "line", "control", "accent", "error", "sunken", "good", "warn", "raised", "back"];
  const found = Object.fromEntries(names.map((name) => [name, read(`--${name}`)]));
  probe.remove();
  return { ...found, font: style.getPropertyValue("--sans") };
}

/** Colours that stay with a sequence for as long as the page is open, each far from the one before. */
const hues = new Map();

export function colourOf(name) {
  if (!hues.has(name)) {
    if (hues.size > 20000) hues.clear();
    hues.set(name, Math.round((hues.size * 137.508 + 250) % 360));
  }
  return `oklch(0.7 0.13 ${hues.get(name)})`;
}

/** Writes the text of a block in as many lines as fit. `corner`: width that the first line leaves free. */
export function writeLines(paint, text, { x, y, width, height, corner }, colours) {
  paint.fillStyle = colours.text;
  paint.textAlign = "left";
  const size = width > 120 && height > 50 ? 13 : width > 97 ? 11.5 : 10;
  const pitch = size + 1.5;
  paint.font = `${size}px ${colours.font}`;
  const lines = Math.max(1, Math.floor((height - 4) / pitch));
  let left = text.replaceAll("\n", "↵").trim();
  for (let line = 0; line < lines && left; line++) {
    const room = width - 9 - (line === 0 ? corner : 0);
    let count = left.length;
    while (count > 1 && paint.measureText(left.slice(0, count)).width > room) count--;
    const cut = count < left.length ? left.lastIndexOf(" ", count) : -1;
    if (cut > 0) count = cut;
    paint.fillText(left.slice(0, count), x + 6, y + 3 + (line + 0.5) * pitch);
    left = left.slice(count).trimStart();
  }
}

export function hatch(paint, { x, y, width, height }, colour, alpha) {
  paint.save();
  paint.beginPath();
  paint.rect(x, y, width, height);
  paint.clip();
  paint.strokeStyle = colour;
  paint.lineWidth = 0.7;
  paint.globalAlpha = alpha;
  paint.beginPath();
  for (let at = 5; at < width + height; at += 7) {
    paint.moveTo(x + at, y);
    paint.lineTo(x + at - height, y + height);
  }
  paint.stroke();
  paint.restore();
}

/** Draws a share `part` of the arc between two points, on a ground that sets it off. */
export function arc(paint, [ax, ay], [bx, by], colour, ground, part) {
  const [cx, cy] = [(ax + bx) / 2, Math.max(4, Math.min(ay, by) - 16 - Math.abs(bx - ax) * 0.12)];
  const at = (t) => [(1 - t) * (1 - t) * ax + 2 * t * (1 - t) * cx + t * t * bx, (1 - t) * (1 - t) * ay + 2 * t * (1 - t) * cy + t * t * by];
  const points = Array.from({ length: 25 }, (_, index) => at((index / 24) * part));
  for (const [style, width] of [[ground, 7], [colour, 3]]) {
    paint.strokeStyle = style;
    paint.lineWidth = width;
    paint.beginPath();
    points.forEach(([x, y]) => paint.lineTo(x, y));
    paint.stroke();
  }
  for (const [style, radius] of [[ground, 7], [colour, 5]]) {
    paint.fillStyle = style;
    paint.beginPath();
    paint.arc(...points.at(-1), radius, 0, 7);
    paint.fill();
  }
}
