"""`Tracing`: exports OpenTelemetry spans and metrics of requests by OTLP, if the standard variables ask for it.

    POST /v1/chat/completions        the HTTP request, a child of the context in its `traceparent`
    └─ chat MODEL                    GenAI's attributes: model, parameters, tokens, finish reasons
       ├─ queue                      submission to the first step that computes it
       ├─ prefill                    to the first token
       └─ decode                     to the last token; several choices have three spans each

Times within the engine are those at which the engine read tokens from the device. The spans of a request are created
when it has ended, from times that are recorded for every request anyway, so tracing costs nothing per token. It needs
the extra `kaon[otel]`, which is imported only if a variable asks for it. See docs/deploy/tracing.md.
"""

import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span
    from starlette.types import Scope

    from engine.sampling_params import SamplingParams
    from engine.text.request_state import RequestState

_PREFIX = "OTEL_EXPORTER_OTLP_"
_SIGNALS = ("TRACES", "METRICS")
_MAX_CHOICES = 16
"""Most choices of a request that have their own spans."""
_CLOSE_MILLISECONDS = 3000
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
        own = {"service.version": version}
        given = os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        if "OTEL_SERVICE_NAME" not in os.environ and "service.name=" not in given:
            own["service.name"] = "kaon"
        resource = Resource.create(own)
        self._epoch = time.time_ns() - time.monotonic_ns()
        """Nanoseconds since the epoch at time 0 of the monotonic clock."""
        self._traces = _tracer_provider(resource) if "TRACES" in signals else None
        self._tracer = None if self._traces is None else self._traces.get_tracer("kaon", version)
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
        context = self._propagator.extract(scope, getter=self._getter)
        span = None
        if self._tracer is not None:
            from opentelemetry.trace import SpanKind

            client = scope.get("client")
            span = self._tracer.start_span(
                scope["method"],
                context,
                SpanKind.SERVER,
                {
                    "http.request.method": scope["method"],
                    "url.path": scope["path"],
                    "url.scheme": scope.get("scheme", "http"),
                    "network.protocol.version": scope.get("http_version", "1.1"),
                    **({"client.address": client[0], "client.port": client[1]} if client else {}),
                },
                start_time=self.nanoseconds(arrival_time),
            )
            from opentelemetry.trace import set_span_in_context

            context = set_span_in_context(span, context)
        return RequestTrace(self, span, context, scope)

    def nanoseconds(self, monotonic: float) -> int:
        """Convert a time of `time.monotonic` to nanoseconds since the epoch."""
        return self._epoch + int(monotonic * 1e9)

    def span(self, name: str, context: "Context", start: float, attributes: Mapping[str, Any]) -> "Span":
        """Begin a span at `start`, a time of `time.monotonic`. The caller ends it."""
        assert self._tracer is not None
        return self._tracer.start_span(name, context, attributes=attributes, start_time=self.nanoseconds(start))

    def record(self, states: "Sequence[RequestState]", attributes: Mapping[str, Any], context: "Context") -> None:
        """Add ended sequences to the histograms. `context` gives the trace of their exemplars."""
        if not self._histograms:
            return
        for state in states:
            values = {"request.duration": state.last_time - state.arrival_time}
            if state.token_ids:
                values["time_to_first_token"] = state.ttft
            if len(state.token_ids) > 1:
                values["time_per_output_token"] = state.tpot
            for name, value in values.items():
                self._histograms[name].record(value, attributes, context)

    def close(self) -> None:
        """Send the remaining data, within a few seconds, and stop."""
        for provider in (self._traces, self._meters):
            if provider is not None:
                provider.force_flush(_CLOSE_MILLISECONDS)
                provider.shutdown()


class RequestTrace:
    """The trace of one HTTP request, from its head to the end of its answer."""

    __slots__ = ("_context", "_scope", "_span", "_tracing", "span_id", "trace_id")

    def __init__(self, tracing: Tracing, span: "Span | None", context: "Context", scope: "Scope") -> None:
        self._tracing = tracing
        self._span = span
        self._context = context
        self._scope = scope
        self.trace_id: str | None = None
        """Trace id in the form of W3C's trace context; None if only metrics are exported."""
        self.span_id: str | None = None
        if span is not None:
            identity = span.get_span_context()
            self.trace_id, self.span_id = f"{identity.trace_id:032x}", f"{identity.span_id:016x}"

    @property
    def header(self) -> bytes | None:
        """Return the value of W3C's response header `traceresponse`; None without a trace."""
        if self._span is None:
            return None
        flags = int(self._span.get_span_context().trace_flags)
        return f"00-{self.trace_id}-{self.span_id}-{flags:02x}".encode()

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
        tracing.record(states, common, self._context)
        if self._span is None or not self._span.is_recording():
            return
        from opentelemetry.trace import set_span_in_context

        attributes: dict[str, Any] = {
            **common,
            "gen_ai.usage.input_tokens": states[0].num_prompt_tokens,
            "gen_ai.usage.output_tokens": sum(len(state.token_ids) for state in states),
            "gen_ai.response.finish_reasons": [state.finish_reason or "abort" for state in states],
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "kaon.usage.cached_tokens": states[0].num_cached_tokens,
        }
        if len(states) > 1:
            attributes["gen_ai.request.choice.count"] = len(states)
        end = max(state.last_time for state in states)
        span = tracing.span(f"{operation or 'pool'} {name}", self._context, states[0].arrival_time, attributes)
        context = set_span_in_context(span, self._context)
        for index, state in enumerate(states[:_MAX_CHOICES]):
            self._phases(context, state, submitted, {"kaon.choice": index} if len(states) > 1 else {})
        span.end(tracing.nanoseconds(max(end, states[0].arrival_time)))

    def _phases(self, context: "Context", state: "RequestState", submitted: float, attributes: dict[str, Any]) -> None:
        """Create the spans of one sequence, with its interruptions as events."""
        tracing = self._tracing
        for name, start, end in _phases_of(state, submitted):
            span = tracing.span(name, context, start, attributes)
            for event, moment in state.interruptions:
                if start <= moment <= end:
                    span.add_event(event, timestamp=tracing.nanoseconds(moment))
            span.end(tracing.nanoseconds(end))

    def end(self, status: int) -> None:
        """End the trace. `status` is the HTTP status of the answer; 499 if the client disconnected before its end."""
        if self._span is None:
            return
        from opentelemetry.trace import Status, StatusCode

        route = getattr(self._scope.get("route"), "path", None)
        if route is not None:
            self._span.update_name(f"{self._scope['method']} {route}")
            self._span.set_attribute("http.route", route)
        self._span.set_attribute("http.response.status_code", status)
        if status >= 500:
            self._span.set_attribute("error.type", str(status))
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()


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


def _tracer_provider(resource: "Resource") -> "TracerProvider":
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def _meter_provider(resource: "Resource") -> "MeterProvider":
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    reader = PeriodicExportingMetricReader(OTLPMetricExporter())
    return MeterProvider([reader], resource=resource, shutdown_on_exit=False)
