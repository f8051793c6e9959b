// The pictures of the message that is being written: pasted, dropped or chosen, each with a button to remove it.

import { $ } from "/dom.js";
import { focusInput } from "/input.js";
import { announce, notice } from "/notice.js";
import { NoPicture, TYPES, readPicture, releasePictures, thumbnail } from "/pictures.js";

const list = $("tray");
const unsent = new Map(); // the pictures of messages that are not sent, by the id of their conversation; "" is a new one
let page = { key: () => "", limits: () => null, model: () => "", used: () => 0 };
let reading = Promise.resolve();

// `key()`: of the conversation that is shown. `limits()`: {count, bytes, pixels} of the model, or null if it reads text
// alone. `model()`: its name. `used()`: pictures that the next message sends again.
export function initTray(given) {
  page = given;
  const field = $("picture-file");
  $("attach").addEventListener("click", () => field.click());
  field.addEventListener("change", () => {
    add([...field.files]);
    field.value = ""; // the same file may be chosen again
  });
  $("input").addEventListener("paste", (event) => {
    const { files, types } = event.clipboardData;
    // Programs for tables and texts also put a picture of the copied text there.
    if (!files.length || types.includes("text/plain")) return;
    event.preventDefault();
    add([...files]);
  });
  const hasFiles = ({ dataTransfer }) => dataTransfer?.types.includes("Files");
  const mark = (isOver) => $("chat").classList.toggle("dropping", isOver);
  document.addEventListener("dragover", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    mark(true);
  });
  document.addEventListener("dragleave", (event) => event.relatedTarget === null && mark(false));
  document.addEventListener("drop", (event) => {
    mark(false);
    if (!hasFiles(event)) return;
    event.preventDefault();
    add([...event.dataTransfer.files]);
  });
}

// Whether pictures can be added depends on the model.
export function drawAttach() {
  const sees = page.limits() !== null;
  $("attach").hidden = !sees;
  $("input").placeholder = sees ? "Message or picture" : "Message";
}

// Takes files one after the other, so that they keep their order.
function add(files) {
  const key = page.key();
  const added = reading.then(() => addAll(files, key));
  reading = added.catch(() => {}); // the page shows what went wrong, and takes further files
}

async function addAll(files, key) {
  const limits = page.limits();
  if (!limits) return notice(`${page.model() || "The model"} reads text alone, so the picture was not added.`);
  for (const file of files) {
    const mine = unsent.get(key) ?? [];
    const used = page.used() + mine.length;
    if (used >= limits.count) {
      return notice(`This conversation has ${used} ${used === 1 ? "picture" : "pictures"}, and the server takes no more.`);
    }
    try {
      unsent.set(key, [...mine, await readPicture(file, limits)]);
    } catch (error) {
      if (!(error instanceof NoPicture)) throw error;
      notice(error.message);
      continue;
    }
    announce(`Picture ${file.name || ""} added.`);
    if (key === page.key()) drawTray();
  }
  if (key === page.key()) focusInput();
}

// Shows the pictures of the message that is being written.
export function drawTray() {
  const key = page.key();
  const mine = unsent.get(key) ?? [];
  const remove = (picture) => {
    unsent.set(
      key,
      mine.filter((one) => one !== picture),
    );
    drawTray();
    announce(`Picture ${picture.name} removed.`);
    focusInput();
  };
  releasePictures(list);
  list.replaceChildren(...mine.map((picture) => thumbnail(picture, key, () => remove(picture))));
  list.hidden = !mine.length;
}

// The pictures of the message, when all files are read.
export async function trayed() {
  await reading;
  return unsent.get(page.key()) ?? [];
}

export function emptyTray(key) {
  unsent.delete(key);
  drawTray();
}
