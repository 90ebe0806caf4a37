"""`Metrics`: what `/metrics` shows. Fed by the hub, once a step and once a request; never once a token."""

from collections.abc import Callable
from typing import Literal

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from engine.messages import SchedulerStats
from engine.request_state import RequestState

_LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_SHORT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)

_MOST_UNTOLD = 1024

FINISH_REASONS = ("stop", "length", "abort", "error", "timeout")
REJECT_REASONS = (
    "queue_requests",
    "queue_tokens",
    "key",
    "timeout",
    "draining",
    "not_ready",
    "invalid",
    "engine",
    "error",
)
STEP_KINDS = ("prefill", "decode", "mixed")


_NO_STATS = SchedulerStats(0, 0, 0, 0, 0, 0, 0, 0, "idle", 0.0)


class Metrics:
    """The server's metrics in a registry of their own. A sequence counts as a request: `n` choices are `n` of them."""

    def __init__(self, version: str) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        registry = self._registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        Info("kaon_build", "Version of the server.", registry=registry).info({"version": version})

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, buckets=buckets, registry=registry)

        self._running = gauge("kaon_requests_running", "Requests in the running batch.")
        self._waiting = gauge("kaon_requests_waiting", "Requests waiting to be scheduled.")
        self._kv_usage = gauge("kaon_kv_cache_usage_ratio", "Share of KV-cache blocks that running requests hold.")
        self._prompt_tokens = counter("kaon_prompt_tokens_total", "Prompt tokens of requests that were answered.")
        self._generation_tokens = counter("kaon_generation_tokens_total", "Tokens generated.")
        self._since_core_start = [
            (counter(f"kaon_{name}_total", text), field)
            for name, field, text in (
                (
                    "prefix_cache_queried_tokens",
                    "prefix_queried_tokens",
                    "Prompt tokens looked up in the prefix cache.",
                ),
                ("prefix_cache_hit_tokens", "prefix_hit_tokens", "Prompt tokens found in the prefix cache."),
                ("preemptions", "preemptions", "Times a running request was preempted for want of KV-cache blocks."),
            )
        ]
        """Counters with the field of `SchedulerStats` that each follows."""
        self._stats = self._told = _NO_STATS
        """The latest, and those that the counters above have been told."""
        self._ttft = histogram("kaon_time_to_first_token_seconds", "Arrival to first token.", _LATENCY_BUCKETS)
        self._tpot = histogram(
            "kaon_time_per_output_token_seconds", "Mean time a token after the first.", _TOKEN_BUCKETS
        )
        self._duration = histogram("kaon_request_duration_seconds", "Arrival to last token.", _LATENCY_BUCKETS)
        self._queue_time = histogram("kaon_request_queue_seconds", "Waiting for the first step.", _SHORT_BUCKETS)
        self._received = counter("kaon_requests_received_total", "Requests that asked to be served.")
        rejected = Counter(
            "kaon_requests_rejected_total", "Requests turned away, by reason.", ["reason"], registry=registry
        )
        self._rejected = {reason: rejected.labels(reason) for reason in REJECT_REASONS}
        self._restarts = counter("kaon_core_restarts_total", "Engine cores that took the place of one that died.")
        self._resumed = counter("kaon_requests_resumed_total", "Requests that went on in another engine core.")
        finished = Counter("kaon_requests_finished_total", "Requests ended, by reason.", ["reason"], registry=registry)
        self._finished = {reason: finished.labels(reason) for reason in FINISH_REASONS}
        self._live = gauge("kaon_requests_live", "Requests admitted that have not ended.")
        slow_readers = Counter(
            "kaon_slow_readers_total",
            "Streams whose client left too much unread, by what became of them.",
            ["action"],
            registry=registry,
        )
        self._slow_readers = {action: slow_readers.labels(action) for action in ("pause", "end")}
        steps = Histogram(
            "kaon_step_duration_seconds",
            "Duration of an engine step, by kind.",
            ["kind"],
            buckets=_SHORT_BUCKETS,
            registry=registry,
        )
        self._steps = {kind: steps.labels(kind) for kind in STEP_KINDS}
        self._untold: dict[str, list[float]] = {kind: [] for kind in STEP_KINDS}
        """Durations of steps that the histograms have not been told yet: telling one costs a tenth of a chunk."""
        self._generated_tokens = 0

    def step(self, stats: SchedulerStats, generated_tokens: int) -> None:
        """An engine step ended, having generated that many tokens. The rest waits for a scrape."""
        self._stats = stats
        self._generated_tokens += generated_tokens
        untold = self._untold.get(stats.step_kind)
        if untold is not None:
            untold.append(stats.step_seconds)
            if len(untold) == _MOST_UNTOLD:
                self._tell_steps()

    def core_restarted(self, resumed: int) -> None:
        """Another core is ready, whose counts begin anew, and in which so many requests go on."""
        self._restarts.inc()
        self._resumed.inc(resumed)
        self._tell_counts()
        self._stats = self._told = _NO_STATS

    def first_token(self, state: RequestState) -> None:
        """A request's first token arrived."""
        self._prompt_tokens.inc(state.num_prompt_tokens)
        self._ttft.observe(state.ttft)
        if state.queue_time is not None:
            self._queue_time.observe(state.queue_time)

    def received(self, count: int) -> None:
        """So many requests asked to be served. Each will be told as rejected or as finished, and once."""
        self._received.inc(count)

    def rejected(self, reason: str, count: int) -> None:
        """So many of them were turned away, for one of `REJECT_REASONS`."""
        self._rejected[reason].inc(count)

    def show_live(self, count: Callable[[], int]) -> None:
        """`count` tells, at each scrape, how many requests are live."""
        self._live.set_function(count)

    def slow_reader(self, action: Literal["pause", "end"]) -> None:
        """A stream's client left too much unread: the request was paused, or ended."""
        self._slow_readers[action].inc()

    def finished(self, state: RequestState, reason: str) -> None:
        """A request ended, with one of `FINISH_REASONS`."""
        self._finished[reason].inc()
        if reason == "length" and not state.token_ids:
            # Nothing was to be generated, so no first token told of the prompt.
            self._prompt_tokens.inc(state.num_prompt_tokens)
        self._duration.observe(state.last_time - state.arrival_time)
        if len(state.token_ids) > 1:
            self._tpot.observe(state.tpot)

    def render(self) -> bytes:
        """All of it in Prometheus' text format."""
        stats = self._stats
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._kv_usage.set(stats.kv_blocks_used / max(1, stats.kv_blocks_total))
        self._tell_counts()
        self._generation_tokens.inc(self._generated_tokens)
        self._generated_tokens = 0
        self._tell_steps()
        return generate_latest(self._registry)

    def _tell_counts(self) -> None:
        for counter, field in self._since_core_start:
            counter.inc(getattr(self._stats, field) - getattr(self._told, field))
        self._told = self._stats

    def _tell_steps(self) -> None:
        for kind, untold in self._untold.items():
            for seconds in untold:
                self._steps[kind].observe(seconds)
            untold.clear()
