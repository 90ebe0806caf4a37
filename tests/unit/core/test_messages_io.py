"""The core's I/O threads: valid messages are passed on, invalid ones are answered, and none is lost."""

import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from engine.core.sockets import CoreSockets
from engine.distributed.message_stream import MessageReader
from engine.messages import AbortRequests, AddRequest, Outbound, RequestOutput, Shutdown, StepOutputs, Stopped
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence

WAIT_SECONDS = 60


@pytest.fixture
def wire() -> Iterator[SimpleNamespace]:
    """A core's sockets and the front end's: `send(*frames)` to it and `receive()` from it."""
    with tempfile.TemporaryDirectory(prefix="kaon-") as directory, zmq.Context() as context:
        router = context.socket(zmq.ROUTER)
        router.set_hwm(0)
        router.setsockopt(zmq.RCVTIMEO, WAIT_SECONDS * 1000)
        router.bind(f"ipc://{directory}/in")
        ours, theirs = socket.socketpair()
        outputs = MessageReader(ours)
        core = CoreSockets(f"ipc://{directory}/in", theirs, block_size=16)
        identity = router.recv_multipart()[0]
        yield SimpleNamespace(
            core=core,
            send=lambda *messages: router.send_multipart([identity, encode([msgspec.Raw(each) for each in messages])]),
            send_raw=lambda frame: router.send_multipart([identity, frame]),
            receive=lambda: msgspec.msgpack.decode(next_message(outputs), type=Outbound),
            take=lambda: core.input_queue.get(timeout=WAIT_SECONDS),
        )
        core.close()
        router.close(0)
        outputs.close()
        theirs.close()


def next_message(outputs: MessageReader) -> bytes:
    """The next message, once it has arrived."""
    while (message := outputs.receive()) is None:
        assert outputs.poll(WAIT_SECONDS * 1000)
    return message


def encode(message: Any) -> bytes:
    return msgspec.msgpack.encode(message)


def test_each_message_of_an_array_is_taken_in_order(wire: SimpleNamespace) -> None:
    params = SamplingParams(max_tokens=3, stop_token_sequences=[[5]])
    wire.send(encode(AddRequest(7, [1, 2], params, cache_salt=9)), encode(AddRequest(8, [3], params, adapter=2)))
    wire.send(encode(AbortRequests([8])), encode(Shutdown()))
    first, second = wire.take(), wire.take()
    assert isinstance(first, Sequence)
    assert (first.id, first.token_ids, first.sampling_params, first.block_size) == (7, [1, 2], params, 16)
    assert (first.stop_token_sequences, first.cache_salt) == ([[5]], 9)
    assert (first.adapter, second.id, second.adapter) == (0, 8, 2)
    assert wire.take() == AbortRequests([8])
    assert wire.take() == Shutdown()


def test_a_request_shares_the_prompt_of_the_last_accepted_one_before_it_in_its_frame(wire: SimpleNamespace) -> None:
    params = SamplingParams()
    shares = [encode(AddRequest(number, [], params, shares_prompt=True)) for number in range(4)]
    whole, malformed = encode(AddRequest(7, [5, 6], params)), encode({"type": "add", "request_id": 8})
    wire.send(whole, encode(AbortRequests([9])), shares[0], malformed, shares[1])
    wire.send(*shares[2:])
    wire.send(encode(Shutdown()))
    taken = [wire.take() for _ in range(4)]
    assert [each.token_ids for each in taken if isinstance(each, Sequence)] == [[5, 6], [5, 6]]
    assert taken[1:] == [AbortRequests([9]), taken[2], Shutdown()]
    refused = [wire.receive().outputs[0] for _ in range(4)]
    assert [(each.request_id, each.finish_reason) for each in refused] == [(id, "error") for id in (8, 1, 2, 3)]
    assert all("no request was sent before this one" in each.error for each in refused[1:])


def test_the_core_is_notified_of_each_sequence_once_it_is_queued(wire: SimpleNamespace) -> None:
    seen = SimpleQueue[int]()
    matchers = SimpleNamespace(
        load=lambda: None, cached=lambda grammar: None, matcher=lambda grammar: SimpleNamespace()
    )
    wire.core.serve(matchers, lambda seq: seen.put(seq.id))
    wire.send(encode(AbortRequests([3])), encode(AddRequest(7, [1], SamplingParams())))
    assert (wire.take(), wire.take().id) == (AbortRequests([3]), 7)
    assert seen.get(timeout=WAIT_SECONDS) == 7
    wire.send(encode(AddRequest(8, [1], SamplingParams(grammar="start: A"))))
    assert wire.take().id == 8
    assert seen.get(timeout=WAIT_SECONDS) == 8
    assert seen.empty(), "an abort is none"


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        ({"type": "add", "request_id": 5, "prompt_token_ids": "text", "sampling_params": {}}, "prompt_token_ids"),
        ({"type": "add", "request_id": 5, "prompt_token_ids": [1], "sampling_params": {"top_p": 7}}, "top_p is 7"),
        ({"type": "add", "request_id": 5, "prompt_token_ids": [], "sampling_params": {}}, "at least 1 prompt token"),
        (
            {"type": "add", "request_id": 5, "prompt_token_ids": [1], "sampling_params": {}, "cache_salt": -7},
            "cache_salt",
        ),
    ],
)
def test_malformed_request_with_an_id_is_answered_with_an_error(
    wire: SimpleNamespace, message: dict[str, Any], sentence: str
) -> None:
    wire.send(encode(message))
    (output,) = wire.receive().outputs
    assert (output.request_id, output.finished, output.finish_reason) == (5, True, "error")
    assert sentence in output.error


def test_times_count_from_when_a_front_end_on_this_host_sent_the_request(wire: SimpleNamespace) -> None:
    wire.send(encode(AddRequest(7, [1], SamplingParams(), sent_time=12.5)))
    assert wire.take().sent_time == 12.5


def test_times_count_from_the_receipt_where_the_front_end_has_another_clock(wire: SimpleNamespace) -> None:
    wire.core._remote = SimpleNamespace(close=lambda: None)
    before = time.monotonic()
    wire.send(encode(AddRequest(7, [1], SamplingParams(), sent_time=1e12)))
    assert before <= wire.take().sent_time <= time.monotonic()


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"\x93\x01\x02", encode({"type": "add"}), encode([1, 2])])
def test_noise_is_logged_and_does_not_disturb_what_follows(
    wire: SimpleNamespace, frame: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    wire.send_raw(frame)
    wire.send(encode(AbortRequests([1])))
    assert wire.take() == AbortRequests([1])
    assert "refused" in caplog.text


def test_everything_queued_before_close_is_sent(wire: SimpleNamespace) -> None:
    steps = [StepOutputs([RequestOutput(step, [step])]) for step in range(3000)]
    for message in (*steps, Stopped()):
        wire.core.output_queue.put(message)
    closing = threading.Thread(target=wire.core.close)
    closing.start()
    assert [wire.receive() for _ in steps] == steps
    assert wire.receive() == Stopped()
    closing.join()


def test_a_request_that_cannot_be_taken_in_is_answered_and_the_next_one_is_taken(
    wire: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Faulty(BaseException):
        """Like panics of native code, which are no `Exception`."""

    def fail(request: AddRequest, *_: object, **fields: object) -> Sequence:
        if request.request_id == 5:
            raise Faulty("out of order")
        return Sequence([1], 16, id=request.request_id)

    monkeypatch.setattr(Sequence, "from_request", fail)
    wire.send(encode(AddRequest(5, [1], SamplingParams())), encode(AddRequest(6, [1], SamplingParams())))
    (output,) = wire.receive().outputs
    assert (output.request_id, output.finish_reason, output.error) == (5, "error", "out of order")
    assert wire.take().id == 6
    assert "Traceback" in caplog.text
