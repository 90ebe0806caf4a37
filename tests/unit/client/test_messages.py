"""Messages are decoded as they were encoded, and other bytes are refused."""

import gc
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from engine.client.supervisor import CoreLink
from engine.distributed.core_process import CoreTransport
from engine.messages import (
    AbortRequests,
    AddRequest,
    Failed,
    Inbound,
    ModelInfo,
    Outbound,
    Ready,
    RequestOutput,
    SchedulerStats,
    Shutdown,
    StepOutputs,
    Stopped,
    TokenLogprobs,
    openai_finish_reason,
    share_fields,
    take_fields,
)
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence

MODEL = ModelInfo("LlamaForCausalLM", "float32", "cpu", "cpu", 1000, 512, 2048, [2, 3], 16, 100)
STATS = SchedulerStats(2, 1, 10, 100, 64, 32, 0, "prefill", 0.01)
FULL_PARAMS = SamplingParams(
    temperature=0.5,
    max_tokens=7,
    ignore_eos=True,
    stop_strings=["\n\n", "é"],
    top_p=0.9,
    top_k=40,
    min_p=0.05,
    presence_penalty=0.1,
    frequency_penalty=-0.1,
    repetition_penalty=1.1,
    logit_bias={5: -100.0, 7: 3.5},
    seed=-(2**63),
    logprobs=3,
    min_tokens=2,
    stop_token_ids=[9],
    stop_token_sequences=[[1, 2], [3]],
    include_stop_str_in_output=True,
    skip_special_tokens=False,
)


@pytest.mark.parametrize(
    "message",
    [
        AddRequest(0, [1, 2, 3], SamplingParams()),
        AddRequest(2**53, [0], FULL_PARAMS, cache_salt=2**64 - 1),
        AbortRequests([1, 2]),
        Shutdown(),
    ],
)
def test_inbound_message_survives_the_wire(message: Inbound) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Inbound) == message


@pytest.mark.parametrize(
    "message",
    [
        Ready(MODEL, {"import": 1.0}),
        Failed("no such model", usage=True),
        StepOutputs([]),
        StepOutputs(
            [
                RequestOutput(1, [5]),
                RequestOutput(2, [6, 7], True, "stop_7", 32, 0.25, [TokenLogprobs(6, -0.5, (6, 1), (-0.5, -1.5))]),
                RequestOutput(3, [], finished=True, finish_reason="error", error="out of luck"),
            ],
            STATS,
        ),
        Stopped(),
    ],
)
def test_outbound_message_survives_the_wire(message: Outbound) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Outbound) == message


def test_parameters_out_of_range_are_refused_when_decoded() -> None:
    frame = msgspec.msgpack.encode(
        {"type": "add", "request_id": 1, "prompt_token_ids": [1], "sampling_params": {"temperature": -1.0}}
    )
    with pytest.raises(msgspec.ValidationError, match=r"temperature is -1"):
        msgspec.msgpack.decode(frame, type=Inbound)


@pytest.mark.parametrize("frame", [b"", b"\x00", b"\xc1", msgspec.msgpack.encode({"type": "exec"})])
def test_what_is_no_message_is_refused(frame: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        msgspec.msgpack.decode(frame, type=Inbound)


@pytest.mark.parametrize(
    ("leave_reason", "expected"),
    [
        (None, None),
        ("eos", "stop"),
        ("stop_sequence", "stop"),
        ("stop_17", "stop"),
        ("max_tokens", "length"),
        ("abort", "abort"),
        ("error", "error"),
    ],
)
def test_finish_reason_is_reported_in_openai_terms(leave_reason: str | None, expected: str | None) -> None:
    assert openai_finish_reason(leave_reason) == expected


def test_messages_that_are_sent_together_are_one_frame() -> None:
    """Each frame is a call that releases the interpreter's lock, and waits for it while other threads compute."""
    sent: list[bytes] = []
    link = CoreLink.__new__(CoreLink)
    link._transport = cast(CoreTransport, SimpleNamespace(send=sent.append))
    messages = [AddRequest(each, [1], SamplingParams()) for each in range(128)]
    link.send(messages)
    (frame,) = sent
    assert msgspec.msgpack.decode(frame, type=list[Inbound]) == messages
    link.send([])
    assert len(sent) == 1


def test_tables_that_the_choices_of_a_request_have_in_common_cross_the_wire_once() -> None:
    tables = SamplingParams(logit_bias=dict.fromkeys(range(1000), 1.0), bad_words=[[1, 2]], stop_token_ids=[7])
    other = SamplingParams(logit_bias={5: 2.0})
    sent = [
        *(AddRequest(choice, [1], msgspec.structs.replace(tables, seed=choice)) for choice in range(3)),
        AbortRequests([9]),
        AddRequest(3, [1], other),
        AddRequest(4, [1], other),
        AddRequest(5, [1], SamplingParams()),
    ]
    frames = [msgspec.msgpack.encode(message) for message in share_fields(sent)]
    assert len(frames[0]) > 5000
    assert max(map(len, frames[1:3])) < 250
    received, previous = [], None
    for frame in frames:
        message = msgspec.msgpack.decode(frame, type=Inbound)
        if isinstance(message, AddRequest):
            take_fields(message, previous)
            previous = message
            message.shares_tables = False
        received.append(message)
    assert received == sent
    first, second = received[0], received[1]
    assert isinstance(first, AddRequest)
    assert isinstance(second, AddRequest)
    assert first.sampling_params.logit_bias is second.sampling_params.logit_bias


def test_a_prompt_that_choices_have_in_common_crosses_the_wire_once() -> None:
    """128 choices of 131,072 tokens were 69 MB, and 0.6 GB of numbers in the core."""
    prompt, params = list(range(1000, 5000)), SamplingParams(logit_bias={5: 2.0})
    sent = [
        *(AddRequest(choice, prompt, params) for choice in range(3)),
        AddRequest(3, list(prompt), SamplingParams()),
    ]
    frames = [msgspec.msgpack.encode(message) for message in share_fields(sent)]
    assert [len(frame) > 5000 for frame in frames] == [True, False, False, True]
    received = [msgspec.msgpack.decode(frame, type=AddRequest) for frame in frames]
    for message, previous in zip(received, [None, *received[:-1]], strict=True):
        take_fields(message, previous)
    assert [message.prompt_token_ids for message in received] == [prompt] * 4
    assert received[2].prompt_token_ids is received[0].prompt_token_ids
    assert sent[1].prompt_token_ids is prompt, "what is sent again later is whole"
    first, second = (Sequence.from_request(message, 16) for message in received[:2])
    first.token_ids.append(7)
    assert second.token_ids == prompt


def test_a_request_that_shares_the_tables_of_none_is_refused() -> None:
    for message in (
        AddRequest(1, [1], SamplingParams(), shares_tables=True),
        AddRequest(1, [], SamplingParams(), shares_prompt=True),
    ):
        with pytest.raises(ValueError, match="is set, but no request was sent before"):
            take_fields(message, None)


def test_garbage_collections_visit_no_alternatives_of_tokens() -> None:
    """Requests hold hundreds of thousands of them, and each full collection would visit every one."""
    sent = StepOutputs([RequestOutput(1, [5], logprobs=[TokenLogprobs(5, -0.5, (5, 6), (-0.5, -1.5), 1)])])
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=StepOutputs)
    assert received.outputs[0].logprobs is not None
    position = received.outputs[0].logprobs[0]
    gc.collect()
    assert not any(map(gc.is_tracked, (position, position.top_ids, position.top_logprobs)))
