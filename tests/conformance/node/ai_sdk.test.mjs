// The Vercel AI SDK through its OpenAI-compatible provider.

import assert from "node:assert/strict";
import { test } from "node:test";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateObject, generateText, Output, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const provider = createOpenAICompatible({
  name: "kaon",
  baseURL: process.env.OPENAI_BASE_URL,
  apiKey: process.env.OPENAI_API_KEY,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const model = provider(process.env.KAON_MODEL);
const greedy = { model, temperature: 0, maxRetries: 0 };
const schema = z.object({ name: z.string(), age: z.number().int() });
const alice = "Extract name and age as JSON: Alice is 30 years old and lives in Paris.";
const tools = {
  get_weather: tool({
    description: "Get the weather for a city",
    inputSchema: z.object({ city: z.string() }),
    execute: async () => "sunny",
  }),
};

test("generateText answers and counts", async () => {
  const { text, finishReason, usage } = await generateText({ ...greedy, prompt: "What is 2 + 3?" });
  assert.equal(text, "2 + 3 = 5");
  assert.equal(finishReason, "stop");
  assert.equal(usage.totalTokens, usage.inputTokens + usage.outputTokens);
});

test("streamText streams and counts", async () => {
  const result = streamText({ ...greedy, prompt: "Tell me a story" });
  const parts = [];
  for await (const part of result.textStream) parts.push(part);
  assert.ok(parts.length > 20);
  assert.ok(parts.join("").endsWith("The end."));
  assert.equal(await result.finishReason, "stop");
  assert.ok((await result.usage).outputTokens > 20);
});

test("generateText completes text with the completion model", async () => {
  const { text } = await generateText({
    model: provider.completionModel(process.env.KAON_MODEL),
    temperature: 0,
    maxRetries: 0,
    prompt: "Hello",
    maxOutputTokens: 8,
  });
  assert.ok(text.length > 0);
});

test("messages, a system prompt and stop sequences are sent", async () => {
  const { text } = await generateText({
    ...greedy,
    system: "Be brief.",
    messages: [
      { role: "user", content: [{ type: "text", text: "Hi, my name is Bob" }] },
      { role: "assistant", content: "Hello Bob!" },
      { role: "user", content: "What is my name?" },
    ],
    stopSequences: ["."],
  });
  assert.match(text, /Bob$/);
});

test("generateObject keeps a schema", async () => {
  const { object } = await generateObject({ ...greedy, schema, prompt: alice });
  assert.deepEqual(object, { name: "Alice", age: 30 });
});

test("generateObject chooses from an enum", async () => {
  const { object } = await generateObject({ ...greedy, output: "enum", enum: ["sunny", "rainy"], prompt: "Hello" });
  assert.ok(["sunny", "rainy"].includes(object));
});

test("streamObject grows into the object", async () => {
  const result = streamObject({ ...greedy, schema, prompt: alice });
  let last;
  for await (const partial of result.partialObjectStream) last = partial;
  assert.deepEqual(last, { name: "Alice", age: 30 });
  assert.deepEqual(await result.object, last);
});

test("Output.object types a text call", async () => {
  const { output } = await generateText({ ...greedy, output: Output.object({ schema }), prompt: alice });
  assert.deepEqual(output, { name: "Alice", age: 30 });
});

test("a tool is called and its result is reported", async () => {
  const { text, steps } = await generateText({
    ...greedy,
    tools,
    stopWhen: stepCountIs(3),
    prompt: "What is the weather in Paris?",
  });
  assert.equal(text, "The weather in Paris is sunny.");
  assert.equal(steps.length, 2);
  assert.deepEqual(steps[0].toolCalls[0].input, { city: "Paris" });
  assert.equal(steps[0].finishReason, "tool-calls");
});

test("a tool loop is streamed", async () => {
  const result = streamText({ ...greedy, tools, stopWhen: stepCountIs(3), prompt: "What is the weather in Paris?" });
  const kinds = [];
  for await (const part of result.fullStream) kinds.push(part.type);
  assert.ok(kinds.includes("tool-input-delta"));
  assert.ok(kinds.includes("tool-result"));
  assert.equal(await result.text, "The weather in Paris is sunny.");
});

test("a call can be forced", async () => {
  for (const toolChoice of ["required", { type: "tool", toolName: "get_weather" }]) {
    const { toolCalls } = await generateText({ ...greedy, tools, toolChoice, prompt: "Hello", maxOutputTokens: 100 });
    assert.equal(toolCalls[0].toolName, "get_weather");
    assert.equal(typeof toolCalls[0].input.city, "string");
  }
});

test("a refusal is an APICallError that says why", async () => {
  await assert.rejects(generateText({ ...greedy, temperature: 3, prompt: "Hello" }), (error) => {
    assert.ok(APICallError.isInstance(error));
    assert.equal(error.statusCode, 400);
    assert.match(error.message, /temperature/);
    return true;
  });
});
