"""Grammar checks whose client has gone end, so that their process serves others."""

import asyncio
import subprocess
import threading

import psutil
import pytest

from engine.text.structured import compiler as module
from engine.text.structured.compiler import GrammarChecks, GrammarCompiler
from engine.text.structured.spec import GrammarSpec


def choice(text: str) -> GrammarSpec:
    return GrammarSpec("choice", [text])


async def test_an_abandoned_check_frees_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ABANDONED_SECONDS", 0.01)
    processes: list[int] = []
    is_written = threading.Event()
    write = module._write

    def write_and_record(process: subprocess.Popen[bytes], frame: bytes) -> None:
        processes.append(process.pid)
        write(process, frame)
        is_written.set()

    monkeypatch.setattr(module, "_write", write_and_record)
    compiler = GrammarCompiler()
    checks = GrammarChecks(compiler)
    try:
        await checks.compile(choice("first"))
        stopped = psutil.Process(processes[-1])
        stopped.suspend()  # As a machine that gives it no time.
        is_written.clear()
        abandoned = asyncio.create_task(checks.compile(choice("second")))
        await asyncio.to_thread(is_written.wait)
        abandoned.cancel()
        async with asyncio.timeout(30):
            assert await checks.compile(choice("third"))
            # No result was stored for the abandoned one.
            assert await checks.compile(choice("second"))
        assert not stopped.is_running()
        assert set(processes) == {stopped.pid, processes[-1]}
    finally:
        compiler.close()
