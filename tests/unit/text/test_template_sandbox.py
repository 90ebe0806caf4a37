"""A request's chat template can neither exhaust the server's time and memory nor leave its sandbox."""

import asyncio
import math
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.text import template_sandbox
from engine.text.process_watch import ProcessWatch
from engine.text.template_sandbox import render_untrusted
from server.limits.accounts import Accounts
from server.limits.jobs import Jobs
from server.limits.owners import ANYONE
from server.request_builder import in_thread

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(autouse=True)
def _as_long_as_a_busy_machine_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "_WALL_SECONDS", 60.0)


def render(template: str, **variables: Any) -> str:
    return render_untrusted(template, {"bos_token": "<s>"}, HELLO, None, True, variables)


def test_it_sees_what_the_models_own_template_sees() -> None:
    template = "{{ bos_token }}{{ messages[0].content }}{{ tools is none }}{{ add_generation_prompt }}{{ mood }}"
    assert render(template, mood="😀") == "<s>helloTrueTrue😀"
    assert render("{{ messages | tojson }}{{ '\\ud800' }}").startswith('[{"role": "user"')
    values = {"a": [math.nan, -math.inf, None], 1: 2}  # As callers of the Python API may pass.
    assert render("{{ of }}", of=values) == str(values)


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        pytest.param(
            "{% macro m(n) %}{{ m(n - 1) if n }}{{ m(n - 1) if n }}{% endmacro %}{{ m(50) }}", marks=pytest.mark.slow
        ),
        "{{ 7 ** (10 ** 8) % 13 }}",
    ],
)
def test_one_that_computes_without_end_is_stopped_within_seconds(template: str) -> None:
    with pytest.raises(ValueError, match="took more than 1 s"):
        render(template)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ('a' * 10 ** 10) | length }}",
        pytest.param("{{ 'a' | center(10 ** 10) }}", marks=pytest.mark.slow),
        pytest.param("{{ '%10000000000d' % 1 }}", marks=pytest.mark.slow),
        "{% set n = namespace(x='a') %}{% for i in range(50) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% for i in range(9999) %}{{ 'a' * 10 ** 5 }}{% endfor %}",
    ],
)
def test_one_that_blows_up_is_bounded_in_memory_and_output(template: str) -> None:
    with pytest.raises(ValueError, match=r"512 MiB|16777216 characters|took more than"):
        render(template)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ self.__init__.__globals__ }}", "unsafe"),
        ("{{ '{0.__class__.__mro__}'.format(messages) }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{% import 'os' as os %}", "no loader"),
        ("{{ open('/etc/passwd') }}", "undefined"),
        ("{% if %}", "does not compile"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "nested too deeply"),
        ("{{ 10 ** 5000 }}", "does not compile: Exceeds the limit"),
        ("{% for a in b %}" * 60 + "{% endfor %}" * 60, "nested too deeply"),
        ("{{ raise_exception('no') }}", "fails on these messages: no"),
    ],
)
def test_what_it_may_not_do_is_reported_in_a_sentence(template: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as reported:
        render(template)
    assert str(reported.value).startswith("the request's chat template")


def test_it_learns_nothing_of_the_servers_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAON_API_KEY", "sk-secret")
    given: list[dict[str, str]] = []

    class Noted(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, env: dict[str, str], **named: Any) -> None:
            given.append(env)
            super().__init__(*arguments, env=env, **named)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    assert render("{{ 6 * 7 }}") == "42"
    [environment] = given
    assert "sk-secret" not in environment.values()


async def test_one_whose_client_has_gone_ends_at_once_and_frees_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine it would hold one of the two slots for ten seconds."""
    processes: list[psutil.Process] = []
    is_started = threading.Event()
    communicate = subprocess.Popen.communicate

    def suspend(process: "subprocess.Popen[bytes]", job: bytes) -> tuple[bytes, bytes]:
        processes.append(psutil.Process(process.pid))
        processes[-1].suspend()  # As a machine that gives it no time.
        is_started.set()
        return communicate(process, job)

    monkeypatch.setattr(subprocess.Popen, "communicate", suspend)
    accounts = Accounts()
    jobs = Jobs(accounts).of(ANYONE)

    def work(watch: ProcessWatch) -> str:
        return render_untrusted("a", {}, HELLO, None, True, {}, watch)

    try:
        abandoned = asyncio.create_task(in_thread(jobs, "a", work))
        await asyncio.to_thread(is_started.wait)
        assert accounts.total("jobs") == 1
        abandoned.cancel()
        with pytest.raises(asyncio.CancelledError):
            await abandoned
        async with asyncio.timeout(30):
            while accounts.total("jobs"):
                await asyncio.sleep(0.01)
        assert [each.is_running() for each in processes] == [False]
    finally:
        jobs.pools.close()


def test_processes_of_abandoned_templates_do_not_start_one_right_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Clients that disconnected at once caused hundreds of starts per second: probes took 2.7 s in the median."""

    class Abandoned(ProcessWatch):
        """Of a request that is cancelled as its process starts."""

        @contextmanager
        def limiting(self, kill: Callable[[], object], seconds: float) -> Iterator[None]:
            self.is_abandoned = True
            with super().limiting(kill, seconds):
                yield

    rests: list[float] = []
    monkeypatch.setattr("engine.text.template_sandbox._LEAST_SECONDS", 1000.0)
    monkeypatch.setattr("engine.text.template_sandbox.time.sleep", rests.append)
    with pytest.raises(ValueError, match="was cancelled before"):
        render_untrusted("a", {}, HELLO, None, True, {}, Abandoned())
    assert 900 < max(rests) <= 1000


def test_one_that_is_abandoned_before_it_begins_is_not_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = ProcessWatch()
    watch.is_abandoned = True
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    with pytest.raises(ValueError, match="was cancelled"):
        render_untrusted("a", {}, HELLO, None, True, {}, watch)


def test_text_that_a_killed_process_wrote_in_part_is_no_prompt(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nprintf '+the first part'\nkill -9 $$\n")
    python.chmod(0o755)
    monkeypatch.setattr(template_sandbox.sys, "executable", str(python))
    with pytest.raises(ValueError, match="took more than"):
        render("a")


def test_one_for_which_the_machine_is_too_busy_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    communicate = subprocess.Popen.communicate

    def suspend(process: "subprocess.Popen[bytes]", job: bytes) -> tuple[bytes, bytes]:
        psutil.Process(process.pid).suspend()
        return communicate(process, job)

    monkeypatch.setattr(subprocess.Popen, "communicate", suspend)
    monkeypatch.setattr(template_sandbox, "_WALL_SECONDS", 0.05)
    with pytest.raises(ValueError, match="was not rendered within"):
        render("a")
