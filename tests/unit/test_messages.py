"""Messages survive the wire as they are, and what is not a message is refused."""

import msgspec
import pytest

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
)
from engine.sampling_params import SamplingParams

MODEL = ModelInfo("LlamaForCausalLM", "float32", "cpu", "cpu", 1000, 512, 2048, [2, 3], 16, 100)
STATS = SchedulerStats(2, 1, 10, 100, 64, 32, 0, 32, "prefill", 0.01)
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
                RequestOutput(2, [6, 7], True, "stop_7", 32, 0.25, [TokenLogprobs(6, -0.5, [6, 1], [-0.5, -1.5])]),
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
def test_finish_reason_is_told_in_openai_terms(leave_reason: str | None, expected: str | None) -> None:
    assert openai_finish_reason(leave_reason) == expected
