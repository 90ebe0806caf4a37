"""Number of files that a chat request passes from its route to `run_model`, in the front end and in the engine core.

A file counts if the request itself is an argument of a function in it: the HTTP request, the validated body, the
checked prompt, the message for the core, the sequence or the batch. A file that gets only text, ids or counts of it
does not count, nor do `LEAVES`, which the request reaches and does not pass.
"""

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.kaon_server import MODEL, KaonServer, eventually, free_port
from tests.e2e.warm_starts import COLD_START

MOST_FILES = 18
LEAVES = (
    "kvcache/block_manager.py",
    "engine/sampling/parameters.py",
    "engine/core/waiting_queue.py",
    "engine/core/sequence_pool.py",
    "engine/core/submitted_steps.py",
    "engine/speculative/drafts.py",
)
"""They read token ids and parameters for their caller, keep sequences and what these hold, set the tokens that end
them, and limit their drafts. Each returns to its caller, which passes the request on."""

PROFILER = '''
"""Imported by each Python process at its start: after SIGUSR1, appends to a file the product files that get the
request. Nothing is profiled before that in the main thread, where imports would take twelve seconds instead of two."""
import os, signal, sys, threading

ROOT, OUT = {root!r}, {out!r}
KINDS = {{"Request", "ChatCompletionRequest", "CheckedPrompt", "NewSequence", "AddRequest", "Sequence"}}
KINDS.add("ScheduledBatch")
known, counted, state = {{}}, set(), {{"on": False, "off": False}}

def kind_of(value):
    if isinstance(value, (list, tuple)) and value and type(value).__name__ not in KINDS:
        value = value[0]
    return type(value).__name__

def profile(frame, event, _):
    if event != "call" or state["off"]:
        return
    code = frame.f_code
    file = known.get(code.co_filename)
    if file is None:
        inside = code.co_filename.startswith(ROOT) and "site-packages" not in code.co_filename
        file = known[code.co_filename] = os.path.relpath(code.co_filename, ROOT) if inside else ""
    if not file or file in counted and code.co_name != "run_model":
        return
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    kinds = {{kind_of(frame.f_locals.get(name)) for name in names}} & KINDS
    if code.co_name == "create_chat_completion" or "AddRequest" in kinds:
        state["on"] = True
    if state["on"] and (kinds or code.co_name == "run_model"):
        counted.add(file)
        with open(OUT, "a") as out:
            out.write(file + "\\n")
        if code.co_name == "run_model":
            state["off"] = True

def begin(number, frame):
    sys.setprofile(profile)
    open(f"{{OUT}}.{{os.getpid()}}", "w").close()

signal.signal(signal.SIGUSR1, begin)
threading.setprofile(profile)
'''


def test_a_chat_request_passes_few_files_from_its_route_to_run_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "files"
    root = Path(__file__).parents[2]
    (tmp_path / "sitecustomize.py").write_text(PROFILER.format(root=f"{root}{os.sep}", out=str(out)))
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    server = KaonServer(tmp_path / "log", free_port(), environment=COLD_START, dtype="float32").ready()
    try:
        for process in (server.process, server.core):
            process.send_signal(signal.SIGUSR1)
            eventually(Path(f"{out}.{process.pid}").exists)
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
        assert server.post("/v1/chat/completions", body).status_code == 200
    finally:
        server.stop()
    files = sorted(set(out.read_text().split()) - set(LEAVES))
    assert {"server/routes/chat.py", "engine/core/scheduler.py", "engine/runner/model_runner.py"} <= set(files)
    assert len(files) <= MOST_FILES, "\n".join(files)
