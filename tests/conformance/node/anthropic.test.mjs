// Anthropic's npm client: messages, streamed and not, tools, structured output, counts, models and errors.

import assert from "node:assert/strict";
import { test } from "node:test";
import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({
  apiKey: process.env.OPENAI_API_KEY,
  authToken: null,
  baseURL: process.env.KAON_URL,
  maxRetries: 0,
});
const model = process.env.KAON_MODEL;
const france = [{ role: "user", content: "What is the capital of France?" }];
const paris = [{ role: "user", content: "What is the weather in Paris?" }];
const input_schema = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const getWeather = { name: "get_weather", description: "Get the weather for a city", input_schema };
const greedy = { model, max_tokens: 60, temperature: 0 };

const textOf = (message) => message.content.filter((each) => each.type === "text").map((each) => each.text).join("");

test("a question is answered", async () => {
  const message = await client.messages.create({ ...greedy, messages: france });
  assert.equal(textOf(message), "The capital of France is Paris.");
  assert.equal(message.stop_reason, "end_turn");
  assert.ok(message._request_id);
});

test("events make the answer", async () => {
  const stream = client.messages.stream({ ...greedy, messages: france });
  let text = "";
  stream.on("text", (piece) => (text += piece));
  const final = await stream.finalMessage();
  assert.equal(text, textOf(final));
  assert.equal(text, "The capital of France is Paris.");
  assert.ok(final.usage.output_tokens > 0);
});

test("a tool is called, and its result is read", async () => {
  const fields = { ...greedy, tools: [getWeather] };
  const asked = await client.messages.stream({ ...fields, messages: paris }).finalMessage();
  const [call] = asked.content;
  assert.equal(asked.stop_reason, "tool_use");
  assert.deepEqual([call.type, call.name, call.input], ["tool_use", "get_weather", { city: "Paris" }]);
  const result = { type: "tool_result", tool_use_id: call.id, content: "sunny" };
  const turn = [...paris, { role: "assistant", content: asked.content }, { role: "user", content: [result] }];
  assert.equal(textOf(await client.messages.create({ ...fields, messages: turn })), "The weather in Paris is sunny.");
});

test("a call can be forced", async () => {
  for (const tool_choice of [{ type: "any" }, { type: "tool", name: "get_weather" }]) {
    const message = await client.messages.create({ ...greedy, messages: france, tools: [getWeather], tool_choice });
    assert.ok(message.content.some((each) => each.type === "tool_use" && each.name === "get_weather"));
  }
});

test("text follows a schema", async () => {
  const schema = {
    type: "object",
    properties: { name: { type: "string" }, age: { type: "integer" } },
    required: ["name", "age"],
    additionalProperties: false,
  };
  const content = "Extract name and age as JSON: Alice is 30 years old and lives in Paris.";
  const output_config = { format: { type: "json_schema", schema } };
  const message = await client.messages.create({ ...greedy, messages: [{ role: "user", content }], output_config });
  assert.deepEqual(JSON.parse(textOf(message)), { name: "Alice", age: 30 });
});

test("tokens are counted and models listed", async () => {
  const counted = await client.messages.countTokens({ model, messages: france });
  assert.ok(counted.input_tokens > 5);
  const listed = [];
  for await (const each of client.models.list()) listed.push(each.id);
  assert.deepEqual(listed, [model]);
  assert.equal((await client.models.retrieve(model)).display_name, model);
});

test("refusals have their classes and types", async () => {
  const refused = async (fields, kind, type) => {
    const asked = client.messages.create({ model, max_tokens: 5, messages: france, ...fields });
    await assert.rejects(asked, (error) => error instanceof kind && error.type === type && Boolean(error.requestID));
  };
  await refused({ max_tokens: -1 }, Anthropic.BadRequestError, "invalid_request_error");
  await refused({ model: "gpt-17" }, Anthropic.NotFoundError, "not_found_error");
  const stranger = new Anthropic({ apiKey: "wrong", authToken: null, baseURL: process.env.KAON_URL, maxRetries: 0 });
  const asked = stranger.messages.create({ model, max_tokens: 5, messages: france });
  await assert.rejects(asked, Anthropic.AuthenticationError);
});

test("a stream that is aborted ends", async () => {
  const stream = client.messages.stream({ ...greedy, max_tokens: 2000, messages: [{ role: "user", content: "Tell me a story" }] });
  stream.on("text", () => stream.abort());
  await assert.rejects(stream.finalMessage(), Anthropic.APIUserAbortError);
  assert.ok((await client.models.list()).data.length);
});
