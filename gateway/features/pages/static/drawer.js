// A panel next to the chat that a button opens and closes. On a narrow page the open panel covers the chat and makes the
// chat inert.

import { $ } from "/dom.js";

const narrow = matchMedia("(max-width: 60rem)");
const drawers = [];

export class Drawer {
  // `onToggle(isOpen)` is called after the user opens or closes it.
  constructor(panelId, buttonId, { onToggle = () => {} } = {}) {
    this.panel = $(panelId);
    this.button = $(buttonId);
    this.onToggle = onToggle;
    this.button.addEventListener("click", () => this.toggle(this.panel.hidden));
    this.panel.querySelector(".close").addEventListener("click", () => this.toggle(false));
    this.panel.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      this.toggle(false);
    });
    drawers.push(this);
  }

  get isOpen() {
    return !this.panel.hidden;
  }

  // True if the open panel covers the chat.
  get isCovering() {
    return this.isOpen && narrow.matches;
  }

  toggle(isOpen) {
    if (isOpen && narrow.matches) for (const other of drawers) if (other !== this && other.isOpen) other.toggle(false);
    const hadFocus = this.panel.contains(document.activeElement);
    this.panel.hidden = !isOpen;
    this.button.setAttribute("aria-expanded", String(isOpen));
    cover();
    this.onToggle(isOpen);
    if (isOpen) {
      this.panel.querySelector("h2").focus();
    } else if (hadFocus || document.activeElement === document.body) this.button.focus();
  }

  // Opens the panel next to the chat at the start of the page, if there is room.
  show() {
    if (narrow.matches) return;
    this.panel.hidden = false;
    this.button.setAttribute("aria-expanded", "true");
    this.onToggle(true);
  }
}

function cover() {
  const isCovered = narrow.matches && drawers.some((drawer) => drawer.isOpen);
  $("chat").inert = isCovered;
}

narrow.addEventListener("change", cover);
