// The npm package `ai` sends images: of the user, and in the result of a tool.

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText } from "ai";
import { deflateSync } from "node:zlib";
import { run } from "./cases.mjs";

// A red PNG file of 60 x 60 pixels.
function crc(bytes) {
  let value = ~0;
  for (const byte of bytes) {
    value ^= byte;
    for (let bit = 0; bit < 8; bit++) value = (value >>> 1) ^ (value & 1 ? 0xedb88320 : 0);
  }
  return ~value >>> 0;
}
function chunk(kind, data) {
  const body = Buffer.concat([Buffer.from(kind), data]);
  const ends = Buffer.alloc(8);
  ends.writeUInt32BE(data.length, 0);
  ends.writeUInt32BE(crc(body), 4);
  return Buffer.concat([ends.subarray(0, 4), body, ends.subarray(4)]);
}
const side = 60;
const head = Buffer.from([0, 0, 0, side, 0, 0, 0, side, 8, 2, 0, 0, 0]);
const row = Buffer.concat([Buffer.from([0]), Buffer.alloc(3 * side, Buffer.from([255, 0, 0]))]);
const rows = deflateSync(Buffer.concat(Array(side).fill(row)));
const signature = Buffer.from([0x89, 0x50, 0x4e, 0x47, 0x0d, 0x0a, 0x1a, 0x0a]);
const png = Buffer.concat([signature, chunk("IHDR", head), chunk("IDAT", rows), chunk("IEND", Buffer.alloc(0))]);

const models = {
  responses: (url) => createOpenAI({ baseURL: url, apiKey: "none" })("seeing"),
  openai: (url) => createOpenAI({ baseURL: url, apiKey: "none" }).chat("seeing"),
  compatible: (url) => createOpenAICompatible({ name: "quire", baseURL: url })("seeing"),
  anthropic: (url) => createAnthropic({ baseURL: url, apiKey: "none" })("seeing"),
};
const question = { role: "user", content: [{ type: "text", text: "What is this?" }] };
const called = { type: "tool-call", toolCallId: "c1", toolName: "look", input: {} };
const result = (value) => ({
  role: "tool",
  content: [{ type: "tool-result", toolCallId: "c1", toolName: "look", output: { type: "content", value } }],
});
const text = { type: "text", text: "Here:" };

const cases = [];
for (const [provider, model] of Object.entries(models)) {
  const ask = async (url, messages) => {
    const answer = await generateText({ model: model(url), messages, maxRetries: 0, maxOutputTokens: 9 });
    return { text: answer.text, tokens: answer.usage.inputTokens };
  };
  const compare = async (url, seeing, blind) => {
    const [one, other] = [await ask(url, seeing), await ask(url, blind)];
    return { text: one.text, with: one.tokens, without: other.tokens };
  };
  const image = { type: "image", image: png };
  const media = { type: "media", data: png.toString("base64"), mediaType: "image/png" };
  const named = {
    [`${provider}_image`]: (url) =>
      compare(url, [{ role: "user", content: [image, ...question.content] }], [question]),
    [`${provider}_tool`]: (url) => {
      const messages = [question, { role: "assistant", content: [called] }];
      return compare(url, [...messages, result([text, media])], [...messages, result([text])]);
    },
  };
  cases.push(...Object.values(named));
}
await run(...cases);
