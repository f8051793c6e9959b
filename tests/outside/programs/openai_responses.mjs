// The Responses API with the npm package `openai`: a tool round trip, streams, and answers as values.

import OpenAI from "openai";
import { zodResponsesFunction, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { run } from "./cases.mjs";

const GetWeather = z.strictObject({ city: z.enum(["Paris", "Rome"]) });
const question = { role: "user", content: "How is the weather in Rome?" };
const plain = { model: "demo", input: [question], seed: 1, max_output_tokens: 100 };
const call = {
  ...plain,
  tools: [zodResponsesFunction({ name: "get_weather", parameters: GetWeather })],
  tool_choice: "required",
  parallel_tool_calls: false,
};
const client = (url) => new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });

async function text(url) {
  const whole = await client(url).responses.create(plain);
  const stored = await client(url).responses.retrieve(whole.id);
  return { text: whole.output_text, stored: stored.output_text, status: whole.status };
}

async function streamed(url) {
  let delta = "";
  const numbers = [];
  const stream = client(url).responses.stream(plain);
  for await (const event of stream) {
    numbers.push(event.sequence_number);
    if (event.type === "response.output_text.delta") delta += event.delta;
  }
  return { delta, numbers, text: (await stream.finalResponse()).output_text };
}

async function tools(url) {
  const { id, output } = await client(url).responses.create(call);
  const made = output.find((item) => item.type === "function_call");
  const result = { type: "function_call_output", call_id: made.call_id, output: "Sunny." };
  const rest = { ...call, tool_choice: "none" };
  const whole = await client(url).responses.create({ ...rest, input: [question, ...output, result] });
  const continued = await client(url).responses.create({ ...rest, input: [result], previous_response_id: id });
  return { name: made.name, arguments: made.arguments, answers: [whole.output_text, continued.output_text] };
}

async function tools_streamed(url) {
  let pieces = 0;
  const stream = client(url).responses.stream(call);
  stream.on("response.function_call_arguments.delta", () => (pieces += 1));
  const made = (await stream.finalResponse()).output.find((item) => item.type === "function_call");
  return { pieces, parsed: made.parsed_arguments };
}

async function parsed(url) {
  const format = zodTextFormat(GetWeather, "weather");
  return (await client(url).responses.parse({ ...plain, text: { format } })).output_parsed;
}

async function parsed_call(url) {
  const { output } = await client(url).responses.parse(call);
  return output.find((item) => item.type === "function_call").parsed_arguments;
}

// A response in the background is read from its beginning, and from its middle.
async function background(url) {
  const { id } = await client(url).responses.create({ ...call, background: true });
  const numbers = async (options) => {
    const found = [];
    for await (const event of client(url).responses.stream({ response_id: id, ...options })) found.push(event.sequence_number);
    return found;
  };
  const whole = await numbers({});
  const middle = Math.floor(whole.length / 2);
  return { whole, middle, rest: await numbers({ starting_after: middle }) };
}

// By default the package asks for base64, and decodes it.
async function embeddings(url) {
  const call = { model: "demo", input: ["A fox.", "A boat."] };
  const decoded = await client(url).embeddings.create(call);
  const floats = await client(url).embeddings.create({ ...call, encoding_format: "float" });
  const vectors = ({ data }) => data.map((one) => Array.from(new Float32Array(one.embedding)));
  return { decoded: vectors(decoded), floats: vectors(floats), tokens: decoded.usage.total_tokens };
}

await run(text, streamed, tools, tools_streamed, parsed, parsed_call, background, embeddings);
