// What the API key of this tab has used.

import { request } from "/api.js";
import { $ } from "/dom.js";
import { authorization } from "/key.js";

const DAYS = 31;
const TIMEOUT_MS = 10000;
const number = new Intl.NumberFormat();

// Shows the usage of the key in the settings; nothing without a key.
export async function showUsage() {
  const box = $("usage");
  box.hidden = true;
  if (!authorization().Authorization) return;
  try {
    const response = await request(`/v1/usage?days=${DAYS}`, { signal: AbortSignal.timeout(TIMEOUT_MS) });
    if (!response.ok) return;
    const rows = (await response.json()).data;
    const today = new Date().toISOString().slice(0, 10);
    box.textContent = `This key: ${sumOf(rows.filter(({ date }) => date === today))} today, ${sumOf(rows)} in ${DAYS} days (UTC).`;
    box.hidden = false;
  } catch {
    // The figures are not needed; the page says elsewhere that the server cannot be reached.
  }
}

function sumOf(rows) {
  const tokens = rows.reduce((sum, row) => sum + row.prompt_tokens + row.completion_tokens, 0);
  const requests = rows.reduce((sum, row) => sum + row.requests, 0);
  return `${number.format(tokens)} tokens in ${number.format(requests)} ${requests === 1 ? "request" : "requests"}`;
}
