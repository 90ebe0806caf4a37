// pi itself, without a terminal, against a model that says what script.json tells it.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { mkdirSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { test } from "node:test";
import { fileURLToPath } from "node:url";

const program = join(dirname(fileURLToPath(import.meta.url)), "node_modules", ".bin", "pi");
const model = process.env.KAON_MODEL;
const home = join(tmpdir(), "home");
mkdirSync(join(home, ".pi", "agent"), { recursive: true });
writeFileSync(
  join(home, ".pi", "agent", "models.json"),
  JSON.stringify({
    providers: {
      kaon: {
        baseUrl: `${process.env.KAON_URL}/v1`,
        api: "openai-completions",
        apiKey: process.env.OPENAI_API_KEY,
        models: [
          {
            id: model,
            name: model,
            reasoning: false,
            input: ["text"],
            contextWindow: 40960,
            maxTokens: 4096,
            cost: { input: 0, output: 0, cacheRead: 0, cacheWrite: 0 },
          },
        ],
      },
    },
  }),
);

test("it runs a command and reads its output", { timeout: 180_000 }, async () => {
  const flags = ["--provider", "kaon", "--model", model, "-p", "Please probe the directory."];
  const environment = { PATH: process.env.PATH, HOME: home, TMPDIR: tmpdir(), PI_OFFLINE: "1" };
  const child = spawn(program, flags, { cwd: home, env: environment, stdio: ["ignore", "pipe", "pipe"] });
  let output = "";
  child.stdout.on("data", (piece) => (output += piece));
  child.stderr.on("data", (piece) => (output += piece));
  const code = await new Promise((resolve) => child.on("close", resolve));
  assert.equal(code, 0, output);
  assert.match(output, /The probe printed what was expected\./);
});
