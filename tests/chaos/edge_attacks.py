"""Attacks on the HTTP edge, in a process of their own: `python -m tests.chaos.edge_attacks NAME PORT`.

An attack continues until standard input ends. Loads go to this machine only. It runs at the lowest priority: attackers
are not to take the server's processor time.
"""

import contextlib
import gzip
import itertools
import json
import os
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache

from tests.e2e.kaon_server import MODEL, hold_little

CONNECTIONS = 120
"""Connections that an attack opens, if the server accepts as many."""
_THREADS = 8
_LARGE = 4 * 2**20 - 1024
"""Bytes of a body just below the default limit."""

HEAVY = [f"heavy{number}" for number in range(10)]
"""Keys of attackers."""


@cache
def _zipped() -> bytes:
    """64 MiB, compressed."""
    return gzip.compress(b" " * 2**26)


Port = int
Over = threading.Event


def _held(port: Port, over: Over, first: bytes, then: bytes, interval: float) -> None:
    """Hold connections: `first` is sent immediately, then a part of `then` every `interval`; closed ones are
    replaced."""
    held: dict[socket.socket, int] = {}
    selector = selectors.DefaultSelector()
    while not over.wait(interval):
        for key, _ in selector.select(0):
            with contextlib.suppress(OSError):
                if key.fileobj.recv(4096):  # type: ignore[union-attr]
                    continue
            selector.unregister(key.fileobj)
            del held[key.fileobj]  # type: ignore[arg-type]
            key.fileobj.close()  # type: ignore[union-attr]
        for connection, position in held.items():
            with contextlib.suppress(OSError):
                connection.send(then[position % max(len(then), 1) :][:1])
            held[connection] = position + 1
        while len(held) < CONNECTIONS and not over.is_set():
            connection = socket.socket()
            connection.settimeout(1)
            with contextlib.suppress(OSError):
                connection.connect(("127.0.0.1", port))
                connection.sendall(first)
                connection.setblocking(False)
                held[connection] = 0
                selector.register(connection, selectors.EVENT_READ)
                continue
            connection.close()
            break


def silent(port: Port, over: Over) -> None:
    """Connections on which nothing is sent."""
    _held(port, over, b"", b"", 0.05)


def heads(port: Port, over: Over) -> None:
    """Heads that send a byte ten times per second."""
    _held(port, over, b"GET /livez HTTP/1.1\r\nHost: x\r\n", b"X-Header: value\r\n", 0.1)


def bodies(port: Port, over: Over) -> None:
    """Bodies that send a byte ten times per second."""
    _held(port, over, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n", b" ", 0.1)


def churn(port: Port, over: Over) -> None:
    """Connections that are opened and closed as fast as possible."""

    def one() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                pass

    _in_threads(one, over)


def abandoned(port: Port, over: Over) -> None:
    """Small requests whose connections are reset at once."""

    def one() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")

    _in_threads(one, over)


def departed(port: Port, over: Over) -> None:
    """Small requests whose clients close at once, without a reset."""

    def one() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as connection:
                connection.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")

    _in_threads(one, over)


def chunks(port: Port, over: Over) -> None:
    """Bodies in chunks of one byte, as fast as possible."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    _repeated(port, over, head, b"1\r\n \r\n" * 10_000)


def pipelines(port: Port, over: Over) -> None:
    """Requests one after the other, without reading an answer."""
    _repeated(port, over, b"", b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n" * 10_000)


def json_bodies(port: Port, over: Over) -> None:
    """Bodies near the limit: numbers, hard fractions, texts, nested lists, invalid ones; eight at a time."""
    bodies = list(large_bodies())

    def one() -> None:
        number = 0
        while not over.is_set():
            body, number = bodies[number % len(bodies)], number + 1
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 30) as connection:
                connection.sendall(head % len(body) + body)
                while connection.recv(65536):
                    pass

    _in_threads(one, over)


def large_bodies() -> Iterator[bytes]:
    """Completions of about the largest size, each expensive in another way; all of them are invalid."""
    for item in (b"1", b"2.2250738585072011e-308", b'""', b"[]", b'{"a":1}', b"null", b'"\\u00e9"'):
        for number in (_LARGE // (len(item) + 1), 130_000, 60_000):
            items = b",".join([item] * min(number, _LARGE // (len(item) + 1)))
            yield b'{"model":"%b","prompt":[%b]}' % (MODEL.encode(), items)
    yield json.dumps({"model": MODEL, "prompt": "[," * (_LARGE // 2 - 50)}).encode()
    yield json.dumps({"model": MODEL, "prompt": "x" * (_LARGE - 100)}).encode()[:-1]
    yield b'{"model":"%b",' % MODEL.encode() + b",".join(b'"%d":0' % number for number in range(130_000)) + b"}"


def log_lines(port: Port, over: Over) -> None:
    """Requests that each write a line to the log."""

    def one() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 30) as connection:
                for _ in range(100):
                    connection.sendall(b"GET /version?%b HTTP/1.1\r\nHost: x\r\n\r\n" % (b"x" * 200))
                    if not connection.recv(65536):
                        break

    _in_threads(one, over)


def _repeated(port: Port, over: Over, head: bytes, part: bytes) -> None:
    def one() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as connection:
                connection.sendall(head)
                while not over.is_set():
                    connection.sendall(part)

    _in_threads(one, over)


# -- by clients with keys, of whom each has as many as it likes -----------------------------------------------------


def keyed(
    number: int, path: str, body: bytes, *, method: str = "POST", close: bool = True, more: bytes = b""
) -> bytes:
    """A request of the heavy key with this number."""
    return (
        (
            f"{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {HEAVY[number % len(HEAVY)]}\r\n"
            f"Content-Length: {len(body)}\r\n{'Connection: close' if close else 'X: y'}\r\n"
        ).encode()
        + more
        + b"\r\n"
        + body
    )


def _sent(port: Port, over: Over, request_of: Callable[[int], bytes]) -> None:
    """Requests, each on a connection of its own whose answer is read completely; eight at a time."""
    numbers = itertools.count()

    def one() -> None:
        while not over.is_set():
            request = request_of(next(numbers))
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 30) as connection:
                connection.sendall(request)
                while connection.recv(65536):
                    pass

    _in_threads(one, over)


def _little_read(port: Port, over: Over, request_of: Callable[[int], bytes], *, half_closed: bool = False) -> None:
    """Connections whose answers are read at one byte per second; closed ones are replaced."""
    held: list[socket.socket] = []
    numbers = itertools.count()
    while not over.wait(1):
        for connection in list(held):
            try:
                if not connection.recv(1):
                    raise OSError
            except BlockingIOError:
                continue
            except OSError:
                connection.close()
                held.remove(connection)
        while len(held) < CONNECTIONS and not over.is_set():
            connection = socket.socket()
            connection.settimeout(1)
            hold_little(connection)
            try:
                connection.connect(("127.0.0.1", port))
                connection.sendall(request_of(next(numbers)))
                if half_closed:
                    connection.shutdown(socket.SHUT_WR)
            except OSError:
                connection.close()
                break
            connection.setblocking(False)
            held.append(connection)


def json_of(**fields: object) -> bytes:
    return json.dumps({"model": MODEL, **fields}).encode()


def unread_probes(port: Port, over: Over) -> None:
    """Pipelined probes and metrics, whose answers are not read."""
    _little_read(port, over, lambda number: b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 50)


def unread_answers(port: Port, over: Over) -> None:
    """Long answers and streams that are read at one byte per second."""
    body = {"prompt": "Once", "max_tokens": 2000, "ignore_eos": True, "logprobs": 5}
    _little_read(port, over, lambda number: keyed(number, "/v1/completions", json_of(**body, stream=number % 2 == 0)))


def unread_prompts(port: Port, over: Over) -> None:
    """Answers of 24 MB, with the log probabilities of prompts, that are read at one byte per second."""
    body = {"max_tokens": 1, "echo": True, "logprobs": 20, "n": 12}
    _little_read(
        port, over, lambda number: keyed(number, "/v1/completions", json_of(**body, prompt=[number % 300 + 5] * 3500))
    )


def expectations(port: Port, over: Over) -> None:
    """Heads that announce a body of a gigabyte, or expect an interim response, and then nothing."""
    _held(
        port,
        over,
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer heavy1\r\nExpect: 100-continue\r\n"
        b"Content-Length: 4000000\r\n\r\n",
        b"",
        0.1,
    )


def gigabytes(port: Port, over: Over) -> None:
    """Bodies of a gigabyte, announced or in chunks, sent as fast as the server reads them."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer heavy2\r\n"
    _repeated(port, over, head + b"Transfer-Encoding: chunked\r\n\r\n", b"10000\r\n" + b"x" * 65536 + b"\r\n")


def shapes(port: Port, over: Over) -> None:
    """Requests whose length has two meanings, upgrades, old protocols, very many and very long headers."""
    body = json_of(prompt="x", max_tokens=1)
    start = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer heavy3\r\n"
    forms = [
        start + b"Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /readyz HTTP/1.1\r\n\r\n",
        start + b"Transfer-Encoding: chunked, identity\r\n\r\n" + body,
        start + b"Transfer-Encoding: xchunked\r\nContent-Length: 5\r\n\r\n12345",
        start + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n123456",
        start + b"Content-Length: -1\r\n\r\n",
        start + b"Content-Length: 99999999999999999999\r\n\r\n",
        start + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
        start + b"Transfer-Encoding: chunked\r\n\r\n1;" + b"e" * 60_000 + b"\r\nx\r\n0\r\n\r\n",
        start + b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\nContent-Length: 0\r\n\r\n",
        start + b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 24\r\n\r\nGET /readyz HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0" * 100,
        b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n" * 500,
        b"GET /v1/models HTTP/0.9\r\n\r\n",
        b"GET http://other/livez HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 250 + b"\r\n",
        b"GET /%b HTTP/1.1\r\nHost: x\r\n\r\n" % (b"%41/" * 15_000),
        b"GET /v1/files?%b HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer heavy4\r\n\r\n" % (b"a=b&" * 15_000),
        b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n" * 500,
        start + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(_zipped()) + _zipped(),
        b"\x16\x03\x01" + bytes(range(256)) * 16,
    ]

    def one() -> None:
        for form in itertools.cycle(forms):
            if over.is_set():
                return
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as connection:
                connection.sendall(form)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):
                    pass

    _in_threads(one, over)


def wrong_keys(port: Port, over: Over) -> None:
    """Very many tiny requests with keys that do not exist."""

    def one() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 30) as connection:
                for number in range(100):
                    connection.sendall(
                        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %d\r\n\r\n" % number
                    )
                    if not connection.recv(65536):
                        break

    _in_threads(one, over)


def resumes(port: Port, over: Over) -> None:
    """Resumable streams that are left after their first bytes, and resumed with ids that exist and that do not."""
    body = json_of(prompt="Once", max_tokens=2000, ignore_eos=True, stream=True, stream_options={"resumable": True})
    numbers = itertools.count()

    def one() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError, IndexError):
                number = next(numbers)
                with socket.create_connection(("127.0.0.1", port), 30) as connection:
                    connection.sendall(keyed(number, "/v1/completions", body))
                    received = connection.recv(4096) + connection.recv(4096)
                id = received.partition(b"id: ")[2].split(b"\n")[0].rpartition(b":")[0] or b"none"
                for event in (b"0", b"1", b"99999", b"9" * 150, b"-1"):
                    with socket.create_connection(("127.0.0.1", port), 30) as connection:
                        more = b"Last-Event-ID: " + id + b":" + event + b"\r\n"
                        connection.sendall(keyed(number, "/v1/completions", body, more=more))
                        connection.recv(4096)

    _in_threads(one, over)


def uploads(port: Port, over: Over) -> None:
    """Files of 20 MB, sent as fast as the server reads them, eight at a time."""
    form = (
        b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
        + b"x" * 20_000_000
        + b"\r\n--x--\r\n"
    )
    more = b"Content-Type: multipart/form-data; boundary=x\r\n"
    requests = [keyed(number, "/v1/files", form, more=more) for number in range(2)]
    _sent(port, over, lambda number: requests[number % 2])


def forms(port: Port, over: Over) -> None:
    """Uploads that are expensive to parse: almost the boundary, again and again; a type of very many semicolons."""
    file = b'--xyz\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n' + b"\r\n--xyza" * 250_000
    types = (b"boundary=xyz", b'boundary=xyz; a="' + b";" * 60_000 + b'"')
    headers = [b"Content-Type: multipart/form-data; " + each + b"\r\n" for each in types]
    _sent(port, over, lambda number: keyed(number, "/v1/files", file, more=headers[number % 2]))


def batches(port: Port, over: Over) -> None:
    """Batches of 50,000 lines, one after the other."""
    line = {"method": "POST", "url": "/v1/completions", "body": {"model": MODEL, "prompt": "x", "max_tokens": 1}}
    lines = b"".join(json.dumps({**line, "custom_id": str(number)}).encode() + b"\n" for number in range(50_000))
    form = (
        b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n' + lines + b"\r\n--x--\r\n"
    )
    more = b"Content-Type: multipart/form-data; boundary=x\r\n"
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 30) as connection:
        connection.sendall(keyed(5, "/v1/files", form, more=more))
        answer = b""
        while part := connection.recv(65536):
            answer += part
    file = json.loads(answer.rpartition(b"\r\n\r\n")[2])["id"]
    batch = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    _sent(port, over, lambda number: keyed(5, "/v1/batches", json.dumps(batch).encode()))


def odd_json(port: Port, over: Over) -> None:
    """Deep, doubled, unpaired and endless values, in bodies of up to 4 MB."""
    model = b'{"model":"%b",' % MODEL.encode()
    forms = [
        model + b'"prompt":"x","metadata":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
        model + b'"prompt":"x",' + b'"max_tokens":1,' * 200_000 + b'"n":1}',
        model + b'"prompt":"x","temperature":NaN}',
        model + b'"prompt":"x","temperature":1e999}',
        model + b'"prompt":"x","seed":' + b"9" * 3_000_000 + b"}",
        model + b'"prompt":"' + b"\\ud800" * 600_000 + b'"}',
        model + b'"prompt":"' + "\U0001f469\u200d".encode() * 500_000 + b'"}',
        model + b'"prompt":"x","logit_bias":{' + b",".join(b'"%d":1' % n for n in range(300_000)) + b"}}",
        model + b'"messages":[' + b",".join([b'{"role":"user","content":"x"}'] * 120_000) + b"]}",
        model + b'"prompt":"x","stop":[' + b",".join([b'"a"'] * 800_000) + b"]}",
        model
        + b'"messages":[{"role":"user","content":"hi"}],"tools":['
        + b",".join(
            b'{"type":"function","function":{"name":"f%d","parameters":{"type":"object"}}}' % n for n in range(20_000)
        )
        + b"]}",
    ]
    paths = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize")
    _sent(
        port, over, lambda number: keyed(number, paths[number % len(paths)], forms[number // len(paths) % len(forms)])
    )


def background(port: Port, over: Over) -> None:
    """Background responses that run long, with readers of their events that come and go."""

    def one() -> None:
        body = json_of(input="Once", background=True, stream=True, max_output_tokens=3000)
        while not over.is_set():
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 30) as connection:
                number = time.monotonic_ns()
                connection.sendall(keyed(number, "/v1/responses", body))
                id = connection.recv(65536).partition(b'"id":"')[2].partition(b'"')[0].decode()
                if id:
                    for after in (0, 1, 10**9):
                        path = f"/v1/responses/{id}?stream=true&starting_after={after}"
                        with socket.create_connection(("127.0.0.1", port), 30) as reader:
                            reader.sendall(keyed(number, path, b"", method="GET"))
                            reader.recv(4096)

    _in_threads(one, over)


def heavy_keys(port: Port, over: Over) -> None:
    """Ten keys with bodies near the limit, prompts at and beyond the context, many choices, texts to tokenise."""
    text = "The quick brown fox jumps over the lazy dog. "
    bodies = [
        ("/v1/completions", json_of(prompt=text * 80_000)),
        ("/v1/completions", json_of(prompt=text * 250, max_tokens=16, n=8, ignore_eos=True)),
        ("/tokenize", json_of(prompt=text * 80_000)),
        ("/v1/chat/completions", json_of(messages=[{"role": "user", "content": text}] * 20_000)),
        ("/v1/completions", json_of(prompt=[text * 100] * 128, max_tokens=1)),
        ("/v1/embeddings", json_of(input=[text * 100] * 500)),
        ("/v1/responses", json_of(input=text * 80_000)),
        ("/v1/completions", json_of(prompt=list(range(1000)) * 3, max_tokens=100, ignore_eos=True)),
    ]
    _sent(port, over, lambda number: keyed(number, *bodies[number % len(bodies)]))


def tokenising(port: Port, over: Over) -> None:
    """Texts near the limit that are hard to split: one character, special tokens, marks, spaces, no spaces."""
    texts = ("a", "<|im_end|>", "a\u0301", " ", "\n", "\U0001f469\u200d", "'s", "\u4e00", "0", "<")
    bodies = [json.dumps(text * (_LARGE // len(json.dumps(text)))).encode() for text in texts]
    model = MODEL.encode()
    forms = [
        (path, b'{"model":"%b","%b":%b}' % (model, field, body))
        for body in bodies
        for path, field in (("/tokenize", b"prompt"), ("/v1/completions", b"prompt"), ("/v1/responses", b"input"))
    ]
    _sent(port, over, lambda number: keyed(number, *forms[number % len(forms)]))


def grammars(port: Port, over: Over) -> None:
    """Schemas and regular expressions that nest, recurse, repeat and branch, and many tools with large schemas."""
    deep: dict[str, object] = {"type": "integer"}
    for _ in range(60):
        deep = {"type": "object", "properties": {"a": deep, "b": deep}, "required": ["a"]}
    circle = {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}, {"type": "array"}]}}}
    circle["$defs"]["b"] = {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "object"}]}  # type: ignore[index]
    wide = {"type": "object", "properties": {f"p{each}": {"enum": list(range(200))} for each in range(500)}}
    repeats = {"type": "array", "items": {"type": "string", "maxLength": 10**6}, "maxItems": 10**6}
    outputs = [{"json": schema} for schema in (deep, circle, wide, repeats)]
    outputs += [{"regex": each} for each in ("(a+)+b", "((a{1,99}){1,99}){1,99}", "(a|a?)+", "(.*){1,32}x", "(" * 500)]
    bodies = [json_of(prompt="x", max_tokens=4, structured_outputs=each) for each in outputs]
    tools = [{"type": "function", "function": {"name": f"f{each}", "parameters": wide}} for each in range(50)]
    chat = json_of(messages=[{"role": "user", "content": "x"}], max_tokens=4, tools=tools, tool_choice="required")
    forms = [("/v1/completions", body) for body in bodies] + [("/v1/chat/completions", chat)]
    _sent(port, over, lambda number: keyed(number, *forms[number % len(forms)]))


def lexers(port: Port, over: Over) -> None:
    """Grammars whose lexers grow with each token, each request with another one."""
    body = {"prompt": "x", "max_tokens": 290, "ignore_eos": True, "n": 8, "temperature": 1.3}

    def request(number: int) -> bytes:
        pattern = f"(.*a.{{1,{300 - number % 250}}}){{1,}}"
        return keyed(number, "/v1/completions", json_of(**body, structured_outputs={"regex": pattern}))

    _sent(port, over, request)


def references(port: Port, over: Over) -> None:
    """Requests for stored items, very often and with one id very many times, and with arguments of very many
    objects."""
    large = {"type": "message", "role": "user", "content": "x" * 3_900_000, "id": "msg_large"}
    sealed = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "x" * 1800}]}
    last = {"role": "user", "content": "Hi"}
    short = {"truncation": "auto", "max_output_tokens": 1}
    previous: dict[str, str] = {}
    for _ in range(12):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 30) as connection:
            connection.sendall(keyed(6, "/v1/responses", json_of(input=[large, last], **short, **previous)))
            answer = b""
            while part := connection.recv(65536):
                answer += part
            if id := answer.partition(b'"id":"')[2].partition(b'"')[0].decode():
                previous = {"previous_response_id": id}
    many = [{"type": "message", "role": "user", "content": str(each), "id": "same"} for each in range(2000)]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":' * 500 + "1" + "}" * 500}}
    forms = [
        ("/v1/responses", json_of(input=[{"type": "item_reference", "id": "msg_large"}] * 2000, **short)),
        ("/v1/responses", json_of(input="Hi", store=False, **short, **previous)),
        ("/v1/responses", json_of(input=[{**sealed, "id": f"rs_{each}"} for each in range(2000)], **short)),
        ("/v1/responses", json_of(input=many, **short)),
        ("/v1/chat/completions", json_of(messages=[{"role": "assistant", "tool_calls": [call] * 1000}], max_tokens=1)),
        ("/v1/chat/completions", json_of(messages=[{"role": "system", "content": "x" * 1900}] * 2000, max_tokens=1)),
    ]
    _sent(port, over, lambda number: keyed(6, *forms[number % len(forms)]))


def tables(port: Port, over: Over) -> None:
    """Requests with the most prompts, choices, biases, stops and metadata that are accepted, and with more."""
    biases = {str(token): 1.0 for token in range(1000)}
    forms = [
        ("/v1/completions", json_of(prompt=["x"] * 10_000, max_tokens=1)),
        ("/v1/completions", json_of(prompt=["x"] * 2048, max_tokens=2, ignore_eos=True)),
        ("/v1/completions", json_of(prompt="x", n=128, max_tokens=3, logit_bias=biases, stop=["a", "b", "c", "d"])),
        ("/v1/completions", json_of(prompt="x", n=128, max_tokens=3, stop_token_ids=list(range(3, 1000)))),
        ("/v1/completions", json_of(prompt=[[1, 2, 3]] * 2048, max_tokens=1, logprobs=5)),
        ("/v1/responses", json_of(input="x", max_output_tokens=2, metadata={"k": "v" * 4_000_000})),
        (
            "/v1/responses",
            json_of(input="x", max_output_tokens=2, metadata={f"k{each}": "v" for each in range(10**5)}),
        ),
        ("/v1/embeddings", json_of(input=["x"] * 2048)),
        ("/score", json_of(text_1="x", text_2=["y"] * 2048)),
    ]
    _sent(port, over, lambda number: keyed(number, *forms[number % len(forms)]))


def cancels(port: Port, over: Over) -> None:
    """Answers and streams that are left immediately, and background responses that are cancelled or deleted
    immediately."""
    long = json_of(prompt="Once", max_tokens=3000, ignore_eos=True, stream=True)
    whole = json_of(prompt="Once", max_tokens=3000, ignore_eos=True, n=8)
    kept = json_of(input="Once", background=True, max_output_tokens=3000)
    numbers = itertools.count()

    def one() -> None:
        while not over.is_set():
            number = next(numbers)
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 30) as connection:
                if number % 3 == 2:
                    connection.sendall(keyed(number, "/v1/responses", kept, close=False))
                    id = connection.recv(65536).partition(b'"id":"')[2].partition(b'"')[0].decode()
                    cancel = keyed(number, f"/v1/responses/{id}/cancel", b"", close=False)
                    connection.sendall(cancel + keyed(number, f"/v1/responses/{id}", b"", method="DELETE"))
                    connection.recv(65536)
                else:
                    connection.sendall(keyed(number, "/v1/completions", (long, whole)[number % 3]) * 2)

    _in_threads(one, over)


def scrapes(port: Port, over: Over) -> None:
    """Probes, metrics and lists, in turn on persistent connections, with 250 headers."""
    more = b"".join(b"X-%d: %b\r\n" % (each, b"v" * 200) for each in range(240))
    paths = ("/metrics", "/v1/models", "/livez", "/kaon/limits", "/openapi.json", "/v1/responses/resp_x/input_items")
    numbers = itertools.count()

    def one() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 30) as connection:
                while not over.is_set():
                    number = next(numbers)
                    path = paths[number % len(paths)]
                    connection.sendall(keyed(number, path, b"", method="GET", close=False, more=more))
                    if not connection.recv(2**20):
                        break

    _in_threads(one, over)


def strange_keys(port: Port, over: Over) -> None:
    """Requests that each have another key, another form of key, another forwarded address and another id."""
    numbers = itertools.count()

    def one() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 30) as connection:
                for _ in range(100):
                    number = next(numbers)
                    key = (b"%d", b"eyJhbGciOiJub25lIn0.e%d.", b"%d" + b"x" * 4000, b"\xff%d")[number % 4] % number
                    connection.sendall(
                        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %b\r\n"
                        b"X-Forwarded-For: %d.1\r\nX-Request-Id: %b\r\nx-api-key: %d\r\nContent-Length: 2\r\n\r\n{}"
                        % (key, number, b"r" * 300, number)
                    )
                    if not connection.recv(65536):
                        break

    _in_threads(one, over)


def admin_calls(port: Port, over: Over) -> None:
    """Adapters, weights and sleep by keys without permission, with paths that are not allowed."""
    forms = [
        ("/v1/load_lora_adapter", json.dumps({"lora_name": "a", "lora_path": "/" + "../" * 1000 + "dev"}).encode()),
        ("/v1/unload_lora_adapter", json.dumps({"lora_name": "a" * 10_000}).encode()),
        ("/update_weights", json.dumps({"model_path": "/proc/self/root/" * 100}).encode()),
        ("/v1/load_lora_adapter", b"{" * 100_000),
    ]
    _sent(port, over, lambda number: keyed(number, *forms[number % len(forms)]))


def resume_flood(port: Port, over: Over) -> None:
    """Pipelines of a hundred resumptions of streams that do not exist, whose answers are read."""

    def one() -> None:
        body = json_of(prompt="x", stream=True)
        requests = b"".join(
            keyed(
                number, "/v1/completions", body, close=False, more=b"Last-Event-ID: cmpl-%d:%d\r\n" % (number, number)
            )
            for number in range(100)
        )
        while not over.is_set():
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as connection:
                connection.sendall(requests)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(2**20):
                    pass

    _in_threads(one, over)


def resets(port: Port, over: Over) -> None:
    """Whole requests, and parts of uploads, whose connections are reset at once."""
    part = (
        b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n' + b"x" * 300_000
    )
    form = b"Content-Type: multipart/form-data; boundary=x\r\n"
    upload = keyed(1, "/v1/files", part, more=form).replace(b"Content-Length: ", b"Content-Length: 9")
    forms = [
        keyed(2, "/v1/completions", json_of(prompt="Once", max_tokens=3000, ignore_eos=True, stream=True)),
        keyed(3, "/v1/completions", json_of(prompt="Once", max_tokens=300, ignore_eos=True, n=4)),
        b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
        upload,
    ]
    numbers = itertools.count()

    def one() -> None:
        while not over.is_set():
            number = next(numbers)
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5) as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.sendall(forms[number % len(forms)])
                if number % 3 == 0:
                    connection.recv(1)

    _in_threads(one, over)


def half_closed(port: Port, over: Over) -> None:
    """Streams whose clients shut down their sending side, and read a byte a second."""
    body = json_of(prompt="Once", max_tokens=3000, ignore_eos=True, stream=True)
    _little_read(port, over, lambda number: keyed(number, "/v1/completions", body), half_closed=True)


def header_fields(port: Port, over: Over) -> None:
    """Requests of 245 header fields, long and short, each on a connection of its own."""
    short = b"".join(b"X-%d: %d\r\n" % (each, each) for each in range(245))
    long = b"".join(b"X-%d: %b\r\n" % (each, b"v" * 230) for each in range(245))
    completion = json_of(prompt="x", max_tokens=1)
    forms = [("GET", "/v1/models", b"", short), ("POST", "/v1/completions", completion, long)]
    _sent(
        port,
        over,
        lambda number: keyed(number, *forms[number % 2][1:3], method=forms[number % 2][0], more=forms[number % 2][3]),
    )


def gathered(port: Port, over: Over) -> None:
    """Heads that are expensive to decode, without a key, whose last bytes come on all connections at once."""
    forms = [
        (b"/livez", b"Upgrade: x\r\nConnection: upgrade" + b"," * 60_000),
        (b"/" + b"%41" * 2700, b"X: y"),
        (b"/v1/files?" + b"%61=&" * 255, b"X: y"),
        (b"/livez", b"X-Forwarded-For: " + b",".join([b"::1"] * 64)),
    ]
    for number in itertools.count():
        target, header = forms[number % len(forms)]
        request = b"GET " + target + b" HTTP/1.1\r\nHost: x\r\n" + header + b"\r\n\r\n"
        with contextlib.ExitStack() as opened, contextlib.suppress(OSError):
            connections = [
                opened.enter_context(socket.create_connection(("127.0.0.1", port), 5)) for _ in range(CONNECTIONS // 2)
            ]
            for connection in connections:
                connection.sendall(request[:-1])
            if over.wait(0.2):
                return
            for connection in connections:
                connection.send(request[-1:])
            for connection in connections:
                connection.recv(65536)


def parameters(port: Port, over: Over) -> None:
    """Requests of as many parameters, and of as many bytes of them, as heads may have."""
    queries = ("a&" * 31_000, "%61=%62&" * 7900, "%61=%62&" * 255)
    _sent(port, over, lambda number: keyed(number, f"/v1/files?{queries[number % 3]}", b"", method="GET"))


def trailers(port: Port, over: Over) -> None:
    """Chunked bodies after whose last chunk a byte of a trailer comes ten times a second."""
    head = keyed(4, "/v1/completions", b"").partition(b"Content-Length")[0] + b"Transfer-Encoding: chunked\r\n\r\n"
    _held(port, over, head + b"2\r\n{}\r\n0\r\n", b"X-Trailer: value\r\n", 0.1)


def downloads(port: Port, over: Over) -> None:
    """Files, lists and descriptions, pipelined, of which nothing is read."""
    part = b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    part += b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n' + b"x" * 20_000_000
    form = b"Content-Type: multipart/form-data; boundary=x\r\n"
    with socket.create_connection(("127.0.0.1", port), 30) as connection:
        connection.sendall(keyed(0, "/v1/files", part + b"\r\n--x--\r\n", more=form))
        answer = b""
        while received := connection.recv(65536):
            answer += received
    file = json.loads(answer.rpartition(b"\r\n\r\n")[2])["id"]
    paths = (f"/v1/files/{file}/content", "/openapi.json", "/docs", "/v1/files", "/v1/models")

    def requests(number: int) -> bytes:
        return keyed(0, paths[number % len(paths)], b"", method="GET", close=False) * 20

    _little_read(port, over, requests)


def stream_readers(port: Port, over: Over) -> None:
    """Very many readers of one background response."""
    body = json_of(input="Once", background=True, stream=True, max_output_tokens=3900, ignore_eos=True)
    while not over.is_set():
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 30) as connection:
            connection.sendall(keyed(7, "/v1/responses", body))
            id = connection.recv(65536).partition(b'"id":"')[2].partition(b'"')[0].decode()
            readers: list[socket.socket] = []
            end = time.monotonic() + 5
            while time.monotonic() < end and not over.wait(0.01):
                with contextlib.suppress(OSError):
                    readers.append(socket.create_connection(("127.0.0.1", port), 1))
                    readers[-1].sendall(keyed(7, f"/v1/responses/{id}?stream=true", b"", method="GET"))
                for reader in readers[:-CONNECTIONS]:
                    reader.close()
                del readers[:-CONNECTIONS]
            for reader in readers:
                reader.close()


def _in_threads(work: Callable[[], None], over: Over) -> None:
    for _ in range(_THREADS):
        threading.Thread(target=work, daemon=True).start()
    over.wait()


ATTACKS: dict[str, Callable[[Port, Over], None]] = {
    each.__name__: each
    for each in (silent, heads, bodies, churn, abandoned, departed, chunks, pipelines, json_bodies, log_lines)
}
"""Attacks on a server without keys."""

KEYED_ATTACKS: dict[str, Callable[[Port, Over], None]] = {
    each.__name__: each
    for each in (
        *(
            unread_probes,
            unread_answers,
            unread_prompts,
            expectations,
            gigabytes,
            shapes,
            wrong_keys,
            resumes,
            uploads,
            forms,
            batches,
        ),
        *(odd_json, background, heavy_keys),
        *(tokenising, grammars, lexers, references, tables, cancels, scrapes, strange_keys, admin_calls, resume_flood),
        *(resets, half_closed, header_fields, gathered, parameters, trailers, downloads, stream_readers),
    )
}
"""Attacks by clients with keys of their own."""


def main() -> None:
    os.nice(19)
    name, port = sys.argv[1:]
    over = threading.Event()

    def wait_for_the_end() -> None:
        sys.stdin.read()
        over.set()
        time.sleep(2)
        sys.exit()

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    (ATTACKS | KEYED_ATTACKS)[name](int(port), over)


if __name__ == "__main__":
    main()
