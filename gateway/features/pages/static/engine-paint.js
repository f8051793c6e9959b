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
  const names = ["text", "quiet", "line", "control", "accent", "error", "sunken", "good", "warn", "raised"];
  const found = Object.fromEntries(names.map((name) => [name, read(`--${name}`)]));
  probe.remove();
  return { ...found, font: style.getPropertyValue("--sans") };
}
