// The openai package and the AI SDK: node javascript.mjs URL MCP. Runs where npm has installed them.

import assert from "node:assert/strict";
import process from "node:process";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import OpenAI from "openai";
import { zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const [url, mcpUrl] = process.argv.slice(2);
const MODEL = "gpt-5";
const MODES = ["previous_response_id", "store=False"];
const WEATHER = 'call get_weather {"city": "Oslo"}';
const SEARCH = 'call web_search {"query": "capital of france"}';
const CODE = 'call python {"code": "print(6 * 7)"}';
const FOUND = "largest city of France";
const mcpTool = { type: "mcp", server_label: "weather", server_url: mcpUrl, require_approval: "never" };

function expect(expected, said) {
  assert.ok(String(said).includes(expected), `there should be ${expected} in ${said}`);
}

function expectFarewell(said) {
  expect("say bye", said);
  expect("first: call", said);
}

// -- openai -----------------------------------------------------------------------------------------------------------------

const client = new OpenAI({ baseURL: url, apiKey: "key", maxRetries: 0 });

// A conversation: by previous_response_id, or with all the items and encrypted reasoning at each turn.
function talk(way, settings) {
  const sealed = way.mode === "store=False";
  let previous;
  let items = [];
  return async (...added) => {
    items.push(...added.map((one) => (typeof one === "string" ? { role: "user", content: one } : one)));
    const kept = sealed ? { store: false, include: ["reasoning.encrypted_content"] } : { previous_response_id: previous };
    const request = { model: MODEL, input: items, ...kept, ...settings };
    const response = way.streamed
      ? await client.responses.stream(request).finalResponse()
      : await client.responses.create(request);
    assert.equal(response.status, "completed");
    const thoughts = response.output.filter((item) => item.type === "reasoning");
    assert.ok(!sealed || (thoughts.length && thoughts.every((one) => one.encrypted_content)), "reasoning should be encrypted");
    previous = response.id;
    items = sealed ? [...items, ...response.output] : [];
    return response;
  };
}

function hosted(settings, told, expected) {
  return async (way) => {
    const say = talk(way, settings);
    expect(expected, (await say(told)).output_text);
    expectFarewell((await say("say bye")).output_text);
  };
}

async function functions(way) {
  const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false };
  const say = talk(way, { tools: [{ type: "function", name: "get_weather", strict: true, parameters }] });
  const call = (await say(WEATHER)).output.find((item) => item.type === "function_call");
  assert.deepEqual(JSON.parse(call.arguments), { city: "Oslo" });
  expect("Sunny", (await say({ type: "function_call_output", call_id: call.call_id, output: "Sunny" })).output_text);
  expectFarewell((await say("say bye")).output_text);
}

async function approval(way) {
  const say = talk(way, { tools: [{ ...mcpTool, require_approval: "always" }] });
  const asked = (await say(WEATHER)).output.find((item) => item.type === "mcp_approval_request");
  const said = await say({ type: "mcp_approval_response", approve: true, approval_request_id: asked.id });
  expect("Sunny in Oslo", said.output_text);
}

async function parsed(way) {
  const text = { format: zodTextFormat(z.object({ answer: z.string() }), "answer") };
  const request = { model: MODEL, input: "yes", text, store: way.mode !== "store=False" };
  const response = way.streamed
    ? await client.responses.stream(request).finalResponse()
    : await client.responses.parse(request);
  assert.deepEqual(response.output_parsed, { answer: "yes" });
}

const OPENAI = {
  functions,
  "structured output": parsed,
  "MCP server": hosted({ tools: [mcpTool] }, WEATHER, "Sunny in Oslo"),
  "MCP server, approved": approval,
  "web search": hosted({ tools: [{ type: "web_search" }] }, SEARCH, FOUND),
  "code interpreter": hosted({ tools: [{ type: "code_interpreter", container: { type: "auto" } }] }, CODE, "42"),
};

// -- the AI SDK ----------------------------------------------------------------------------------------------------------

globalThis.AI_SDK_LOG_WARNINGS = false; // it tells of what it leaves out when nothing is stored
const ai = createOpenAI({ baseURL: url, apiKey: "key" });

async function generate(way, settings, previous) {
  const openai =
    way.mode === "store=False"
      ? { store: false, include: ["reasoning.encrypted_content"], reasoningEffort: "low", reasoningSummary: "auto" }
      : { previousResponseId: previous };
  const request = {
    model: ai.responses(MODEL),
    maxRetries: 0,
    stopWhen: stepCountIs(5),
    providerOptions: { openai },
    onError: () => {}, // else it prints; the promises fail all the same
    ...settings,
  };
  const result = way.streamed ? streamText(request) : await generateText(request);
  if (way.streamed) await result.consumeStream();
  return result;
}

function twoTurns(tools, told, expected) {
  return async (way) => {
    const messages = [{ role: "user", content: told }];
    const first = await generate(way, { tools, messages });
    expect(expected, await first.text);
    const bye = { role: "user", content: "say bye" };
    if (way.mode === "store=False") {
      const said = (await first.response).messages;
      expect("reasoningEncryptedContent", JSON.stringify(said));
      expectFarewell(await (await generate(way, { tools, messages: [...messages, ...said, bye] })).text);
      return;
    }
    const previous = (await first.steps).at(-1).providerMetadata.openai.responseId;
    expectFarewell(await (await generate(way, { tools, messages: [bye] }, previous)).text);
  };
}

async function object(way) {
  const settings = { prompt: "yes", output: Output.object({ schema: z.object({ answer: z.string() }) }) };
  assert.deepEqual(await (await generate(way, settings)).output, { answer: "yes" });
}

const getWeather = tool({
  description: "The weather of a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `Sunny in ${city}`,
});

const AI_SDK = {
  functions: twoTurns({ get_weather: getWeather }, WEATHER, "Sunny in Oslo"),
  "structured output": object,
  "MCP server": twoTurns(
    { mcp: ai.tools.mcp({ serverLabel: "weather", serverUrl: mcpUrl, requireApproval: "never" }) },
    WEATHER,
    "Sunny in Oslo",
  ),
  "web search": twoTurns({ web_search: ai.tools.webSearch({}) }, SEARCH, FOUND),
  "code interpreter": twoTurns({ code_interpreter: ai.tools.codeInterpreter({}) }, CODE, "42"),
};

// ---------------------------------------------------------------------------------------------------------------------------

async function run(name, cases) {
  let failed = 0;
  for (const [title, attempt] of Object.entries(cases)) {
    const began = performance.now();
    const ways = MODES.flatMap((mode) => [false, true].map((streamed) => ({ mode, streamed })));
    const faults = [];
    for (const way of ways) {
      try {
        await attempt(way);
      } catch (error) {
        faults.push(`${way.mode}, ${way.streamed ? "streamed" : "not streamed"}: ${String(error.stack).slice(0, 600)}`);
      }
    }
    const seconds = ((performance.now() - began) / 1000).toFixed(1).padStart(5);
    console.log(`${faults.length ? "FAILED" : "ok    "} ${name.padEnd(15)}${title.padEnd(30)}${ways.length} ways ${seconds} s`);
    for (const fault of faults) console.log(`       - ${fault}`);
    failed += faults.length;
  }
  return failed;
}

const failed = (await run("openai (npm)", OPENAI)) + (await run("@ai-sdk/openai", AI_SDK));
process.exitCode = failed ? 1 : 0;
