// A panel next to the chat that a button opens and closes. On a narrow page the open panel covers the chat and makes the
// chat inert.

import { $ } from "/dom.js";

const narrow = matchMedia("(max-width: 60rem)");
const drawers = [];

export class Drawer {
  constructor(panelId, buttonId, { onOpen = () => {} } = {}) {
    this.panel = $(panelId);
    this.button = $(buttonId);
    this.onOpen = onOpen;
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

  toggle(isOpen) {
    if (isOpen) for (const other of drawers) if (other !== this && other.isOpen) other.toggle(false);
    const hadFocus = this.panel.contains(document.activeElement);
    this.panel.hidden = !isOpen;
    this.button.setAttribute("aria-expanded", String(isOpen));
    cover();
    if (isOpen) {
      this.onOpen();
      this.panel.querySelector("h2").focus();
    } else if (hadFocus || document.activeElement === document.body) this.button.focus();
  }
}

function cover() {
  const isCovered = narrow.matches && drawers.some((drawer) => drawer.isOpen);
  $("chat").inert = isCovered;
}

narrow.addEventListener("change", cover);
