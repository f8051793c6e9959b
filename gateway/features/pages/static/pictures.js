// Pictures that the reader adds to a message: read from files, made smaller than the limits, and shown.
//
//   picture {id, name, type, width, height}      its file is in the browser's storage, under the id of its conversation

import { Refusal, randomId } from "/api.js";
import { el, signButton } from "/dom.js";
import { holdPicture, loadPicture } from "/store.js";

export const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
// A conversation is sent as a whole with each message: several pictures must fit a body of 4 MiB in base64. Models make
// larger pictures smaller anyway.
const MOST_BYTES = 384 * 1024;
const LONGEST_SIDE = 1536;
const QUALITY = 0.9;
const SHOWN_HEIGHT = 190;
const SMALLER = 0.75;

// A file that cannot be used as a picture. The text is for the reader. A call that needs it is not sent.
export class NoPicture extends Refusal {
  constructor(message) {
    super(message, { code: "page", isFinal: true });
  }
}

// Reads a file as a picture of this conversation, smaller if the limits {bytes, pixels} ask for it. Throws NoPicture.
export async function readPicture(file, limits) {
  const name = file.name || "picture";
  if (!TYPES.includes(file.type)) throw new NoPicture(`“${name}” is no PNG, JPEG, WebP or GIF file.`);
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    throw new NoPicture(`“${name}” cannot be read as a picture.`);
  }
  try {
    const fitted = await fit(file, bitmap, limits);
    const picture = { id: randomId(), name: name.slice(0, 200), type: fitted.file.type, width: fitted.width, height: fitted.height };
    holdPicture(picture.id, fitted.file);
    return picture;
  } finally {
    bitmap.close();
  }
}

async function fit(file, bitmap, { bytes, pixels }) {
  const mostBytes = Math.min(bytes, MOST_BYTES);
  let { width, height } = bitmap;
  let scale = Math.min(1, LONGEST_SIDE / Math.max(width, height), Math.sqrt(pixels / (width * height)));
  if (scale === 1 && file.size <= mostBytes) return { file, width, height };
  for (;;) {
    [width, height] = [bitmap.width, bitmap.height].map((length) => Math.max(1, Math.floor(length * scale)));
    const canvas = el("canvas", { width, height });
    const context = canvas.getContext("2d");
    // JPEG has no transparency; the server shows models pictures over white, too.
    context.fillStyle = "#ffffff";
    context.fillRect(0, 0, width, height);
    context.imageSmoothingQuality = "high";
    context.drawImage(bitmap, 0, 0, width, height);
    const made = await new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", QUALITY));
    if (made === null) throw new NoPicture("This browser cannot make the picture smaller.");
    if (made.size <= mostBytes || width * height < 64) return { file: made, width, height };
    scale *= SMALLER;
  }
}

// The messages as the API takes them: pictures before their text. Throws NoPicture if the browser has lost one.
export async function withPictures(messages, home) {
  const parts = ({ pictures, content }) =>
    Promise.all(pictures.map(async (picture) => ({ type: "image_url", image_url: { url: await dataUrl(picture, home) } }))).then(
      (images) => (content ? [...images, { type: "text", text: content }] : images),
    );
  return Promise.all(
    messages.map(async ({ pictures, ...message }) => (pictures ? { ...message, content: await parts({ pictures, ...message }) } : message)),
  );
}

export async function dataUrl(picture, home) {
  const file = await loadPicture(home, picture.id);
  if (!file) {
    throw new NoPicture(`The picture “${picture.name}” is no longer in this browser: add it again to a message of a new conversation.`);
  }
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new NoPicture(`The picture “${picture.name}” cannot be read.`));
    reader.readAsDataURL(file);
  });
}

// Returns the file of a data URL of this type; null if it is none.
export function fileOf(url, type) {
  const start = `data:${type};base64,`;
  if (!TYPES.includes(type) || typeof url !== "string" || !url.startsWith(start)) return null;
  try {
    return new Blob([Uint8Array.from(atob(url.slice(start.length)), (sign) => sign.charCodeAt(0))], { type });
  } catch {
    return null;
  }
}

// A small picture, which a click shows in full size. `remove()`: called by its button ✕; without it there is none.
export function thumbnail(picture, home, remove) {
  const { name, width, height } = picture;
  const image = el("img", { alt: `${name}, ${width} × ${height} pixels` });
  // The size on the page is known before the file is read, so that nothing moves later.
  const scale = Math.min(1, SHOWN_HEIGHT / height);
  [image.width, image.height] = [width, height].map((length) => Math.max(1, Math.round(scale * length)));
  const open = el("button", { type: "button", className: "picture", onclick: () => showLarge(image) }, image);
  open.title = "Show in full size";
  open.setAttribute("aria-label", `Show ${image.alt} in full size`);
  loadPicture(home, picture.id).then((file) => {
    if (file) return draw(image, file);
    open.disabled = true;
    image.replaceWith(`${name} is no longer in this browser`);
  });
  return el("li", {}, open, ...(remove ? [signButton("✕", `Remove ${name}`, remove)] : []));
}

function draw(image, file) {
  image.src = URL.createObjectURL(file);
  image.decode().catch(() => {}); // of a file that another program has written
}

// Frees the memory of the pictures in an element that leaves the page.
export function releasePictures(element) {
  for (const { src } of element.querySelectorAll(".picture img[src]")) URL.revokeObjectURL(src);
}

function showLarge({ src, alt }) {
  const dialog = el("dialog", { className: "large", onclick: () => dialog.close(), onclose: () => dialog.remove() });
  dialog.setAttribute("aria-label", alt);
  dialog.append(el("img", { src, alt }), signButton("✕", "Close", () => dialog.close()));
  document.body.append(dialog);
  dialog.showModal();
}
