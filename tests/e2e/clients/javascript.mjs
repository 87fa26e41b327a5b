// The openai package and the AI SDK: node javascript.mjs URL MCP SSE STORE. Runs where npm has installed them.

import assert from "node:assert/strict";
import process from "node:process";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import OpenAI, { toFile } from "openai";
import { zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const [url, mcpUrl, , store] = process.argv.slice(2);
const MODEL = "gpt-5";
const MODES = ["previous_response_id", "store=False"];
const WEATHER = 'call get_weather {"city": "Oslo"}';
const SIGNED = 'sign get_weather {"city": "Oslo"}\nsign get_weather {"city": "Rome"}\nthen\nsign get_weather {"city": "Bonn"}';
const SEARCH = 'call web_search {"query": "capital of france"}';
const FILES = 'call file_search {"queries": ["days of leave"]}';
const IN_FILE = "28 days of annual leave";
const CODE = 'call python {"code": "print(6 * 7)"}';
const FOUND = "largest city of France";
const mcpTool = { type: "mcp", server_label: "weather", server_url: mcpUrl, require_approval: "never" };

function expect(expected, said) {
  assert.ok(String(said).includes(expected), `there should be ${expected} in ${said}`);
}

function expectFarewell(said) {
  expect("say bye", said);
  expect("first: ", said);
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

async function vectorStore() {
  const store = await client.vectorStores.create({ name: "handbook" });
  const leave = await toFile(Buffer.from("Every employee has 28 days of annual leave."), "leave.md");
  const file = await client.vectorStores.files.uploadAndPoll(store.id, leave);
  assert.deepEqual([file.status, file.last_error], ["completed", null]);
  const pay = await toFile(Buffer.from("Salaries are paid at the end of the month."), "pay.md");
  const batch = await client.vectorStores.fileBatches.uploadAndPoll(store.id, { files: [pay] });
  assert.deepEqual([batch.status, batch.file_counts.completed], ["completed", 1]);
  const again = await client.vectorStores.files.createAndPoll(store.id, { file_id: file.id, attributes: { year: 2026 } });
  assert.deepEqual([again.status, again.attributes], ["completed", { year: 2026 }]);
  const found = await client.vectorStores.search(store.id, { query: "How many days of leave do I have?" });
  assert.equal(found.data[0].filename, "leave.md");
  expect("28 days", found.data[0].content[0].text);
  await client.vectorStores.delete(store.id);
}

const OPENAI = {
  functions,
  "structured output": parsed,
  "MCP server": hosted({ tools: [mcpTool] }, WEATHER, "Sunny in Oslo"),
  "MCP server, approved": approval,
  "web search": hosted({ tools: [{ type: "web_search" }] }, SEARCH, FOUND),
  "file search": hosted({ tools: [{ type: "file_search", vector_store_ids: [store] }] }, FILES, IN_FILE),
  "code interpreter": hosted({ tools: [{ type: "code_interpreter", container: { type: "auto" } }] }, CODE, "42"),
  "vector store": vectorStore,
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

// `source` is the name of a file that the answer cites.
function twoTurns(tools, told, expected, source) {
  return async (way) => {
    const messages = [{ role: "user", content: told }];
    const first = await generate(way, { tools, messages });
    expect(expected, await first.text);
    if (source) assert.ok((await first.sources).some((one) => one.filename === source), "the file should be a source");
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

// With a conversation, the AI SDK sends all items of earlier steps again.
async function conversation(way) {
  const { id } = await client.conversations.create();
  const conversing = (settings) => {
    const request = { model: ai.responses(MODEL), maxRetries: 0, stopWhen: stepCountIs(5), tools: { get_weather: getWeather } };
    return { ...request, providerOptions: { openai: { conversation: id } }, ...settings };
  };
  const settings = conversing({ prompt: 'call get_weather {"city": "Oslo"}\nthen\ncall get_weather {"city": "Bonn"}' });
  const result = way.streamed ? streamText(settings) : await generateText(settings);
  if (way.streamed) await result.consumeStream();
  expect("Sunny in Oslo | Sunny in Bonn", await result.text);
  const items = [];
  for await (const item of client.conversations.items.list(id)) items.push(item.type);
  const count = (kind) => items.filter((one) => one === kind).length;
  assert.deepEqual([count("function_call"), count("function_call_output")], [2, 2]);
  expectFarewell((await generateText(conversing({ prompt: "say bye" }))).text);
}

async function object(way) {
  const settings = { prompt: "yes", output: Output.object({ schema: z.object({ answer: z.string() }) }) };
  assert.deepEqual(await (await generate(way, settings)).output, { answer: "yes" });
}

function objectWithTools(tools) {
  return async (way) => {
    const settings = { prompt: WEATHER, tools, output: Output.object({ schema: z.object({ answer: z.string() }) }) };
    const result = await generate(way, settings);
    expect("Sunny in Oslo", (await result.output).answer);
    assert.equal((await result.steps).flatMap((step) => step.toolCalls).length, 1);
  };
}

const getWeather = tool({
  description: "The weather of a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `Sunny in ${city}`,
});

// The AI SDK sends back only the members of OpenAI's API, and encrypted reasoning only if nothing is stored.
async function signed(way) {
  const tools = { get_weather: getWeather };
  if (way.mode === "store=False") await twoTurns(tools, SIGNED, "Sunny in Oslo | Sunny in Rome | Sunny in Bonn")(way);
}

const mcp = ai.tools.mcp({ serverLabel: "weather", serverUrl: mcpUrl, requireApproval: "never" });

const AI_SDK = {
  functions: twoTurns({ get_weather: getWeather }, WEATHER, "Sunny in Oslo"),
  "functions with signatures": signed,
  "functions, conversation": conversation,
  "structured output": object,
  "structured output, functions": objectWithTools({ get_weather: getWeather }),
  "structured output, MCP server": objectWithTools({ mcp }),
  "MCP server": twoTurns({ mcp }, WEATHER, "Sunny in Oslo"),
  "web search": twoTurns({ web_search: ai.tools.webSearch({}) }, SEARCH, FOUND),
  "file search": twoTurns({ file_search: ai.tools.fileSearch({ vectorStoreIds: [store] }) }, FILES, IN_FILE, "handbook.md"),
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
