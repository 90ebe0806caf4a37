// Coding agents themselves, without a terminal, against a model that says what script.json tells it.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { mkdirSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { test } from "node:test";
import { fileURLToPath } from "node:url";

const modules = join(dirname(fileURLToPath(import.meta.url)), "node_modules");
// The program itself: the package opencode-ai would link it in a script, and scripts are not run.
const opencode = join(modules, "opencode-linux-x64", "bin", "opencode");
const home = join(tmpdir(), "home");
const work = join(tmpdir(), "work");
for (const folder of [home, work, join(home, ".continue")]) mkdirSync(folder, { recursive: true });

const model = process.env.KAON_MODEL;
const url = `${process.env.KAON_URL}/v1`;
const key = process.env.OPENAI_API_KEY;
const prompt = "Please probe the directory.";

writeFileSync(
  join(work, "opencode.json"),
  JSON.stringify({
    autoupdate: false,
    share: "disabled",
    permission: { bash: "allow" },
    provider: {
      kaon: {
        npm: "@ai-sdk/openai-compatible",
        options: { baseURL: url, apiKey: key },
        models: { [model]: { name: model } },
      },
    },
  }),
);
writeFileSync(
  join(home, ".continue", "config.yaml"),
  `name: kaon
version: 1.0.0
schema: v1
models:
  - name: ${model}
    provider: openai
    model: ${model}
    apiBase: ${url}
    apiKey: ${key}
    roles: [chat]
    capabilities: [tool_use]
`,
);

/** What a program writes to standard output, and its exit code. */
function run(program, flags, further = {}) {
  const environment = { PATH: process.env.PATH, HOME: home, TMPDIR: tmpdir(), XDG_DATA_HOME: home, ...further };
  const child = spawn(program, flags, { cwd: work, env: environment, stdio: ["ignore", "pipe", "pipe"] });
  let output = "";
  child.stdout.on("data", (piece) => (output += piece));
  child.stderr.on("data", (piece) => (output += piece));
  return new Promise((resolve, reject) => {
    child.on("error", reject);
    child.on("close", (code) => resolve({ code, output }));
  });
}

const agents = {
  opencode: () => run(opencode, ["run", prompt, "--model", `kaon/${model}`]),
  continue: () =>
    run(join(modules, ".bin", "cn"), ["-p", prompt, "--allow", "Bash", "--config", join(home, ".continue", "config.yaml")], {
      CONTINUE_TELEMETRY_ENABLED: "0",
    }),
};

for (const [name, start] of Object.entries(agents)) {
  test(`${name} runs a command and reads its output`, { timeout: 180_000 }, async () => {
    const { code, output } = await start();
    assert.equal(code, 0, output);
    assert.match(output, /The probe printed what was expected\./);
  });
}
