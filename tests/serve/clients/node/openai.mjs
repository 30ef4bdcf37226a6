// The official npm client over the gateway: chat, stream, tools, a stream that breaks off.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "weather in Oslo?" }];
const weather = {
  type: "function",
  function: { name: "weather", parameters: { type: "object", properties: { city: { type: "string" } } } },
};

const whole = await client.chat.completions.create({ model: "r", messages });
const called = await client.chat.completions.create({ model: "r", messages, tools: [weather] });
let streamed = "";
for await (const chunk of await client.chat.completions.create({ model: "r", messages, stream: true })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
}
let broken = false;
try {
  const stream = await client.chat.completions.create({
    model: "r", messages: [{ role: "user", content: "break" }], stream: true,
  });
  for await (const _ of stream);
} catch (error) {
  broken = error instanceof OpenAI.APIError;
}
console.log(JSON.stringify({
  text: whole.choices[0].message.content,
  streamed,
  broken,
  tools: called.choices[0].message.tool_calls,
}));
