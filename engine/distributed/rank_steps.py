"""Steps of several ranks: `RankSteps` sends each as a `StepMessage`, which the other ranks compute as a `RankBatch`.

Rank 0 takes their reports at the end of each step. A rank that raises in a step has all others leave it.
"""

import logging
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from engine.batch import AppendedBlocks, PromptSpan, ScheduledBatch
from engine.distributed.step_transport import StepTransport
from engine.messages import PoolingParams
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence

logger = logging.getLogger(__name__)

_GREEDY = SamplingParams(temperature=0.0)
"""Only rank 0 samples: the other ranks need no sampling parameters."""


class NewRow(msgspec.Struct, array_like=True, frozen=True):
    """A sequence that begins in this step, or begins again."""

    slot: int
    token_ids: list[int]
    block_table: list[int]
    adapter: int
    pooling: PoolingParams | None = None


class StepMessage(msgspec.Struct, array_like=True, frozen=True, tag=0):
    """One step. Rows as in `ScheduledBatch`."""

    number: int
    """Ranks that left one step early join each other again in the next by its number."""
    sampled: list[int]
    """Tokens that were sampled in the last step, in the order of its rows; none where it failed, or there was none."""
    slots: list[int]
    num_scheduled_tokens: list[int]
    context_lens: list[int]
    num_decodes: int
    new_rows: list[NewRow]
    appended_blocks: Rows[AppendedBlocks]
    prompt_spans: list[tuple[int, int]]
    """First position and number of tokens of each."""
    is_greedy: bool
    """Whether every row takes its argmax, so that no logits are gathered."""
    tokens_across_dp: tuple[int, ...]
    """Tokens that each replica computes, where they compute in lockstep."""
    draft_tokens: list[int]
    """Draft tokens of all rows, in order."""
    num_next_drafts: list[int]
    """Drafts to make of each row for its next step."""


class AdapterMessage(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """A change of the LoRA adapters between two steps."""

    number: int
    path: str | None
    """The directory to attach under the number; None: remove the adapter of the number."""


@dataclass(frozen=True, slots=True)
class RankBatch:
    """The part of a `ScheduledBatch` that a rank needs which does not sample."""

    slots: npt.NDArray[np.int64]
    num_scheduled_tokens: list[int]
    context_lens: list[int]
    total_tokens_num: int
    total_seqs_num_decode: int
    new_seqs: Rows[Sequence]
    appended_blocks: Rows[AppendedBlocks]
    prompt_spans: list[PromptSpan]
    draft_tokens: list[int]
    num_next_drafts: list[int]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(StepMessage)
_message_decoder = msgspec.msgpack.Decoder(StepMessage | AdapterMessage)


def encode_step(
    batch: ScheduledBatch,
    number: int,
    sampled: list[int],
    *,
    is_greedy: bool,
    tokens_across_dp: tuple[int, ...] = (),
) -> bytes:
    """Encode the message of a step."""
    return _encoder.encode(
        StepMessage(
            number=number,
            sampled=sampled,
            slots=batch.slot_list,
            num_scheduled_tokens=batch.num_scheduled_tokens,
            context_lens=batch.context_lens,
            num_decodes=batch.total_seqs_num_decode,
            new_rows=[
                NewRow(seq.slot, seq.token_ids, seq.block_table, seq.adapter, seq.pooling) for seq in batch.new_seqs
            ],
            appended_blocks=batch.appended_blocks,
            prompt_spans=[(span.first, len(span.token_ids)) for span in batch.prompt_spans],
            is_greedy=is_greedy,
            tokens_across_dp=tokens_across_dp,
            draft_tokens=batch.draft_tokens,
            num_next_drafts=batch.num_next_drafts,
        )
    )


def decode_step(message: bytes) -> StepMessage:
    """Decode what `encode_step` has encoded."""
    return _decoder.decode(message)


def decode_message(message: bytes) -> StepMessage | AdapterMessage:
    """Decode whatever rank 0 sends."""
    decoded: StepMessage | AdapterMessage = _message_decoder.decode(message)
    return decoded


def rank_batch(message: StepMessage, block_size: int) -> RankBatch:
    """The batch of a message."""
    return RankBatch(
        slots=np.array(message.slots, dtype=np.int64),
        num_scheduled_tokens=message.num_scheduled_tokens,
        context_lens=message.context_lens,
        total_tokens_num=sum(message.num_scheduled_tokens),
        total_seqs_num_decode=message.num_decodes,
        new_seqs=[_sequence(row, block_size) for row in message.new_rows],
        appended_blocks=message.appended_blocks,
        prompt_spans=[PromptSpan(-1, first, [0] * count, 0) for first, count in message.prompt_spans],
        draft_tokens=message.draft_tokens,
        num_next_drafts=message.num_next_drafts,
    )


def _sequence(row: NewRow, block_size: int) -> Sequence:
    seq = Sequence(row.token_ids, block_size, _GREEDY, id=-1, adapter=row.adapter, pooling=row.pooling)
    seq.slot, seq.block_table = row.slot, row.block_table
    return seq


ABORTED = "aborted"
"""Reported by a rank that left the step because another had."""

_LEAVE_SECONDS = 5.0
"""For the other ranks to leave a step that rank 0 cannot compute."""


class RankGroup(Protocol):
    """A rank's collectives, as far as `AsyncIOProcManager` and `RankSteps` use them."""

    def join(self) -> None:
        """Join the other ranks."""

    def begin_step(self, number: int) -> None:
        """The collectives from here on belong to this step."""

    def abort(self) -> None:
        """Have every rank leave the step."""

    def close(self) -> None:
        """Leave the other ranks, before this process ends."""


class RankStepError(RuntimeError):
    """A rank other than 0 could not compute its part of a step."""


class RankSteps:
    """Rank 0's control of the other ranks while steps run: sends them each step, and takes their reports."""

    def __init__(self, transport: StepTransport, size: int, group: RankGroup, fail: Callable[[str], object]) -> None:
        """`fail` ends this process with a sentence."""
        self._transport, self._others, self._group, self._fail = transport, range(1, size), group, fail
        self._number = 0
        self._sampled: list[int] = []
        self._is_open = False

    @property
    def number(self) -> int:
        """Number of the step that runs; 0 between steps."""
        return self._number if self._is_open else 0

    def begin(self, batch: ScheduledBatch, *, is_greedy: bool, tokens_across_dp: tuple[int, ...] = ()) -> None:
        """Have the other ranks compute a step too. Ends this process where it cannot be sent to one of them."""
        self._number += 1
        message = encode_step(
            batch, self._number, self._sampled, is_greedy=is_greedy, tokens_across_dp=tokens_across_dp
        )
        self._sampled = []
        try:
            self._transport.write(message)
        except ConnectionError as error:
            self._fail(str(error))
            raise
        self._is_open = True
        self._group.begin_step(self._number)

    def change_adapter(self, number: int, path: str | None) -> None:
        """Have the other ranks attach or remove an adapter, between steps. Raises `RankStepError` where one cannot."""
        try:
            self._transport.write(_encoder.encode(AdapterMessage(number, path)))
        except ConnectionError as error:
            self._fail(str(error))
            raise
        self._raise_first([self._transport.take(rank) for rank in self._others])

    def end(self, sampled: list[int]) -> None:
        """This rank has computed the step and sampled these tokens. Raises `RankStepError` where another has not."""
        self._is_open = False
        failures = [self._transport.take(rank) for rank in self._others]
        self._raise_first(failures)
        self._sampled = sampled

    def abandon(self, error: BaseException) -> None:
        """Leave a step that raised here, with all others. Raises `RankStepError` where one of them raised first."""
        if not self._is_open:
            return
        self._is_open = False
        self._group.abort()
        failures: list[str] = []
        for rank in self._others:
            failure = self._transport.take_within(rank, _LEAVE_SECONDS)
            if failure is None:
                self._fail(
                    f"a step failed on tensor-parallel rank 0 ({str(error) or type(error).__name__}), and rank "
                    f"{rank} did not leave it within {_LEAVE_SECONDS:g} s"
                )
                return
            failures.append(failure)
        self._raise_first(failures)

    def _raise_first(self, failures: list[str]) -> None:
        """Raise the failure of the first rank that did not only leave the step because another had."""
        for rank, failure in zip(self._others, failures, strict=True):
            if failure and failure != ABORTED:
                sentence, _, trace = failure.partition("\n")
                if trace:
                    logger.error("tensor-parallel rank %d raised in a step:\n%s", rank, trace)
                raise RankStepError(f"tensor-parallel rank {rank}: {sentence}") from None
