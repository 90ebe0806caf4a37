"""`Tracing`: exports OpenTelemetry spans and metrics of requests by OTLP, if the standard variables ask for it.

    POST /v1/chat/completions        the HTTP request, a child of the context in its `traceparent`
    └─ chat MODEL                    GenAI's attributes: model, parameters, tokens, finish reasons
       ├─ queue                      submission to the first step that computes it
       ├─ prefill                    to the first token
       └─ decode                     to the last token; several choices have three spans each

Times within the engine are those at which the engine read tokens from the device. A request that arrives gets its ids
and the sampler's decision, nothing else. When a sampled request has ended, its times, which are recorded for every
request anyway, are stored, so tracing costs nothing per token. A thread encodes and sends the spans in batches. It
needs the extra `kaon[otel]`, which is imported only if a variable asks for it. See docs/deploy/tracing.md.
"""

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
    from opentelemetry.trace import TraceFlags
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
_MAX_PHASES = 3
"""Most spans of a choice."""
_GENERATION = (
    "gen_ai.provider.name",
    "gen_ai.request.model",
    "gen_ai.response.model",
    "gen_ai.operation.name",
    "gen_ai.response.finish_reasons",
    "gen_ai.request.choice.count",
    "gen_ai.request.max_tokens",
    "gen_ai.request.temperature",
    "gen_ai.request.top_p",
)
"""Attributes that the spans of many generations share; the numbers of tokens are added."""
_REQUEST = (
    "http.request.method",
    "url.path",
    "url.scheme",
    "network.protocol.version",
    "http.response.status_code",
    "client.address",
    "http.route",
    "error.type",
)
"""Attributes that the spans of many HTTP requests share; the client's port is added."""
_SAMPLED, _RANDOM = 1, 2
"""Flags of W3C's trace context: the trace is sampled; its id is random."""
_MAX_CACHED_LENGTH = 100
"""Longest path whose span's fields are cached."""
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
_HISTOGRAMS = {
    "gen_ai.server.request.duration": ("Time of a request, from its arrival to its last token.", _REQUEST_SECONDS),
    "gen_ai.server.time_to_first_token": ("Time from a request's arrival to its first token.", _FIRST_TOKEN_SECONDS),
    "gen_ai.server.time_per_output_token": ("Mean time a token after the first.", _TOKEN_SECONDS),
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

        getter, propagator = _Headers(), TraceContextTextMapPropagator()

        def parent_of(scope: "Scope") -> _Identity | None:
            """Return the client's span, which the headers name; None if they are malformed."""
            remote = get_current_span(propagator.extract(scope, getter=getter)).get_span_context()
            if not remote.is_valid:
                return None
            ids = remote.trace_id.to_bytes(16), remote.span_id.to_bytes(8)
            return _Identity(*ids, remote.trace_flags, remote.trace_state.to_header())

        self._parent_of = parent_of
        own = {"service.version": version}
        given = os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        if "OTEL_SERVICE_NAME" not in os.environ and "service.name=" not in given:
            own["service.name"] = "kaon"
        resource = Resource.create(own)
        self.spans = _Spans(resource, version) if "TRACES" in signals else None
        self.histograms = _Histograms(resource, version) if "METRICS" in signals else None

    @classmethod
    def of_environment(cls, version: str) -> "Tracing | None":
        """Create the exporters that the environment asks for; None if it asks for none. Raises `ValueError`."""
        signals = requested_signals(os.environ)
        return cls(signals, version) if signals else None

    def begin(self, scope: "Scope", arrival_time: float) -> "RequestTrace":
        """Begin the trace of an HTTP request. `arrival_time` is a time of `time.monotonic`."""
        parent = None
        for name, _ in scope["headers"]:
            if name == b"traceparent":
                parent = self._parent_of(scope)
                break
        return RequestTrace(
            self, scope, arrival_time, parent, None if self.spans is None else self.spans.begin(scope, parent)
        )

    def close(self) -> None:
        """Send the remaining data and stop. Data that a collector has not taken after a few seconds are lost."""

        # The SDK's retries end at no time limit of these calls; a daemon's thread does not delay the process's end.
        exporters = [each for each in (self.spans, self.histograms) if each is not None]
        threads = [threading.Thread(target=each.close, daemon=True) for each in exporters]
        end = time.monotonic() + _CLOSE_SECONDS
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))


class _Identity(NamedTuple):
    """The identity of a span, as W3C's trace context has it."""

    trace_id: bytes
    span_id: bytes
    trace_flags: "TraceFlags"
    """The SDK's batches read it."""
    trace_state: str
    """The header `tracestate`; empty if there is none."""


class _Sequence(NamedTuple):
    """What spans show of a sequence that has ended. A `RequestState` also holds its text."""

    arrival_time: float
    queue_time: float | None
    first_token_time: float
    last_time: float
    num_tokens: int
    interruptions: Sequence[tuple[str, float]]
    finish_reason: str | None


class _Others(NamedTuple):
    """What a span shows of the sequences beyond `_MAX_CHOICES`, of which a request may have thousands."""

    reasons: tuple[str, ...] = ()
    num_tokens: int = 0
    last_time: float = 0.0


class _Generation(NamedTuple):
    """What spans show of a request's sequences."""

    sequences: Sequence[_Sequence]
    """The first `_MAX_CHOICES`."""
    model: str
    operation: str | None
    submitted: float
    sampling: tuple[int, float, float]
    """Most tokens, temperature, top-p."""
    prompt: tuple[int, int]
    """Number of its tokens, and of those that were cached."""
    others: _Others


class _Exchange(NamedTuple):
    """What a span shows of an HTTP request."""

    end: float
    method: str
    path: str
    route: str | None
    protocol: tuple[str, str]
    """Scheme and version."""
    client: tuple[str | None, int | None]
    status: int


class RequestTrace:
    """The trace of one HTTP request, from its head to the end of its answer."""

    __slots__ = ("_arrival_time", "_exchange", "_generations", "_parent", "_sampled", "_scope", "_tracing", "context")

    def __init__(
        self,
        tracing: Tracing,
        scope: "Scope",
        arrival_time: float,
        parent: _Identity | None,
        context: _Identity | None,
    ) -> None:
        """`parent` is the client's span. `context` identifies the request's; None if no spans are exported."""
        self._tracing = tracing
        self._scope = scope
        self._arrival_time = arrival_time
        self._parent = parent
        self._sampled = context is not None and context.trace_flags & _SAMPLED
        self.context = context
        self._generations: list[_Generation] = []
        self._exchange: _Exchange | None = None

    @property
    def trace_id(self) -> str | None:
        """Trace id in the form of W3C's trace context; None if only metrics are exported."""
        return None if self.context is None else self.context.trace_id.hex()

    @property
    def span_id(self) -> str | None:
        """Id of the HTTP request's span in the same form."""
        return None if self.context is None else self.context.span_id.hex()

    @property
    def header(self) -> bytes | None:
        """Return the value of W3C's response header `traceresponse`; None without a trace."""
        context = self.context
        if context is None:
            return None
        return f"00-{context.trace_id.hex()}-{context.span_id.hex()}-0{context.trace_flags:d}".encode()

    def generated(
        self, states: "Sequence[RequestState]", params: "SamplingParams", model: str | None, submitted: float
    ) -> None:
        """Record that the request's sequences have ended. `submitted` is when they were sent to the engine, or
        refused. Sequences of background responses and of resumable streams may end after `end` was called."""
        histograms, model = self._tracing.histograms, model or "unknown"
        operation = _OPERATIONS.get(getattr(self._scope.get("route"), "path", ""))
        if histograms is not None:
            histograms.observe(states, model, operation, self.context or self._parent)
        if self._sampled:
            sequences = [
                _Sequence(
                    state.arrival_time,
                    state.queue_time,
                    state.first_token_time,
                    state.last_time,
                    len(state.token_ids),
                    state.interruptions,
                    state.finish_reason,
                )
                for state in states[:_MAX_CHOICES]
            ]
            others = _NO_OTHERS if len(states) <= _MAX_CHOICES else _others(states[_MAX_CHOICES:])
            sampling = params.max_tokens, params.temperature, params.top_p
            prompt = states[0].num_prompt_tokens, states[0].num_cached_tokens
            trace, exporter = self, self._tracing.spans
            if self._exchange is not None:
                # The request's own span may have been exported already, so this generation is exported by itself.
                trace = RequestTrace(self._tracing, self._scope, self._arrival_time, self._parent, self.context)
            trace._generations.append(_Generation(sequences, model, operation, submitted, sampling, prompt, others))
            if trace is not self and exporter is not None:
                exporter.add(trace)

    def end(self, status: int) -> None:
        """End the trace. `status` is the HTTP status of the answer; 499 if the client disconnected before its end."""
        exporter, scope = self._tracing.spans, self._scope
        if exporter is None or not self._sampled:
            return
        route, client = scope.get("route"), scope.get("client") or (None, None)
        protocol = scope.get("scheme", "http"), scope.get("http_version", "1.1")
        self._exchange = _Exchange(
            time.monotonic(), scope["method"], scope["path"], getattr(route, "path", None), protocol, client, status
        )
        # The scope leads to the connection, which would stay in memory until a collector has taken the trace.
        self._scope = {"route": route}
        exporter.add(self)

    def encoded(self) -> bytes:
        """Encode the spans of a trace. The request's own is the last one, if the request has ended."""
        context, parent, exchange, spans = self.context, self._parent, self._exchange, list[bytes]()
        assert context is not None
        for generation in self._generations:
            self._encode_generation(spans, context, generation)
        if exchange is None:
            return b"".join(spans)
        name, kind, error = exchange.method, _SERVER if parent is None else _SERVED, None
        if exchange.route is not None:
            name = f"{name} {exchange.route}"
        if exchange.status >= 500:
            kind, error = kind + _FAILED, str(exchange.status)
        encode = _fields if len(exchange.path) <= _MAX_CACHED_LENGTH else _fields.__wrapped__
        _, method, path, route, protocol, (host, port), status = exchange
        fields = encode(kind, name, _REQUEST, method, path, *protocol, status, host, route, error)
        if port is not None:
            fields += _attribute("client.port", port)
        above = b"" if parent is None else parent.span_id
        _encode(spans, context, context.span_id, above, self._arrival_time, exchange.end, fields)
        return b"".join(spans)

    def _encode_generation(self, spans: list[bytes], context: _Identity, generation: _Generation) -> None:
        """Append the spans of a generation's phases, and its own."""
        sequences, model, operation, submitted, sampling, prompt, others = generation
        several = len(sequences) > 1
        ids = _new_ids(1 + _MAX_PHASES * len(sequences))
        id, at = ids[:8], 8
        for index, sequence in enumerate(sequences):
            for phase, start, end in _phases_of(sequence, submitted):
                fields = _fields(_INTERNAL, phase, ("kaon.choice",), index) if several else _PHASES[phase]
                if sequence.interruptions:
                    fields += _events(sequence.interruptions, start, end)
                _encode(spans, context, ids[at : at + 8], id, start, end, fields)
                at += 8
        name = f"{operation or 'pool'} {model}"
        reasons = tuple([each.finish_reason or "abort" for each in sequences]) + others.reasons
        choices = len(reasons) if several else None
        encode = _fields.__wrapped__ if others.reasons else _fields
        fields = b"".join(
            (
                encode(_INTERNAL, name, _GENERATION, "kaon", model, model, operation, reasons, choices, *sampling),
                _attribute("gen_ai.usage.input_tokens", prompt[0]),
                _attribute(
                    "gen_ai.usage.output_tokens", sum([each.num_tokens for each in sequences]) + others.num_tokens
                ),
                _attribute("kaon.usage.cached_tokens", prompt[1]),
            )
        )
        start = sequences[0].arrival_time
        end = max([start, others.last_time, *[each.last_time for each in sequences]])
        _encode(spans, context, id, context.span_id, start, end, fields)


_NO_OTHERS = _Others()


def _others(states: "Sequence[RequestState]") -> _Others:
    reasons = tuple([state.finish_reason or "abort" for state in states])
    num_tokens = sum([len(state.token_ids) for state in states])
    return _Others(reasons, num_tokens, max([state.last_time for state in states]))


def _phases_of(sequence: _Sequence, submitted: float) -> list[tuple[str, float, float]]:
    """Return name, start and end of each phase that a sequence reached."""
    if sequence.queue_time is None:
        return [("queue", submitted, max(submitted, sequence.last_time))]
    scheduled = submitted + sequence.queue_time
    first = sequence.first_token_time if sequence.num_tokens else sequence.last_time
    phases = [("queue", submitted, scheduled), ("prefill", scheduled, max(scheduled, first))]
    if sequence.num_tokens > 1:
        phases.append(("decode", first, sequence.last_time))
    return phases


def _new_ids(count: int) -> bytes:
    """Return random ids of 8 bytes each. One of zeros, which is invalid, has a probability of 2^-64."""
    return random.getrandbits(64 * count).to_bytes(8 * count)


_EPOCH = time.time_ns() - time.monotonic_ns()
"""Nanoseconds from 1970 to 0 of `time.monotonic`."""
_IDS_AND_TIMES = struct.Struct("<2s16s2s8scQcQ")
_TIME = struct.Struct("<cQ")
_DOUBLE = struct.Struct("<cd")
_INTERNAL = b"\x30\x01\x85\x01\x00\x01\x00\x00"
"""Fields of a span within the server: its kind (6), and its flags (16), which say that its parent is known to be local
(0x100)."""
_SERVER, _SERVED = b"\x30\x02" + _INTERNAL[2:], b"\x30\x02\x85\x01\x00\x03\x00\x00"
"""Those of a request's own span without a parent, and with one, which is remote (0x200)."""
_FAILED = b"\x7a\x02\x18\x02"
"""A span's status (15): an error."""


def _encode(
    spans: list[bytes], context: _Identity, id: bytes, parent: bytes, start: float, end: float, fields: bytes
) -> None:
    """Append a span as an item of OTLP's `ScopeSpans` (field 2). Times are those of `time.monotonic`, and `fields` the
    encoded fields that follow them. An empty `parent` is none."""
    if context.trace_state:
        fields += _field(3, context.trace_state.encode())
    if parent:
        fields += b"\x22\x08" + parent
    start_ns, end_ns = _EPOCH + int(start * 1e9), _EPOCH + int(end * 1e9)
    head = _IDS_AND_TIMES.pack(b"\x0a\x10", context.trace_id, b"\x12\x08", id, b"\x39", start_ns, b"\x41", end_ns)
    spans += (b"\x12", _varint(len(head) + len(fields)), head, fields)


@functools.lru_cache(4096)
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


@functools.lru_cache(4096, typed=True)
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


@functools.lru_cache(1024, typed=True)
def _fields(
    kind: bytes, name: str, keys: tuple[str, ...], *values: str | int | float | tuple[str, ...] | None
) -> bytes:
    """Encode the fields of a span that many spans share: kind, name (5) and attributes, without values of None."""
    pairs = zip(keys, values, strict=True)
    attributes = [_attribute.__wrapped__(key, value) for key, value in pairs if value is not None]
    return kind + _field(5, _utf8(name)) + b"".join(attributes)


def _events(interruptions: Sequence[tuple[str, float]], start: float, end: float) -> bytes:
    """Encode the events of a span (field 11) between two times."""
    events = [each for each in interruptions if start <= each[1] <= end]
    times = [_TIME.pack(b"\x09", _EPOCH + int(moment * 1e9)) for _, moment in events]
    return b"".join(_field(11, time + _field(2, _utf8(name))) for time, (name, _) in zip(times, events, strict=True))


_PHASES = {phase: _fields(_INTERNAL, phase, ()) for phase in ("queue", "prefill", "decode")}


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
        from opentelemetry.sdk.trace.sampling import DEFAULT_ON, Decision
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace import (
            NonRecordingSpan,
            SpanContext,
            SpanKind,
            TraceFlags,
            TraceState,
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
            """Encodes the traces of a batch. The SDK's exporter sends them, with its settings and retries."""

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
        sampler = TracerProvider(resource=resource, shutdown_on_exit=False).sampler

        def sample(scope: "Scope", parent: _Identity | None, trace_id: bytes) -> tuple[bool, str]:
            """Ask the SDK's sampler. Returns whether it takes the trace, and the header `tracestate`."""
            context = None
            if parent is not None:
                ids = int.from_bytes(parent.trace_id), int.from_bytes(parent.span_id)
                state = TraceState.from_header([parent.trace_state])
                context = set_span_in_context(NonRecordingSpan(SpanContext(*ids, True, parent.trace_flags, state)))
            method = scope["method"]
            attributes = {"http.request.method": method, "url.path": scope["path"]}
            result = sampler.should_sample(context, int.from_bytes(trace_id), method, SpanKind.SERVER, attributes)
            own = result.trace_state
            return result.decision is Decision.RECORD_AND_SAMPLE, "" if own is None else own.to_header()

        self._sample = None if sampler is DEFAULT_ON else sample
        """The sampler; None if it follows the client's decision and takes all other traces."""
        self._flags = [TraceFlags(flags) for flags in range(4)]

    def begin(self, scope: "Scope", parent: _Identity | None) -> _Identity:
        """Return the identity of a request's span, whose flags say whether the sampler takes it."""
        ids = _new_ids(3)
        trace_id, is_taken, flags, state = ids[:16], True, _RANDOM, ""
        if parent is not None:
            trace_id, flags, state = parent.trace_id, parent.trace_flags & _RANDOM, parent.trace_state
            is_taken = bool(parent.trace_flags & _SAMPLED)
        if self._sample is not None:
            is_taken, state = self._sample(scope, parent, trace_id)
        return _Identity(trace_id, ids[16:], self._flags[flags | is_taken], state)

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
        spans = trace.encoded()
        if batch and len(batch) + len(spans) > _MAX_BODY_BYTES:
            yield bytes(batch)
            batch.clear()
        batch += spans
    yield bytes(batch)


class _Histogram:
    """Observations with equal attributes."""

    __slots__ = ("attributes", "bounds", "counts", "exemplars", "largest", "smallest", "start", "sum")

    def __init__(self, attributes: Mapping[str, str], bounds: Sequence[float], start: int) -> None:
        self.attributes, self.bounds, self.start = attributes, bounds, start
        self.counts = [0] * (len(bounds) + 1)
        self.sum, self.smallest, self.largest = 0.0, math.inf, -math.inf
        self.exemplars: dict[int, tuple[float, tuple[int, _Identity | None]]] = {}
        """The latest observation of each bucket since the last export, with its time and trace."""

    def add(self, value: float, exemplar: tuple[int, _Identity | None] | None) -> None:
        """Add an observation. `exemplar` is its time and trace, if it may represent its bucket."""
        bucket = bisect_left(self.bounds, value)
        self.counts[bucket] += 1
        self.sum += value
        if value < self.smallest:
            self.smallest = value
        if value > self.largest:
            self.largest = value
        if exemplar is not None:
            self.exemplars[bucket] = value, exemplar


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

        def point(observed: _Histogram) -> HistogramDataPoint:
            exemplars = []
            for value, (moment, trace) in observed.exemplars.values():
                ids = trace and (int.from_bytes(trace.span_id), int.from_bytes(trace.trace_id))
                exemplars.append(Exemplar({}, value, moment, *(ids or (None, None))))
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
                for index, (name, (text, _)) in enumerate(_HISTOGRAMS.items()):
                    observed = [each[index] for each in self._observed.values()]
                    if points := [point(each) for each in observed if any(each.counts)]:
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
        self._observed: dict[tuple[str, str | None], list[_Histogram]] = {}
        """The histograms of a model and an operation, in the order of `_HISTOGRAMS`."""
        self._start = time.time_ns()
        self._exemplars = os.environ.get(_EXEMPLARS, "").lower() or "trace_based"
        self._closed = threading.Event()
        interval = export_interval(os.environ)
        exporter = OTLPMetricExporter()
        self._thread = threading.Thread(target=export, name="otlp-metrics", daemon=True)
        self._thread.start()

    def observe(
        self, states: "Sequence[RequestState]", model: str, operation: str | None, context: _Identity | None
    ) -> None:
        """Add ended sequences. `context` is the trace for their exemplars."""
        exemplar: tuple[int, _Identity | None] | None = None
        if self._exemplars == "trace_based":
            if context is not None and context.trace_flags & _SAMPLED:
                exemplar = time.time_ns(), context
        elif self._exemplars == "always_on":
            exemplar = time.time_ns(), context
        with self._lock:
            histograms = self._observed.get((model, operation))
            if histograms is None:
                histograms = self._observed[model, operation] = self._new_histograms(model, operation)
            duration, first_token, per_token = histograms
            for state in states:
                duration.add(state.last_time - state.arrival_time, exemplar)
                if state.token_ids:
                    first_token.add(state.ttft, exemplar)
                if len(state.token_ids) > 1:
                    per_token.add(state.tpot, exemplar)

    def _new_histograms(self, model: str, operation: str | None) -> list[_Histogram]:
        attributes = {"gen_ai.provider.name": "kaon", "gen_ai.request.model": model, "gen_ai.response.model": model}
        if operation is not None:
            attributes["gen_ai.operation.name"] = operation
        return [_Histogram(attributes, bounds, self._start) for _, bounds in _HISTOGRAMS.values()]

    def close(self) -> None:
        """Send the histograms a last time and stop."""
        self._closed.set()
        self._thread.join()
