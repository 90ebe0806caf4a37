"""`SequencePool`: the waiting and running sequences, the slots and blocks that they hold, and their owners' service.

A sequence is queued (`add`), runs in a slot (`admit`), and then waits again (`preempt`) or ends (`finish`, `remove`).
The slot and the blocks of a sequence that stops running are reused only after the step submitted last has been read.
So no submitted step writes to a slot or block that belongs to another sequence.
"""

import operator
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager

from engine.batch import DecodeRows
from engine.core.step_budget import StepLimits
from engine.core.waiting_queue import Holdings, WaitingQueue
from engine.messages import RequestOutput, terminal_output
from engine.sequence import Sequence, SequenceStatus
from engine.speculative.drafts import Drafts
from kvcache.block_manager import BlockManager
from models.config.rope import RopeContext


class SequencePool:
    """All sequences that have not ended. Its owner chooses which of them start, stop and grow."""

    def __init__(
        self,
        block_manager: BlockManager,
        waiting: WaitingQueue,
        drafts: Drafts,
        limits: StepLimits,
        *,
        window: int | None,
        rope: RopeContext | None,
        tokens_of: Callable[[float], float] | None,
    ) -> None:
        """`limits.num_rows` is the number of slots. `window` and `rope` are those of `Scheduler`. `tokens_of` converts
        seconds to the tokens for which owners are charged; None: time is not charged."""
        self.block_manager = block_manager
        self.waiting = waiting
        self.running: deque[Sequence] = deque()
        """Running sequences, in order of admission."""
        self._num_slots_of = Counter[str]()
        """Number of slots that each owner's sequences hold."""
        self.prefilling: dict[Sequence, None] = {}
        """Running sequences whose prompts are partly computed, in order of admission."""
        self.shares = waiting.shares
        self.preempted: list[int] = []
        """Ids of preempted sequences; the caller that reports them clears the list."""
        self.num_preemptions = 0
        self.prefix_queried_tokens = self.prefix_hit_tokens = 0
        self._drafts, self._limits = drafts, limits
        self._window, self._rope = window, rope
        self._has_rope_limits = rope is not None and not rope.grows
        self._tokens_of = tokens_of
        self._num_slots = limits.num_rows
        self._free_slots = list(reversed(range(self._num_slots)))
        self._deferred_slots: deque[list[int]] = deque()
        """Of each unread step, slots of sequences that stopped running since it was submitted."""
        self._decode_rows: DecodeRows | None = None
        """Running sequences whose prompts are computed; None, to be rebuilt, after a sequence joined or left."""

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.running
        yield from self.waiting

    def add(self, seq: Sequence) -> None:
        """Queue a sequence."""
        if self._rope is not None:
            seq.follow_rope(self._rope)
        self._forget_owners(seq.owner)
        if seq.num_completion_tokens:
            # It was running in a core that died, so later sequences of its owner are not served before it.
            self.waiting.append_front(seq)
        else:
            self.waiting.append(seq)

    def has_slot(self, num_reserved: int = 0) -> bool:
        """Return whether a sequence can start such that `num_reserved` slots remain free. Thread-safe."""
        return len(self._free_slots) > num_reserved and len(self.running) + num_reserved < self._limits.num_rows

    def holds_slot(self, owner: str) -> bool:
        """Return whether a sequence of the owner holds a slot. Thread-safe."""
        return owner in self._num_slots_of

    def admit(self, seq: Sequence, start: int, end: int) -> None:
        """Start a sequence that was taken from the queue: its tokens `[start, end)` are computed in the next step."""
        self.prefix_queried_tokens += seq.num_tokens
        self.block_manager.allocate(seq, end)
        if self._window is not None:
            self.block_manager.release_unseen(seq, start - self._window + 1)
        self.prefix_hit_tokens += seq.num_cached_tokens
        seq.slot = self._free_slots.pop()
        self._num_slots_of[seq.owner] += 1
        seq.status = SequenceStatus.RUNNING
        seq.num_computed_tokens = start
        if seq.schedule_time == 0.0:
            seq.schedule_time = time.monotonic()
        self.running.append(seq)
        self.prefilling[seq] = None

    def end_prompt(self, seq: Sequence) -> None:
        """Note that the rest of a sequence's prompt is scheduled, so that it decodes in later steps."""
        del self.prefilling[seq]
        self._decode_rows = None

    def decode_rows(self) -> tuple[DecodeRows, list[int]]:
        """The running sequences whose prompts are computed, with their numbers of tokens.

        Sequences whose rotary frequencies change at their length are preempted, since their cached keys are invalid.
        """
        rows = self._decode_rows
        if rows is None or len(rows.seqs) + len(self.prefilling) != len(self.running):
            rows = self._decode_rows = DecodeRows(seq for seq in self.running if seq not in self.prefilling)
            if self._window is not None:
                # Free blocks outside the window now: a prompt just computed would hold them until it needs another
                # block.
                for seq in rows.seqs:
                    self.block_manager.release_unseen(seq, len(seq.token_ids) - self._window)
        lengths = list(map(len, rows.token_ids))
        if self._has_rope_limits and any(map(operator.ge, lengths, rows.limits)):
            for seq, length in zip(rows.seqs, lengths, strict=True):
                if length >= seq.rope_limit and not seq.num_placeholder:
                    self.preempt(seq)
            if self._decode_rows is None:
                return self.decode_rows()
        return rows, lengths

    @property
    def has_changed(self) -> bool:
        """Whether the result of `decode_rows` is obsolete, because a sequence joined or left."""
        return self._decode_rows is None

    @contextmanager
    def only(self, chosen: Collection[Sequence]) -> Iterator[None]:
        """Hide all other sequences during the block."""
        waiting, running, prefilling = self.waiting, self.running, self.prefilling
        self.waiting = waiting.only(chosen)
        self.running = deque(seq for seq in running if seq in chosen)
        self.prefilling = {seq: None for seq in prefilling if seq in chosen}
        self._decode_rows = None
        try:
            yield
        finally:
            self.running = deque((*(seq for seq in running if seq not in chosen), *self.running))
            self.prefilling = {seq: None for seq in prefilling if seq not in chosen} | self.prefilling
            self._decode_rows = None
            waiting.keep(lambda seq: seq not in chosen)
            for seq in reversed(list(self.waiting)):
                waiting.appendleft(seq)
            self.waiting = waiting

    # -- submitted steps ----------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Note that a step was submitted."""
        self._deferred_slots.append([])
        self.block_manager.begin_step()

    def end_step(self) -> None:
        """Note that the oldest submitted step was read, and free the slots and blocks that it held."""
        self.block_manager.end_step()
        self._free_slots += self._deferred_slots.popleft()

    # -- owners -------------------------------------------------------------------------------------------------------

    @property
    def owners(self) -> set[str]:
        """The owners that have sequences."""
        rows = self._decode_rows
        decoding = (seq.owner for seq in self.running) if rows is None else rows.costs
        return {*self.waiting.owners, *(seq.owner for seq in self.prefilling), *decoding}

    def holdings(self) -> Holdings:
        """Return what each owner's running sequences hold."""
        return Holdings(self.running, self.waiting, self._limits.num_rows, len(self.block_manager.blocks))

    def charge_grammar(self, seq: Sequence) -> None:
        """Charge a sequence's owner for the time that its grammar took since the last charge."""
        matcher = seq.matcher
        if matcher is not None and matcher.uncharged_seconds and self._tokens_of is not None:
            cost, matcher.uncharged_seconds = self._tokens_of(matcher.uncharged_seconds), 0.0
            self.shares.charge(seq.owner, cost / seq.weight)

    def _forget_owners(self, owner: str) -> None:
        """Remove the service of owners that no longer matters, before a sequence of `owner` is queued."""
        if not self.running and not self.waiting:
            self.shares.restart(owner)
            return
        if not self.waiting and not self.prefilling:
            self.shares.catch_up()
        if self.shares.is_crowded:
            self.shares.forget_all_but({seq.owner for seq in self.running} | self.waiting.owners)

    # -- removal ------------------------------------------------------------------------------------------------------

    def preempt(self, seq: Sequence) -> None:
        """Free a running sequence's blocks. It waits at the head of its owner's queue and prefills again."""
        if self.running and self.running[-1] is seq:
            self.running.pop()
        elif seq in self.running:
            self.running.remove(seq)
        self._release(seq, SequenceStatus.WAITING)
        if self._rope is not None:
            seq.follow_rope(self._rope)
        self.waiting.appendleft(seq)
        self.num_preemptions += 1
        self.preempted.append(seq.id)

    def retract(self, seqs: Iterable[Sequence]) -> None:
        """Requeue the sequences of a step that raised, since none of its results are valid."""
        # Each is put at the head of the queue, so the reverse order preserves their order.
        for seq in reversed(list(seqs)):
            if seq.status is SequenceStatus.RUNNING:
                self.block_manager.forget(seq)
                self.preempt(seq)

    def finish(self, seqs: list[Sequence]) -> None:
        """Free what sequences hold whose last tokens are appended."""
        for seq in seqs:
            # A block with placeholders is not published, so publish it now that its tokens are known.
            self.block_manager.publish(seq, len(seq.token_ids) - 1)
            self._release(seq, SequenceStatus.FINISHED)
        self.running = deque(seq for seq in self.running if seq.status is SequenceStatus.RUNNING)

    def fail(self, seqs: Iterable[Sequence], error: str, bad_request: bool = False) -> list[RequestOutput]:
        """As `Scheduler.fail`."""
        live = [seq for seq in seqs if not seq.is_finished]
        for seq in live:
            self.block_manager.forget(seq)
        return self.remove(live, "error", error, bad_request)

    def remove(
        self, seqs: list[Sequence], reason: str, error: str | None = None, bad_request: bool = False
    ) -> list[RequestOutput]:
        """End sequences now and free what they hold. Returns their terminal outputs."""
        for seq in seqs:
            seq.leave_reason = reason
            self.charge_grammar(seq)
            self._release(seq, SequenceStatus.FINISHED)
        if seqs:
            self.running = deque(seq for seq in self.running if seq.status is SequenceStatus.RUNNING)
            self.waiting.keep(lambda seq: seq.status is SequenceStatus.WAITING)
        return [terminal_output(seq.id, reason, error, bad_request=bad_request) for seq in seqs]

    def _release(self, seq: Sequence, status: SequenceStatus) -> None:
        """Free blocks and slot of a sequence that stops running."""
        seq.status = status
        self._decode_rows = None
        if status is SequenceStatus.FINISHED:
            seq.leave_time = time.monotonic()
            self._drafts.forget(seq)
        self.block_manager.deallocate(seq)
        seq.num_computed_tokens = 0
        seq.num_placeholder = 0
        seq.spec_token_ids = []
        if seq.slot >= 0:
            (self._deferred_slots[-1] if self._deferred_slots else self._free_slots).append(seq.slot)
            seq.slot = -1
            self._num_slots_of[seq.owner] -= 1
            if not self._num_slots_of[seq.owner]:
                del self._num_slots_of[seq.owner]
        self.prefilling.pop(seq, None)

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless queues, slots and blocks agree."""
        self.block_manager.check_integrity(self.running)
        slots = [seq.slot for seq in self.running]
        slots += (slot for step in self._deferred_slots for slot in step)
        if sorted(slots + self._free_slots) != list(range(self._num_slots)):
            raise AssertionError(f"slots leak: {slots} running, {self._free_slots} free")
        if Counter(seq.owner for seq in self.running) != self._num_slots_of:
            raise AssertionError(f"owners are counted to hold {dict(self._num_slots_of)} slots")
        if not self._deferred_slots and any(seq.num_placeholder for seq in (*self.running, *self.waiting)):
            raise AssertionError("a sequence has a placeholder, but no step is submitted")
        for seq in self.running:
            if seq.status is not SequenceStatus.RUNNING:
                raise AssertionError(f"sequence {seq.id} runs with status {seq.status}")
        for seq in self.waiting:
            if seq.status is not SequenceStatus.WAITING or seq.block_table or seq.slot != -1:
                raise AssertionError(f"waiting sequence {seq.id} holds blocks or a slot")
        self.waiting.check_integrity()
        if any(seq not in self.running for seq in self.prefilling):
            raise AssertionError("a sequence prefills but does not run")
