"""One server with all optional interfaces for operators: traces, metrics for routers, KV events, a service manager."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import zmq

from tests import ports
from tests.e2e.kaon_server import MODEL, KaonServer, eventually, free_port
from tests.e2e.otlp_receiver import OtlpReceiver, attributes, otlp_receiver

pytestmark = pytest.mark.usefixtures("warm_children")

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"


class Operated(NamedTuple):
    server: KaonServer
    receiver: OtlpReceiver
    notified: list[str]
    """Messages to the service manager."""
    events_port: int


@pytest.fixture(scope="module")
def operated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    folder = tmp_path_factory.mktemp("operated")
    notified: list[str] = []

    def manage() -> None:
        while message := manager.recv(4096):
            notified.append(message.decode())

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager, otlp_receiver() as receiver:
        manager.bind(str(folder / "notify"))
        managing = threading.Thread(target=manage)
        managing.start()
        events_port = ports.free_ports()
        server = KaonServer(
            folder / "log",
            free_port(),
            environment={
                "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url,
                "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test",
                "OTEL_BSP_SCHEDULE_DELAY": "50",
                "OTEL_METRIC_EXPORT_INTERVAL": "200",
                "NOTIFY_SOCKET": str(folder / "notify"),
                "WATCHDOG_USEC": "400000",
            },
            num_kvcache_blocks=64,
            max_model_len=1024,
            server_config={"metrics_aliases": "vllm", "access_log": "json"},
            kv_events_config={"kv_events_endpoint": f"tcp://*:{events_port}", "kv_events_topic": "kv@a@b"},
        ).ready()
        yield Operated(server, receiver, notified, events_port)
        assert server.stop() == 0
        assert "Traceback" not in server.stderr
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
            last.sendto(b"", str(folder / "notify"))
        managing.join()
        assert any(message.startswith("STOPPING=1") for message in notified)


def post(operated: Operated, path: str, body: dict[str, Any], **headers: str) -> tuple[Any, str]:
    """The answer, and the id of its trace."""
    response = operated.server.post(path, {"model": MODEL, **body}, **headers)
    version, trace_id, span_id, flags = response.headers["traceresponse"].split("-")
    assert (version, len(span_id), int(flags, 16) & 1) == ("00", 16, 1)
    return response, trace_id


def spans(operated: Operated, trace_id: str, root: str = "POST") -> dict[str, Any]:
    """The spans of a trace by name, once that of the HTTP request, which ends last, has arrived."""
    eventually(lambda: any(span.name.startswith(root) for span in operated.receiver.of_trace(trace_id)))
    found = operated.receiver.of_trace(trace_id)
    return {span.name: span for span in found}


def test_a_trace_goes_from_the_client_s_context_to_the_last_token(operated: Operated) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 6, "temperature": 0.5, "stream": True}
    response, trace_id = post(operated, "/v1/chat/completions", body, traceparent=f"00-{TRACE}-{PARENT}-01")
    assert trace_id == TRACE
    assert response.headers["traceresponse"].split("-")[2] != PARENT
    found = spans(operated, TRACE)
    assert found.keys() == {"POST /v1/chat/completions", f"chat {MODEL}", "queue", "prefill", "decode"}
    http, chat = found["POST /v1/chat/completions"], found[f"chat {MODEL}"]
    assert http.parent_span_id.hex() == PARENT
    assert http.kind == 2  # SERVER
    assert attributes(http).items() >= {"http.route": "/v1/chat/completions", "http.response.status_code": 200}.items()
    assert chat.parent_span_id == http.span_id
    given = attributes(chat)
    assert given["gen_ai.operation.name"] == "chat"
    assert given["gen_ai.request.model"] == MODEL
    assert given["gen_ai.usage.input_tokens"] > 0
    assert 0 < given["gen_ai.usage.output_tokens"] <= 6
    assert given["gen_ai.request.max_tokens"] == 6
    assert given["gen_ai.response.finish_reasons"] in (["length"], ["stop"])
    phases = [found[name] for name in ("queue", "prefill", "decode")]
    assert all(phase.parent_span_id == chat.span_id for phase in phases)
    # Each begins where the previous one ends, within the HTTP request.
    times = [(span.start_time_unix_nano, span.end_time_unix_nano) for span in phases]
    assert all(start <= end for start, end in times)
    assert [end for _, end in times[:-1]] == [start for start, _ in times[1:]]
    assert http.start_time_unix_nano <= chat.start_time_unix_nano <= times[0][0]
    assert times[-1][1] <= http.end_time_unix_nano
    resource = operated.receiver.resources[0]
    assert resource["service.name"] == "kaon"
    assert resource["deployment.environment.name"] == "test"


def test_each_choice_has_its_spans_and_an_error_its_status(operated: Operated) -> None:
    _, trace_id = post(operated, "/v1/completions", {"prompt": "A", "max_tokens": 3, "n": 2, "ignore_eos": True})
    spans(operated, trace_id)
    choices = [
        attributes(span)["kaon.choice"] for span in operated.receiver.of_trace(trace_id) if span.name == "decode"
    ]
    assert sorted(choices) == [0, 1]
    _, trace_id = post(operated, "/v1/completions", {"prompt": "A", "max_tokens": -3})
    found = spans(operated, trace_id)
    assert list(found) == ["POST /v1/completions"]
    assert attributes(found["POST /v1/completions"])["http.response.status_code"] == 400


def test_a_context_that_is_not_sampled_is_respected(operated: Operated) -> None:
    other = "0af7651916cd43dd8448eb211c80319c"
    body = {"model": MODEL, "prompt": "A", "max_tokens": 2}
    response = operated.server.post("/v1/completions", body, traceparent=f"00-{other}-{PARENT}-00")
    assert int(response.headers["traceresponse"][-2:], 16) & 1 == 0
    _, trace_id = post(operated, "/v1/completions", {"prompt": "A", "max_tokens": 2})
    spans(operated, trace_id)  # The later one has arrived.
    assert operated.receiver.of_trace(other) == []


def test_probes_and_scrapes_have_no_trace(operated: Operated) -> None:
    for path in ("/readyz", "/metrics"):
        assert "traceresponse" not in operated.server.get(path).headers


def test_the_json_log_names_the_trace(operated: Operated) -> None:
    _, trace_id = post(operated, "/v1/completions", {"prompt": "A", "max_tokens": 2})
    span = spans(operated, trace_id)["POST /v1/completions"]

    def lines() -> list[dict[str, Any]]:
        return [json.loads(line) for line in operated.server.stderr.splitlines() if trace_id in line]

    eventually(lambda: bool(lines()))
    assert [line["span_id"] for line in lines()] == [span.span_id.hex()]


def test_a_preemption_is_an_event_of_the_request_that_lost_its_blocks(operated: Operated) -> None:
    """64 blocks of 16 tokens are too few for four sequences of 300."""
    before = operated.server.metric("kaon_preemptions_total")
    body = {"prompt": "A", "max_tokens": 300, "n": 4, "ignore_eos": True, "temperature": 1.0}
    _, trace_id = post(operated, "/v1/completions", body)
    assert operated.server.metric("kaon_preemptions_total") > before
    spans(operated, trace_id)
    events = [event.name for span in operated.receiver.of_trace(trace_id) for event in span.events]
    assert events == ["preempted"] * len(events)
    assert events


def test_an_engine_that_dies_is_an_event_of_what_continued(operated: Operated) -> None:
    body = {"model": MODEL, "prompt": "A", "max_tokens": 400, "ignore_eos": True, "stream": True}
    core = operated.server.core
    with operated.server.http() as http, http.stream("POST", "/v1/completions", json=body) as response:
        trace_id = response.headers["traceresponse"].split("-")[1]
        lines = response.iter_lines()
        next(lines)
        core.kill()
        assert list(lines)[-2:] == ["data: [DONE]", ""]
    found = spans(operated, trace_id)
    events = [event.name for span in found.values() for event in span.events]
    assert "engine 0 restarted" in events


def test_metrics_follow_genai_s_conventions_and_point_to_traces(operated: Operated) -> None:
    _, trace_id = post(operated, "/v1/completions", {"prompt": "A", "max_tokens": 4, "ignore_eos": True})
    names = ("request.duration", "time_to_first_token", "time_per_output_token")
    histograms = operated.receiver.histograms

    def exemplars(name: str) -> set[str]:
        exports = histograms.get(f"gen_ai.server.{name}", [])
        return {each.trace_id.hex() for points in exports for point in points for each in point.exemplars}

    for name in names:
        eventually(lambda name=name: trace_id in exemplars(name))  # type: ignore[misc]
        assert operated.receiver.units[f"gen_ai.server.{name}"] == "s"
        last = histograms[f"gen_ai.server.{name}"][-1]
        [point] = [each for each in last if attributes(each).get("gen_ai.operation.name") == "text_completion"]
        assert point.count > 0
        assert attributes(point)["gen_ai.request.model"] == MODEL


# -- routers and the service manager ----------------------------------------------------------------------------


def test_a_router_sees_the_prefix_that_was_cached(operated: Operated) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"kv@a@")
    socket.connect(f"tcp://127.0.0.1:{operated.events_port}")
    prompt = [300 + number for number in range(40)]
    stored: list[int] = []
    last: object = None
    number = 0
    while len(stored) < 32:
        if not stored:  # A subscriber is connected some time after its call.
            number += 1
            post(operated, "/v1/completions", {"prompt": [number, *prompt], "max_tokens": 1})
        while socket.poll(200):
            topic, _, payload = socket.recv_multipart()
            assert topic == b"kv@a@b"
            for kind, *fields in msgspec.msgpack.decode(payload)[1]:
                if kind != "BlockStored":
                    continue
                hashes, parent, tokens, *_ = fields
                # Where a busy machine computes the prompt in two steps, its second block comes on its own.
                if tokens[1:16] == prompt[:15] if not stored else parent == last:
                    stored += tokens
                    last = hashes[-1]
    assert stored == [stored[0], *prompt][:32]
    context.destroy(linger=0)


def test_routers_names_are_shown_and_the_load_comes_with_answers(operated: Operated) -> None:
    assert operated.server.metric(f'vllm:num_requests_waiting{{engine="0",model_name="{MODEL}"}}') == 0
    assert operated.server.metric('vllm:cache_config_info{block_size="16",num_gpu_blocks="64"}') == 1
    body = {"model": MODEL, "prompt": "A", "max_tokens": 2}
    response = operated.server.post("/v1/completions", body, **{"endpoint-load-metrics-format": "json"})
    load = json.loads(response.headers["endpoint-load-metrics"].removeprefix("JSON "))
    assert load["named_metrics"].keys() == {"kv_cache_usage_perc", "num_requests_waiting", "num_requests_running"}


def test_the_service_manager_is_notified(operated: Operated) -> None:
    [ready] = [message for message in operated.notified if "READY=1" in message]
    assert ready == f"READY=1\nSTATUS=serving {MODEL} on {operated.server.url}"
    beats = operated.notified.count("WATCHDOG=1")
    eventually(lambda: operated.notified.count("WATCHDOG=1") >= beats + 2)


# -- what cannot be exported ------------------------------------------------------------------------------------


def test_what_cannot_be_exported_ends_the_start_with_a_sentence() -> None:
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
    command = [sys.executable, "-m", "server", "serve", "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **variables}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ended.returncode == 2  # The exit code after which a service manager does not retry.
    assert "OTEL_EXPORTER_OTLP_PROTOCOL is grpc" in ended.stderr
