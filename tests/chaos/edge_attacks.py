"""Attacks on the HTTP edge, in a process of their own: `python -m tests.chaos.edge_attacks NAME PORT`.

An attack goes on until standard input ends. Loads go to this machine only.
"""

import contextlib
import json
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

from tests.e2e.kaon_server import MODEL

CONNECTIONS = 120
"""Connections that an attack holds, as far as the server lets it."""
_THREADS = 8
_LARGE = 4 * 2**20 - 1024
"""Bytes of a body just below the default limit."""

Port = int
Over = threading.Event


def _held(port: Port, over: Over, first: bytes, then: bytes, interval: float) -> None:
    """Hold connections: `first` is sent at once, then a part of `then` each `interval`; a new one for each closed."""
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
    """Heads of which a byte comes ten times a second."""
    _held(port, over, b"GET /livez HTTP/1.1\r\nHost: x\r\n", b"X-Header: value\r\n", 0.1)


def bodies(port: Port, over: Over) -> None:
    """Bodies of which a byte comes ten times a second."""
    _held(port, over, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n", b" ", 0.1)


def churn(port: Port, over: Over) -> None:
    """Connections that are opened and closed as fast as possible."""

    def one() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                pass

    _in_threads(one, over)


def chunks(port: Port, over: Over) -> None:
    """Bodies in chunks of a byte, as fast as possible."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    _repeated(port, over, head, b"1\r\n \r\n" * 10_000)


def pipelines(port: Port, over: Over) -> None:
    """Requests one after the other, without reading an answer."""
    _repeated(port, over, b"", b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n" * 10_000)


def json_bodies(port: Port, over: Over) -> None:
    """Bodies near the limit: numbers, hard fractions, texts, nested lists, broken ones; eight at a time."""
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
    """Completions of about the largest size, each costly in its own way; none of them can run."""
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


def _in_threads(work: Callable[[], None], over: Over) -> None:
    for _ in range(_THREADS):
        threading.Thread(target=work, daemon=True).start()
    over.wait()


ATTACKS: dict[str, Callable[[Port, Over], None]] = {
    each.__name__: each for each in (silent, heads, bodies, churn, chunks, pipelines, json_bodies, log_lines)
}


def main() -> None:
    name, port = sys.argv[1:]
    over = threading.Event()

    def wait_for_the_end() -> None:
        sys.stdin.read()
        over.set()
        time.sleep(2)
        sys.exit()

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    ATTACKS[name](int(port), over)


if __name__ == "__main__":
    main()
