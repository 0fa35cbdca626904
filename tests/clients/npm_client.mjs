// OpenAI's npm package against a running Quire. The server's address is in CLIENTS_URL.
import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.env.CLIENTS_URL, apiKey: "none", maxRetries: 0, timeout: 60_000 });
const paris = "The capital of France is Paris.";
const messages = [{ role: "user", content: "Tell me the capital of France in one sentence." }];
const ask = { model: "SmolLM2-135M-Instruct", messages, temperature: 0 };

const whole = await client.chat.completions.create(ask);
assert.equal(whole.choices[0].message.content, paris);
assert.equal(whole.choices[0].finish_reason, "stop");
assert.equal(whole.usage.total_tokens, 48);

let text = "";
let usage = null;
for await (const chunk of await client.chat.completions.create({ ...ask, stream: true, stream_options: { include_usage: true } })) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(text, paris);
assert.equal(usage.total_tokens, 48);

const cut = await client.chat.completions.create({ ...ask, stop: [" is"], logprobs: true, top_logprobs: 2 });
assert.equal(cut.choices[0].message.content, "The capital of France");
assert.equal(Buffer.from(cut.choices[0].logprobs.content.flatMap((entry) => entry.bytes)).toString(), "The capital of France");

const drawn = { ...ask, temperature: 1, seed: 7, n: 2, max_tokens: 12 };
const [first, second] = [await client.chat.completions.create(drawn), await client.chat.completions.create(drawn)];
assert.deepEqual(first.choices.map((each) => each.message.content), second.choices.map((each) => each.message.content));

const completion = await client.completions.create({ model: ask.model, prompt: "The capital of France is", max_tokens: 3, temperature: 0 });
assert.match(completion.choices[0].text, /Paris/);
assert.equal((await client.responses.create({ model: ask.model, input: messages[0].content, temperature: 0 })).output_text, paris);

await assert.rejects(client.chat.completions.create({ ...ask, temperature: 5 }), (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature");
await assert.rejects(client.chat.completions.create({ ...ask, model: "nobody" }), OpenAI.NotFoundError);
const endless = { ...ask, max_tokens: 1500, ignore_eos: true };
await assert.rejects(client.chat.completions.create(endless, { timeout: 500 }), OpenAI.APIConnectionTimeoutError);
const left = new AbortController();
setTimeout(() => left.abort(), 300);
await assert.rejects(client.chat.completions.create(endless, { signal: left.signal }), OpenAI.APIUserAbortError);
assert.equal((await client.chat.completions.create(ask)).choices[0].message.content, paris);
console.log(`openai from npm on node ${process.version}: passed`);
