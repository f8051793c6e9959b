// Presets: named sets of the instructions and of the other settings, which this browser keeps.

import { $, el } from "/dom.js";
import { tell } from "/notice.js";
import { presets as stored } from "/store.js";

// `read()` returns the values of the fields, and `write(values)` fills the fields.
export function initPresets(read, write) {
  draw("");
  $("preset").addEventListener("change", (event) => {
    event.stopPropagation(); // the choice is no setting
    const values = stored.get()[$("preset").value];
    if (values) write(values);
    $("preset-remove").disabled = !values;
  });
  $("preset-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const name = $("preset-name").value.trim();
    if (!name) return;
    stored.set({ ...stored.get(), [name]: read() });
    $("preset-name").value = "";
    draw(name);
    tell(`The settings are kept as “${name}”.`);
  });
  $("preset-remove").addEventListener("click", () => {
    const { [$("preset").value]: values, ...others } = stored.get();
    const name = $("preset").value;
    stored.set(others);
    draw("");
    $("preset").focus();
    const undo = el("button", { type: "button", textContent: "Undo" });
    undo.addEventListener("click", () => {
      stored.set({ ...stored.get(), [name]: values });
      draw(name);
      tell("");
    });
    tell(`The preset “${name}” is removed.`, undo);
  });
}

function draw(chosen) {
  const names = Object.keys(stored.get()).sort((a, b) => a.localeCompare(b));
  const none = el("option", { value: "", textContent: names.length ? "Choose a preset" : "None yet" });
  $("preset").replaceChildren(none, ...names.map((name) => el("option", { value: name, textContent: name })));
  $("preset").value = chosen;
  $("preset").disabled = !names.length;
  $("preset-remove").disabled = !chosen;
}
