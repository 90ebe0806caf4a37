"""Spans of a request as a collector receives them, and that an untraced request makes none."""

import gc
import http.server
import subprocess
import sys
import threading
import time
import tracemalloc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from server.tracing import RequestTrace, Tracing, WrongVariable, requested_signals
from tests.e2e.otlp_receiver import OtlpReceiver, attributes, otlp_receiver

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
ROUTE = "/v1/completions"
FIRST_TOKEN = "gen_ai.server.time_to_first_token"
PARAMS: Any = SimpleNamespace(max_tokens=8, temperature=1.0, top_p=0.9)


def state(now: float, **changes: Any) -> Any:
    values = {
        "arrival_time": now,
        "queue_time": 0.5,
        "first_token_time": now + 1,
        "last_time": now + 2,
        "token_ids": [1, 2, 3],
        "ttft": 1.0,
        "tpot": 0.5,
        "num_prompt_tokens": 4,
        "num_cached_tokens": 0,
        "finish_reason": "length",
        "interruptions": [],
    }
    return SimpleNamespace(**{**values, **changes})


def begin(
    tracing: Tracing, now: float, *, flags: str | None = None, path: str = ROUTE, **fields: object
) -> RequestTrace:
    headers = [] if flags is None else [(b"traceparent", f"00-{TRACE}-{PARENT}-{flags}".encode())]
    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": headers,
        "client": ("127.0.0.1", 5),
        **fields,
    }
    trace = tracing.begin(scope, now)
    scope["route"] = SimpleNamespace(path=ROUTE)
    return trace


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Any:
    with otlp_receiver() as running:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", running.url)
        yield running


@pytest.mark.parametrize("compression", ["none", "gzip", "deflate"])
def test_a_collector_receives_the_spans_of_a_request(
    compression: str, receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", compression)
    tracing, now = Tracing({"TRACES"}, "1.2"), time.monotonic()
    trace = begin(tracing, now, flags="03")
    assert trace.header == f"00-{TRACE}-{trace.span_id}-03".encode()
    trace.generated([state(now, interruptions=[("preempted", now + 1.5)])], PARAMS, "m", now)
    trace.end(500)
    tracing.close()
    queue, prefill, decode, generation, http = receiver.of_trace(TRACE)
    assert [span.name for span in receiver.spans] == [
        "queue",
        "prefill",
        "decode",
        "text_completion m",
        f"POST {ROUTE}",
    ]
    assert http.parent_span_id.hex() == PARENT
    assert (http.kind, http.status.code, http.flags) == (Span.SPAN_KIND_SERVER, Status.STATUS_CODE_ERROR, 0x300)
    assert attributes(http) == {
        "http.request.method": "POST",
        "url.path": ROUTE,
        "url.scheme": "http",
        "network.protocol.version": "1.1",
        "http.response.status_code": 500,
        "client.address": "127.0.0.1",
        "client.port": 5,
        "http.route": ROUTE,
        "error.type": "500",
    }
    assert generation.parent_span_id == http.span_id
    assert (generation.kind, generation.status.code, generation.flags) == (Span.SPAN_KIND_INTERNAL, 0, 0x100)
    assert attributes(generation) == {
        "gen_ai.provider.name": "kaon",
        "gen_ai.request.model": "m",
        "gen_ai.response.model": "m",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.usage.input_tokens": 4,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.request.max_tokens": 8,
        "gen_ai.request.temperature": 1.0,
        "gen_ai.request.top_p": 0.9,
        "kaon.usage.cached_tokens": 0,
    }
    assert {span.parent_span_id for span in (queue, prefill, decode)} == {generation.span_id}
    seconds = [(span.end_time_unix_nano - span.start_time_unix_nano) / 1e9 for span in (queue, prefill, decode)]
    assert seconds == pytest.approx([0.5, 0.5, 1.0])
    assert [(event.name, event.time_unix_nano - decode.start_time_unix_nano) for event in decode.events] == [
        ("preempted", pytest.approx(5e8, abs=2))
    ]
    assert receiver.resources[0].items() >= {"service.name": "kaon", "service.version": "1.2"}.items()


def test_a_trace_without_a_parent_begins_with_random_ids(receiver: OtlpReceiver) -> None:
    tracing, now = Tracing({"TRACES"}, "1"), time.monotonic()
    traces = [begin(tracing, now, path="/" + "long" * 1000) for _ in range(2)]
    for trace in traces:
        trace.end(404)
    tracing.close()
    assert [span.trace_id.hex() for span in receiver.spans] == [trace.trace_id for trace in traces]
    assert len({trace.trace_id for trace in traces}) == 2
    assert {span.parent_span_id for span in receiver.spans} == {b""}
    assert {attributes(span)["url.path"] for span in receiver.spans} == {"/" + "long" * 1000}


def test_texts_and_numbers_of_every_length_are_received_as_they_are(receiver: OtlpReceiver) -> None:
    tracing, now, path = Tracing({"TRACES"}, "1"), time.monotonic(), "/\ud800é" + "a" * 20_000
    trace = begin(tracing, now, path=path)
    changes: list[dict[str, Any]] = [{"num_prompt_tokens": 2**33, "num_cached_tokens": 300}, {"finish_reason": None}]
    trace.generated([state(now, **each) for each in changes], PARAMS, "modèle" * 30, now)
    trace.end(200)
    tracing.close()
    generation, http = receiver.spans[-2:]
    assert attributes(http)["url.path"] == path.replace("\ud800", "?")
    assert generation.name == f"text_completion {'modèle' * 30}"
    assert (
        attributes(generation).items()
        >= {
            "gen_ai.usage.input_tokens": 2**33,
            "kaon.usage.cached_tokens": 300,
            "gen_ai.response.finish_reasons": ["length", "abort"],
        }.items()
    )
    assert [attributes(span)["kaon.choice"] for span in receiver.spans[:-2]] == [0, 0, 0, 1, 1, 1]


def test_a_batch_that_a_collector_would_refuse_is_sent_in_parts(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.tracing._MAX_BODY_BYTES", 5000)
    tracing, now = Tracing({"TRACES"}, "1"), time.monotonic()
    paths = [f"/{number}" + "long" * 500 for number in range(5)] + ["/" + "long" * 2000]
    for path in paths:
        begin(tracing, now, path=path).end(404)
    tracing.close()
    assert [attributes(span)["url.path"] for span in receiver.spans] == paths
    assert len(receiver.resources) == 4


def test_a_trace_that_waits_for_its_batch_holds_no_connection(receiver: OtlpReceiver) -> None:
    """Thousands of traces wait while a collector does not answer. A request's scope leads to its connection."""

    class Connection:
        pass

    tracing, connection, now = Tracing({"TRACES"}, "1"), Connection(), time.monotonic()
    held, trace = weakref.ref(connection), begin(tracing, now, state={"connection": connection})
    del connection
    trace.end(200)
    gc.collect()
    assert held() is None
    tracing.close()
    assert [span.name for span in receiver.spans] == [f"POST {ROUTE}"]


def test_a_waiting_trace_of_a_thousand_choices_keeps_little_of_them(receiver: OtlpReceiver) -> None:
    tracing, now = Tracing({"TRACES"}, "1"), time.monotonic()
    trace = begin(tracing, now)
    states = [state(now, last_time=now + 2 + number) for number in range(1000)]
    states[-1].finish_reason = "stop"
    tracemalloc.start()
    trace.generated(states, PARAMS, "m", now)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 30_000
    trace.end(200)
    tracing.close()
    *phases, generation, _ = receiver.spans
    assert [attributes(span)["kaon.choice"] for span in phases] == [number // 3 for number in range(48)]
    assert generation.end_time_unix_nano - generation.start_time_unix_nano == pytest.approx(1001e9, abs=1000)
    assert (
        attributes(generation).items()
        >= {
            "gen_ai.request.choice.count": 1000,
            "gen_ai.usage.output_tokens": 3000,
            "gen_ai.response.finish_reasons": ["length"] * 999 + ["stop"],
        }.items()
    )


@pytest.mark.parametrize("is_exported", [False, True])
def test_a_generation_that_outlives_its_request_is_received(
    is_exported: bool, receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a background response, and of a resumable stream whose client has disconnected."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10" if is_exported else "60000")
    tracing, now = Tracing({"TRACES"}, "1"), time.monotonic()
    trace = begin(tracing, now)
    trace.end(200)
    while is_exported and not receiver.spans:
        time.sleep(0.01)
    trace.generated([state(now)], PARAMS, "m", now)
    tracing.close()
    http, *phases, generation = receiver.spans
    assert [span.name for span in (http, *phases, generation)] == [
        f"POST {ROUTE}",
        "queue",
        "prefill",
        "decode",
        "text_completion m",
    ]
    assert generation.parent_span_id == http.span_id
    assert {span.trace_id for span in receiver.spans} == {http.trace_id}


def observed(receiver: OtlpReceiver, values: list[tuple[float, str | None]], times: int = 1) -> list[Any]:
    """The exported points of the time to the first token after each of `times` exports of these values."""
    tracing = Tracing({"METRICS"}, "1")
    for _ in range(times):
        for ttft, flags in values:
            now = time.monotonic()
            begin(tracing, now, flags=flags).generated([state(now, ttft=ttft)], PARAMS, "m", now)
        exported = len(receiver.histograms.get(FIRST_TOKEN, ()))
        while times > 1 and len(receiver.histograms.get(FIRST_TOKEN, ())) == exported:
            time.sleep(0.01)
    tracing.close()
    return [points for (points,) in receiver.histograms[FIRST_TOKEN]]


def test_histograms_count_requests_and_point_to_their_traces(receiver: OtlpReceiver) -> None:
    (point,) = observed(receiver, [(0.1, None), (0.1001, "01"), (0.2, "01"), (0.02, "00"), (99.0, None)])
    counts = dict(zip([*point.explicit_bounds, None], point.bucket_counts, strict=True))
    assert {bound: count for bound, count in counts.items() if count} == {0.02: 1, 0.1: 1, 0.25: 2, None: 1}
    assert (point.count, point.sum, point.min, point.max) == (5, pytest.approx(99.4201), 0.02, 99.0)
    (exemplar,) = point.exemplars
    assert (exemplar.as_double, exemplar.trace_id.hex(), exemplar.span_id.hex()) == (0.2, TRACE, PARENT)
    assert attributes(point) == {
        "gen_ai.provider.name": "kaon",
        "gen_ai.request.model": "m",
        "gen_ai.response.model": "m",
        "gen_ai.operation.name": "text_completion",
    }


@pytest.mark.parametrize(("temporality", "counts"), [("cumulative", {1, 2}), ("delta", {1})])
def test_counts_are_cumulative_or_since_the_last_export(
    temporality: str, counts: set[int], receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", temporality)
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "100")
    points = observed(receiver, [(0.1, None)], times=2)
    assert {point.count for point in points} == counts
    starts = [point.start_time_unix_nano for point in points]
    assert (starts[0] < starts[-1]) == (temporality == "delta")


def test_an_exporter_that_raises_is_logged_and_tried_again(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The SDK's older exporters raise where the time of a retry is over."""
    export, has_raised = OTLPMetricExporter.export, threading.Event()

    def raise_first(self: OTLPMetricExporter, *args: Any) -> Any:
        if has_raised.is_set():
            return export(self, *args)
        has_raised.set()
        raise ValueError("the timeout is not above 0")

    monkeypatch.setattr(OTLPMetricExporter, "export", raise_first)
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "10")
    tracing, now = Tracing({"METRICS"}, "1"), time.monotonic()
    begin(tracing, now).generated([state(now)], PARAMS, "m", now)
    assert has_raised.wait(60)
    tracing.close()
    assert [point.count for (point,) in receiver.histograms[FIRST_TOKEN]][-1] == 1
    assert "the timeout is not above 0" in caplog.text


@pytest.mark.parametrize(
    ("filter", "exemplars"), [("trace_based", [0.2]), ("always_on", [0.1, 0.2]), ("always_off", [])]
)
def test_the_filter_chooses_exemplars(
    filter: str, exemplars: list[float], receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_METRICS_EXEMPLAR_FILTER", filter)
    (point,) = observed(receiver, [(0.1, None), (0.2, "01")])
    assert [each.as_double for each in point.exemplars] == exemplars


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION", "base2_exponential_bucket_histogram"),
        ("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "total"),
        ("OTEL_METRICS_EXEMPLAR_FILTER", "some"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "1m"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "0"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "inf"),
    ],
)
def test_a_variable_of_metrics_that_cannot_be_followed_is_refused(variable: str, value: str) -> None:
    metrics = {"OTEL_METRICS_EXPORTER": "otlp"}
    assert requested_signals(metrics) == {"METRICS"}
    with pytest.raises(WrongVariable, match=rf"{variable} is {value}; it must be "):
        requested_signals({**metrics, variable: value})
    assert requested_signals({"OTEL_TRACES_EXPORTER": "otlp", variable: value}) == {"TRACES"}


def test_an_exporter_that_is_not_there_is_refused() -> None:
    with pytest.raises(WrongVariable, match="OTEL_TRACES_EXPORTER is zipkin; it must be otlp or none"):
        requested_signals({"OTEL_TRACES_EXPORTER": "zipkin"})


def test_sizes_of_batches_that_cannot_be_followed_are_refused(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "10")
    with pytest.raises(WrongVariable, match=r"OTEL_BSP_\* cannot be followed: max_export_batch_size must be less"):
        Tracing({"TRACES"}, "1")


@pytest.mark.parametrize(("sampler", "flags"), [("parentbased_always_on", "00"), ("always_off", "01")])
def test_a_request_that_is_not_sampled_makes_no_span(
    sampler: str, flags: str, receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    tracing, now = Tracing({"TRACES"}, "1"), time.monotonic()
    trace = begin(tracing, now, flags=flags)
    assert trace.header == f"00-{TRACE}-{trace.span_id}-00".encode()
    trace.generated([state(now)], PARAMS, "m", now)
    trace.end(200)
    tracing.close()
    assert receiver.spans == []


def test_a_collector_that_does_not_answer_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK waits and retries for ten seconds a batch; a process would be killed at the end of its grace period."""
    released, answered = threading.Event(), []

    class Silent(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            released.wait(30)
            answered.append(self.path)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Silent) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{served.server_port}")
        monkeypatch.setattr("server.tracing._CLOSE_SECONDS", 0.1)
        tracing = Tracing({"TRACES", "METRICS"}, "1")
        begin(tracing, time.monotonic()).end(200)
        tracing.close()
        assert answered == []
        released.set()
        served.shutdown()


def test_nothing_of_opentelemetry_is_imported_where_no_variable_asks_for_it() -> None:
    code = "import sys, server.process; sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PATH": ""}, timeout=100)
