"""The peers' load generator, against a server that replays a script."""

import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from benchmarks.peers.load import Answer, LoadError, Piece, Request, ResponseError, Target, events, run, steady_gaps

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
WAIT_SECONDS = 60
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def event(**payload: Any) -> bytes:
    return f"data: {json.dumps(payload)}\n\n".encode()


def text(value: str) -> bytes:
    return event(choices=[{"index": 0, "text": value}])


def usage(prompt: int, completion: int) -> bytes:
    return event(choices=[], usage={"prompt_tokens": prompt, "completion_tokens": completion})


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


DONE = b"data: [DONE]\n\n"


@contextmanager
def playing(
    *pieces: bytes, pause: float = 0.0, linger: bool = False, together: int = 1
) -> Iterator[tuple[int, list[bytes]]]:
    """A server that answers every connection with `pieces`. Yields its port and its received requests.

    With `linger` it keeps the connection open after its answer. It answers only when `together` requests have arrived.
    """
    requests: list[bytes] = []
    gathered = threading.Barrier(together)
    over = threading.Event()

    def answer(connection: socket.socket) -> None:
        with connection:
            received = b""
            while b"\r\n\r\n" not in received or not received.endswith(b"}"):
                received += connection.recv(65536)
            requests.append(received)
            gathered.wait(WAIT_SECONDS)
            for piece in pieces:
                connection.sendall(piece)
                time.sleep(pause)
            if linger:
                over.wait(2 * WAIT_SECONDS)

    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:

        def accept() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1], requests
        over.set()
        listener.shutdown(socket.SHUT_RDWR)


def ask(port: int, asked: Sequence[Request] = (Request(" one two", 2, 3),), **target: Any) -> list[Answer]:
    return run(Target(port, "model", **target), asked, timeout=WAIT_SECONDS)


ANSWER = (HEAD + b"\r\n", text(" a"), text(" b"), text(" c"), usage(2, 3), DONE)


def test_an_answer_has_an_arrival_for_each_event_with_text() -> None:
    with playing(*ANSWER[:1], text(""), *ANSWER[1:], pause=0.002) as (port, _):
        (answer,) = ask(port)
    assert answer.tokens == 3
    assert len(answer.arrivals) == 3
    # Events that a busy machine reads together have the same time.
    assert answer.started < answer.arrivals[0] <= answer.arrivals[1] <= answer.arrivals[2] == answer.ended
    assert answer.ttft == answer.arrivals[0] - answer.started


def test_the_end_mark_ends_an_answer_whose_connection_stays_open() -> None:
    with playing(*ANSWER[:-1], DONE[:7], DONE[7:], pause=0.01, linger=True) as (port, _):
        (answer,) = ask(port)
    assert len(answer.arrivals) == 3


def test_a_server_without_an_end_mark_ends_its_answer_by_closing() -> None:
    with playing(*ANSWER[:-1]) as (port, _):
        (answer,) = ask(port)
    assert len(answer.arrivals) == 3


def test_requests_are_in_flight_together_and_answers_come_in_their_order() -> None:
    pieces = (HEAD + b"\r\n", text(" a"), usage(2, 1), DONE)
    with playing(*pieces, together=16) as (port, requests):
        answers = ask(port, [Request(f" p{number}", 2, 1) for number in range(16)])
    assert sorted(answer.started for answer in answers) == [answer.started for answer in answers]
    assert len(requests) == 16


def test_completions_send_the_prompt_greedily_with_usage() -> None:
    with playing(*ANSWER) as (port, requests):
        ask(port, extra={"seed": 1})
    head, _, body = requests[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/completions HTTP/1.1\r\n")
    assert json.loads(body) == {
        "model": "model",
        "prompt": " one two",
        "max_tokens": 3,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "seed": 1,
    }


def test_chat_completions_send_the_prompt_as_a_message_and_read_deltas() -> None:
    deltas = [event(choices=[{"delta": delta}]) for delta in ({"role": "assistant"}, {"content": " a"}, {})]
    with playing(HEAD + b"\r\n", *deltas, usage(2, 3), DONE) as (port, requests):
        (answer,) = ask(port, path="/v1/chat/completions")
    assert len(answer.arrivals) == 1
    assert json.loads(requests[0].partition(b"\r\n\r\n")[2])["messages"] == [{"role": "user", "content": " one two"}]


@pytest.mark.parametrize(("prompt", "completion"), [(3, 3), (2, 2)])
def test_other_counts_than_were_asked_for_are_an_error(prompt: int, completion: int) -> None:
    with (
        playing(HEAD + b"\r\n", text(" a"), usage(prompt, completion), DONE) as (port, _),
        pytest.raises(LoadError, match=f"asked for 3 tokens after 2; the server counts {completion} after {prompt}"),
    ):
        ask(port)


def test_an_answer_without_usage_is_an_error() -> None:
    with playing(HEAD + b"\r\n", text(" a"), DONE) as (port, _), pytest.raises(LoadError, match="without usage"):
        ask(port)


def test_a_refusal_is_an_error_with_its_status_and_body() -> None:
    refusal = b'HTTP/1.1 400 Bad Request\r\nContent-Length: 15\r\n\r\n{"error": "no"}'
    with playing(refusal) as (port, _), pytest.raises(LoadError, match=r'400 bad request: {"error": "no"}'):
        ask(port)


def test_no_server_is_an_error() -> None:
    with socket.socket() as silent:  # The port is taken, so that no other process can listen there.
        silent.bind(("127.0.0.1", 0))
        port: int = silent.getsockname()[1]
        with pytest.raises(LoadError, match=f"no connection to port {port}"):
            ask(port)


def test_an_answer_that_does_not_end_in_time_is_an_error() -> None:
    with (
        playing(HEAD + b"\r\n", linger=True) as (port, _),
        pytest.raises(LoadError, match=r"1 of 1 answers did not end within 0\.2 s"),
    ):
        run(Target(port, "model"), [Request(" one", 1, 1)], timeout=0.2)


def test_events_are_found_wherever_chunks_and_reads_cut_them() -> None:
    body = text(" a") + b": ping\n\n" + text(" b") + usage(2, 2) + DONE
    whole = CHUNKED + b"".join(chunk(body[i : i + 7]) for i in range(0, len(body), 7)) + b"0\r\n\r\n"
    for size in (1, 5, 64, len(whole)):
        found = events([Piece(float(i), whole[i : i + size]) for i in range(0, len(whole), size)])
        assert [each.payload["choices"][0]["text"] for each in found[:2]] == [" a", " b"]
        assert found[2].payload["usage"] == {"prompt_tokens": 2, "completion_tokens": 2}
        assert len(found) == 3
        assert [each.time for each in found] == sorted(each.time for each in found)


def test_an_event_has_the_time_of_its_last_byte() -> None:
    first, second = text(" a"), text(" b")
    pieces = [
        Piece(1.0, CHUNKED + chunk(first[:9])),
        Piece(2.0, chunk(first[9:])[:-4]),
        Piece(3.0, chunk(first[9:])[-4:] + chunk(second)),
        Piece(4.0, chunk(DONE)),
    ]
    assert [each.time for each in events(pieces)] == [3.0, 3.0]
    pieces[1], pieces[2] = Piece(2.0, chunk(first[9:])), Piece(3.0, chunk(second))
    assert [each.time for each in events(pieces)] == [2.0, 3.0]


def test_an_event_cut_off_is_an_error() -> None:
    with pytest.raises(ResponseError, match="not JSON"):
        events([Piece(1.0, HEAD + b"\r\n" + text(" a")[:-5])])


def test_gaps_are_steady_between_the_last_first_token_and_the_first_end() -> None:
    early = Answer(0.0, (1.0, 2.0, 3.0, 4.5), 4)
    late = Answer(0.0, (2.0, 3.5, 4.0, 6.0), 4)
    assert sorted(steady_gaps([early, late])) == [0.5, 1.0, 1.5, 1.5]
