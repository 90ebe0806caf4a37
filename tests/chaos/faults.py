"""`ChaosServer`: `kaon serve` as a process, with methods that inject faults and observe the recovery."""

import contextlib
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from engine.distributed.rank_link import RANK_MODULE
from tests.e2e.kaon_server import KaonServer, eventually, free_port
from tests.e2e.processes import LoggedProcess, command_line

FINISH_REASONS = ("stop", "length", "abort", "error", "timeout")

SMALL = ("--cpu-kvcache-gib", "0.25", "--max-num-seqs", "128")
"""Flags of every server here: the default dtype, whose results do not depend on the batch, and a small cache."""


class ChaosServer(KaonServer):
    """A server started by its command line, with the given options."""

    def __init__(self, log: Path, *options: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-P", "-m", "server", "serve", "--port", str(self.port), "--log-level", "warning"]
        LoggedProcess.__init__(self, [*command, *SMALL, *options], log)

    # -- what it is doing -----------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics by its name and labels, as in the text format."""
        text = self.get("/metrics").text
        pairs = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def until(self, holds: Callable[[], bool]) -> None:
        """Return once `holds()` is true; fail after a generous timeout, or when the server has ended."""

        def holds_in_life() -> bool:
            assert not self.has_ended(), f"the server ended with {self.process.wait()}: {self.stderr[-2000:]}"
            return holds()

        eventually(holds_in_life)

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def restarts(self) -> float:
        return self.metric("kaon_core_restarts_total")

    def is_ready(self) -> bool:
        return self.get("/readyz").status_code == 200

    def generated(self) -> float:
        """Tokens that its cores have generated."""
        return self.metric("kaon_generation_tokens_total")

    def is_idle(self) -> bool:
        """Whether nothing is live, in the server or in the core, and every block is free."""
        metrics = self.metrics()
        gauges = ("requests_live", "requests_running", "requests_waiting", "kv_cache_usage_ratio")
        return all(metrics[f"kaon_{gauge}"] == 0 for gauge in gauges)

    def balance(self) -> tuple[float, float]:
        """Requests received, and those finished, rejected or live: both are equal at any time."""
        metrics = self.metrics()
        ended = sum(metrics[f'kaon_requests_finished_total{{reason="{reason}"}}'] for reason in FINISH_REASONS)
        rejected = sum(value for name, value in metrics.items() if name.startswith("kaon_requests_rejected_total{"))
        return metrics["kaon_requests_received_total"], ended + rejected + metrics["kaon_requests_live"]

    def resident(self) -> tuple[int, int]:
        """Memory in bytes of the API process and of the core."""
        (core,) = self.cores()
        return self.process.memory_info().rss, core.memory_info().rss

    def end(self) -> None:
        """End it and its direct children, in any state."""
        if not self.has_ended():
            for process in (*self.process.children(recursive=True), self.process):
                process.kill()
            self.process.wait()

    def until_generated(self, tokens: float) -> None:
        """Return once its cores have generated `count` tokens in all."""
        self.until(lambda: self.generated() >= tokens)

    def until_all_go_on(self) -> None:
        """Return once every live request has a token of the running core, or none is live."""
        decodes = 'kaon_step_duration_seconds_count{kind="decode"}'
        before = self.metric(decodes)

        def all_go_on() -> bool:
            metrics = self.metrics()
            # Prompts precede decodes: a decode step has all running sequences, and then none waits.
            decoded = metrics[decodes] > before and not metrics["kaon_requests_waiting"]
            return decoded or not metrics["kaon_requests_live"]

        self.until(all_go_on)

    # -- what is done to it ---------------------------------------------------------------------------------------

    def kill_core(self) -> None:
        """SIGKILL the running core; return when another one is ready."""
        with self._replaced():
            self._running_core().kill()

    def kill_core_twice(self, moments: random.Random) -> None:
        """SIGKILL the core, and the next one at some time during its start; return when a third one is ready."""
        with self._replaced():
            first = self._running_core()
            first.kill()
            self.until(lambda: any(core != first for core in self.cores()))
            time.sleep(moments.uniform(0, 1.5))
            second = self._running_core()
            second.kill()
            self.until(lambda: any(core not in (first, second) for core in self.cores()))

    def stop_core(self) -> None:
        """SIGSTOP the running core; return when another one is ready."""
        with self._replaced():
            self._running_core().suspend()

    def kill_rank(self) -> None:
        """SIGKILL a tensor-parallel rank other than the first; return when another core is ready."""
        with self._replaced():
            self._running_rank().kill()

    def stop_rank(self) -> None:
        """SIGSTOP such a rank; return when another core is ready."""
        with self._replaced():
            self._running_rank().suspend()

    @contextlib.contextmanager
    def _replaced(self) -> Iterator[None]:
        """Inject a fault within the block; then wait until another core is ready."""
        before = self.restarts()
        yield
        self.until(lambda: self.restarts() > before and self.is_ready())

    def _running_core(self) -> psutil.Process:
        self.until(lambda: len(self.cores()) == 1)
        return self.cores()[0]

    def _running_rank(self) -> psutil.Process:
        return next(each for each in self._running_core().children() if RANK_MODULE in command_line(each))
