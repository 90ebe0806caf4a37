"""`Metrics`: what `/metrics` shows. Fed by the hub, once a step and once a request; never once a token."""

from collections.abc import Callable, Collection
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
from server.replica_metrics import SHORT_BUCKETS, replica_metrics

_LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)

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


class Metrics:
    """The server's metrics in a registry of their own. A sequence counts as a request: `n` choices are `n` of them.

    What an engine core tells has, where there are several, the label `replica`.
    """

    def __init__(self, version: str, num_replicas: int = 1) -> None:
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

        self._replicas = replica_metrics(registry, num_replicas)
        self._prompt_tokens = counter("kaon_prompt_tokens_total", "Prompt tokens of requests that were answered.")
        self._ttft = histogram("kaon_time_to_first_token_seconds", "Arrival to first token.", _LATENCY_BUCKETS)
        self._tpot = histogram(
            "kaon_time_per_output_token_seconds", "Mean time a token after the first.", _TOKEN_BUCKETS
        )
        self._duration = histogram("kaon_request_duration_seconds", "Arrival to last token.", _LATENCY_BUCKETS)
        self._queue_time = histogram("kaon_request_queue_seconds", "Waiting for the first step.", SHORT_BUCKETS)
        self._received = counter("kaon_requests_received_total", "Requests that asked to be served.")
        rejected = Counter(
            "kaon_requests_rejected_total", "Requests turned away, by reason.", ["reason"], registry=registry
        )
        self._rejected = {reason: rejected.labels(reason) for reason in REJECT_REASONS}
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

    def step(self, stats: SchedulerStats, generated_tokens: int, replica: int = 0) -> None:
        """An engine step ended, having generated that many tokens. The rest waits for a scrape."""
        self._replicas[replica].step(stats, generated_tokens)

    def core_restarted(self, resumed: int, replica: int = 0) -> None:
        """Another core is ready, whose counts begin anew, and in which so many requests go on."""
        self._replicas[replica].core_restarted(resumed)

    def requests_moved(self, resumed: int, replica: int) -> None:
        """A replica has taken over requests of another, of which so many go on in it."""
        self._replicas[replica].requests_moved(resumed)

    def show_serving(self, replicas: Callable[[], Collection[int]]) -> None:
        """`replicas` tells, at each scrape, whose cores are ready."""
        for number, replica in enumerate(self._replicas):
            replica.show_serving(lambda number=number: number in replicas())  # type: ignore[misc]

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
        for replica in self._replicas:
            replica.tell()
        return generate_latest(self._registry)
