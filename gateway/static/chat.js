// The chat page: streams from this server's own API, and shows text only as text.
"use strict";

const $ = (id) => document.getElementById(id);
const messages = [];
let model = null;
let running = null;

function show(role, text) {
  $("hint").hidden = true;
  const element = document.createElement("div");
  element.className = `message ${role}`;
  element.textContent = text;
  $("log").append(element);
  scroll(true);
  return element;
}

function scroll(always) {
  const log = $("log");
  const near = log.scrollHeight - log.scrollTop - log.clientHeight < 120;
  if (always || near) log.scrollTop = log.scrollHeight;
}

function setRunning(controller) {
  running = controller;
  $("send").hidden = controller !== null;
  $("stop").hidden = controller === null;
}

async function loadModel() {
  const response = await fetch("/v1/models");
  const list = await response.json();
  model = list.data[0].id;
  $("model").textContent = model;
}

function body() {
  const system = $("system").value.trim();
  const history = system ? [{ role: "system", content: system }, ...messages] : messages;
  const request = { model, messages: history, stream: true, stream_options: { include_usage: true } };
  if ($("temperature").value !== "") request.temperature = Number($("temperature").value);
  if ($("max_tokens").value !== "") request.max_tokens = Number($("max_tokens").value);
  return JSON.stringify(request);
}

// The data of each event of a response, one by one.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    buffer += value;
    const blocks = buffer.split("\n\n");
    buffer = blocks.pop();
    for (const block of blocks) {
      for (const line of block.split("\n")) {
        if (line.startsWith("data: ")) yield line.slice(6);
      }
    }
  }
}

async function answer(element, controller) {
  if (model === null) await loadModel();
  const began = performance.now();
  const response = await fetch("/v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: body(),
    signal: controller.signal,
  });
  if (!response.ok) throw new Error((await response.json()).error.message);
  let first = null;
  let complete = false;
  for await (const data of events(response)) {
    if (data === "[DONE]") {
      complete = true;
      break;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    const text = chunk.choices[0]?.delta.content;
    if (text) {
      first ??= performance.now();
      element.textContent += text;
      scroll(false);
    }
    if (chunk.usage) report(chunk.usage, began, first);
  }
  if (!complete) throw new Error("The answer broke off.");
}

function report(usage, began, first) {
  const now = performance.now();
  const seconds = (now - (first ?? began)) / 1000;
  const rate = usage.completion_tokens > 1 && seconds > 0 ? ` · ${((usage.completion_tokens - 1) / seconds).toFixed(1)} tokens/s` : "";
  const wait = first === null ? "" : ` · first after ${((first - began) / 1000).toFixed(2)} s`;
  $("status").textContent = `${usage.prompt_tokens} + ${usage.completion_tokens} tokens${wait}${rate}`;
}

async function send() {
  const text = $("input").value.trim();
  if (!text || running) return;
  $("input").value = "";
  resize();
  messages.push({ role: "user", content: text });
  show("user", text);
  const element = show("assistant waiting", "");
  const controller = new AbortController();
  setRunning(controller);
  $("status").textContent = "";
  try {
    await answer(element, controller);
  } catch (error) {
    if (error.name === "AbortError") $("status").textContent = "Stopped.";
    else show("error", error.message);
  } finally {
    element.classList.remove("waiting");
    // A turn without an answer would confuse the next one. After `New chat` neither is part of the conversation.
    if (!element.isConnected) $("status").textContent = "";
    else if (element.textContent) messages.push({ role: "assistant", content: element.textContent });
    else {
      messages.pop();
      element.remove();
    }
    setRunning(null);
    $("input").focus();
  }
}

function resize() {
  const input = $("input");
  input.rows = Math.min(8, input.value.split("\n").length);
}

function switchTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("theme", root.dataset.theme);
}

const theme = localStorage.getItem("theme");
if (theme === "dark" || theme === "light") document.documentElement.dataset.theme = theme;

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("input").addEventListener("input", resize);
$("input").addEventListener("keydown", (event) => {
  // Enter sends; a line break is Shift+Enter. While an input method composes, Enter is its own.
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
$("stop").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", () => {
  running?.abort();
  messages.length = 0;
  for (const element of document.querySelectorAll(".message")) element.remove();
  $("hint").hidden = false;
  $("status").textContent = "";
});
$("theme").addEventListener("click", switchTheme);

loadModel().catch(() => {
  $("model").textContent = "not reachable";
});
