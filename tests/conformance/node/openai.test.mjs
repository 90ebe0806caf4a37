// The official npm client: models, completions, chat completions and responses, streamed and not.

import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = new OpenAI({ maxRetries: 0 });
const model = process.env.KAON_MODEL;
const sum = [{ role: "user", content: "What is 2 + 3?" }];
const story = [{ role: "user", content: "Tell me a story" }];
const weather = [{ role: "user", content: "What is the weather in Paris?" }];
const person = "Extract name and age as JSON: Alice is 30 years old and lives in Paris.";
const Person = z.object({ name: z.string(), age: z.number().int() });
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const getWeather = {
  type: "function",
  function: { name: "get_weather", description: "Get the weather for a city", parameters },
};

test("models are listed and retrieved", async () => {
  const listed = [];
  for await (const each of client.models.list()) listed.push(each.id);
  assert.deepEqual(listed, [model]);
  assert.equal((await client.models.retrieve(model)).id, model);
});

test("a prompt is completed, streamed and not", async () => {
  const fields = { model, prompt: "The capital of France is", temperature: 0 };
  assert.equal((await client.completions.create(fields)).choices[0].text, " Paris.");
  let text = "";
  for await (const chunk of await client.completions.create({ ...fields, stream: true })) text += chunk.choices[0].text;
  assert.equal(text, " Paris.");
});

test("a question is answered", async () => {
  const answer = await client.chat.completions.create({ model, messages: sum, temperature: 0 });
  assert.equal(answer.choices[0].message.content, "2 + 3 = 5");
  assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens);
  assert.ok(answer._request_id);
});

test("chunks make the answer, with usage last", async () => {
  const fields = { model, messages: story, temperature: 0 };
  const whole = await client.chat.completions.create(fields);
  let text = "";
  let usage;
  const stream = await client.chat.completions.create({
    ...fields,
    stream: true,
    stream_options: { include_usage: true },
  });
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta.content ?? "";
    usage = chunk.usage;
  }
  assert.equal(text, whole.choices[0].message.content);
  assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
});

test("the stream helper accumulates", async () => {
  const stream = client.chat.completions.stream({ model, messages: story, temperature: 0 });
  assert.ok((await stream.finalContent()).endsWith("The end."));
});

test("parse fills in a zod schema", async () => {
  const answer = await client.chat.completions.parse({
    model,
    messages: [{ role: "user", content: person }],
    temperature: 0,
    response_format: zodResponseFormat(Person, "person"),
  });
  assert.deepEqual(answer.choices[0].message.parsed, { name: "Alice", age: 30 });
});

test("runTools calls the function and tells its result", async () => {
  const asked = [];
  const run = (city) => {
    asked.push(city);
    return "sunny";
  };
  for (const stream of [false, true]) {
    const runner = client.chat.completions.runTools({
      model,
      messages: weather,
      temperature: 0,
      stream,
      tools: [{ ...getWeather, function: { ...getWeather.function, parse: JSON.parse, function: ({ city }) => run(city) } }],
    });
    assert.equal(await runner.finalContent(), "The weather in Paris is sunny.");
  }
  assert.deepEqual(asked, ["Paris", "Paris"]);
});

test("a call can be forced", async () => {
  const answer = await client.chat.completions.create({
    model,
    messages: sum,
    temperature: 0,
    max_tokens: 100,
    tools: [getWeather],
    tool_choice: "required",
  });
  const [call] = answer.choices[0].message.tool_calls;
  assert.deepEqual(Object.keys(JSON.parse(call.function.arguments)), ["city"]);
});

test("a response is created, continued, retrieved and deleted", async () => {
  const first = await client.responses.create({ model, input: "Hi, my name is Bob", temperature: 0 });
  const second = await client.responses.create({
    model,
    input: "What is my name?",
    temperature: 0,
    previous_response_id: first.id,
  });
  assert.match(second.output_text, /Bob/);
  assert.equal((await client.responses.retrieve(first.id)).output_text, first.output_text);
  await client.responses.delete(first.id);
  await assert.rejects(client.responses.retrieve(first.id), OpenAI.NotFoundError);
});

test("a response is streamed as typed events", async () => {
  const stream = client.responses.stream({ model, input: "What is 2 + 3?", temperature: 0 });
  const kinds = [];
  for await (const event of stream) kinds.push(event.type);
  assert.equal(kinds[0], "response.created");
  assert.equal(kinds.at(-1), "response.completed");
  assert.equal((await stream.finalResponse()).output_text, "2 + 3 = 5");
});

test("a response is parsed with a zod schema", async () => {
  const response = await client.responses.parse({
    model,
    input: person,
    temperature: 0,
    text: { format: zodTextFormat(Person, "person") },
  });
  assert.deepEqual(response.output_parsed, { name: "Alice", age: 30 });
});

test("refusals are the client's own errors", async () => {
  const ask = (fields, options) => client.chat.completions.create({ model, messages: sum, ...fields }, options);
  await assert.rejects(ask({ temperature: 3 }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.param, "temperature");
    assert.ok(error.requestID);
    return true;
  });
  await assert.rejects(ask({ model: "gpt-17" }), OpenAI.NotFoundError);
  await assert.rejects(ask({}, { headers: { authorization: "Bearer wrong" } }), OpenAI.AuthenticationError);
});

test("a stream may be aborted", async () => {
  const stream = await client.chat.completions.create({ model, messages: story, temperature: 0, stream: true });
  for await (const chunk of stream) {
    assert.ok(chunk.id);
    break;
  }
  assert.ok(stream.controller.signal.aborted);
});
