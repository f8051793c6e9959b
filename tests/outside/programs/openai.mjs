// The npm package `openai`: a tool round trip, and the helpers that stream, parse, and run tools.

import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { run } from "./cases.mjs";

const GetWeather = z.strictObject({ city: z.enum(["Paris", "Rome"]) });
const question = { role: "user", content: "How is the weather in Rome?" };
const call = {
  model: "demo",
  messages: [question],
  tools: [zodFunction({ name: "get_weather", parameters: GetWeather })],
  tool_choice: "required",
  parallel_tool_calls: false,
  seed: 1,
  max_tokens: 100,
};
const client = (url) => new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });

async function tools(url) {
  const { message } = (await client(url).chat.completions.create(call)).choices[0];
  const [made] = message.tool_calls;
  const result = { role: "tool", tool_call_id: made.id, content: "Sunny." };
  const messages = [question, message, result];
  const answer = await client(url).chat.completions.create({ ...call, messages, tool_choice: "none" });
  return { function: made.function, answer: answer.choices[0].message.content };
}

async function streamed(url) {
  let chunks = 0;
  const stream = client(url).chat.completions.stream(call);
  for await (const _ of stream) chunks += 1;
  const { message, finish_reason } = (await stream.finalChatCompletion()).choices[0];
  return { chunks, finish_reason, function: message.tool_calls[0].function };
}

async function parsed(url) {
  const { tools, tool_choice, parallel_tool_calls, ...plain } = call;
  const response_format = zodResponseFormat(GetWeather, "weather");
  return (await client(url).chat.completions.parse({ ...plain, response_format })).choices[0].message.parsed;
}

async function runTools(url) {
  const called = [];
  const weather = (arguments_) => {
    called.push(arguments_);
    return "Sunny.";
  };
  const parameters = call.tools[0].function.parameters;
  const tool = { type: "function", function: { name: "get_weather", parameters, parse: JSON.parse, function: weather } };
  const runner = client(url).chat.completions.runTools({ ...call, tools: [tool] }, { maxChatCompletions: 2 });
  await runner.done();
  return { called };
}

await run(tools, streamed, parsed, runTools);
