// Conversations as files: export to JSON, and import of such a file.

import { imported } from "/checks.js";
import { el } from "/dom.js";
import { notice, tell } from "/notice.js";
import { NoPicture, dataUrl, fileOf } from "/pictures.js";
import { allConversations, holdPicture, loadConversation, picturesOf, saveConversation } from "/store.js";

export async function exportConversation(conversation) {
  download(await complete(conversation), `quire-${conversation.id.slice(0, 8)}.json`);
}

export async function exportAll() {
  download(await Promise.all((await allConversations()).map(complete)), "quire-conversations.json");
}

// Returns a conversation with the files of its pictures, as data URLs. One that the browser has lost has none.
async function complete(conversation) {
  const whole = async (picture) => {
    const data = await dataUrl(picture, conversation.id).catch((error) => {
      if (!(error instanceof NoPicture)) throw error;
    });
    return data ? { ...picture, data } : picture;
  };
  const turns = conversation.turns.map(async (turn) =>
    turn.pictures ? { ...turn, pictures: await Promise.all(turn.pictures.map(whole)) } : turn,
  );
  return { ...conversation, turns: await Promise.all(turns) };
}

// Takes the files of pictures out of a conversation that was exported.
function unpack(conversation) {
  for (const picture of picturesOf(conversation)) {
    const file = fileOf(picture.data, picture.type);
    delete picture.data;
    if (file) holdPicture(picture.id, file);
  }
}

function download(value, name) {
  const url = URL.createObjectURL(new Blob([JSON.stringify(value, null, 2)], { type: "application/json" }));
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

// Asks for a file, and stores its conversations. One that is here already stays, unless the file has a later state of it.
export function importFile(whenDone) {
  const field = el("input", { type: "file", accept: ".json,application/json" });
  field.addEventListener("change", async () => {
    if (field.files.length) await take(field.files[0]);
    whenDone();
  });
  field.click();
}

async function take(file) {
  let given;
  try {
    given = JSON.parse(await file.text());
  } catch {
    return notice(`“${file.name}” is no JSON file, so nothing was imported.`);
  }
  const counts = { new: 0, known: 0, wrong: 0 };
  for (const one of Array.isArray(given) ? given : [given]) {
    let conversation;
    try {
      conversation = imported(one);
    } catch {
      counts.wrong += 1;
      continue;
    }
    const known = await loadConversation(conversation.id);
    if (known && known.changed >= conversation.changed) {
      counts.known += 1;
      continue;
    }
    unpack(conversation);
    try {
      await saveConversation(conversation);
    } catch {
      return notice(`This browser has no room for all of it: ${imports(counts.new)}.`);
    }
    counts.new += 1;
  }
  const known = counts.known ? `, ${counts.known} ${counts.known === 1 ? "was" : "were"} here already` : "";
  if (counts.wrong) notice(`${imports(counts.new)}${known}. ${counts.wrong} in “${file.name}” cannot be read by this page.`);
  else tell(`${imports(counts.new)}${known}.`);
}

const imports = (count) => `${count} ${count === 1 ? "conversation" : "conversations"} imported`;
