// The Vercel AI SDK over the gateway: generateText, streamText, tools, an error part in a stream.
import { generateText, stepCountIs, streamText, tool, jsonSchema } from "ai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";

const provider = createOpenAICompatible({ name: "gateway", baseURL: process.argv[2], apiKey: "none" });
const model = provider("r");
const calls = [];
const weather = tool({
  description: "The weather in a city.",
  inputSchema: jsonSchema({ type: "object", properties: { city: { type: "string" } } }),
  execute: async (input) => {
    calls.push({ weather: input });
    return "sunny";
  },
});

const whole = await generateText({ model, prompt: "hi" });
const used = await generateText({
  model, prompt: "weather in Oslo?", tools: { weather }, stopWhen: stepCountIs(3),
});
let streamed = "";
for await (const text of streamText({ model, prompt: "hi" }).textStream) streamed += text;
let broken = false;
const stream = streamText({ model, prompt: "break", maxRetries: 0, onError: () => {} });
for await (const part of stream.fullStream) if (part.type === "error") broken = true;
console.log(JSON.stringify({ text: whole.text, streamed, broken, tools: [calls, used.text] }));
