"""Spans of a request as a collector receives them, and that an untraced request makes none."""

import http.server
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from server.tracing import RequestTrace, Tracing
from tests.e2e.otlp_receiver import OtlpReceiver, attributes, otlp_receiver

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
ROUTE = "/v1/completions"
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


def begin(tracing: Tracing, now: float, *, flags: str | None = None, path: str = ROUTE) -> RequestTrace:
    headers = [] if flags is None else [(b"traceparent", f"00-{TRACE}-{PARENT}-{flags}".encode())]
    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": headers,
        "client": ("127.0.0.1", 5),
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
    assert trace.spans == []
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
