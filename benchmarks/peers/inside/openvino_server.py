"""`openvino_server.py MODEL PORT CACHE_GB PROPERTIES`: a thin HTTP server over OpenVINO GenAI's continuous batching.

The pipeline is used as its documentation describes: requests are added with `add_request`, and a loop calls `step`.
The server has only what /v1/completions with `stream` needs, and costs as little as possible: the tokenizers library
encodes prompts and decodes tokens, and the loop itself writes each step's tokens to the sockets.
"""

import itertools
import json
import queue
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class Answering:
    """A request in the pipeline; `stream` is its connection."""

    def __init__(self, body: dict[str, Any], tokenizer: Tokenizer, stream: Any) -> None:
        self.ids: list[int] = tokenizer.encode(body["prompt"], add_special_tokens=False).ids
        self.max_tokens: int = body["max_tokens"]
        self.ended = threading.Event()
        self._tokenizer = tokenizer
        self._text = DecodeStream(skip_special_tokens=True)
        self._stream = stream
        self._model: str = body["model"]
        self._count = 0

    def write(self, tokens: list[int], finished: bool) -> None:
        """Send `tokens`, and after the last ones the end of the stream."""
        self._count += len(tokens)
        text = "".join(self._text.step(self._tokenizer, token) or "" for token in tokens)
        reason = "length" if finished else None
        events: list[dict[str, Any]] = [{"choices": [{"index": 0, "text": text, "finish_reason": reason}]}]
        if finished:
            counts = {"prompt_tokens": len(self.ids), "completion_tokens": self._count}
            events.append({"choices": [], "usage": {**counts, "total_tokens": sum(counts.values())}})
        common = {"object": "text_completion", "model": self._model}
        data = "".join(f"data: {json.dumps(common | event)}\n\n" for event in events)
        try:
            self._stream.write((data + "data: [DONE]\n\n" * finished).encode())
        finally:
            if finished:
                self.ended.set()


class Pipeline:
    """The pipeline and its loop. Any thread may add requests by `put`."""

    def __init__(self, folder: Path, cache_gb: int, properties: dict[str, str]) -> None:
        settings = openvino_genai.SchedulerConfig()
        settings.cache_size = cache_gb
        settings.enable_prefix_caching = True
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(folder, settings, "CPU", properties)
        self._waiting: queue.SimpleQueue[Answering] = queue.SimpleQueue()
        self._running: list[tuple[Answering, Any]] = []
        self._numbers = itertools.count()
        self.put = self._waiting.put

    def run(self) -> None:
        """Run steps while there are requests; otherwise wait."""
        while True:
            while not (self._running and self._waiting.empty()):
                self._add(self._waiting.get())
            self._pipeline.step()
            self._deliver()

    def _add(self, request: Answering) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = request.max_tokens
        config.do_sample = False
        ids = openvino.Tensor(np.array([request.ids], dtype=np.int64))
        self._running.append((request, self._pipeline.add_request(next(self._numbers), ids, config)))

    def _deliver(self) -> None:
        going_on = []
        for request, handle in self._running:
            finished = handle.get_status() != openvino_genai.GenerationStatus.RUNNING
            tokens = []
            while handle.can_read():
                tokens += next(iter(handle.read().values())).generated_ids
            if tokens or finished:
                request.write(tokens, finished)
            if not finished:
                going_on.append((request, handle))
        self._running = going_on


def main(folder: Path, port: int, cache_gb: int, properties: dict[str, str]) -> None:
    """Serve until killed."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    pipeline = Pipeline(folder, cache_gb, properties)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            request = Answering(body, tokenizer, self.wfile)
            pipeline.put(request)
            request.ended.wait()

        def log_message(self, *_: Any) -> None:
            """Log no requests."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 256

    server = Server(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    pipeline.run()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
