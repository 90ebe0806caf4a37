// qwen-code itself, without a terminal, against a model that says what script.json tells it.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { mkdirSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { test } from "node:test";
import { fileURLToPath } from "node:url";

const program = join(dirname(fileURLToPath(import.meta.url)), "node_modules", ".bin", "qwen");
const home = join(tmpdir(), "home");
const work = join(tmpdir(), "work");
for (const folder of [home, work]) mkdirSync(folder, { recursive: true });

/** What qwen-code writes, and its exit code. */
function qwen(...flags) {
  const environment = {
    PATH: process.env.PATH,
    HOME: home,
    TMPDIR: tmpdir(),
    OPENAI_BASE_URL: `${process.env.KAON_URL}/v1`,
    OPENAI_API_KEY: process.env.OPENAI_API_KEY,
    OPENAI_MODEL: process.env.KAON_MODEL,
    QWEN_CODE_SUPPRESS_YOLO_WARNING: "1",
  };
  const all = ["--auth-type", "openai", "--yolo", ...flags];
  const child = spawn(program, all, { cwd: work, env: environment, stdio: ["ignore", "pipe", "pipe"] });
  let output = "";
  child.stdout.on("data", (piece) => (output += piece));
  child.stderr.on("data", (piece) => (output += piece));
  return new Promise((resolve, reject) => {
    child.on("error", reject);
    child.on("close", (code) => resolve({ code, output }));
  });
}

test("it runs two commands at once, one of which fails, and reads their output", { timeout: 180_000 }, async () => {
  const { code, output } = await qwen("-p", "Probe twice.");
  assert.equal(code, 0, output);
  assert.match(output, /Both printed what was expected\./);
});

test("a conversation goes on", { timeout: 180_000 }, async () => {
  const { code, output } = await qwen("--continue", "-p", "And what did it print?");
  assert.equal(code, 0, output);
  assert.match(output, /It printed THE-PROBE-77, as I said\./);
});
