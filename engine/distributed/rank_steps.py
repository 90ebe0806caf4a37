"""Steps of several ranks: `RankSteps` sends each as a `StepMessage`, which the other ranks compute as a `RankBatch`.

Rank 0 receives their reports when it reads a step, which may be after it has begun the next one. If a rank raises in a
step, all ranks leave the step.
"""

import logging
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from engine.batch import AppendedBlocks, PromptSpan, ScheduledBatch
from engine.distributed.logs import before_stack
from engine.distributed.step_transport import StepTransport
from engine.messages import PoolingParams
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence

logger = logging.getLogger(__name__)

_GREEDY = SamplingParams(temperature=0.0)
"""Only rank 0 samples: the other ranks need no sampling parameters."""


class NewRow(msgspec.Struct, array_like=True, frozen=True):
    """A sequence that begins in this step, or resumes after preemption."""

    slot: int
    token_ids: list[int]
    block_table: list[int]
    adapter: int
    pooling: PoolingParams | None = None
    rope_length: int = 0


class StepMessage(msgspec.Struct, array_like=True, frozen=True, tag=0):
    """One step. Rows as in `ScheduledBatch`."""

    number: int
    """Number of the step. Ranks that left a step early connect again in the next one by its number."""
    sampled: list[tuple[int, list[int]]]
    """Number of each step that was read since the last message, with its tokens in the order of its rows."""
    slots: list[int]
    num_scheduled_tokens: list[int]
    context_lens: list[int]
    num_decodes: int
    new_rows: list[NewRow]
    appended_blocks: Rows[AppendedBlocks]
    prompt_spans: list[tuple[int, int]]
    """First position and number of tokens of each span."""
    is_greedy: bool
    """Whether every row takes its argmax, so that no logits are gathered."""
    tokens_across_dp: tuple[int, ...]
    """Number of tokens that each replica computes, if they compute in lockstep."""
    may_replay: bool
    """Whether all replicas replay a graph, if they compute in lockstep."""
    draft_tokens: list[int]
    """Draft tokens of all rows, in order."""
    num_next_drafts: list[int]
    """Number of drafts to compute for each row's next step."""
    is_deferred: bool
    """Whether rank 0 broadcasts the tokens on the device, so that the next step can begin before they are read."""
    drafts_on_device: bool
    """Whether the ranks also draft after this step before it is read."""


class AdapterMessage(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """A change of the LoRA adapters between two steps."""

    number: int
    path: str | None
    """Directory of the adapter to attach under the number; None: remove the adapter with the number."""


@dataclass(frozen=True, slots=True)
class RankBatch:
    """The part of a `ScheduledBatch` that a rank without sampling needs."""

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
    sampled: list[tuple[int, list[int]]],
    *,
    is_greedy: bool,
    tokens_across_dp: tuple[int, ...] = (),
    may_replay: bool = False,
    is_deferred: bool = False,
    drafts_on_device: bool = False,
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
                NewRow(seq.slot, seq.token_ids, seq.block_table, seq.adapter, seq.pooling, seq.rope_length)
                for seq in batch.new_seqs
            ],
            appended_blocks=batch.appended_blocks,
            prompt_spans=[(span.first, len(span.token_ids)) for span in batch.prompt_spans],
            is_greedy=is_greedy,
            tokens_across_dp=tokens_across_dp,
            may_replay=may_replay,
            draft_tokens=batch.draft_tokens,
            num_next_drafts=batch.num_next_drafts,
            is_deferred=is_deferred,
            drafts_on_device=drafts_on_device,
        )
    )


def decode_step(message: bytes) -> StepMessage:
    """Decode a message of `encode_step`."""
    return _decoder.decode(message)


def decode_message(message: bytes) -> StepMessage | AdapterMessage:
    """Decode a message of rank 0 of any kind."""
    decoded: StepMessage | AdapterMessage = _message_decoder.decode(message)
    return decoded


def rank_batch(message: StepMessage, block_size: int) -> RankBatch:
    """Create the batch of a message."""
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
    seq.slot, seq.block_table, seq.rope_length = row.slot, row.block_table, row.rope_length
    return seq


ABORTED = "aborted"
"""Report of a rank that left the step because another rank failed."""

_LEAVE_SECONDS = 5.0
"""Seconds that the other ranks have to leave a step that rank 0 cannot compute."""


class RankGroup(Protocol):
    """The interface of a rank's collectives that `AsyncIOProcManager` and `RankSteps` use."""

    def join(self) -> None:
        """Connect to the other ranks."""

    def begin_step(self, number: int) -> None:
        """Note that the following collectives belong to this step."""

    def abort(self) -> bool:
        """Make every rank leave the step. Returns False if ranks cannot leave collectives that they have begun."""

    def close(self) -> None:
        """Disconnect from the other ranks before this process ends."""


class RankStepError(RuntimeError):
    """A rank other than 0 could not compute its part of a step."""


class RankSteps:
    """Rank 0's control of the other ranks while steps run: sends them each step, and receives their reports.

    Several steps may be open: begun and not ended. They end in order; only the newest can be abandoned.
    """

    def __init__(self, transport: StepTransport, size: int, group: RankGroup, fail: Callable[[str], object]) -> None:
        """`fail` ends this process with a sentence."""
        self._transport, self._others, self._group, self._fail = transport, range(1, size), group, fail
        self._number = 0
        self._open: deque[int] = deque()
        self._early: deque[list[str]] = deque()
        """Reports of the oldest open steps that were received while a newer step was abandoned."""
        self._sampled: list[tuple[int, list[int]]] = []

    @property
    def number(self) -> int:
        """Number of the latest begun step."""
        return self._number

    def is_open(self, number: int) -> bool:
        """Return whether the step was begun and has not ended. Thread-safe."""
        return number in tuple(self._open)

    def begin(
        self,
        batch: ScheduledBatch,
        *,
        is_greedy: bool,
        tokens_across_dp: tuple[int, ...] = (),
        may_replay: bool = False,
        is_deferred: bool = False,
        drafts_on_device: bool = False,
    ) -> None:
        """Send a step to the other ranks, which compute it too. Ends this process if it cannot be sent to one of them.

        `is_deferred`: this rank will broadcast the step's tokens. `drafts_on_device`: it also broadcasts the next
        drafts.
        """
        self._number += 1
        message = encode_step(
            batch,
            self._number,
            self._sampled,
            is_greedy=is_greedy,
            tokens_across_dp=tokens_across_dp,
            may_replay=may_replay,
            is_deferred=is_deferred,
            drafts_on_device=drafts_on_device,
        )
        self._sampled = []
        try:
            self._transport.write(message)
        except ConnectionError as error:
            self._fail(str(error))
            raise
        self._open.append(self._number)
        self._group.begin_step(self._number)

    def change_adapter(self, number: int, path: str | None) -> None:
        """Make the other ranks attach or remove an adapter between steps. Raises `RankStepError` if one fails."""
        assert not self._open, "adapters change while no step is open"
        try:
            self._transport.write(_encoder.encode(AdapterMessage(number, path)))
        except ConnectionError as error:
            self._fail(str(error))
            raise
        self._raise_first(self._take())

    def end(self, sampled: list[int]) -> None:
        """End the oldest open step, in which this rank sampled these tokens.

        Raises `RankStepError` if another rank failed to compute it.
        """
        number = self._open[0]
        self._raise_first(self._close_oldest())
        if sampled:
            self._sampled.append((number, sampled))

    def discard(self, number: int) -> None:
        """Receive the reports of a step whose tokens are not read. No effect if it has ended."""
        while self.is_open(number):
            self._close_oldest()

    def abandon(self, number: int, error: BaseException) -> None:
        """Leave the newest step, which raised here, on all ranks. No effect if it has ended.

        Raises `RankStepError` if another rank raised first. Ends this process if a rank stays in a collective that
        this one has left.
        """
        if not self.is_open(number):
            return
        assert self._open[-1] == number, "only the newest step can be abandoned"
        can_leave = self._group.abort()
        taken: list[list[str]] = []
        for _ in range(len(self._open) - len(self._early)):
            taken.append([])
            for rank in self._others:
                failure = self._transport.take_within(rank, _LEAVE_SECONDS)
                if failure is None:
                    self._fail(f"{_raised(error)}, and rank {rank} did not leave it within {_LEAVE_SECONDS:g} s")
                    return
                taken[-1].append(failure)
        self._early += taken
        self._open.pop()
        failures = self._early.pop()
        if not can_leave and "" in failures:
            # Its report says that its part is enqueued; there it waits for this rank's part.
            rank = self._others[failures.index("")]
            self._fail(f"{_raised(error)}, and rank {rank} cannot leave the step's collectives")
            return
        self._raise_first(failures)

    def _close_oldest(self) -> list[str]:
        """End the oldest open step, and return its reports."""
        failures = self._early.popleft() if self._early else self._take()
        self._open.popleft()
        return failures

    def _take(self) -> list[str]:
        return [self._transport.take(rank) for rank in self._others]

    def _raise_first(self, failures: list[str]) -> None:
        """Raise the failure of the first rank that failed itself, instead of leaving the step because of another
        rank."""
        for rank, failure in zip(self._others, failures, strict=True):
            if failure and failure != ABORTED:
                sentence, _, trace = failure.partition("\n")
                if trace:
                    logger.error("tensor-parallel rank %d raised in a step:", rank, extra=before_stack(trace))
                raise RankStepError(f"tensor-parallel rank {rank}: {sentence}") from None


def _raised(error: BaseException) -> str:
    return f"a step failed on tensor-parallel rank 0 ({str(error) or type(error).__name__})"
