"""The scheduler one step ahead of what is read, against a model of the KV cache with a device that is as late as
possible.

A submitted step runs only when it is read. Until then its slots and blocks must not be reused, which generation
numbers show; and at that time every position of each row's context must hold the row's own prefix.
"""

from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from engine.batch import UNREAD_DRAFT, ScheduledBatch, ScheduledBatchOutput
from engine.messages import TokenLogprobs
from engine.sequence import Sequence
from kvcache.block import Block
from kvcache.block_manager import RELEASED
from tests.property.test_scheduling import (
    POISON,
    VOCAB,
    FakeWorker,
    SchedulingMachine,
    duration,
    next_token,
    vector_of,
)


@dataclass
class Unread:
    """A step that was launched."""

    batch: ScheduledBatch
    rows: list[tuple[Sequence, int, int, int]]
    """Sequence, slot, end and token count of each row."""
    generations: dict[int, int]
    """Generations of the blocks that the step may read or write."""
    prompt_logprobs: dict[int, list[TokenLogprobs]]
    drafts_on_device: bool
    unknown: set[int]
    """Slots of rows that begin at the end of an unread step: `end` is the largest possible one."""


class LateWorker(FakeWorker):
    """Stores rows when a step is launched, and computes it when it is read."""

    def __init__(self, block_size: int, window: int | None, mtp_k: int = 0) -> None:
        super().__init__(block_size, 0, window)
        self.most_drafts = mtp_k
        """Drafts made by a model in the worker."""
        self.made: dict[int, list[int]] = {}
        """The latest drafts of each slot."""
        self.generations: Counter[int] = Counter()
        self.unread: deque[Unread] = deque()

    def can_draft_on_device(self, batch: ScheduledBatch) -> bool:
        """Whether the device drafts after a step before it is read: always where the scheduler requires it, otherwise
        at random."""
        if not self.most_drafts or batch.total_seqs_num_prefill:
            return False
        slots = {slot for step in self.unread if step.drafts_on_device for _, slot, _, _ in step.rows}
        if not slots.isdisjoint(batch.slot_list):
            return True
        return any(batch.num_next_drafts) and sum(batch.context_lens) % 4 > 0

    def launch(self, batch: ScheduledBatch, *, drafts_on_device: bool = False) -> None:
        """Store a step's rows."""
        for step in self.unread:
            wants = any(step.batch.num_next_drafts) or step.batch.scheduled_spec_decode_tokens
            assert step.drafts_on_device or not (self.most_drafts and wants), "it drafts once it is read"
        unknown = {slot for step in self.unread if step.drafts_on_device for _, slot, _, _ in step.rows}
        unknown &= set(batch.slot_list)
        for seq_id, drafts in batch.scheduled_spec_decode_tokens.items():
            slot = batch.slot_list[batch.req_ids.index(seq_id)]
            assert (UNREAD_DRAFT in drafts) == (slot in unknown)
        in_use = {slot for step in self.unread for _, slot, _, _ in step.rows}
        for seq in batch.new_seqs:
            assert seq.slot not in in_use, "a slot changed hands before its step was read"
            self.take_in(seq)
        for slot, start, block_ids in batch.appended_blocks:
            assert len(self.tables[slot]) == start
            self.tables[slot] += block_ids
        rows = [
            (seq, seq.slot, end, count)
            for seq, end, count in zip(batch.sequences, batch.context_lens, batch.num_scheduled_tokens, strict=True)
        ]
        touched = {
            self.cell(slot, position)[0]
            for _, slot, end, count in rows
            for position in self.seen(end, end - len(self.tokens[slot]) if slot in unknown else count)
        }
        generations = {block_id: self.generations[block_id] for block_id in touched}
        self.unread.append(Unread(batch, rows, generations, self.read_prompts(batch), drafts_on_device, unknown))

    def known_rows(self, step: Unread) -> list[tuple[Sequence, int, int, int, list[int]]]:
        """The rows of the oldest step, whose ends are known now, with the drafts that they verify."""
        rows = []
        for seq, slot, end, count in step.rows:
            drafts = step.batch.scheduled_spec_decode_tokens.get(seq.id, [])
            if slot in step.unknown:
                drafts = self.made[slot][: len(drafts)]
                assert len(drafts) == count - 1
                known = len(self.tokens[slot]) + len(drafts)
                assert known <= end
                end = known
            rows.append((seq, slot, end, count, drafts))
        return rows

    def seen(self, end: int, count: int) -> range:
        """Positions that a row reads or writes."""
        return range(0 if self.window is None else max(0, end - count - self.window + 1), end)

    def finish(self, broken: Collection[int] = ()) -> ScheduledBatchOutput:
        """Compute the oldest step. Sequences in `broken` write poison."""
        step = self.unread.popleft()
        for block_id, generation in step.generations.items():
            assert self.generations[block_id] == generation, "a block changed hands before its step was read"
        poisoned = set()
        rows = self.known_rows(step)
        for seq, slot, end, count, drafts in rows:
            context = [*self.tokens[slot], *drafts][:end]
            assert len(context) == end, (
                f"sequence {seq.id} computes {end - count} to {end}, but has {len(context)} tokens"
            )
            met = any(self.kv.get(self.cell(slot, at)) == POISON for at in self.seen(end - count, 0))
            for position in range(end - count, end):
                cell, content = self.cell(slot, position), self.content(slot, context, position)
                if (seq.id in broken or (met and seq.slot != slot)) and self.kv.get(cell) != content:
                    self.kv[cell] = POISON
                    poisoned.add(cell)
                else:
                    self.kv[cell] = content
        errors, sampled, vectors = {}, {}, {}
        made: dict[int, list[int]] = {}
        for index, (seq, slot, end, count, drafts) in enumerate(rows):
            cells = {position: self.cell(slot, position) for position in self.seen(end, count)}
            known = self.tokens[slot]
            if seq.id in broken or not poisoned.isdisjoint(cells.values()):
                errors[seq.id] = "not a number"
            elif seq.slot == slot:
                for position, cell in cells.items():
                    assert self.kv[cell] == self.content(slot, [*known, *drafts], position)
            if seq.pooling is not None:
                if end == len(known) and seq.slot == slot and seq.id not in errors:
                    vectors[seq.id] = vector_of(known)
            elif end == len(known) + len(drafts):
                new = [next_token(known)]
                for draft in drafts:
                    if draft != new[-1]:
                        break
                    new.append(next_token(known + new))
                known += new
                if seq.id not in errors:
                    sampled[seq.id] = tuple(new)
                wanted = step.batch.num_next_drafts[index] if self.most_drafts and step.batch.num_next_drafts else 0
                self.made[slot] = made[seq.id] = self.guesses(known)[:wanted]
        return ScheduledBatchOutput(
            sampled,
            made if any(made.values()) else None,
            errors=errors or None,
            prompt_logprobs=step.prompt_logprobs,
            vectors=vectors or None,
        )

    def guesses(self, known: list[int]) -> list[int]:
        """Drafts of which a random number are correct."""
        num_right, guessed = hash((*known,)) % (self.most_drafts + 1), list[int]()
        for index in range(self.most_drafts):
            right = next_token(known + guessed)
            guessed.append(right if index < num_right else (right + 1) % VOCAB)
        return guessed

    def fail(self) -> list[Sequence]:
        """The oldest step raises; no result of it or of later steps may remain."""
        for step in self.unread:
            for _, slot, end, count in step.rows:
                context = self.tokens[slot]
                for position in range(end - count, end):
                    cell = self.cell(slot, position)
                    if position >= len(context) or self.kv.get(cell) != self.content(slot, context, position):
                        self.kv[cell] = POISON
        seqs = [seq for seq, slot, _, _ in self.unread[0].rows if seq.slot == slot]
        self.unread.clear()
        return seqs


class DeferredMachine(SchedulingMachine):
    """Like `SchedulingMachine`, with up to two unread steps."""

    worker: LateWorker

    def __init__(self) -> None:
        super().__init__()
        self.worker = LateWorker(self.block_size, self.window, self.mtp_k if self.by_model else 0)
        pool = self.scheduler.block_manager.pool
        take = pool.take

        def counted() -> Block:
            block = take()
            self.worker.generations[block.block_id] += 1
            return block

        pool.take = counted  # type: ignore[method-assign]

    @precondition(lambda self: self.scheduler.has_requests() or self.worker.unread)
    @rule(fault=st.sampled_from([None] * 8 + ["raises", "first row", "last row", "launch"]))
    def step(self, fault: str | None = None) -> None:
        """Launch a step and read the previous one."""
        scheduled = self.scheduler.schedule()
        if scheduled is None:
            assert self.worker.unread, "nothing is computed though there are requests"
            self.read_step(fault)
            return
        batch, seqs = scheduled
        self.check_size(batch)
        assert all(count > 0 for count in batch.num_scheduled_tokens)
        for seq, end in zip(batch.sequences, batch.context_lens, strict=True):
            assert end < seq.token_limit or end <= seq.num_prompt_tokens, "computed past a limit that is known ahead"
        if fault == "launch":
            while self.worker.unread:
                self.read_step()
            # The results that it computed before it raised are lost.
            self.scheduler.retract(seqs.values())
            return
        drafts_on_device = self.worker.can_draft_on_device(batch)
        self.worker.launch(batch, drafts_on_device=drafts_on_device)
        self.scheduler.begin_step(batch, drafts_on_device=drafts_on_device)
        if len(self.worker.unread) > 1:
            self.read_step(fault)

    @precondition(lambda self: self.worker.unread)
    @rule(fault=st.sampled_from([None, None, "raises", "first row"]))
    def read_step(self, fault: str | None = None) -> None:
        """Read the oldest step."""
        if fault == "raises":
            seqs = self.worker.fail()
            self.scheduler.drop_steps()
            self.put_nowait(self.scheduler.fail(seqs[:1], "raised"))
            return
        batch = self.worker.unread[0].batch
        ids = [seq.id for seq, slot, _, _ in self.worker.unread[0].rows if seq.slot == slot]
        broken = {"first row": ids[:1], "last row": ids[-1:]}.get(fault or "", [])
        self.put_nowait(self.scheduler.read_step(self.worker.finish(broken)))
        self.scheduler.note_duration(batch, duration(batch))

    def teardown(self) -> None:
        """All sequences finish, and no block or slot leaks."""
        for _ in range(2000):
            if self.scheduler.is_finished() and not self.worker.unread:
                break
            self.step()
        super().teardown()
        for table in self.worker.tables.values():
            assert RELEASED not in table or self.window is not None


VARIANTS: dict[str, dict[str, object]] = {
    "prefill_first": {},
    "prefill_first_without_cache": {"caching": False},
    "mixed": {"policy": "mixed"},
    "mixed_with_tiny_steps": {"policy": "mixed", "budget": 5},
    "chunked_prompts": {"budget": 6},
    "blocks_of_one_token": {"block_size": 1, "num_blocks": 48},
    "short_context": {"max_model_len": 17, "num_blocks": 8},
    "few_blocks": {"num_blocks": 5},
    "cache_of_one_block_with_delay": {"block_size": 16, "num_blocks": 1, "delay_factor": 3.0},
    "drafts": {"mtp_k": 4, "looks_up": True},
    "drafts_mixed": {"mtp_k": 3, "looks_up": True, "policy": "mixed", "budget": 9},
    "drafts_in_few_blocks": {"mtp_k": 4, "looks_up": True, "num_blocks": 5},
    "drafts_in_blocks_of_one_token": {"mtp_k": 2, "looks_up": True, "block_size": 1, "num_blocks": 48},
    "by_model": {"mtp_k": 3, "by_model": True},
    "by_model_mixed_in_few_blocks": {"mtp_k": 4, "by_model": True, "policy": "mixed", "num_blocks": 6, "budget": 11},
    "by_model_of_one_token_blocks": {"mtp_k": 2, "by_model": True, "block_size": 1, "num_blocks": 48},
    "by_model_in_a_window_of_a_short_context": {"mtp_k": 3, "by_model": True, "window": 4, "max_model_len": 23},
    "by_model_of_bounded_owners": {
        "mtp_k": 3,
        "by_model": True,
        "max_step_seconds": 2.0,
        "owners": ("light", "heavy"),
    },
    "drafts_in_a_window": {"mtp_k": 3, "looks_up": True, "window": 4, "policy": "mixed"},
    "owners_in_few_blocks": {"owners": ("light", "heavy"), "num_blocks": 7},
    "bounded_owners": {"max_step_seconds": 2.5, "owners": ("light", "heavy", "third"), "num_blocks": 9},
    "bounded_owners_mixed_with_drafts": {
        "max_step_seconds": 1.5,
        "owners": ("light", "heavy"),
        "policy": "mixed",
        "mtp_k": 3,
        "looks_up": True,
    },
    "whole_prompts": {"splits_prompts": False, "caching": False},
    "window": {"window": 6},
    "window_mixed": {"window": 4, "policy": "mixed", "budget": 7},
    "window_of_one_token": {"window": 1, "block_size": 1, "num_blocks": 30, "budget": 4},
    "window_without_cache": {"window": 5, "caching": False, "budget": 6},
}


SHORT = {
    "prefill_first_without_cache",
    "mixed_with_tiny_steps",
    "short_context",
    "few_blocks",
    "cache_of_one_block_with_delay",
    "drafts_mixed",
    "drafts_in_blocks_of_one_token",
    "drafts_in_a_window",
    "by_model_mixed_in_few_blocks",
    "by_model_in_a_window_of_a_short_context",
    "bounded_owners",
    "whole_prompts",
    "window_of_one_token",
}
"""Settings of which every pair occurs together."""


@pytest.mark.parametrize(
    "variant", [pytest.param(each, marks=() if each in SHORT else pytest.mark.slow) for each in VARIANTS]
)
def test_nothing_is_lost_repeated_or_freed_early_one_step_ahead(variant: str) -> None:
    machine = type(f"DeferredMachine_{variant}", (DeferredMachine,), VARIANTS[variant])
    count = settings.default.max_examples * 2 // 5
    machine.TestCase.settings = settings(max_examples=count, stateful_step_count=60, deadline=None)
    machine.TestCase("runTest").runTest()
