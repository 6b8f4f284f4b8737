// Runs one case: `node cases.mjs NAME BASE_URL`. Exits with 0 if the client received the expected answers.
// ../test_node.py scripts and checks the server.
import assert from "node:assert/strict";
import OpenAI, { toFile } from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, Output, generateText, stepCountIs, streamText, tool } from "ai";

const [name, url] = process.argv.slice(2);
const model = "org/tiny";
const messages = [{ role: "user", content: "hi" }];
const fullText = "Hello wörld 😀!";
const Person = z.object({ name: z.string(), age: z.number().int() });
const Add = z.object({ a: z.number() });
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const settings = { name: "loom", baseURL: `${url}/v1`, apiKey: "none" };
const aiModels = [
  createOpenAI(settings).responses(model),
  createOpenAI(settings).chat(model),
  createOpenAICompatible({ ...settings, supportsStructuredOutputs: true })(model),
];
const chat = (more = {}, options = {}) => client.chat.completions.create({ model, messages, ...more }, options);

const cases = {
  async chat() {
    const answer = await chat({ logprobs: true, top_logprobs: 2 });
    assert.equal(answer.choices[0].message.content, fullText);
    assert.equal(answer.choices[0].logprobs.content[0].top_logprobs.length, 2);
    assert.equal(answer.usage.completion_tokens, 5);
    assert.match(answer._request_id, /^req_/);
    const listed = [];
    for await (const one of client.models.list()) listed.push(one.id);
    assert.deepEqual(listed, [model]);
  },

  async stream() {
    let text = "";
    let usage;
    for await (const chunk of await chat({ stream: true, stream_options: { include_usage: true } })) {
      text += chunk.choices[0]?.delta.content ?? "";
      usage = chunk.usage ?? usage;
    }
    assert.equal(text, fullText);
    assert.equal(usage.completion_tokens, 5);
    const helper = client.chat.completions.stream({ model, messages });
    assert.equal(await helper.finalContent(), fullText);
    const completion = await client.completions.create({ model, prompt: "a", max_tokens: 2 });
    assert.equal(completion.choices[0].text, "Hello");
  },

  async responses() {
    const answer = await client.responses.create({ model, input: "hi", store: false });
    assert.equal(answer.output_text, fullText);
    const kinds = [];
    const helper = client.responses.stream({ model, input: "hi" });
    for await (const event of helper) kinds.push(event.type);
    const final = await helper.finalResponse();
    assert.equal(final.output_text, fullText);
    assert.equal(kinds[0], "response.created");
    assert.equal((await client.responses.retrieve(final.id)).output_text, fullText);
  },

  async parse() {
    const answer = await client.chat.completions.parse({
      model, messages, response_format: zodResponseFormat(Person, "person"),
    });
    assert.deepEqual(answer.choices[0].message.parsed, { name: "Ada", age: 36 });
    const response = await client.responses.parse({
      model, input: "who?", text: { format: zodTextFormat(Person, "person") },
    });
    assert.deepEqual(response.output_parsed, { name: "Ada", age: 36 });
  },

  // The client runs the tool with arguments from a stream, and sends its result.
  async tools() {
    const called = [];
    const add = zodFunction({ name: "add", parameters: Add, function: ({ a }) => (called.push(a), "two") });
    const runner = client.chat.completions.runTools({ model, messages, tools: [add], stream: true });
    assert.equal(await runner.finalContent(), "2");
    assert.deepEqual(called, [1]);
  },

  // Vercel's AI SDK, with its providers.
  async aiSdk() {
    for (const one of aiModels) {
      const prompt = "hi";
      assert.equal((await generateText({ model: one, prompt, maxRetries: 0 })).text, "Hello there.");
      const pieces = [];
      for await (const piece of streamText({ model: one, prompt }).textStream) pieces.push(piece);
      assert.deepEqual(pieces, ["Hello", " there", "."]);
      const called = [];
      const add = tool({ inputSchema: Add, execute: async ({ a }) => (called.push(a), "two") });
      const answer = await generateText({ model: one, prompt, tools: { add }, stopWhen: stepCountIs(2) });
      assert.deepEqual([called, answer.text], [[1], "2"]);
      const object = await generateText({ model: one, prompt, output: Output.object({ schema: Person }) });
      assert.deepEqual(object.output, { name: "Ada", age: 36 });
      const rejected = (e) => APICallError.isInstance(e) && e.statusCode === 400 && /temperature/.test(e.message);
      await assert.rejects(generateText({ model: one, prompt, temperature: -1, maxRetries: 0 }), rejected);
    }
  },

  async errors() {
    const fails = async (kind, check, more) => {
      for (const stream of [false, true]) {
        const error = await chat({ ...more, stream }).then(() => assert.fail("no error"), (error) => error);
        assert(error instanceof kind, `${error}`);
        check(error);
      }
    };
    await fails(OpenAI.BadRequestError, (e) => assert.equal(e.param, "temperature"), { temperature: -1 });
    await fails(OpenAI.NotFoundError, (e) => assert.equal(e.code, "model_not_found"), { model: "gpt-5" });
    const long = [{ role: "user", content: "x".repeat(600) }];
    await fails(OpenAI.BadRequestError, (e) => {
      assert.equal(e.code, "context_length_exceeded");
      assert.match(e.message, /maximum context length is 512 tokens/);
    }, { messages: long });
  },

  async retries() {
    assert.equal((await chat({}, { maxRetries: 1 })).choices[0].message.content, fullText);
    await assert.rejects(chat({}, { maxRetries: 1 }), (e) => e instanceof OpenAI.InternalServerError);
  },

  async broken() {
    let text = "";
    const read = async () => {
      for await (const chunk of await chat({ stream: true })) text += chunk.choices[0].delta.content ?? "";
    };
    await assert.rejects(read, (e) => e instanceof OpenAI.APIError && /device was lost/.test(e.message));
    assert.equal(text, "Hello");
  },

  async abort() {
    const stream = await chat({ stream: true });
    for await (const chunk of stream) {
      assert.equal(chunk.choices[0].delta.content, "x");
      stream.controller.abort();
    }
    // Wait until the server has seen the abort: the end of this process would also close the connection.
    await new Promise((resolve) => process.stdin.once("data", resolve));
    process.stdin.destroy();
  },

  async batches() {
    const line = (custom_id, more) => JSON.stringify({
      custom_id, method: "POST", url: "/v1/chat/completions", body: { messages, max_tokens: 3, ...more },
    });
    const data = [line("a"), line("b", { temperature: -1 })].join("\n");
    const file = await client.files.create({ file: await toFile(Buffer.from(data), "in.jsonl"), purpose: "batch" });
    assert.equal(await (await client.files.content(file.id)).text(), data);
    let batch = await client.batches.create({
      input_file_id: file.id, endpoint: "/v1/chat/completions", completion_window: "24h",
    });
    while (!["completed", "failed"].includes(batch.status)) batch = await client.batches.retrieve(batch.id);
    assert.deepEqual([batch.request_counts.completed, batch.request_counts.failed], [1, 1]);
    const good = JSON.parse(await (await client.files.content(batch.output_file_id)).text());
    assert.equal(good.response.body.usage.completion_tokens, 3);
    const bad = JSON.parse(await (await client.files.content(batch.error_file_id)).text());
    assert.equal(bad.response.body.error.param, "temperature");
    const listed = [];
    for await (const one of client.batches.list()) listed.push(one.id);
    assert.deepEqual(listed, [batch.id]);
    assert.equal((await client.files.delete(file.id)).deleted, true);
  },
};

await cases[name]();
