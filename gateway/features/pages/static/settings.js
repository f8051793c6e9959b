// The settings of the form. An empty field is left to the server, and an error is shown at its field.

import { Refusal, WRONG_KEY, models } from "/api.js";
import { $, el } from "/dom.js";
import { changeKey } from "/key.js";
import { announce, notice } from "/notice.js";
import { initPresets } from "/presets.js";
import { settings as stored } from "/store.js";
import { showUsage } from "/usage.js";

const NUMBERS = { temperature: Number, top_p: Number, max_tokens: Number, seed: Number };
const FIELDS = ["model", "system", "temperature", "top_p", "max_tokens", "seed", "n", "sweep", "priority"];
const OWN_FIELDS = FIELDS.filter((name) => name !== "model");
const DEFAULTS = { ...Object.fromEntries(OWN_FIELDS.map((name) => [name, ""])), n: "1" };
// Sampling parameters without a field of their own: their names for people, and the value with which they have no effect.
const OTHERS = [["top_k", "top k", 0], ["min_p", "min p", 0], ["repetition_penalty", "repetition penalty", 1]];
const MOST_TEMPERATURES = 8;
const MOST_ANSWERS = 64;

// Fills the fields with the stored settings, and stores each change.
export function initSettings() {
  const kept = stored.get();
  fill(kept);
  $("settings").addEventListener("input", store);
  $("model").addEventListener("change", () => {
    showModel();
    store();
  });
  initPresets(written, (values) => {
    fill({ ...DEFAULTS, ...values });
    store();
  });
  $("key-button").addEventListener("click", changeKey);
  $("defaults").addEventListener("click", () => {
    fill(DEFAULTS);
    check();
    stored.set({});
  });
  check();
}

// The values of all fields but the model.
const written = () => Object.fromEntries(OWN_FIELDS.map((name) => [name, $(name).value]));

function fill(values) {
  for (const name of OWN_FIELDS) if (typeof values[name] === "string") $(name).value = values[name];
}

function store() {
  check();
  stored.set({ ...written(), model: $("model").value });
}

let numLoads = 0;
let isSaid = false; // the notice is about the models

// Asks for the models until the server answers, or wants another key. Says what keeps it from answering.
export async function loadModels() {
  const number = (numLoads += 1);
  for (let wait = 500; number === numLoads; wait = Math.min(2 * wait, 10000)) {
    try {
      showModels(await models());
      showUsage();
      if (isSaid) notice("");
      isSaid = false;
      return;
    } catch (error) {
      const isRefused = error instanceof Refusal;
      $("model-name").textContent = isRefused ? "not available" : "not reachable";
      if (error.code === WRONG_KEY) return announce(error.message);
      isSaid = true;
      notice(isRefused ? error.message : "The server cannot be reached. The page asks it again every few seconds.");
      if (error.retryAfter) wait = Math.max(wait, 1000 * error.retryAfter);
    }
    await new Promise((resolve) => setTimeout(resolve, wait));
  }
}

let cards = [];
let whenShown = () => {};

// Calls `action()` when a model is shown.
export function onModel(action) {
  whenShown = action;
}

const selected = () => cards.find(({ id }) => id === $("model").value);

// The tokens that the selected model can take; NaN if that is unknown.
export const contextOfModel = () => selected()?.context ?? NaN;

// The limits of pictures for the selected model, {count, bytes, pixels}; null if it reads text alone.
export const imagesOfModel = () => selected()?.images ?? null;

// Shows the name, the context length and the defaults of the selected model.
function showModel() {
  const { value } = $("model");
  const card = cards.find(({ id }) => id === value);
  $("model-name").textContent = value;
  if (card?.context) $("max_tokens").max = String(card.context);
  showDefaults(card?.defaults);
  // One model is a name; several are a choice.
  $("model").hidden = cards.length < 2;
  $("model-name").hidden = cards.length >= 2;
  whenShown();
}

// Shows the value that an empty field stands for: the model's own, if the server has told it.
function showDefaults(defaults) {
  for (const name of ["temperature", "top_p"]) $(name).placeholder = String(defaults?.[name] ?? 1);
  const others = OTHERS.filter(([name, , neutral]) => (defaults?.[name] ?? neutral) !== neutral);
  $("model-defaults").textContent = others.length
    ? `The model also sets ${others.map(([name, title]) => `${title} ${defaults[name]}`).join(", ")}.`
    : "";
}

function showModels(found) {
  const kept = stored.get().model;
  const wanted = $("model").value || kept;
  const nameOf = ({ id, parent }) => (parent ? `${id} (adapter of ${parent})` : id);
  $("model").replaceChildren(...found.map((card) => el("option", { value: card.id, textContent: nameOf(card) })));
  if (found.some(({ id }) => id === wanted)) $("model").value = wanted;
  cards = found;
  showModel();
}

// The parameters of each request that one question makes; null if a field is wrong.
export function optionsOfRuns() {
  if (!check()) return null;
  const options = { model: $("model").value };
  for (const [name, read] of Object.entries(NUMBERS)) if ($(name).value !== "") options[name] = read($(name).value);
  if ($("priority").value) options.priority = $("priority").value;
  const system = $("system").value.trim();
  if (system) options.system = system;
  const n = Number($("n").value || 1);
  if (n > 1) options.n = n;
  const temperatures = sweep();
  return temperatures.length ? temperatures.map((temperature) => ({ ...options, temperature })) : [options];
}

// The first field that is wrong.
export function wrongField() {
  return FIELDS.map($).find((field) => !field.validity.valid);
}

function check() {
  const temperatures = sweep();
  let message = "";
  if (temperatures.some((number) => !(number >= 0 && number <= 2))) {
    message = "Write numbers from 0 to 2 with commas between them, like 0, 0.7, 1.2.";
  } else if (temperatures.length > MOST_TEMPERATURES) message = `At most ${MOST_TEMPERATURES} temperatures.`;
  else if (temperatures.length * Number($("n").value || 1) > MOST_ANSWERS) message = `At most ${MOST_ANSWERS} answers in all.`;
  $("sweep").setCustomValidity(message);
  for (const name of FIELDS) {
    const field = $(name);
    const isWrong = !field.validity.valid;
    if (isWrong) field.setAttribute("aria-invalid", "true");
    else field.removeAttribute("aria-invalid");
    const note = $(`${name}-note`);
    if (note) note.textContent = isWrong ? field.validationMessage : note.dataset.text;
  }
  return !wrongField();
}

function sweep() {
  const text = $("sweep").value.trim();
  return text ? text.split(/[\s,;]+/).filter(Boolean).map(Number) : [];
}
