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
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", lambda thread: pytest.fail("the event loop waits for a thread"))
            abandoned.cancel()
            with pytest.raises(asyncio.CancelledError):
                await abandoned
        async with asyncio.timeout(30):
            assert await checks.compile(choice("third"))
            # No result was stored for the abandoned one.
            assert await checks.compile(choice("second"))
        assert not stopped.is_running()
        assert set(processes) == {stopped.pid, processes[-1]}
    finally:
        compiler.close()


async def test_a_process_that_starts_outlives_an_abandoned_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cheap checks of clients that disconnect could otherwise keep it from ever starting."""
    monkeypatch.setattr(module, "_ABANDONED_SECONDS", 0.01)
    processes: list[psutil.Process] = []
    is_started = threading.Event()
    write = module._write

    def write_and_suspend(process: subprocess.Popen[bytes], frame: bytes) -> None:
        if not is_started.is_set():
            processes.append(psutil.Process(process.pid))
            processes[-1].suspend()
        write(process, frame)
        is_started.set()

    monkeypatch.setattr(module, "_write", write_and_suspend)
    compiler = GrammarCompiler()
    checks = GrammarChecks(compiler)
    try:
        abandoned = asyncio.create_task(checks.compile(choice("first")))
        await asyncio.to_thread(is_started.wait)
        abandoned.cancel()
        await asyncio.sleep(0.1)
        assert [each.status() for each in processes] == [psutil.STATUS_STOPPED]
        processes[0].resume()
        async with asyncio.timeout(60):
            assert await checks.compile(choice("second"))
        assert processes[0].is_running()
    finally:
        compiler.close()
