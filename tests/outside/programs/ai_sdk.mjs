// The npm package `ai` with its providers for OpenAI (Responses, its default, and chat completions), compatible servers
// and Anthropic's Messages API.

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { run } from "./cases.mjs";

const schema = z.strictObject({ city: z.enum(["Paris", "Rome"]) });
// So long that a stream of it cannot arrive as one event.
const days = ["monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday", "city"];
const longSchema = z.strictObject(Object.fromEntries(days.map((day) => [day, z.enum(["Paris", "Rome"])])));
const common = { prompt: "How is the weather in Rome?", maxRetries: 0, maxOutputTokens: 100 };
// Makes answers repeat themselves. Responses and Messages have a seed only as an extension, which the package lacks.
const fetchSeeded = (url, init) => fetch(url, { ...init, body: JSON.stringify({ ...JSON.parse(init.body), seed: 1 }) });
const models = {
  responses: (url) => createOpenAI({ baseURL: url, apiKey: "none", fetch: fetchSeeded })("demo"),
  openai: (url) => createOpenAI({ baseURL: url, apiKey: "none" }).chat("demo"),
  compatible: (url) => createOpenAICompatible({ name: "quire", baseURL: url, supportsStructuredOutputs: true })("demo"),
  anthropic: (url) => createAnthropic({ baseURL: url, apiKey: "none", fetch: fetchSeeded })("demo"),
};
const seeded = (provider) => (["responses", "anthropic"].includes(provider) ? {} : { seed: 1 });

const cases = [];
for (const [provider, model] of Object.entries(models)) {
  const weatherTool = (called) => ({
    description: "The weather of a city.",
    inputSchema: schema,
    execute: (input) => {
      called.push(input);
      return "Sunny.";
    },
  });
  // The first step must call the tool, the second must answer.
  const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" });
  const options = (url, called) => ({
    ...common,
    ...seeded(provider),
    model: model(url),
    tools: { get_weather: tool(weatherTool(called)) },
    stopWhen: stepCountIs(2),
    prepareStep,
  });
  const named = {
    [`${provider}_tools`]: async (url) => {
      const called = [];
      const { text, steps } = await generateText(options(url, called));
      return { called, text, finish_reasons: steps.map((step) => step.finishReason) };
    },
    [`${provider}_tools_streamed`]: async (url) => {
      const called = [];
      const kinds = new Set();
      const result = streamText({ ...options(url, called), onError: () => {} });
      for await (const part of result.fullStream) {
        if (part.type === "error") throw part.error;
        kinds.add(part.type);
      }
      return { called, text: await result.text, kinds: [...kinds].sort() };
    },
    [`${provider}_output`]: async (url) => {
      const { output } = await generateText({
        ...common,
        ...seeded(provider),
        model: model(url),
        output: Output.object({ schema }),
      });
      return output;
    },
    [`${provider}_output_streamed`]: async (url) => {
      const call = { ...common, ...seeded(provider), model: model(url), output: Output.object({ schema: longSchema }), maxOutputTokens: 300 };
      let partial = 0;
      const result = streamText({ ...call, onError: () => {} });
      for await (const _ of result.partialOutputStream) partial += 1;
      return { partial, cities: Object.values(await result.output) };
    },
    // The first step must call the tool; in the others the model chooses between the tool and the object.
    [`${provider}_output_with_tools`]: async (url) => {
      for (let attempt = 0; attempt < 20; attempt += 1) {
        const called = [];
        const result = await generateText({
          ...options(url, called),
          prompt: `${common.prompt} ${attempt}`,
          stopWhen: stepCountIs(8),
          prepareStep: ({ stepNumber }) => ({
            toolChoice: stepNumber === 0 ? "required" : "auto",
            // As the demo model may never choose the object, later attempts leave it no other choice.
            ...(attempt >= 10 && stepNumber > 0 && { activeTools: [] }),
          }),
          output: Output.object({ schema }),
        });
        if (result.finishReason !== "tool-calls") return { called, output: result.output };
      }
    },
  };
  cases.push(...Object.values(named));
}

await run(...cases);
