"""`SubmittedSteps`: the steps that were given to the device and are not read yet. Owned by the scheduler.

A sequence that leaves meanwhile keeps its slot, as its blocks are kept by the block manager, until the step submitted
last has been read: no submitted step computes for a slot, or over a block, that changes hands.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol

from engine.batch import ScheduledBatch, ScheduledBatchOutput
from engine.messages import RequestOutput
from engine.sequence import Sequence
from kvcache.block_manager import RELEASED, BlockManager


class OutputQueue(Protocol):
    """Where a step's outputs go."""

    def put_nowait(self, outputs: list[RequestOutput], /) -> None: ...


class Owner(Protocol):
    """What is needed of the scheduler."""

    def postprocess(
        self,
        seqs: list[Sequence],
        fwd_output: ScheduledBatchOutput,
        stream_output_queue: OutputQueue | None = None,
        verified: Mapping[int, list[int]] | None = None,
    ) -> list[Sequence]: ...

    def retract(self, seqs: Iterable[Sequence]) -> None: ...


class _Step(NamedTuple):
    batch: ScheduledBatch
    parts: frozenset[Sequence]
    """Sequences to which the step brings no token, as it computes a part of their prompts."""
    left_slots: list[int]
    """To be given out again when the step has been read."""

    def live(self) -> list[Sequence]:
        """The sequences that are as the step saw them: they did not end, and do not wait again."""
        batch = self.batch
        return [seq for seq, slot in zip(batch.sequences, batch.slot_list, strict=True) if seq.slot == slot]


class SubmittedSteps:
    """First in, first out."""

    def __init__(self, scheduler: Owner, block_manager: BlockManager, free_slots: list[int]) -> None:
        """`free_slots` is where slots are given back."""
        self._scheduler, self._block_manager, self._free_slots = scheduler, block_manager, free_slots
        self._steps: deque[_Step] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def verify_drafts(self) -> bool:
        """Whether one of the steps does: how many tokens its rows get is known when it has been read."""
        return any(step.batch.scheduled_spec_decode_tokens for step in self._steps)

    def begin(self, batch: ScheduledBatch) -> None:
        """A step was submitted. Sequences whose last token it computes get a placeholder for what it samples."""
        seqs, num_decodes = batch.sequences, batch.total_seqs_num_decode
        parts = [seq for seq in seqs[num_decodes:] if seq.num_computed_tokens < seq.num_tokens]
        for seq in seqs:
            seq.num_placeholder += 1
        for seq in parts:
            seq.num_placeholder -= 1
        self._steps.append(_Step(batch, frozenset(parts), []))
        self._block_manager.begin_step()

    def read(self, fwd_output: ScheduledBatchOutput, stream_output_queue: OutputQueue | None = None) -> None:
        """Take the tokens of the step that was submitted first, as `postprocess` does; those of who left are dropped.

        Sequences that began, in a step submitted since, behind blocks of a row that failed begin again.
        """
        batch, errors = self._steps[0].batch, fwd_output.errors
        spoiled = set[int]()
        if errors:
            rows = zip(batch.req_ids, batch.tables, strict=True)
            spoiled.update(block_id for seq_id, table in rows if seq_id in errors for block_id in table)
            spoiled.discard(RELEASED)
            # Also what those computed that are gone.
            self._block_manager.forget_blocks(spoiled)
        step, live = self._end()
        for seq in step.parts:
            fwd_output.token_ids.pop(seq.id, None)
        self._scheduler.postprocess(live, fwd_output, stream_output_queue, batch.scheduled_spec_decode_tokens)
        if spoiled:
            self._scheduler.retract([seq for seq in self._started() if not spoiled.isdisjoint(seq.block_table)])

    def drop(self) -> None:
        """Have the sequences of all steps wait again: the device has ended, and none will be read."""
        for step in self._steps:
            for table in step.batch.tables:
                self._block_manager.forget_blocks(table)
        while self._steps:
            self._scheduler.retract(self._end()[1])

    def keep(self, slot: int) -> bool:
        """Whether a slot that its sequence left must not be given out yet; it will be when it may."""
        if self._steps:
            self._steps[-1].left_slots.append(slot)
        return bool(self._steps)

    @property
    def kept_slots(self) -> list[int]:
        """All slots that nobody has and that are not given out yet."""
        return [slot for step in self._steps for slot in step.left_slots]

    def _end(self) -> tuple[_Step, list[Sequence]]:
        """The step submitted first is over: let go of what it held. Its live sequences lose a placeholder each."""
        step = self._steps.popleft()
        self._block_manager.end_step()
        self._free_slots += step.left_slots
        live = step.live()
        for seq in live:
            seq.num_placeholder -= 1
        for seq in step.parts.intersection(live):
            seq.num_placeholder += 1
        return step, live

    def _started(self) -> Iterator[Sequence]:
        """Sequences that started in one of the steps, and are live."""
        for step in self._steps:
            yield from set(step.live()).intersection(step.batch.new_seqs)
