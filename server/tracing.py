"""`Tracing`: exports OpenTelemetry spans and metrics of requests by OTLP, if the standard variables ask for it.

    POST /v1/chat/completions        the HTTP request, a child of the context in its `traceparent`
    └─ chat MODEL                    GenAI's attributes: model, parameters, tokens, finish reasons
       ├─ queue                      submission to the first step that computes it
       ├─ prefill                    to the first token
       └─ decode                     to the last token; several choices have three spans each

Times within the engine are those at which the engine read tokens from the device. A request that arrives gets its ids
and the sampler's decision, nothing else. The spans of a sampled request are created when it has ended, from times that
are recorded for every request anyway, so tracing costs nothing per token; a thread encodes and sends them in batches.
It needs the extra `kaon[otel]`, which is imported only if a variable asks for it. See docs/deploy/tracing.md.
"""

import functools
import gzip
import os
import random
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.trace import SpanContext
    from starlette.types import Scope

    from engine.sampling_params import SamplingParams
    from engine.text.request_state import RequestState

_PREFIX = "OTEL_EXPORTER_OTLP_"
_SIGNALS = ("TRACES", "METRICS")
_MAX_CHOICES = 16
"""Most choices of a request that have their own spans."""
_SAMPLED, _RANDOM = 1, 2
"""Flags of W3C's trace context: the trace is sampled; its id is random."""
_LOCAL_PARENT, _REMOTE_PARENT = 0x100, 0x200
"""OTLP's flags of a span: it is known whether its parent is remote; it is."""
_MAX_CACHED_LENGTH = 100
"""Longer attributes are encoded for each span; the cache of attributes is small."""
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
_SECONDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_FIRST_TOKEN_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
"""Bucket bounds that the GenAI conventions give."""


class WrongVariable(ValueError):
    """An OpenTelemetry variable asks for a signal or protocol that Kaon does not export. The text is for the user."""


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
    return frozenset(found)


class Tracing:
    """The exporters. `begin` creates the trace of a request. Call `close` after the last request."""

    def __init__(self, signals: Collection[str], version: str) -> None:
        """`signals` as returned by `requested_signals`. Raises `ValueError` if the extra is not installed."""
        try:
            from opentelemetry.propagators.textmap import Getter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.trace import NonRecordingSpan, get_current_span, set_span_in_context
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
        self._span_of, self._in_context, self._remote_span = get_current_span, set_span_in_context, NonRecordingSpan
        own = {"service.version": version}
        given = os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        if "OTEL_SERVICE_NAME" not in os.environ and "service.name=" not in given:
            own["service.name"] = "kaon"
        resource = Resource.create(own)
        self.spans = _Spans(resource, version) if "TRACES" in signals else None
        self._meters = _meter_provider(resource) if "METRICS" in signals else None
        self._histograms: dict[str, Any] = {}
        if self._meters is not None:
            meter = self._meters.get_meter("kaon", version)
            for name, text, bounds in (
                ("request.duration", "Time of a request, from its arrival to its last token.", _SECONDS),
                ("time_to_first_token", "Time from a request's arrival to its first token.", _FIRST_TOKEN_SECONDS),
                ("time_per_output_token", "Mean time a token after the first.", _TOKEN_SECONDS),
            ):
                self._histograms[name] = meter.create_histogram(
                    f"gen_ai.server.{name}", "s", text, explicit_bucket_boundaries_advisory=bounds
                )

    @classmethod
    def of_environment(cls, version: str) -> "Tracing | None":
        """Create the exporters that the environment asks for; None if it asks for none. Raises `ValueError`."""
        signals = requested_signals(os.environ)
        return cls(signals, version) if signals else None

    def begin(self, scope: "Scope", arrival_time: float) -> "RequestTrace":
        """Begin the trace of an HTTP request. `arrival_time` is a time of `time.monotonic`."""
        remote = self._span_of(self._propagator.extract(scope, getter=self._getter)).get_span_context()
        parent = remote if remote.is_valid else None
        if self.spans is None:
            return RequestTrace(self, scope, arrival_time, parent, None)
        name, attributes = scope["method"], {"http.request.method": scope["method"], "url.path": scope["path"]}
        return RequestTrace(self, scope, arrival_time, parent, self.spans.begin(name, parent, attributes))

    def record(
        self, states: "Sequence[RequestState]", attributes: Mapping[str, Any], context: "SpanContext | None"
    ) -> None:
        """Add ended sequences to the histograms. `context` gives the trace of their exemplars."""
        if not self._histograms:
            return
        current = None if context is None else self._in_context(self._remote_span(context))
        for state in states:
            values = {"request.duration": state.last_time - state.arrival_time}
            if state.token_ids:
                values["time_to_first_token"] = state.ttft
            if len(state.token_ids) > 1:
                values["time_per_output_token"] = state.tpot
            for name, value in values.items():
                self._histograms[name].record(value, attributes, current)

    def close(self) -> None:
        """Send the remaining data and stop. Data that a collector has not taken after a few seconds are lost."""

        def flush(provider: "TracerProvider | MeterProvider") -> None:
            provider.force_flush()
            provider.shutdown()

        # The SDK's retries end at no time limit of these calls; a daemon's thread does not delay the process's end.
        providers = [each for each in (None if self.spans is None else self.spans.provider, self._meters) if each]
        threads = [threading.Thread(target=flush, args=(provider,), daemon=True) for provider in providers]
        end = time.monotonic() + _CLOSE_SECONDS
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))


class RequestTrace:
    """The trace of one HTTP request, from its head to the end of its answer."""

    __slots__ = ("_arrival_time", "_parent", "_sampled", "_scope", "_tracing", "context", "spans")

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
        self.context = context
        self.spans: list[_Span] = []
        """The spans that have ended, if the trace is sampled. The request's own is the last one."""

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
        refused."""
        tracing, route = self._tracing, getattr(self._scope.get("route"), "path", "")
        operation = _OPERATIONS.get(route)
        name = model or "unknown"
        common = {"gen_ai.provider.name": "kaon", "gen_ai.request.model": name, "gen_ai.response.model": name}
        if operation is not None:
            common["gen_ai.operation.name"] = operation
        tracing.record(states, common, self.context or self._parent)
        if self.context is None or not self._sampled:
            return
        id = _new_id()
        several = len(states) > 1
        for index, state in enumerate(states[:_MAX_CHOICES]):
            choice = {"kaon.choice": index} if several else {}
            for phase, start, end in _phases_of(state, submitted):
                events = [each for each in state.interruptions if start <= each[1] <= end]
                self.spans.append(_Span(phase, _new_id(), id, start, end, choice, events))
        first = states[0]
        # The histograms' exemplars refer to `common`.
        attributes = {
            **common,
            "gen_ai.usage.input_tokens": first.num_prompt_tokens,
            "gen_ai.usage.output_tokens": sum(len(state.token_ids) for state in states),
            "gen_ai.response.finish_reasons": [state.finish_reason or "abort" for state in states],
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "kaon.usage.cached_tokens": first.num_cached_tokens,
        }
        if several:
            attributes["gen_ai.request.choice.count"] = len(states)
        end = max(first.arrival_time, *(state.last_time for state in states))
        name = f"{operation or 'pool'} {name}"
        self.spans.append(_Span(name, id, self.context.span_id, first.arrival_time, end, attributes))

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
        self.spans.append(_Span(name, id, parent, start, end, attributes, server=True, failed=failed))
        exporter.add(self)


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


class _Spans:
    """The SDK's sampler, its queue and its connection to a collector, with an encoding of our own.

    A span of the SDK is open while a request runs, and takes locks, copies and checks for each attribute; its encoding
    computes a hash of the resource for each span. Both cost several times as much (docs/decisions/operations.md).
    """

    def __init__(self, resource: "Resource", version: str) -> None:
        from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
        from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
        from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
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

        epoch = time.time_ns() - time.monotonic_ns()
        scope = InstrumentationScope("kaon", version)
        identity = SpanContext(1, 1, False)
        empty = encode_spans([ReadableSpan("", identity, resource=resource, instrumentation_scope=scope)])
        del empty.resource_spans[0].scope_spans[0].spans[:]
        error = Status(code=Status.STATUS_CODE_ERROR)

        def nanoseconds(monotonic: float) -> int:
            return epoch + int(monotonic * 1e9)

        @functools.lru_cache(1024)
        def text(key: str, value: str) -> KeyValue:
            return KeyValue(key=key, value=AnyValue(string_value=value))

        def attribute(key: str, value: Any) -> KeyValue:
            if isinstance(value, str):
                return text(key, value) if len(value) < _MAX_CACHED_LENGTH else text.__wrapped__(key, value)
            if isinstance(value, int):
                return KeyValue(key=key, value=AnyValue(int_value=value))
            if isinstance(value, float):
                return KeyValue(key=key, value=AnyValue(double_value=value))
            values = ArrayValue(values=[AnyValue(string_value=each) for each in value])
            return KeyValue(key=key, value=AnyValue(array_value=values))

        def encode(traces: "Sequence[RequestTrace]") -> bytes:
            request = ExportTraceServiceRequest()
            request.CopyFrom(empty)
            spans = request.resource_spans[0].scope_spans[0].spans
            for trace in traces:
                assert trace.context is not None
                trace_id, state = trace.context.trace_id.to_bytes(16), trace.context.trace_state.to_header()
                for span in trace.spans:
                    spans.append(
                        Span(
                            trace_id=trace_id,
                            span_id=span.id.to_bytes(8),
                            trace_state=state,
                            parent_span_id=span.parent.to_bytes(8) if span.parent else b"",
                            name=span.name,
                            kind=Span.SPAN_KIND_SERVER if span.server else Span.SPAN_KIND_INTERNAL,
                            start_time_unix_nano=nanoseconds(span.start),
                            end_time_unix_nano=nanoseconds(span.end),
                            attributes=[attribute(*each) for each in span.attributes.items()],
                            events=[
                                Span.Event(name=event, time_unix_nano=nanoseconds(moment))
                                for event, moment in span.events
                            ],
                            status=error if span.failed else None,
                            flags=_LOCAL_PARENT | (_REMOTE_PARENT if span.server and span.parent else 0),
                        )
                    )
            body: bytes = request.SerializeToString()
            return body

        class Connection(Session):
            """Sends `payload`, compressed as the SDK's exporter says, in place of that exporter's own encoding."""

            payload = b""

            def prepare_request(self, request: Request) -> PreparedRequest:
                encoding = {**self.headers, **request.headers}.get("Content-Encoding")
                request.data = _COMPRESSIONS[encoding](self.payload) if encoding in _COMPRESSIONS else self.payload
                return super().prepare_request(request)

        class Exporter(SpanExporter):
            """Encodes the traces of a batch. The SDK's exporter sends them, with its settings and retries."""

            def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
                connection.payload = encode(cast("Sequence[RequestTrace]", spans))
                return exporter.export(())

            def shutdown(self) -> None:
                exporter.shutdown()  # type: ignore[no-untyped-call]

        connection = Connection()
        exporter = OTLPSpanExporter(session=connection)
        self._queue = BatchSpanProcessor(Exporter())
        self.provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self.provider.add_span_processor(self._queue)
        self._sampler, self._taken, self._kind = self.provider.sampler, Decision.RECORD_AND_SAMPLE, SpanKind.SERVER
        self._new_trace_id = self.provider.id_generator.generate_trace_id
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


def _meter_provider(resource: "Resource") -> "MeterProvider":
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    reader = PeriodicExportingMetricReader(OTLPMetricExporter())
    return MeterProvider([reader], resource=resource, shutdown_on_exit=False)
