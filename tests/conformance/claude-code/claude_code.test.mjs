// Claude Code itself, without a terminal, against a model that says what script.json tells it.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { test } from "node:test";
import { fileURLToPath } from "node:url";

const platform = `@anthropic-ai/claude-code-${process.platform}-${process.arch}`;
const program = join(dirname(fileURLToPath(import.meta.url)), "node_modules", platform, "claude");
const home = join(tmpdir(), "home");
const work = join(tmpdir(), "work");
for (const folder of [home, work]) mkdirSync(folder, { recursive: true });

const environment = {
  PATH: process.env.PATH,
  HOME: home,
  TMPDIR: tmpdir(),
  ANTHROPIC_BASE_URL: process.env.KAON_URL,
  ANTHROPIC_AUTH_TOKEN: process.env.OPENAI_API_KEY,
  ANTHROPIC_MODEL: process.env.KAON_MODEL,
  ANTHROPIC_DEFAULT_HAIKU_MODEL: process.env.KAON_MODEL,
  CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
  DISABLE_TELEMETRY: "1",
  DISABLE_ERROR_REPORTING: "1",
  DISABLE_AUTOUPDATER: "1",
  CLAUDE_CODE_MAX_RETRIES: "0",
  IS_SANDBOX: "1",
};

/** What `claude -p PROMPT FLAGS` writes as JSON, and its exit code. */
function claude(prompt, flags = [], further = {}) {
  const all = ["-p", prompt, "--output-format", "json", ...flags];
  const child = spawn(program, all, { cwd: work, env: { ...environment, ...further }, stdio: ["ignore", "pipe", "pipe"] });
  let output = "";
  let errors = "";
  child.stdout.on("data", (piece) => (output += piece));
  child.stderr.on("data", (piece) => (errors += piece));
  return new Promise((resolve, reject) => {
    child.on("error", reject);
    child.on("close", (code) => {
      try {
        resolve({ code, ...JSON.parse(output) });
      } catch {
        reject(new Error(`claude ended with ${code}: ${output}${errors}`));
      }
    });
  });
}

/** The share of the prompts that was found in the cache. */
function cached({ usage }) {
  const { input_tokens, cache_creation_input_tokens, cache_read_input_tokens } = usage;
  return cache_read_input_tokens / (input_tokens + cache_creation_input_tokens + cache_read_input_tokens);
}

test("a prompt is answered, and the conversation goes on", { timeout: 120_000 }, async () => {
  const first = await claude("My word is cucumber.");
  assert.deepEqual([first.code, first.is_error, first.result], [0, false, "I will remember it."]);
  const second = await claude("What was my word?", ["--continue"]);
  assert.deepEqual([second.code, second.result], [0, "Your word was cucumber."]);
  assert.ok(cached(second) > 0.9, `${cached(second)} of the prompt was cached`);
});

test("files are read and edited and commands run", { timeout: 120_000 }, async () => {
  writeFileSync(join(work, "note.txt"), "41 blue whales\n");
  const done = await claude("Read the note, please.", ["--allowedTools", "Read,Edit,Bash"]);
  assert.deepEqual([done.code, done.result], [0, "The note now says 42 blue whales."]);
  assert.equal(readFileSync(join(work, "note.txt"), "utf-8"), "42 blue whales\n");
  assert.match(readFileSync(join(work, "count.txt"), "utf-8"), /^1 /);
  // Of three turns, the second and the third begin as the one before.
  assert.ok(cached(done) > 0.6, `${cached(done)} of the prompts was cached`);
});

test("a wrong key is reported", { timeout: 120_000 }, async () => {
  const refused = await claude("My word is cucumber.", [], { ANTHROPIC_AUTH_TOKEN: "wrong" });
  assert.equal(refused.is_error, true);
  assert.equal(refused.api_error_status, 401);
});

test("a model that is not served is reported", { timeout: 120_000 }, async () => {
  const refused = await claude("My word is cucumber.", ["--model", "no-such-model"]);
  assert.equal(refused.is_error, true);
  assert.equal(refused.api_error_status, 404);
});
