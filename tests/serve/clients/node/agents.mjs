// An agent of @openai/agents with one tool, over chat completions and over responses.
import { Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, run, setTracingDisabled, tool } from "@openai/agents";
import OpenAI from "openai";
import { z } from "zod";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none" });
setTracingDisabled(true);
const weather = tool({
  name: "weather",
  description: "Return the weather.",
  parameters: z.object({ city: z.string() }),
  execute: async ({ city }) => `sunny in ${city}`,
});
const found = {};
for (const [name, Kind] of [["chat", OpenAIChatCompletionsModel], ["responses", OpenAIResponsesModel]]) {
  const agent = new Agent({ name: "a", instructions: "Use the tool.", model: new Kind(client, "r"), tools: [weather] });
  found[name] = (await run(agent, "weather in Oslo?")).finalOutput;
}
console.log(JSON.stringify(found));
