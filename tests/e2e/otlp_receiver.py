"""`OtlpReceiver`: receives OTLP over HTTP as a collector does, and stores spans and metrics."""

import gzip
import http.server
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


class OtlpReceiver:
    """The received telemetry. Spans are messages of OTLP."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.spans: list[Any] = []
        self.resources: list[dict[str, Any]] = []
        self.histograms: dict[str, list[Any]] = {}
        """The points of each export, by the metric's name; they are cumulative."""
        self.units: dict[str, str] = {}

    def of_trace(self, trace_id: str) -> list[Any]:
        """The spans of a trace, whose id is in hexadecimal."""
        return [span for span in self.spans if span.trace_id.hex() == trace_id]

    def receive(self, path: str, body: bytes) -> bytes:
        if path == "/v1/traces":
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                self.resources.append(attributes(resource.resource))
                self.spans += [span for scope in resource.scope_spans for span in scope.spans]
            return ExportTraceServiceResponse().SerializeToString()
        assert path == "/v1/metrics"
        for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
            for metric in (metric for scope in resource.scope_metrics for metric in scope.metrics):
                self.histograms.setdefault(metric.name, []).append(list(metric.histogram.data_points))
                self.units[metric.name] = metric.unit
        return ExportMetricsServiceResponse().SerializeToString()


def attributes(message: Any) -> dict[str, Any]:
    """The attributes of a span, event, resource or point."""
    return {each.key: _value(each.value) for each in message.attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)


@contextmanager
def otlp_receiver() -> Iterator[OtlpReceiver]:
    """A receiver that listens during the block."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            match self.headers["Content-Encoding"]:
                case "gzip":
                    body = gzip.decompress(body)
                case "deflate":
                    body = zlib.decompress(body)
            answer = receiver.receive(self.path, body)
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as served:
        receiver = OtlpReceiver(served.server_port)
        thread = threading.Thread(target=served.serve_forever, daemon=True)
        thread.start()
        yield receiver
        served.shutdown()
        thread.join()
