"""Codex CLI, as npm installs it, with a model whose answers are scripted in `codex/script.json`.

The server's chat template shows the model its whole input, so that the script can match it. The configuration is that
of docs/agents.md.
"""

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

HERE = Path(__file__).parent
PROGRAM = Path(os.environ["KAON_ENVIRONMENT"]) / "node_modules" / ".bin" / "codex"
SECONDS = 120
PATCHED = 'say "é"\nC:\\x\n'

Events: TypeAlias = list[dict[str, Any]]
Codex: TypeAlias = Callable[..., Events]


@pytest.fixture
def codex(base_url: str, api_key: str, model: str, tmp_path: Path) -> Codex:
    """Run `codex exec` in a home and a directory of the test's own. Returns the events that it prints."""
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    settings = (HERE.parent.parent / "docs" / "agents.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```toml\n(.*?)```", settings, re.DOTALL)[:1]
    replaced = {
        r'^model = ".*?"': f'model = "{model}"',
        r'^base_url = ".*?"': f'base_url = "{base_url}"',
        r'^model_catalog_json = ".*?"': f'model_catalog_json = "{home / "kaon.json"}"',
    }
    for pattern, line in replaced.items():
        example, count = re.subn(pattern, line, example, flags=re.MULTILINE)
        assert count == 1, f"docs/agents.md has no line {pattern}"
    catalog = urllib.request.Request(f"{base_url}/models", headers={"Authorization": f"Bearer {api_key}"})
    with urllib.request.urlopen(catalog) as answer:
        (home / "kaon.json").write_bytes(answer.read())

    def run(*arguments: str, catalog: bool = True, provider: str = "Kaon", extra: str = "") -> Events:
        config = example.replace('name = "Kaon"', f'name = "{provider}"') + extra
        if not catalog:
            config = re.sub(r"(?m)^model_catalog_json.*\n", "", config)
        (home / "config.toml").write_text(config)
        command = [str(PROGRAM), "exec", *arguments]
        flags = ("--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
        position = len(command) - 1
        done = subprocess.run(
            [*command[:position], *flags, command[position]],
            cwd=work,
            env={**os.environ, "CODEX_HOME": str(home), "HOME": str(home), "KAON_API_KEY": api_key},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run


def items(events: Events, kind: str) -> list[dict[str, Any]]:
    assert events[-1]["type"] == "turn.completed", events
    ended = [event["item"] for event in events if event["type"] == "item.completed"]
    return [item for item in ended if item["type"] == kind]


def said(events: Events) -> list[str]:
    return [item["text"] for item in items(events, "agent_message")]


def test_it_answers_with_default_settings(codex: Codex) -> None:
    events = codex("Say hello.", catalog=False)
    assert said(events) == ["Hello."]
    usage = events[-1]["usage"]
    assert usage["input_tokens"] > 1000
    assert usage["output_tokens"] > 0


def test_it_runs_commands_and_its_reasoning_comes_back(codex: Codex) -> None:
    events = codex("Run it.")
    (command,) = items(events, "command_execution")
    assert (command["aggregated_output"], command["exit_code"]) == ("hello-from-shell\n", 0)
    assert said(events) == ["The shell said so."]
    assert events[-1]["usage"]["reasoning_output_tokens"] > 0
    assert events[-1]["usage"]["cached_input_tokens"] > 1000


def test_it_applies_patches(codex: Codex, tmp_path: Path) -> None:
    events = codex("Patch it.")
    assert said(events) == ["It is written."]
    assert (tmp_path / "work" / "hello.txt").read_text() == PATCHED


MCP = f'\n[mcp_servers.notes]\ncommand = "{sys.executable}"\nargs = ["{HERE / "mcp_notes.py"}"]\n'


@pytest.mark.parametrize("catalog", [True, False])
def test_it_calls_tools_of_mcp_servers(codex: Codex, catalog: bool) -> None:
    events = codex("Read my note.", catalog=catalog, extra=MCP)
    (called,) = items(events, "mcp_tool_call")
    assert (called["server"], called["tool"], called["arguments"]) == ("notes", "read_note", {"title": "shopping"})
    assert called["status"] == "completed"
    assert said(events) == ["I read it.", "The note says: milk."]


def test_it_spawns_agents(codex: Codex) -> None:
    events = codex("Spawn one.")
    (spawned,) = items(events, "collab_tool_call")
    assert (spawned["tool"], spawned["status"]) == ("spawn_agent", "completed")
    # Codex asks again if the agent reports before the turn has ended.
    assert set(said(events)) == {"It is spawned."}


LIMIT = ("-c", "model_auto_compact_token_limit=1000")


def test_it_resumes(codex: Codex) -> None:
    thread = codex("Run it.")[0]["thread_id"]
    events = codex("resume", thread, "And what did you weigh?")
    assert events[0]["thread_id"] == thread
    assert said(events) == ["I never weighed."]


def test_it_compacts_with_a_summary_of_its_own(codex: Codex) -> None:
    thread = codex("Run it.")[0]["thread_id"]
    assert said(codex("resume", *LIMIT, thread, "Go on.")) == ["I go on from Codex's summary."]


def test_it_compacts_with_the_servers_summary(codex: Codex) -> None:
    thread = codex("Run it.", provider="OpenAI")[0]["thread_id"]
    assert said(codex("resume", *LIMIT, thread, "Go on.", provider="OpenAI")) == ["I go on from the server's summary."]
    assert said(codex("resume", thread, "And on.", provider="OpenAI")) == ["I go on from the server's summary."]


def test_it_goes_over_from_websockets_to_http_at_once(codex: Codex) -> None:
    events = codex("-c", "model_providers.kaon.supports_websockets=true", "Say hello.")
    assert said(events) == ["Hello."]
    assert not [event for event in events if event["type"] == "error"]
