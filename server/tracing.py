"""`Tracing`: exports OpenTelemetry spans and metrics of requests by OTLP, if the standard variables ask for it.

    POST /v1/chat/completions        the HTTP request, a child of the context in its `traceparent`
    └─ chat MODEL                    GenAI's attributes: model, parameters, tokens, finish reasons
       ├─ queue                      submission to the first step that computes it
       ├─ prefill                    to the first token
       └─ decode                     to the last token; several choices have three spans each

Times within the engine are those at which the engine read tokens from the device. A request that arrives gets its ids
and the sampler's decision, nothing else. The spans of a sampled request are encoded when it has ended, from times that
are recorded for every request anyway, so tracing costs nothing per token; a thread sends them in batches. It needs the
extra `kaon[otel]`, which is imported only if a variable asks for it. See docs/deploy/tracing.md.
"""

import copy
import functools
import gzip
import logging
import math
import os
import random
import struct
import threading
import time
import zlib
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext
    from starlette.types import Scope

    from engine.sampling_params import SamplingParams
    from engine.text.request_state import RequestState

_log = logging.getLogger(__name__)

_PREFIX = "OTEL_EXPORTER_OTLP_"
_SIGNALS = ("TRACES", "METRICS")
_TEMPORALITY, _EXEMPLARS = f"{_PREFIX}METRICS_TEMPORALITY_PREFERENCE", "OTEL_METRICS_EXEMPLAR_FILTER"
_INTERVAL = "OTEL_METRIC_EXPORT_INTERVAL"
_CHOICES = {
    f"{_PREFIX}METRICS_DEFAULT_HISTOGRAM_AGGREGATION": ("explicit_bucket_histogram",),
    _TEMPORALITY: ("cumulative", "delta", "lowmemory"),
    _EXEMPLARS: ("trace_based", "always_on", "always_off"),
}
"""Values of variables for metrics; the first one is the default."""
_MAX_CHOICES = 16
"""Most choices of a request that have their own spans."""
_SAMPLED, _RANDOM = 1, 2
"""Flags of W3C's trace context: the trace is sampled; its id is random."""
_MAX_CACHED_LENGTH = 100
"""Longer texts are encoded for each span; the cache of encoded attributes is small."""
_MAX_BODY_BYTES = 8 * 2**20
"""Longest body that is sent to a collector, before compression. Collectors refuse bodies of 20 MiB by default."""
_COMPRESSIONS: dict[Any, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress}
_CLOSE_SECONDS = 3
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
"""Operation names of the GenAI conventions by route. Other routes, such as reranking, have none."""
_REQUEST_SECONDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_FIRST_TOKEN_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_DURATION = "gen_ai.server.request.duration"
_FIRST_TOKEN = "gen_ai.server.time_to_first_token"
_PER_TOKEN = "gen_ai.server.time_per_output_token"
_HISTOGRAMS = {
    _DURATION: ("Time of a request, from its arrival to its last token.", _REQUEST_SECONDS),
    _FIRST_TOKEN: ("Time from a request's arrival to its first token.", _FIRST_TOKEN_SECONDS),
    _PER_TOKEN: ("Mean time a token after the first.", _TOKEN_SECONDS),
}
"""Descriptions of histograms, and the bounds of their buckets, which the GenAI conventions give."""


class WrongVariable(ValueError):
    """An OpenTelemetry variable asks for something that Kaon does not export. The text is for the user."""


def requested_signals(environment: Mapping[str, str]) -> frozenset[str]:
    """Return which of `TRACES` and `METRICS` the variables ask for. Raises `WrongVariable`."""
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return frozenset()
    found = set()
    for signal in _SIGNALS:
        exporter = environment.get(f"OTEL_{signal}_EXPORTER", "").lower()
        if exporter not in ("", "otlp", "none"):
            raise WrongVariable(f"OTEL_{signal}_EXPORTER is {exporter}; it must be otlp or none")
        endpoint = environment.get(f"{_PREFIX}{signal}_ENDPOINT") or environment.get(f"{_PREFIX}ENDPOINT")
        if exporter == "none" or not (endpoint or exporter):
            continue
        variables = (f"{_PREFIX}{signal}_PROTOCOL", f"{_PREFIX}PROTOCOL")
        for variable in variables:
            if environment.get(variable, "http/protobuf") != "http/protobuf":
                raise WrongVariable(
                    f"{variable} is {environment[variable]}; Kaon exports http/protobuf, to port 4318 of a collector"
                )
        found.add(signal)
    for variable, values in _CHOICES.items() if "METRICS" in found else ():
        value = environment.get(variable, "")
        if value.lower() not in ("", *values):
            raise WrongVariable(f"{variable} is {value}; it must be {' or '.join(values)}")
    if "METRICS" in found:
        export_interval(environment)
    return frozenset(found)


def export_interval(environment: Mapping[str, str]) -> float:
    """Return the seconds between two exports of metrics. Raises `WrongVariable`."""
    milliseconds = environment.get(_INTERVAL) or "60000"
    try:
        seconds = float(milliseconds) / 1000
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < threading.TIMEOUT_MAX:
        raise WrongVariable(f"{_INTERVAL} is {milliseconds}; it must be a number of milliseconds above 0")
    return seconds


class Tracing:
    """The exporters. `begin` creates the trace of a request. Call `close` after the last request."""

    def __init__(self, signals: Collection[str], version: str) -> None:
        """`signals` as returned by `requested_signals`. Raises `ValueError` if the extra is not installed."""
        try:
            from opentelemetry.propagators.textmap import Getter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.trace import get_current_span
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ValueError(
                "OTEL_* variables ask for OpenTelemetry, which is not installed: pip install 'kaon[otel]', or set "
                "OTEL_SDK_DISABLED=true"
            ) from error

        class _Headers(Getter["Scope"]):
            def get(self, carrier: "Scope", key: str) -> list[str] | None:
                name = key.encode()
                return [value.decode("latin-1") for each, value in carrier["headers"] if each == name] or None

            def keys(self, carrier: "Scope") -> list[str]:
                return [name.decode("latin-1") for name, _ in carrier["headers"]]

        self._getter = _Headers()
        self._propagator = TraceContextTextMapPropagator()
        self._span_of = get_current_span
        own = {"service.version": version}
        given = os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        if "OTEL_SERVICE_NAME" not in os.environ and "service.name=" not in given:
            own["service.name"] = "kaon"
        resource = Resource.create(own)
        self.spans = _Spans(resource, version) if "TRACES" in signals else None
        self._histograms = _Histograms(resource, version) if "METRICS" in signals else None

    @classmethod
    def of_environment(cls, version: str) -> "Tracing | None":
        """Create the exporters that the environment asks for; None if it asks for none. Raises `ValueError`."""
        signals = requested_signals(os.environ)
        return cls(signals, version) if signals else None

    def begin(self, scope: "Scope", arrival_time: float) -> "RequestTrace":
        """Begin the trace of an HTTP request. `arrival_time` is a time of `time.monotonic`."""
        parent = None
        if any(name == b"traceparent" for name, _ in scope["headers"]):
            remote = self._span_of(self._propagator.extract(scope, getter=self._getter)).get_span_context()
            parent = remote if remote.is_valid else None
        if self.spans is None:
            return RequestTrace(self, scope, arrival_time, parent, None)
        name, attributes = scope["method"], {"http.request.method": scope["method"], "url.path": scope["path"]}
        return RequestTrace(self, scope, arrival_time, parent, self.spans.begin(name, parent, attributes))

    def record(
        self, states: "Sequence[RequestState]", attributes: Mapping[str, str], context: "SpanContext | None"
    ) -> None:
        """Add ended sequences to the histograms. `context` gives the trace of their exemplars."""
        if self._histograms is None:
            return
        for state in states:
            values = {_DURATION: state.last_time - state.arrival_time}
            if state.token_ids:
                values[_FIRST_TOKEN] = state.ttft
            if len(state.token_ids) > 1:
                values[_PER_TOKEN] = state.tpot
            self._histograms.observe(values, attributes, context)

    def close(self) -> None:
        """Send the remaining data and stop. Data that a collector has not taken after a few seconds are lost."""

        # The SDK's retries end at no time limit of these calls; a daemon's thread does not delay the process's end.
        exporters = [each for each in (self.spans, self._histograms) if each is not None]
        threads = [threading.Thread(target=each.close, daemon=True) for each in exporters]
        end = time.monotonic() + _CLOSE_SECONDS
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))


class RequestTrace:
    """The trace of one HTTP request, from its head to the end of its answer."""

    __slots__ = (
        "_arrival_time",
        "_common",
        "_has_ended",
        "_parent",
        "_sampled",
        "_scope",
        "_tracing",
        "context",
        "spans",
    )

    def __init__(
        self,
        tracing: Tracing,
        scope: "Scope",
        arrival_time: float,
        parent: "SpanContext | None",
        context: "SpanContext | None",
    ) -> None:
        """`parent` is the client's span. `context` identifies the request's; None if no spans are exported."""
        self._tracing = tracing
        self._scope = scope
        self._arrival_time = arrival_time
        self._parent = parent
        self._sampled = context is not None and bool(context.trace_flags & _SAMPLED)
        self._has_ended = False
        self.context = context
        self._common = b""
        """The encoded fields that all spans have."""
        self.spans: list[bytes] = []
        """The encoded spans that have ended, if the trace is sampled. The request's own is the last one."""

    @property
    def trace_id(self) -> str | None:
        """Trace id in the form of W3C's trace context; None if only metrics are exported."""
        return None if self.context is None else f"{self.context.trace_id:032x}"

    @property
    def span_id(self) -> str | None:
        """Id of the HTTP request's span in the same form."""
        return None if self.context is None else f"{self.context.span_id:016x}"

    @property
    def header(self) -> bytes | None:
        """Return the value of W3C's response header `traceresponse`; None without a trace."""
        context = self.context
        if context is None:
            return None
        return b"00-%032x-%016x-%02x" % (context.trace_id, context.span_id, context.trace_flags)

    def generated(
        self, states: "Sequence[RequestState]", params: "SamplingParams", model: str | None, submitted: float
    ) -> None:
        """Record that the request's sequences have ended. `submitted` is when they were sent to the engine, or
        refused. Those of background responses and of resumable streams may end after the trace."""
        tracing, route = self._tracing, getattr(self._scope.get("route"), "path", "")
        operation = _OPERATIONS.get(route)
        name = model or "unknown"
        common = {"gen_ai.provider.name": "kaon", "gen_ai.request.model": name, "gen_ai.response.model": name}
        if operation is not None:
            common["gen_ai.operation.name"] = operation
        tracing.record(states, common, self.context or self._parent)
        if self.context is None or not self._sampled:
            return
        trace = self
        if self._has_ended:
            # The request's own span may have been exported already, so these are exported by themselves.
            trace = copy.copy(self)
            trace.spans = []
        id = _new_id()
        several = len(states) > 1
        for index, state in enumerate(states[:_MAX_CHOICES]):
            choice = {"kaon.choice": index} if several else {}
            for phase, start, end in _phases_of(state, submitted):
                events = [each for each in state.interruptions if start <= each[1] <= end]
                trace._add(_Span(phase, _new_id(), id, start, end, choice, events))
        first = states[0]
        attributes = {
            **common,
            "gen_ai.usage.input_tokens": first.num_prompt_tokens,
            "gen_ai.usage.output_tokens": sum(len(state.token_ids) for state in states),
            "gen_ai.response.finish_reasons": tuple(state.finish_reason or "abort" for state in states),
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "kaon.usage.cached_tokens": first.num_cached_tokens,
        }
        if several:
            attributes["gen_ai.request.choice.count"] = len(states)
        end = max(first.arrival_time, *(state.last_time for state in states))
        name = f"{operation or 'pool'} {name}"
        trace._add(_Span(name, id, self.context.span_id, first.arrival_time, end, attributes))
        if trace is not self and tracing.spans is not None:
            tracing.spans.add(trace)

    def end(self, status: int) -> None:
        """End the trace. `status` is the HTTP status of the answer; 499 if the client disconnected before its end."""
        exporter, scope = self._tracing.spans, self._scope
        if exporter is None or self.context is None or not self._sampled:
            return
        attributes = {
            "http.request.method": scope["method"],
            "url.path": scope["path"],
            "url.scheme": scope.get("scheme", "http"),
            "network.protocol.version": scope.get("http_version", "1.1"),
            "http.response.status_code": status,
        }
        name, failed = scope["method"], status >= 500
        if (client := scope.get("client")) is not None:
            attributes["client.address"], attributes["client.port"] = client[0], client[1]
        if (route := getattr(scope.get("route"), "path", None)) is not None:
            attributes["http.route"], name = route, f"{name} {route}"
        if failed:
            attributes["error.type"] = str(status)
        parent = 0 if self._parent is None else self._parent.span_id
        start, end, id = self._arrival_time, time.monotonic(), self.context.span_id
        self._add(_Span(name, id, parent, start, end, attributes, server=True, failed=failed))
        self._has_ended = True
        # The scope leads to the connection, which would stay in memory until a collector has taken the trace.
        self._scope = {"route": scope.get("route")}
        exporter.add(self)

    def _add(self, span: "_Span") -> None:
        if not self._common:
            assert self.context is not None
            self._common = _field(1, self.context.trace_id.to_bytes(16))
            if self.context.trace_state:
                self._common += _field(3, self.context.trace_state.to_header().encode())
        self.spans.append(_encoded(span, self._common))


def _phases_of(state: "RequestState", submitted: float) -> Iterator[tuple[str, float, float]]:
    """Yield name, start and end of each phase that a sequence reached."""
    if state.queue_time is None:
        yield "queue", submitted, max(submitted, state.last_time)
        return
    scheduled = submitted + state.queue_time
    first = state.first_token_time if state.token_ids else state.last_time
    yield "queue", submitted, scheduled
    yield "prefill", scheduled, max(scheduled, first)
    if len(state.token_ids) > 1:
        yield "decode", first, state.last_time


class _Span(NamedTuple):
    """A span that has ended, with times of `time.monotonic`. A parent of 0 is none."""

    name: str
    id: int
    parent: int
    start: float
    end: float
    attributes: Mapping[str, Any]
    events: Sequence[tuple[str, float]] = ()
    server: bool = False
    failed: bool = False


def _new_id() -> int:
    return random.getrandbits(64) or 1


_EPOCH = time.time_ns() - time.monotonic_ns()
"""Nanoseconds from 1970 to 0 of `time.monotonic`."""
_TIMES = struct.Struct("<cQcQ")
_TIME = struct.Struct("<cQ")
_DOUBLE = struct.Struct("<cd")
_INTERNAL, _SERVER = b"\x30\x01", b"\x30\x02"
"""Fields of a span: its kind (6)."""
_LOCAL_PARENT, _REMOTE_PARENT = b"\x85\x01\x00\x01\x00\x00", b"\x85\x01\x00\x03\x00\x00"
"""Its flags (16): it is known whether its parent is remote (0x100), and it is (0x200)."""
_FAILED = b"\x7a\x02\x18\x02"
"""Its status (15): an error."""


def _varint(value: int) -> bytes:
    """Encode an integer as protobuf does; a negative one as its 64-bit complement."""
    if 0 <= value < 0x80:
        return bytes((value,))
    value &= 2**64 - 1
    groups = bytearray()
    while value >= 0x80:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    groups.append(value)
    return bytes(groups)


def _field(number: int, content: bytes) -> bytes:
    """Encode a field of protobuf (1 to 15) whose value is a text, bytes or a message."""
    return bytes((number << 3 | 2,)) + _varint(len(content)) + content


def _utf8(text: str) -> bytes:
    """Encode a text; surrogates, which UTF-8 does not have, become question marks."""
    return text.encode(errors="replace")


@functools.lru_cache(1024, typed=True)
def _attribute(key: str, value: str | int | float | tuple[str, ...]) -> bytes:
    """Encode an attribute of a span (field 9, `KeyValue`)."""
    if isinstance(value, str):
        encoded = _field(1, _utf8(value))
    elif isinstance(value, int):
        encoded = b"\x18" + _varint(value)
    elif isinstance(value, float):
        encoded = _DOUBLE.pack(b"\x21", value)
    else:
        encoded = _field(5, b"".join(_field(1, _field(1, _utf8(each))) for each in value))
    return _field(9, _field(1, key.encode()) + _field(2, encoded))


@functools.lru_cache(256)
def _text(number: int, text: str) -> bytes:
    """Encode a text field of a span."""
    return _field(number, _utf8(text))


def _encoded(span: _Span, trace: bytes) -> bytes:
    """Encode a span as an item of OTLP's `ScopeSpans` (field 2). `trace` is the fields that all spans of it have."""
    remote = span.server and span.parent != 0
    parts = [
        trace,
        b"\x12\x08",
        span.id.to_bytes(8),
        _text(5, span.name),
        _SERVER if span.server else _INTERNAL,
        _TIMES.pack(b"\x39", _EPOCH + int(span.start * 1e9), b"\x41", _EPOCH + int(span.end * 1e9)),
        _REMOTE_PARENT if remote else _LOCAL_PARENT,
    ]
    if span.parent:
        parts += (b"\x22\x08", span.parent.to_bytes(8))
    for key, value in span.attributes.items():
        is_long = isinstance(value, str) and len(value) > _MAX_CACHED_LENGTH
        parts.append(_attribute.__wrapped__(key, value) if is_long else _attribute(key, value))
    for event, moment in span.events:
        parts.append(_field(11, _TIME.pack(b"\x09", _EPOCH + int(moment * 1e9)) + _text(2, event)))
    if span.failed:
        parts.append(_FAILED)
    return _field(2, b"".join(parts))


class _Spans:
    """The SDK's sampler, its queue and its connection to a collector, with an encoding of our own.

    A span of the SDK is open while a request runs, and takes locks, copies and checks for each attribute. Those, and
    its encoding, cost several times as much (docs/decisions/operations.md).
    """

    def __init__(self, resource: "Resource", version: str) -> None:
        from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
        from opentelemetry.sdk.trace.sampling import Decision
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace import (
            NonRecordingSpan,
            SpanContext,
            SpanKind,
            TraceFlags,
            set_span_in_context,
        )
        from requests import PreparedRequest, Request, Session

        scope = InstrumentationScope("kaon", version)
        empty = ReadableSpan("", SpanContext(1, 1, False), resource=resource, instrumentation_scope=scope)
        (resource_spans,) = encode_spans([empty]).resource_spans
        (scope_spans,) = resource_spans.scope_spans
        del scope_spans.spans[:], resource_spans.scope_spans[:]
        encoded_resource, encoded_scope = resource_spans.SerializeToString(), scope_spans.SerializeToString()

        class Connection(Session):
            """Sends `payload`, compressed as the SDK's exporter says, in place of that exporter's own encoding."""

            payload = b""

            def prepare_request(self, request: Request) -> PreparedRequest:
                encoding = {**self.headers, **request.headers}.get("Content-Encoding")
                request.data = _COMPRESSIONS[encoding](self.payload) if encoding in _COMPRESSIONS else self.payload
                return super().prepare_request(request)

        class Exporter(SpanExporter):
            """Joins the traces of a batch. The SDK's exporter sends them, with its settings and retries."""

            def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
                result = SpanExportResult.SUCCESS
                for body in _joined(cast("Sequence[RequestTrace]", spans)):
                    connection.payload = _field(1, encoded_resource + _field(2, encoded_scope + body))
                    if exporter.export(()) is not SpanExportResult.SUCCESS:
                        result = SpanExportResult.FAILURE
                return result

            def shutdown(self) -> None:
                exporter.shutdown()  # type: ignore[no-untyped-call]

        connection = Connection()
        exporter = OTLPSpanExporter(session=connection)
        try:
            self._queue = BatchSpanProcessor(Exporter())
        except ValueError as error:
            raise WrongVariable(f"the variables OTEL_BSP_* cannot be followed: {error}") from error
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._sampler, self._taken, self._kind = provider.sampler, Decision.RECORD_AND_SAMPLE, SpanKind.SERVER
        self._new_trace_id = provider.id_generator.generate_trace_id
        self._identity, self._flags = SpanContext, TraceFlags
        self._in_context, self._remote_span = set_span_in_context, NonRecordingSpan

    def begin(self, name: str, parent: "SpanContext | None", attributes: Mapping[str, Any]) -> "SpanContext":
        """Return the identity of a request's span, whose flags say whether the sampler takes it."""
        if parent is None:
            context, trace_id, flags = None, self._new_trace_id(), _RANDOM
        else:
            context = self._in_context(self._remote_span(parent))
            trace_id, flags = parent.trace_id, parent.trace_flags & _RANDOM
        result = self._sampler.should_sample(context, trace_id, name, self._kind, attributes)
        if result.decision is self._taken:
            flags |= _SAMPLED
        return self._identity(trace_id, _new_id(), False, self._flags(flags), result.trace_state)

    def add(self, trace: RequestTrace) -> None:
        """Add a sampled trace that has ended to the next batch."""
        self._queue.on_end(cast("ReadableSpan", trace))

    def close(self) -> None:
        """Send the remaining traces and stop."""
        self._queue.shutdown()  # type: ignore[no-untyped-call]


def _joined(traces: Sequence[RequestTrace]) -> Iterator[bytes]:
    """Join encoded traces to bodies of at most `_MAX_BODY_BYTES` or of one trace."""
    batch = bytearray()
    for trace in traces:
        spans = b"".join(trace.spans)
        if batch and len(batch) + len(spans) > _MAX_BODY_BYTES:
            yield bytes(batch)
            batch.clear()
        batch += spans
    yield bytes(batch)


class _Observed:
    """A histogram's observations with equal attributes."""

    __slots__ = ("attributes", "bounds", "counts", "exemplars", "largest", "smallest", "start", "sum")

    def __init__(self, attributes: Mapping[str, str], bounds: Sequence[float], start: int) -> None:
        self.attributes, self.bounds, self.start = attributes, bounds, start
        self.counts = [0] * (len(bounds) + 1)
        self.sum, self.smallest, self.largest = 0.0, math.inf, -math.inf
        self.exemplars: dict[int, tuple[float, int, SpanContext | None]] = {}
        """The latest observation of each bucket since the last export, with its time and trace."""


class _Histograms:
    """The histograms of the GenAI conventions. The SDK's exporter sends them.

    An observation in a histogram of the SDK takes about ten times as long (docs/decisions/operations.md).
    """

    def __init__(self, resource: "Resource", version: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import Exemplar
        from opentelemetry.sdk.metrics.export import (
            AggregationTemporality,
            Histogram,
            HistogramDataPoint,
            Metric,
            MetricsData,
            ResourceMetrics,
            ScopeMetrics,
        )
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        is_delta = os.environ.get(_TEMPORALITY, "").lower() in ("delta", "lowmemory")
        temporality = AggregationTemporality.DELTA if is_delta else AggregationTemporality.CUMULATIVE
        scope = InstrumentationScope("kaon", version)

        def point(observed: _Observed) -> HistogramDataPoint:
            exemplars = [
                Exemplar({}, value, moment, *((None, None) if trace is None else (trace.span_id, trace.trace_id)))
                for value, moment, trace in observed.exemplars.values()
            ]
            observed.exemplars.clear()
            return HistogramDataPoint(
                observed.attributes,
                observed.start,
                time.time_ns(),
                sum(observed.counts),
                observed.sum,
                list(observed.counts),
                observed.bounds,
                observed.smallest,
                observed.largest,
                exemplars,
            )

        def take() -> MetricsData | None:
            """Return all histograms, or None if there are no observations."""
            metrics = []
            with self._lock:
                for name, (text, _) in _HISTOGRAMS.items():
                    points = [point(each) for (of, *_), each in self._observed.items() if of == name]
                    if points:
                        metrics.append(Metric(name, text, "s", Histogram(points, temporality)))
                if temporality is AggregationTemporality.DELTA:
                    self._observed.clear()
                    self._start = time.time_ns()
            if not metrics:
                return None
            scopes = [ScopeMetrics(scope, metrics, "")]
            return MetricsData([ResourceMetrics(resource, scopes, resource.schema_url)])

        def export() -> None:
            """Export all histograms at each interval, and a last time when they are closed."""
            closed = False
            while not closed:
                closed = self._closed.wait(interval)
                try:
                    if (data := take()) is not None:
                        exporter.export(data)
                except Exception:  # noqa: BLE001 - the next export may succeed
                    _log.exception("metrics were not exported; they are exported every %g s", interval)
            exporter.shutdown()

        self._lock = threading.Lock()
        self._observed: dict[tuple[str, str, str | None], _Observed] = {}
        self._start = time.time_ns()
        self._exemplars = os.environ.get(_EXEMPLARS, "").lower() or "trace_based"
        self._closed = threading.Event()
        interval = export_interval(os.environ)
        exporter = OTLPMetricExporter()
        self._thread = threading.Thread(target=export, name="otlp-metrics", daemon=True)
        self._thread.start()

    def observe(
        self, values: Mapping[str, float], attributes: Mapping[str, str], context: "SpanContext | None"
    ) -> None:
        """Add an observation to each of the named histograms. `context` is the trace for their exemplars."""
        model, operation = attributes["gen_ai.request.model"], attributes.get("gen_ai.operation.name")
        sampled = context is not None and bool(context.trace_flags & _SAMPLED)
        is_exemplar = self._exemplars == "always_on" or (sampled and self._exemplars == "trace_based")
        now = time.time_ns()
        with self._lock:
            for name, value in values.items():
                key = name, model, operation
                observed = self._observed.get(key)
                if observed is None:
                    observed = self._observed[key] = _Observed(attributes, _HISTOGRAMS[name][1], self._start)
                bucket = bisect_left(observed.bounds, value)
                observed.counts[bucket] += 1
                observed.sum += value
                observed.smallest = min(observed.smallest, value)
                observed.largest = max(observed.largest, value)
                if is_exemplar:
                    observed.exemplars[bucket] = value, now, context

    def close(self) -> None:
        """Send the histograms a last time and stop."""
        self._closed.set()
        self._thread.join()
