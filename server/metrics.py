"""`Metrics`: the Prometheus metrics of `/metrics`, and `ReplicaMetrics`: those of one engine core.

The hub reports to `Metrics` once a step and once a request, never once a token. With several replicas, the samples of
an engine core have the label `replica`, and with several models the label `model`; those of a single core have none.
Replicas are numbered through all models.
"""

import asyncio
import math
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

import msgspec
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from engine.distributed.logs import dropped_lines
from engine.messages import ModelInfo, SchedulerStats
from engine.text.request_state import RequestState

SHORT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)

STEP_KINDS = ("prefill", "decode", "mixed")

OwnerCounts: TypeAlias = Sequence[tuple[str, Mapping[str, int], Mapping[str, int]]]
"""For each label: the counts since the start, and the present use of each resource."""

_MAX_UNOBSERVED = 1024

_PAGE_PARTS = 5
"""Rendering of metrics takes at most 1 / 5 of the time, unless the pause between two renderings would be longer than
`_MOST_PAGE_SECONDS`."""
_MOST_PAGE_SECONDS = 0.05
"""Longest pause between two renderings in seconds, so that a scrape is answered within 0.1 s."""

_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
"""Methods that are labels of metrics. A client could invent any number of others."""

_ANSWERED_AT_ONCE = 2
"""Most scrapes that are answered per round of the event loop: as many may wait as there are connections."""

_PAGE_BYTES = os.sysconf("SC_PAGESIZE")

_Metric = TypeVar("_Metric", bound=MetricWrapperBase)

_NO_STATS = SchedulerStats(0, 0, 0, 0, 0, 0, 0, "idle", 0.0)

_GAUGES = (
    ("kaon_core_serving", "Whether the engine core is ready: 1, or 0 while it starts."),
    ("kaon_requests_running", "Requests in the running batch."),
    ("kaon_requests_waiting", "Requests waiting to be scheduled."),
    ("kaon_kv_cache_usage_ratio", "Share of KV-cache blocks that running requests hold."),
    ("kaon_kv_cache_blocks", "Blocks of the KV cache."),
    ("kaon_kv_cache_block_tokens", "Tokens in a block of the KV cache; 0 while the model loads."),
    ("kaon_core_resident_memory_bytes", "Memory of the engine core's process, without that of further ranks."),
    ("kaon_gpu_memory_bytes", "GPU memory that the engine core's process holds, without further ranks; NaN on a CPU."),
    ("kaon_gpu_memory_total_bytes", "Memory of the engine core's GPU; NaN on a CPU."),
)
_COUNTERS = (
    ("kaon_generation_tokens_total", "Tokens generated."),
    ("kaon_core_restarts_total", "Engine cores that replaced one that died."),
    ("kaon_requests_resumed_total", "Requests that continued in another engine core."),
)
_SINCE_CORE_START = (
    (
        "kaon_prefix_cache_queried_tokens_total",
        "Prompt tokens looked up in the prefix cache.",
        "prefix_queried_tokens",
    ),
    ("kaon_prefix_cache_hit_tokens_total", "Prompt tokens found in the prefix cache.", "prefix_hit_tokens"),
    (
        "kaon_preemptions_total",
        "Times a running request was preempted because no KV-cache block was free.",
        "preemptions",
    ),
    ("kaon_drafts_total", "Times that a step verified drafts of a request.", "num_drafts"),
    ("kaon_draft_tokens_total", "Draft tokens verified.", "draft_tokens"),
    (
        "kaon_accepted_draft_tokens_total",
        "Draft tokens that verification accepted.",
        "accepted_draft_tokens",
    ),
    (
        "kaon_sentinel_checks_total",
        "Served results that were computed again by plain torch and compared.",
        "sentinel_checks",
    ),
    (
        "kaon_sentinel_mismatches_total",
        "Served results that differ from plain torch by more than rounding explains.",
        "sentinel_mismatches",
    ),
)
"""Counters: name, help text and the field of `SchedulerStats` that holds the value."""

_LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)

_LENGTH_BUCKETS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144)

FINISH_REASONS = ("stop", "length", "abort", "error", "timeout")
CLOSE_REASONS = ("connections", "address", "key", "descriptors", "evicted", "head", "body", "unread", "gone")
"""Why connections end. Refused: too many connections, too many of the address or key, no descriptor. Closed: to make
room; the head or the body was received too slowly; the answer was not read; the client, half closed before, has
gone."""

REJECT_REASONS = (
    "queue_requests",
    "queue_tokens",
    "key",
    "jobs",
    "logprobs",
    "quota",
    "timeout",
    "draining",
    "not_ready",
    "invalid",
    "engine",
    "error",
)


class InterTokenTimes(Collector):
    """Histogram of the times between tokens of a sequence.

    `observe` is called once per token and only stores the time: an observation by the library's own histogram costs a
    tenth of the time of a streamed chunk.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._pending: list[float] = []
        self._counts = [0] * (len(_TOKEN_BUCKETS) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, seconds: float, tokens: int) -> None:
        """Record that `tokens` tokens were received together, `seconds` after the token before them."""
        self._pending += [seconds / tokens] * tokens
        if len(self._pending) > _MAX_UNOBSERVED:
            self._count()

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Yield the histogram with all observations so far."""
        self._count()
        buckets, total = [], 0
        for bound, count in zip((*map(str, _TOKEN_BUCKETS), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        yield HistogramMetricFamily(
            "kaon_inter_token_latency_seconds", "Time between two tokens of a request.", buckets, self._sum
        )

    def _count(self) -> None:
        for seconds in self._pending:
            self._counts[bisect_left(_TOKEN_BUCKETS, seconds)] += 1
        self._sum += sum(self._pending)
        self._pending.clear()


class Metrics:
    """The server's metrics, in their own registry. Each sequence counts as a request: `n` choices are `n` requests."""

    def __init__(
        self, version: str, num_replicas: int | Mapping[str, int] = 1, aliases_for: str | None = None
    ) -> None:
        """`num_replicas` is the model's number of replicas or, with several models, that of each by name.

        `aliases_for` is the model's name in the additional metrics with vLLM's names, which routers read; None: do not
        add them.
        """
        self._page: asyncio.Task[None] | None = None
        """The next rendering, which all calls of `page` wait for."""
        self._readers: list[asyncio.Future[bytes]] = []
        """Futures of those calls."""
        self._next_page_at = 0.0
        disable_created_metrics()  # type: ignore[no-untyped-call]
        registry = self._registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        Info("kaon_build", "Version of the server.", registry=registry).info({"version": version})

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, buckets=buckets, registry=registry)

        self._replicas = replica_metrics(registry, num_replicas)

        # Tokens and times of requests.
        self._prompt_tokens = counter("kaon_prompt_tokens_total", "Prompt tokens of requests that were answered.")
        self._ttft = histogram("kaon_time_to_first_token_seconds", "Arrival to first token.", _LATENCY_BUCKETS)
        self._tpot = histogram(
            "kaon_time_per_output_token_seconds", "Mean time a token after the first.", _TOKEN_BUCKETS
        )
        self._inter_token = InterTokenTimes(registry)
        self._prompt_length = histogram(
            "kaon_request_prompt_tokens", "Prompt tokens of a request that was answered.", _LENGTH_BUCKETS
        )
        self._output_length = histogram(
            "kaon_request_output_tokens", "Tokens generated for a request that ended.", _LENGTH_BUCKETS
        )
        self._duration = histogram("kaon_request_duration_seconds", "Arrival to last token.", _LATENCY_BUCKETS)
        self._queue_time = histogram("kaon_request_queue_seconds", "Waiting for the first step.", SHORT_BUCKETS)

        # Numbers of requests.
        self._http = counter(
            "kaon_http_requests_total",
            "HTTP requests answered, by method, route and status; 499: the client left before the answer.",
            *("method", "route", "status"),
        )
        self._by_model = counter(
            "kaon_model_requests_total", "Requests ended, by the model or adapter that computed them.", "model"
        )
        self._received = counter("kaon_requests_received_total", "Requests received.")
        rejected = counter("kaon_requests_rejected_total", "Requests refused, by reason.", "reason")
        self._rejected = {reason: rejected.labels(reason) for reason in REJECT_REASONS}
        finished = counter("kaon_requests_finished_total", "Requests ended, by reason.", "reason")
        self._finished = {reason: finished.labels(reason) for reason in FINISH_REASONS}
        self._live: list[Callable[[], int]] = []
        gauge("kaon_requests_live", "Requests admitted that have not ended.").set_function(
            lambda: sum(count() for count in self._live)
        )

        # Clients and the log.
        slow_readers = counter(
            "kaon_slow_readers_total", "Streams whose client read too slowly, by the action taken.", "action"
        )
        self._slow_readers = {action: slow_readers.labels(action) for action in ("pause", "end")}
        self._open_connections = gauge("kaon_connections_open", "Connections of clients that are open.")
        closed = counter(
            "kaon_connections_closed_total",
            "Connections refused or closed for lack of room or because of their client, by reason.",
            "reason",
        )
        self._closed_connections = {reason: closed.labels(reason) for reason in CLOSE_REASONS}
        self._dropped_log_lines = counter(
            "kaon_log_lines_dropped_total", "Lines of the API process' log dropped because the log was not read."
        )
        self._seen_dropped_log_lines = 0

        # Several models, and adapters.
        self._model_loads = counter("kaon_model_loads_total", "Times that a model of several was loaded.", "model")
        self._model_load_seconds = counter(
            "kaon_model_load_seconds_total", "Time that loading a model of several took.", "model"
        )
        self._model_evictions = counter(
            "kaon_model_evictions_total", "Times that a model was unloaded to make room for another.", "model"
        )
        self._adapters: list[Callable[[], Sequence[str]]] = []
        registry.register(_AdapterCollector(self._adapter_names))
        self._aliases: _VllmAliases | None = None
        if aliases_for is not None:
            self._aliases = _VllmAliases(aliases_for, self._adapter_names)

    def step(self, stats: SchedulerStats, generated_tokens: int, replica: int = 0) -> None:
        """Record an engine step that generated `generated_tokens` tokens. Samples are updated at the next scrape."""
        self._replicas[replica].step(stats, generated_tokens)

    def core_restarted(self, resumed: int, replica: int = 0, *, died: bool = True) -> None:
        """Record that a new core is ready; its counts begin at 0, and it continues `resumed` requests.

        `died`: whether it replaces a core that died, and not one that was ended to free its memory.
        """
        self._replicas[replica].core_restarted(resumed, died=died)

    def requests_moved(self, resumed: int, replica: int) -> None:
        """Record that a replica continues `resumed` requests of another one."""
        self._replicas[replica].requests_moved(resumed)

    def show_engine(
        self,
        *,
        serving: Callable[[], Collection[int]] | None = None,
        model: Callable[[], ModelInfo | None] = lambda: None,
        pids: Callable[[], Sequence[int | None]] | None = None,
        adapters: Callable[[], Sequence[str]] = tuple,
        first: int = 0,
        num_replicas: int | None = None,
    ) -> None:
        """Have each scrape call these for a model whose replicas are `num_replicas` (default: all) from `first` on.

        `serving` returns the replicas whose cores are ready and `pids` the process ids of the cores, None of one on
        another host, both counted from 0 for each model; `model` the loaded model, None while it loads; `adapters`
        the names of the loaded adapters.
        """
        self._adapters.append(adapters)
        last = None if num_replicas is None else first + num_replicas
        for number, replica in enumerate(self._replicas[first:last]):
            if serving is not None:
                replica.show_serving(lambda number=number: number in serving())  # type: ignore[misc]
            if pids is not None:
                replica.show_pid(lambda number=number: pids()[number])  # type: ignore[misc]
            replica.show_model(model)

    def show_models(self, loaded: Callable[[], Mapping[str, bool]]) -> None:
        """At each scrape, `loaded` returns whether each of several models is loaded, by its name."""
        self._registry.register(_ModelCollector(loaded))
        for name in loaded():
            for counter in (self._model_loads, self._model_load_seconds, self._model_evictions):
                counter.labels(name)

    def model_loaded(self, name: str, seconds: float) -> None:
        """Count that one of several models was loaded, in `seconds`."""
        self._model_loads.labels(name).inc()
        self._model_load_seconds.labels(name).inc(seconds)

    def model_evicted(self, name: str) -> None:
        """Count that one of several models was unloaded to make room for another."""
        self._model_evictions.labels(name).inc()

    def _adapter_names(self) -> list[str]:
        return [name for adapters in self._adapters for name in adapters()]

    def load_report(self, format: str) -> bytes | None:
        """Return the value of the header `endpoint-load-metrics` in ORCA's format `text` or `json`; None for
        others."""
        all_stats = [replica.stats for replica in self._replicas]
        total = sum(stats.kv_blocks_total for stats in all_stats)
        named = {
            "kv_cache_usage_perc": sum(stats.kv_blocks_used for stats in all_stats) / max(1, total),
            "num_requests_waiting": float(sum(stats.num_waiting for stats in all_stats)),
            "num_requests_running": float(sum(stats.num_running for stats in all_stats)),
        }
        if format == "text":
            return ("TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in named.items())).encode()
        if format == "json":
            return b"JSON " + msgspec.json.encode({"named_metrics": named})
        return None

    def http_request(self, method: str, route: str | None, status: int) -> None:
        """Count an ended HTTP request. `route` is the path's template; None if the path is no route of the server."""
        self._http.labels(method if method in _METHODS else "other", route or "none", status).inc()

    def tokens_arrived(self, seconds: float, tokens: int) -> None:
        """Record `tokens` further tokens of a request, received `seconds` after the token before them."""
        self._inter_token.observe(seconds, tokens)

    def first_token(self, state: RequestState) -> None:
        """Record a request's first token."""
        self._ttft.observe(state.ttft)
        self.prompt_computed(state)

    def prompt_computed(self, state: RequestState) -> None:
        """Record that the prompt of a request was computed."""
        self._count_prompt(state)
        if state.queue_time is not None:
            self._queue_time.observe(state.queue_time)

    def _count_prompt(self, state: RequestState) -> None:
        self._prompt_tokens.inc(state.num_prompt_tokens)
        self._prompt_length.observe(state.num_prompt_tokens)

    def received(self, count: int) -> None:
        """Count received requests. Each is later reported exactly once, as rejected or as finished."""
        self._received.inc(count)

    def rejected(self, reason: str, count: int) -> None:
        """Count refused requests. `reason` is one of `REJECT_REASONS`."""
        self._rejected[reason].inc(count)

    def show_owners(self, owners: Callable[[], OwnerCounts]) -> None:
        """Register `owners`, which is called at each scrape and returns the past and present use of each label."""
        self._registry.register(_OwnerCollector(owners))

    def show_live(self, count: Callable[[], int]) -> None:
        """Register `count`, which is called at each scrape and returns the number of live requests of a model."""
        self._live.append(count)

    def show_connections(self, count: Callable[[], int]) -> None:
        """Register `count`, which is called at each scrape and returns the number of open connections."""
        self._open_connections.set_function(count)

    def connection_closed(self, reason: str) -> None:
        """Count a refused or closed connection. `reason` is one of `CLOSE_REASONS`."""
        self._closed_connections[reason].inc()

    def slow_reader(self, action: Literal["pause", "end"]) -> None:
        """Count that a request was paused or ended because its client read the stream too slowly."""
        self._slow_readers[action].inc()

    def finished(self, state: RequestState, reason: str, model: str) -> None:
        """Record an ended request. `reason` is one of `FINISH_REASONS`, `model` the served name of model or
        adapter."""
        self._finished[reason].inc()
        self._by_model.labels(model).inc()
        if reason == "length" and not state.token_ids:
            # The request generated no token, so `first_token` has not counted the prompt.
            self._count_prompt(state)
        self._output_length.observe(len(state.token_ids))
        self._duration.observe(state.last_time - state.arrival_time)
        if len(state.token_ids) > 1:
            self._tpot.observe(state.tpot)

    async def page(self) -> bytes:
        """Render the metrics, including all events before this call.

        A call renders at once if a rendering is due: each round of the event loop could take tens of milliseconds.
        Calls that must wait share the next rendering. Rendering takes a fifth of the time, or more if one rendering
        takes over 12 ms, so a client that requests the metrics continuously does not block the event loop.
        """
        if self._page is None and time.monotonic() >= self._next_page_at:
            return self._render_timed()
        if self._page is None:
            self._page = asyncio.create_task(self._render_when_due())
        reader: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._readers.append(reader)
        return await reader

    async def _render_when_due(self) -> None:
        await asyncio.sleep(self._next_page_at - time.monotonic())
        # Later calls wait for the next rendering.
        self._page, readers, self._readers = None, self._readers, []
        try:
            text = self._render_timed()
        except Exception as error:
            for reader in readers:
                if not reader.done():
                    reader.set_exception(error)
            raise
        # The newest first, so that a probe does not wait for the answers of a client that asked many times at once.
        for number, reader in enumerate(reversed(readers)):
            if number and not number % _ANSWERED_AT_ONCE:
                await asyncio.sleep(0)
            if not reader.done():  # A future is done if its client has disconnected.
                reader.set_result(text)

    def _render_timed(self) -> bytes:
        # CPU time of this thread: time that it waits for a processor does not count.
        began = time.thread_time()
        text = self.render()
        wait = (_PAGE_PARTS - 1) * (time.thread_time() - began)
        self._next_page_at = time.monotonic() + min(wait, _MOST_PAGE_SECONDS)
        return text

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        for replica in self._replicas:
            replica.publish()
        dropped = dropped_lines()
        self._dropped_log_lines.inc(dropped - self._seen_dropped_log_lines)
        self._seen_dropped_log_lines = dropped
        families = list(self._registry.collect())
        if self._aliases is not None:
            families += list(self._aliases.of(families))
        return text_of(families)


_number: Callable[[float], str] = floatToGoString


def text_of(families: Iterable[Metric]) -> bytes:
    """Return metrics in Prometheus' text format: what `generate_latest` returns, in less time."""
    lines: list[str] = []
    for family in families:
        lines.append(_heading(family.name, family.type, family.documentation))
        lines += [
            f"{_series(each.name, tuple(each.labels.items()))} {_number(each.value)}\n" for each in family.samples
        ]
    return "".join(lines).encode()


_SUFFIXES = {"counter": "_total", "info": "_info"}
"""What the text format adds to the names of families of these types."""


@lru_cache(1024)
def _heading(name: str, type: str, documentation: str) -> str:
    name += _SUFFIXES.get(type, "")
    documentation = documentation.replace("\\", r"\\").replace("\n", r"\n")
    return f"# HELP {name} {documentation}\n# TYPE {name} {'gauge' if type == 'info' else type}\n"


@lru_cache(8192)
def _series(name: str, labels: tuple[tuple[str, str], ...]) -> str:
    """Return the name of a sample with its labels."""
    if not labels:
        return name
    pairs = ",".join(f'{label}="{value.translate(_ESCAPES)}"' for label, value in sorted(labels))
    return f"{name}{{{pairs}}}"


_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


_VLLM_NAMES = {
    "kaon_requests_running": "vllm:num_requests_running",
    "kaon_requests_waiting": "vllm:num_requests_waiting",
    "kaon_kv_cache_usage_ratio": "vllm:kv_cache_usage_perc",
    "kaon_prompt_tokens": "vllm:prompt_tokens",
    "kaon_generation_tokens": "vllm:generation_tokens",
    "kaon_preemptions": "vllm:num_preemptions",
    "kaon_prefix_cache_queried_tokens": "vllm:prefix_cache_queries",
    "kaon_prefix_cache_hit_tokens": "vllm:prefix_cache_hits",
    "kaon_drafts": "vllm:spec_decode_num_drafts",
    "kaon_draft_tokens": "vllm:spec_decode_num_draft_tokens",
    "kaon_accepted_draft_tokens": "vllm:spec_decode_num_accepted_tokens",
    "kaon_accepted_draft_tokens_by_position": "vllm:spec_decode_num_accepted_tokens_per_pos",
    "kaon_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "kaon_inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
    "kaon_request_duration_seconds": "vllm:e2e_request_latency_seconds",
    "kaon_request_queue_seconds": "vllm:request_queue_time_seconds",
    "kaon_request_prompt_tokens": "vllm:request_prompt_tokens",
    "kaon_request_output_tokens": "vllm:request_generation_tokens",
}
"""vLLM's names of metric families with the same meaning; counters without the suffix `_total`."""
_MEANS = frozenset(("kaon_kv_cache_usage_ratio",))
"""Gauges that are averaged over the replicas. Other gauges are summed."""


class _VllmAliases:
    """The metrics that routers read, under vLLM's names.

    The Gateway API inference extension and llm-d read one sample per name, so replicas are added up here.
    """

    def __init__(self, model_name: str, adapters: Callable[[], Sequence[str]]) -> None:
        self._labels = {"model_name": model_name, "engine": "0"}
        self._adapters = adapters

    def of(self, families: Sequence[Metric]) -> Iterator[Metric]:
        """Yield those of `families` that `_VLLM_NAMES` has, the cache's size, and the adapters."""
        cache: dict[str, str] = {}
        for family in families:
            if family.name in ("kaon_kv_cache_blocks", "kaon_kv_cache_block_tokens"):
                # The size of one replica's cache: routers compare it with the blocks of a prefix.
                cache[family.name] = str(int(family.samples[0].value))
            elif family.name in _VLLM_NAMES:
                yield self._renamed(family)
        gauge = GaugeMetricFamily(
            "vllm:cache_config_info", "Size of the KV cache.", labels=["block_size", "num_gpu_blocks"]
        )
        gauge.add_metric([cache["kaon_kv_cache_block_tokens"], cache["kaon_kv_cache_blocks"]], 1.0)
        yield gauge
        names = self._adapters()
        if names:
            gauge = GaugeMetricFamily(
                "vllm:lora_requests_info",
                "Adapters that are loaded; its value is the time.",
                labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
            )
            # All served adapters are in memory, so no adapter waits to be loaded.
            gauge.add_metric([str(len(names)), ",".join(names), ""], time.time())
            yield gauge

    def _renamed(self, family: Metric) -> Metric:
        """Return `family` under vLLM's name, with its replicas added up."""
        name = _VLLM_NAMES[family.name]
        renamed = Metric(name, family.documentation, family.type)
        totals: dict[tuple[str, tuple[tuple[str, str], ...]], list[float]] = {}
        for sample in family.samples:
            suffix = sample.name.removeprefix(family.name)
            kept = tuple((label, value) for label, value in sample.labels.items() if label in ("le", "position"))
            totals.setdefault((suffix, kept), []).append(sample.value)
        for (suffix, kept), values in totals.items():
            value = sum(values) / (len(values) if family.name in _MEANS else 1)
            renamed.add_sample(name + suffix, {**self._labels, **dict(kept)}, value)
        return renamed


class _AdapterCollector(Collector):
    """`kaon_lora_adapter_info`: which adapters are loaded."""

    def __init__(self, adapters: Callable[[], Sequence[str]]) -> None:
        self._adapters = adapters

    def collect(self) -> Iterator[Metric]:
        gauge = GaugeMetricFamily("kaon_lora_adapter_info", "LoRA adapters that are loaded.", labels=["adapter"])
        for name in self._adapters():
            gauge.add_metric([name], 1.0)
        yield gauge


class _ModelCollector(Collector):
    """`kaon_model_loaded`: which of several models are loaded."""

    def __init__(self, loaded: Callable[[], Mapping[str, bool]]) -> None:
        self._loaded = loaded

    def collect(self) -> Iterator[Metric]:
        gauge = GaugeMetricFamily("kaon_model_loaded", "Whether a model of several is loaded.", labels=["model"])
        for name, is_loaded in self._loaded().items():
            gauge.add_metric([name], float(is_loaded))
        yield gauge


_OWNER_COUNTERS = {
    "requests": "Requests admitted, by key.",
    "refused": "Requests refused with 429, by key.",
    "prompt_tokens": "Prompt tokens of admitted requests, by key.",
    "output_tokens": "Tokens generated, by key.",
}


class _OwnerCollector(Collector):
    """The metrics of owners by the name of their keys, computed at each scrape."""

    def __init__(self, owners: Callable[[], OwnerCounts]) -> None:
        self._owners = owners

    def collect(self) -> Iterator[Metric]:
        owners = self._owners()
        for name, text in _OWNER_COUNTERS.items():
            counter = CounterMetricFamily(f"kaon_key_{name}", text, labels=["key"])
            for label, used, _ in owners:
                counter.add_metric([label], used[name])
            yield counter
        gauge = GaugeMetricFamily("kaon_key_in_use", "What keys use now, by resource.", labels=["key", "resource"])
        for label, _, in_use in owners:
            for resource, count in in_use.items():
                gauge.add_metric([label, resource], count)
        yield gauge


def replica_metrics(registry: CollectorRegistry, num_replicas: int | Mapping[str, int]) -> list["ReplicaMetrics"]:
    """Create the metrics of each replica, in the order of their numbers. `num_replicas` as for `Metrics`."""
    by_model = {"": num_replicas} if isinstance(num_replicas, int) else num_replicas
    labels = ["model"] * (not isinstance(num_replicas, int)) + ["replica"] * (max(by_model.values()) > 1)
    gauges = {name: Gauge(name, text, labels, registry=registry) for name, text in _GAUGES}
    texts = [*_COUNTERS, *((name, text) for name, text, _ in _SINCE_CORE_START)]
    counters = {name: Counter(name, text, labels, registry=registry) for name, text in texts}
    steps = Histogram(
        "kaon_step_duration_seconds",
        "Duration of an engine step, by kind.",
        [*labels, "kind"],
        buckets=SHORT_BUCKETS,
        registry=registry,
    )
    by_position = Counter(
        "kaon_accepted_draft_tokens_by_position_total",
        "Draft tokens that verification accepted, by their position among a request's drafts, from 0.",
        [*labels, "position"],
        registry=registry,
    )
    values = [{"model": model, "replica": str(number)} for model, size in by_model.items() for number in range(size)]
    return [
        ReplicaMetrics(gauges, counters, steps, by_position, {label: each[label] for label in labels})
        for each in values
    ]


class ReplicaMetrics:
    """The metrics of one replica. `step` only stores its numbers; `publish` updates the samples at a scrape."""

    def __init__(
        self,
        gauges: dict[str, Gauge],
        counters: dict[str, Counter],
        steps: Histogram,
        by_position: Counter,
        labels: dict[str, str],
    ) -> None:
        """The metrics are shared by all replicas; `labels` select this replica's samples."""
        self._gauges, self._counters = _children(gauges, labels), _children(counters, labels)
        self._by_position, self._labels = by_position, labels
        self._stats = self._published = _NO_STATS
        """The latest stats, and the stats at the last `publish`."""
        self._is_serving: Callable[[], bool] = lambda: True
        self._model: Callable[[], ModelInfo | None] = lambda: None
        self._steps = {kind: steps.labels(**labels, kind=kind) for kind in STEP_KINDS}
        self._unobserved: dict[str, list[float]] = {kind: [] for kind in STEP_KINDS}
        """Durations of steps that `publish` adds to the histograms: an observation takes a tenth of the time of a
        chunk."""
        self._generated_tokens = 0

    def step(self, stats: SchedulerStats, generated_tokens: int) -> None:
        """Record an engine step that generated `generated_tokens` tokens."""
        self._stats = stats
        self._generated_tokens += generated_tokens
        unobserved = self._unobserved.get(stats.step_kind)
        if unobserved is not None:
            unobserved.append(stats.step_seconds)
            if len(unobserved) == _MAX_UNOBSERVED:
                self._observe_steps()

    def core_restarted(self, resumed: int, *, died: bool = True) -> None:
        """Record that a new core, whose counts begin at 0, is ready and continues `resumed` requests.

        `died`: whether it replaces a core that died; otherwise the core was ended on purpose.
        """
        self._counters["kaon_core_restarts_total"].inc(died)
        self.requests_moved(resumed)
        self._publish_counts()
        self._stats = self._published = _NO_STATS

    def requests_moved(self, resumed: int) -> None:
        """Record that this replica continues `resumed` requests of another one."""
        self._counters["kaon_requests_resumed_total"].inc(resumed)

    def show_serving(self, is_serving: Callable[[], bool]) -> None:
        """Register `is_serving`, which is called at each scrape and returns whether the core is ready."""
        self._is_serving = is_serving
        self._gauges["kaon_core_serving"].set_function(is_serving)

    def show_pid(self, pid: Callable[[], int | None]) -> None:
        """Register `pid`, which is called at each scrape and returns the core's process id; None on another host."""
        self._gauges["kaon_core_resident_memory_bytes"].set_function(lambda: resident_bytes(pid()))

    def show_model(self, model: Callable[[], ModelInfo | None]) -> None:
        """Register `model`, which is called at each scrape and returns the loaded model, or None while it loads."""
        self._model = model

    @property
    def stats(self) -> SchedulerStats:
        """The latest stats; zeros if the core has died, since it then runs nothing and holds no blocks."""
        return self._stats if self._is_serving() else _NO_STATS

    def publish(self) -> None:
        """Update the samples of this replica."""
        stats, model = self.stats, self._model()
        values = {
            "kaon_requests_running": stats.num_running,
            "kaon_requests_waiting": stats.num_waiting,
            "kaon_kv_cache_usage_ratio": stats.kv_blocks_used / max(1, stats.kv_blocks_total),
            "kaon_gpu_memory_bytes": stats.device_memory or math.nan,
            "kaon_gpu_memory_total_bytes": stats.device_memory_total or math.nan,
        }
        if model is not None:
            values["kaon_kv_cache_blocks"] = model.num_kvcache_blocks
            values["kaon_kv_cache_block_tokens"] = model.block_size
        for name, value in values.items():
            self._gauges[name].set(value)
        self._publish_counts()
        self._counters["kaon_generation_tokens_total"].inc(self._generated_tokens)
        self._generated_tokens = 0
        self._observe_steps()

    def _publish_counts(self) -> None:
        for name, _, field in _SINCE_CORE_START:
            self._counters[name].inc(getattr(self._stats, field) - getattr(self._published, field))
        before = dict(enumerate(self._published.accepted_by_position))
        for position, count in enumerate(self._stats.accepted_by_position):
            counter = self._by_position.labels(**self._labels, position=str(position))
            counter.inc(count - before.get(position, 0))
        self._published = self._stats

    def _observe_steps(self) -> None:
        for kind, unobserved in self._unobserved.items():
            for seconds in unobserved:
                self._steps[kind].observe(seconds)
            unobserved.clear()


def resident_bytes(pid: int | None) -> float:
    """Return the resident memory of a process in bytes; NaN if it has ended or, for None, runs on another host."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return math.nan


def _children(metrics: dict[str, _Metric], labels: dict[str, str]) -> dict[str, _Metric]:
    """Return the metrics with these labels, by name."""
    return {name: metric.labels(**labels) for name, metric in metrics.items()} if labels else metrics
