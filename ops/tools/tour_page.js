// The tour as a page of its own, whose recording is in the page.
import { $ } from "/dom.js";
import { Stage } from "/engine-stage.js";
import { Tour, mayMove } from "/engine-tour.js";

const stage = new Stage({ onEnd: () => tour.next(), onUse: () => {} });
const tour = new Tour(stage, JSON.parse($("recording").textContent), () => {});
tour.show(0);
if (mayMove()) stage.player.start();
