"""`Scheduler`: decides which tokens each step computes, and appends the sampled tokens to their sequences.

For each step the engine core calls `schedule()`, launches the model, calls `begin_step()`, and calls `read_step()` at
once or after it launched the next step. `postprocess()` combines `begin_step()` and `read_step()`, for callers that
read each step at once. The contract is docs/specification.md#scheduler. The block manager allocates the blocks.

The order of this file: submitted steps that are not read, and the scheduler with its queue, the two phases of a step,
the reading of steps, the shares of owners, interposed steps, the removal of sequences, statistics and checks.
"""

import logging
import operator
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from queue import SimpleQueue
from typing import Any, NamedTuple

from engine.batch import UNREAD_DRAFT, AppendedBlocks, DecodeRows, ScheduledBatch, ScheduledBatchOutput, StepBuilder
from engine.core.step_budget import StepBudget, StepLimits
from engine.core.waiting_queue import CREDIT_TOKENS, Holdings, WaitingQueue
from engine.fair_shares import FairShares
from engine.messages import RequestOutput, SchedulerStats, terminal_output
from engine.sequence import Sequence, SequenceStatus, SequenceType
from engine.speculative.drafts import Drafts
from kvcache.block_manager import RELEASED, BlockManager
from models.config.rope import RopeContext

logger = logging.getLogger(__name__)

DEFAULT_AGING_SECONDS = 10.0
"""Seconds of waiting that count as much as one unit of priority; `Config` has the same default."""

_OVER_SHARE = 1.25
"""An owner that holds more than this multiple of its fair share of slots or blocks is preempted for waiting owners."""
_FAR_BELOW_SHARE = 0.5
"""For an owner that holds at most this part of its fair share, any owner that holds more than its own is preempted."""
_HOLD_BACK_SECONDS = 10.0
"""Seconds for which a preempted owner starts nothing beyond its share, so that others can use the freed room."""
_ROOM_CHECK_SECONDS = 0.05
"""Seconds between two computations of the owners' holdings."""


class _SubmittedStep(NamedTuple):
    """A step that was submitted to the device and is not read yet."""

    batch: ScheduledBatch
    partial_prefills: frozenset[Sequence]
    """Sequences that get no token from the step, because it computes a chunk before their prompt's end."""
    deferred_slots: list[int]
    """Slots of sequences that stopped running since; they become free when the step has been read."""
    time: float
    """Time at which the step was scheduled, on the scheduler's clock."""
    drafts_on_device: bool
    """Whether the device verifies the step and makes its rows' next drafts before the step is read."""

    verified: dict[int, list[int]]
    """The drafts that the step verifies, by sequence id, once the step that made them is read."""

    def most_tokens(self, seq: Sequence) -> int:
        """The most tokens that the step samples for a sequence."""
        return 1 + len(self.batch.scheduled_spec_decode_tokens.get(seq.id, ()))

    def still_running(self) -> list[Sequence]:
        """The step's sequences that have neither ended nor been preempted since."""
        batch = self.batch
        return [seq for seq, slot in zip(batch.sequences, batch.slot_list, strict=True) if seq.slot == slot]


def _begin_answer(seq: Sequence, output: RequestOutput) -> None:
    """Record the time of a sequence's first output, and add the values that only the first output reports."""
    seq.first_token_time = time.monotonic()
    output.queue_time = max(0.0, seq.schedule_time - seq.arrive_time)
    output.num_cached_tokens = min(seq.num_cached_tokens, seq.num_prompt_tokens)
    output.prompt_logprobs, seq.prompt_logprobs = seq.prompt_logprobs, None


def _may_be_interposed(seq: Sequence) -> bool:
    """Whether interposed steps could compute a sequence's prompt if it is short."""
    return not (seq.is_suspect or seq.adapter or seq.pooling is not None or seq.prompt_logprobs is not None)


class Scheduler:
    """Continuous batching over `waiting` and `running` sequences.

    Under `prefill_first` a step computes waiting prompts or, when none can start, one token of every running
    sequence. Under `mixed` it computes the decodes first and fills the rest of its token budget with prompt chunks.
    With `max_step_seconds` steps are bounded by predicted time too, and both policies compute decodes with prompts.
    Owners of sequences are served in turn, by the number of tokens computed for them. `config` may be any object with
    the attributes that docs/specification.md#scheduler lists; attributes that only Kaon has are optional.

    The slot and the blocks of a sequence that stops running are reused only after the step submitted last has been
    read. So no submitted step writes to a slot or block that belongs to another sequence.
    """

    def __init__(
        self,
        config: Any,
        *,
        window: int | None = None,
        rope: RopeContext | None = None,
        blocks_at_first: int | None = None,
        splits_prompts: bool = True,
        default_step_seconds: float = 0.0,
        max_interposed_tokens: int = 0,
        max_rounds: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`window`: the attention window of the layer with the widest one, in tokens including the query's own; None
        for no window.

        With a window, blocks that no later token attends to are freed. `rope`: how a sequence's rotary frequencies
        depend on its length; None if they do not. `blocks_at_first`: initial number of blocks of a cache that grows
        with its use; None for all blocks. `splits_prompts`: False where each token attends to the whole prompt, which
        is then computed in one step. `default_step_seconds`: `max_step_seconds` where the config sets none; it grows
        where steps have large fixed costs; 0 for no bound. `max_interposed_tokens`: the most tokens of a step that is
        computed while another one is paused; 0 if none is. `max_rounds`: the most rounds in which a step verifies
        drafts. `clock`: the clock of `Sequence.arrive_time`.
        """
        self.max_num_seqs: int = config.max_num_seqs
        self.max_num_batched_tokens: int = config.max_num_batched_tokens
        self.bos_token_id: int | None = getattr(config, "bos_token_id", None)
        self.eos_token_id: int | None = config.eos_token_id
        self.stop_token_ids = frozenset(config.stop_token_ids or ())
        self.block_manager = BlockManager(config, blocks_at_first=blocks_at_first)
        self.window = window
        self._rope = rope
        self._has_rope_limits = rope is not None and not rope.grows
        self.splits_prompts = splits_prompts
        self._shares = FairShares(CREDIT_TOKENS)
        self.waiting = WaitingQueue(getattr(config, "priority_aging_seconds", DEFAULT_AGING_SECONDS), self._shares)
        self.running: deque[Sequence] = deque()
        self.prev_time = 0.0
        self.prev_prompt = False
        self.last_prompt_latency = 0.0
        """Seconds between the scheduling and the reading of the latest step with a prompt."""
        self.delay_factor: float = config.scheduler_delay_factor
        self.drafts = Drafts(config, config.max_num_seqs, max_rounds)
        self.use_spec, self.mtp_k = self.drafts.are_on, self.drafts.max_drafts
        self.mixed: bool = getattr(config, "scheduling_policy", "prefill_first") == "mixed"
        seconds: float | None = getattr(config, "max_step_seconds", None)
        if self.delay_factor > 0:
            max_interposed_tokens = 0
        self.step_budget: StepBudget | None = None
        """Bounds the time of steps; None if only their tokens are bounded."""
        if default_step_seconds if seconds is None else seconds:
            self.step_budget = StepBudget(seconds, default_step_seconds, max_interposed_tokens, mixed=self.mixed)

        # A sequence's last token needs no KV, since no token follows it.
        capacity = len(self.block_manager.blocks) * self.block_manager.block_size + 1
        max_model_len: int | None = getattr(config, "max_model_len", None)
        self.token_limit = capacity if max_model_len is None else min(capacity, max_model_len)
        """The most tokens of any sequence: the context length, or the size of the cache if that is smaller."""
        self.longest_prompt = min(capacity - 1, self.token_limit)
        """The most tokens of a prompt without generated tokens."""

        # Every running sequence decodes in each step, so at most as many may run as a step has tokens.
        self._num_slots = max(1, min(self.max_num_seqs, self.max_num_batched_tokens))
        self.limits = StepLimits(self.max_num_batched_tokens, self._num_slots)
        self._free_slots = list(reversed(range(self._num_slots)))
        self._prefilling: dict[Sequence, None] = {}
        """Running sequences whose prompts are partly computed, in order of admission."""
        self._blocked: Sequence | None = None
        """The sequence that was next in the last step but could not start, for want of a slot or blocks."""
        self._has_room: str | None = None
        """The owner for whose sequence others were preempted; it starts before they can start again."""
        self._next_room_check = 0.0
        self._held_back: dict[str, tuple[float, float]] = {}
        """Preempted owners: the time until which each starts nothing beyond a share of all slots and blocks, and that
        share."""
        self._latest_ends: tuple[frozenset[int | None], list[int] | None, bool] = frozenset(), None, False
        """The end tokens of the sequence added last, the request's own list, and whether the model's are included."""
        self._submitted: deque[_SubmittedStep] = deque()
        """Submitted steps that are not read, in order of submission."""
        self._clock = clock
        self._decode_rows: DecodeRows | None = None
        """Running sequences whose prompts are computed; None, to be rebuilt, after a sequence joined or left."""
        self._prefix_queried_tokens = 0
        self._prefix_hit_tokens = 0
        self._preemptions = 0
        self.preempted: list[int] = []
        """Ids of preempted sequences; the caller that reports them clears the list."""
        self._prefill_tokens = 0

    # -- the queue ----------------------------------------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. Raises `ValueError` for one that does not fit an empty cache, and so could never start."""
        longest = self.token_limit - 1 if seq.max_tokens else self.longest_prompt
        if seq.num_tokens > longest:
            room = " leave room for an answer" if seq.max_tokens else " fit"
            raise ValueError(f"the prompt has {seq.num_tokens} tokens; at most {longest}{room}")
        self._set_ends(seq)
        if self._rope is not None:
            seq.follow_rope(self._rope)
        self._forget_owners()
        if seq.num_completion_tokens:
            # It was running in a core that died, so later sequences of its owner are not served before it.
            self.waiting.append_front(seq)
        else:
            self.waiting.append(seq)

    def extend(self, seqs: Iterable[Sequence]) -> None:
        """Queue sequences in order."""
        for seq in seqs:
            self.add(seq)

    def abort(self, seq_ids: Collection[int]) -> list[RequestOutput]:
        """End these sequences now and free their blocks. Returns their terminal outputs. Unknown ids are ignored."""
        ids = set(seq_ids)
        return self._remove([seq for seq in (*self.running, *self.waiting) if seq.id in ids], "abort")

    def retract(self, seqs: Iterable[Sequence]) -> None:
        """Requeue the sequences of a step that raised, since none of its results are valid."""
        # Each is put at the head of the queue, so the reverse order preserves their order.
        for seq in reversed(list(seqs)):
            if seq.status is SequenceStatus.RUNNING:
                self.block_manager.forget(seq)
                self.preempt(seq)

    def shrink_steps(self, num_tokens: int, num_rows: int) -> bool:
        """Make steps smaller than one that ran out of memory. Returns False if that step cannot be smaller."""
        if self.drafts.suspend():
            return True
        if not self.splits_prompts and num_rows == 1:
            return False
        if not self.limits.shrink(num_tokens, num_rows):
            return False
        while len(self.running) > self.limits.num_rows:
            self.preempt(self.running[-1])
        return True

    def fail(self, seqs: Iterable[Sequence], error: str, bad_request: bool = False) -> list[RequestOutput]:
        """End sequences that a step could not compute; `error` is the message for their clients.

        `bad_request`: the requests are invalid. The sequences' blocks were published in the prefix cache when the step
        was scheduled; they are unpublished here, because they may never have been written.
        """
        live = [seq for seq in seqs if not seq.is_finished]
        for seq in live:
            self.block_manager.forget(seq)
        return self._remove(live, "error", error, bad_request)

    def is_finished(self) -> bool:
        """Whether no sequence is waiting or running."""
        return not self.waiting and not self.running

    def has_requests(self) -> bool:
        """Whether a sequence is waiting or running."""
        return not self.is_finished()

    def get_request_counts(self) -> tuple[int, int]:
        """(running, waiting)."""
        return len(self.running), len(self.waiting)

    def get_num_unfinished_requests(self) -> int:
        """Number of sequences waiting or running."""
        return len(self.waiting) + len(self.running)

    def get_next_batch_info(self) -> tuple[bool, int]:
        """(whether the next step would prefill, number of tokens of its first prompt or of all its decodes)."""
        if self._prefilling or self.waiting:
            prompt = next(iter(self._prefilling)) if self._prefilling else self.waiting[0]
            return True, prompt.num_tokens - max(prompt.num_computed_tokens, prompt.num_cached_tokens)
        return False, len(self.running)

    # -- one step -----------------------------------------------------------------------------------------------------

    def schedule(self) -> tuple[ScheduledBatch, dict[int, Sequence]] | None:
        """Choose the tokens of the next step and reserve its blocks; None if there is nothing to compute.

        Also returns None if a submitted step must be read first: no sequence is preempted while a step is unread.
        """
        if self._submitted and not self._may_follow(self._submitted[-1]):
            return None
        now = self._clock()
        blocked = self._blocked
        if blocked is not None and not self._make_room(now):
            return None
        self.limits.note_step()
        self.drafts.begin_step()
        step = StepBuilder(self.limits.num_tokens, self.mtp_k)
        may_admit = self._passed_delay(now)
        if self.step_budget is not None:
            self._shares.set_time(now)
            self.step_budget.begin_step(self._owners(), self._shares.least_recent, now)
        if self.mixed or self.step_budget is not None:
            if self._schedule_decodes(step):
                self._schedule_prefills(step, may_admit, blocked)
        else:
            self._schedule_prefills(step, may_admit)
            if not step.num_prefills:
                self._schedule_decodes(step)
        self.prev_prompt = step.num_prefills > 0
        if not step.seqs:
            return None
        is_current = not self._submitted or self._has_device_drafts()
        step.num_next_drafts = self.drafts.num_next(step.seqs.values(), step.num_decodes, is_current=is_current)
        is_awaited = bool(self._prefilling) or (bool(self.waiting) and self._has_slot())
        if step.drafts and not step.num_prefills and not is_awaited:
            step.num_rounds = self.drafts.num_rounds
        return step.batch()

    def schedule_only(self, seqs: Collection[Sequence]) -> tuple[ScheduledBatch, dict[int, Sequence]] | None:
        """As `schedule`, for `seqs` only; others are preempted if these need their blocks."""
        chosen = set(seqs)
        waiting, running, prefilling = self.waiting, self.running, self._prefilling
        self.waiting = waiting.only(chosen)
        self.running = deque(seq for seq in running if seq in chosen)
        self._prefilling = {seq: None for seq in prefilling if seq in chosen}
        self._decode_rows = self._blocked = None
        try:
            scheduled = self.schedule()
        finally:
            self.running = deque((*(seq for seq in running if seq not in chosen), *self.running))
            self._prefilling = {seq: None for seq in prefilling if seq not in chosen} | self._prefilling
            self._decode_rows = self._blocked = None
            waiting.keep(lambda seq: seq not in chosen)
            for seq in reversed(list(self.waiting)):
                waiting.appendleft(seq)
            self.waiting = waiting
        if scheduled is None:
            holding = [seq for seq in self.running if seq not in chosen]
            if holding and not chosen.isdisjoint(waiting):
                self.preempt(holding[-1])
                return self.schedule_only(seqs)
        return scheduled

    # -- the two phases -----------------------------------------------------------------------------------------------

    def _passed_delay(self, now: float) -> bool:
        """Whether waiting prompts may start: see docs/specification.md#delay-factor."""
        self.prev_time = now
        if self.delay_factor <= 0 or not self.waiting or not self.running:
            return True
        waited = now - min(seq.arrive_time for seq in self.waiting)
        return waited > self.delay_factor * self.last_prompt_latency

    def _schedule_prefills(self, step: StepBuilder, may_admit: bool, blocked: Sequence | None = None) -> None:
        """Add prompts to the step while budget, time, slots and blocks last, those of the least served owner first.

        Within an owner, prompts that were started are continued, in order, before others start. `blocked` is the
        sequence that could not start in the last step.
        """
        if not self._prefilling and not (may_admit and self.waiting):
            return
        started: dict[str, deque[Sequence]] = {}
        for seq in self._prefilling:
            started.setdefault(seq.owner, deque()).append(seq)
        if self.step_budget is not None:
            self.step_budget.give_prompts_time(step)
        served = self._shares.served
        passed_over = self._owners_to_pass_over() if self._held_back else set[str]()
        for each in passed_over:
            self._shares.forgo(each)
        favoured, self._has_room = self._has_room, None
        if favoured is not None and favoured in self.waiting.owners and may_admit:
            # Start it first, since owners that are served before it would take the freed room. If it cannot start yet,
            # it is served in its turn below.
            self._start(step, favoured)
            self._blocked = None
        if may_admit and self.waiting:
            self._add_short_prompts(step, passed_over, blocked)
        while step.budget > 0:
            owner = min(started, key=served) if started else None
            starting = self.waiting.next_owner(passed_over) if may_admit else None
            if starting is not None and (owner is None or served(starting) < served(owner)):
                if not self._start(step, starting):
                    waiting_with_it = set[str]() if self._blocked is None else self._wait_with(starting)
                    passed_over |= waiting_with_it
                    may_admit = bool(waiting_with_it)
                continue
            if owner is None:
                return
            seq = started[owner][0]
            count = self._chunk(step, seq.num_computed_tokens, seq.num_tokens - seq.num_computed_tokens)
            if count <= 0:
                return
            if self.window is not None:
                self.block_manager.release_unseen(seq, seq.num_computed_tokens - self.window + 1)
            self.block_manager.publish(seq, seq.num_computed_tokens + count)
            self._add_prefill(step, seq, count)
            if seq not in self._prefilling:
                started[owner].popleft()
                if not started[owner]:
                    del started[owner]

    def _add_short_prompts(self, step: StepBuilder, passed_over: Collection[str], blocked: Sequence | None) -> None:
        """Add whole short prompts of the least served owner beyond the step's time, if it was served no more than the
        mean lately. In chunks of what other owners' decodes leave of a small model's step they would take many steps.
        """
        if self.step_budget is None:
            return
        owner = self._shares.lightest(each for each in self.waiting.latest_owners if each not in passed_over)
        if owner is None or self._is_waited_for(owner, blocked):
            return
        seconds = self.step_budget.seconds_to_add(self._shares.recent(owner))
        if seconds > 0.0:
            rest, step.seconds, before = step.seconds, seconds, step.num_prefills
            self._take_short_prompts(step, owner, None)
            self.step_budget.note_added(seconds - step.seconds)
            step.seconds, step.num_added = rest, step.num_prefills - before

    def _start(self, step: StepBuilder, owner: str) -> bool:
        """Start the first waiting sequence of an owner. Returns False if it, and all others, must wait."""
        seq = self.waiting.first_of(owner)
        if not self._has_slot():
            self._blocked = seq
            return False
        num_new = max(1, seq.num_tokens - self.block_manager.count_cached_tokens(seq))
        count = self._chunk(step, seq.num_tokens - num_new, num_new)
        if not self.splits_prompts and count < num_new and not step.seqs:
            # A prompt that cannot be split is computed alone, whatever its length.
            count = num_new
        if count <= 0 or (count < num_new and not self._may_split(step, num_new)):
            return False
        if not self.block_manager.can_allocate(seq):
            self._blocked = seq
            return False
        self.waiting.take(owner)
        self._admit(step, seq, seq.num_tokens - num_new, count)
        return True

    def _has_slot(self) -> bool:
        return bool(self._free_slots) and len(self.running) < self.limits.num_rows

    def _may_split(self, step: StepBuilder, num_new: int) -> bool:
        """Whether a prompt that exceeds the rest of the budget may start with a chunk."""
        if not self.splits_prompts:
            return False
        if self.mixed or self.step_budget is not None:
            return True
        return num_new > self.limits.num_tokens and not step.num_prefills

    def _chunk(self, step: StepBuilder, start: int, num_left: int) -> int:
        """How many of a prompt's next `num_left` tokens, after `start` others, the step computes."""
        count = min(num_left, step.budget)
        return count if self.step_budget is None else self.step_budget.chunk(step, start, count)

    def _admit(self, step: StepBuilder, seq: Sequence, start: int, count: int) -> None:
        """Start a waiting sequence, whose tokens `[start, start + count)` are computed in this step."""
        self._prefix_queried_tokens += seq.num_tokens
        self.block_manager.allocate(seq, start + count)
        if self.window is not None:
            self.block_manager.release_unseen(seq, start - self.window + 1)
        self._prefix_hit_tokens += seq.num_cached_tokens
        seq.slot = self._free_slots.pop()
        seq.status = SequenceStatus.RUNNING
        seq.num_computed_tokens = start
        if seq.schedule_time == 0.0:
            seq.schedule_time = time.monotonic()
        self.running.append(seq)
        self._prefilling[seq] = None
        step.new_seqs.append(seq)
        self._add_prefill(step, seq, count)

    def _add_prefill(self, step: StepBuilder, seq: Sequence, count: int) -> None:
        seq.type = SequenceType.PREFILL
        if self.step_budget is not None:
            self.step_budget.take(step, seq.num_computed_tokens, count)
        seq.num_computed_tokens += count
        self._prefill_tokens += count
        self._shares.serve(seq.owner, count / seq.weight)
        if seq.num_computed_tokens == seq.num_tokens:
            del self._prefilling[seq]
            self._decode_rows = None
        step.add_prefill(seq, count)

    def _schedule_decodes(self, step: StepBuilder) -> bool:
        """Add one token and its drafts of every sequence whose prompt is computed. False if a step must be read first.

        An unread step that verifies drafts must be, because its rows continue after the accepted drafts. A sequence
        costs Python work only in steps in which it needs or fills a block, one in `block_size`.
        """
        rows, lengths = self._current_decode_rows()
        if self._submitted:
            if not self._has_device_drafts() and any(
                each.batch.scheduled_spec_decode_tokens for each in self._submitted
            ):
                return False
            rows, lengths = rows.continuing()
            if not rows.seqs:
                return True
            if self._has_device_drafts() and max(lengths) + self.mtp_k > self.token_limit:
                # Rows are padded to a common length, for which each context needs room.
                return False
        if self.step_budget is not None:
            rows, lengths = self.step_budget.take_turns(rows, lengths, self.drafts.tokens_per_row(rows.seqs))
        self.drafts.propose(rows.seqs, step.budget)
        growths = self._growths(rows, lengths)
        if self._submitted and not self.block_manager.can_append_all(growths):
            return False
        for seq, count in growths:
            if seq.status is SequenceStatus.RUNNING:
                self._grow(step, seq, count)
        if self._decode_rows is None:
            # A sequence was preempted, so the rows have changed.
            return self._schedule_decodes(step)
        step.add_decodes(rows, lengths)
        for owner, cost in rows.costs.items():
            self._shares.charge(owner, cost)
        for seq_id, tokens in step.drafts.items():
            seq = step.seqs[seq_id]
            self._shares.charge(seq.owner, len(tokens) / seq.weight)
        return True

    def _current_decode_rows(self) -> tuple[DecodeRows, list[int]]:
        """The running sequences whose prompts are computed, with their numbers of tokens.

        Sequences whose rotary frequencies change at their length are preempted, since their cached keys are invalid.
        """
        rows = self._decode_rows
        if rows is None or len(rows.seqs) + len(self._prefilling) != len(self.running):
            rows = self._decode_rows = DecodeRows(seq for seq in self.running if seq not in self._prefilling)
            if self.window is not None:
                # Free blocks outside the window now: a prompt just computed would hold them until it needs another
                # block.
                for seq in rows.seqs:
                    self.block_manager.release_unseen(seq, len(seq.token_ids) - self.window)
        lengths = list(map(len, rows.token_ids))
        if self._has_rope_limits and any(map(operator.ge, lengths, rows.limits)):
            for seq, length in zip(rows.seqs, lengths, strict=True):
                if length >= seq.rope_limit and not seq.num_placeholder:
                    self.preempt(seq)
            if self._decode_rows is None:
                return self._current_decode_rows()
        return rows, lengths

    def _growths(self, rows: DecodeRows, lengths: list[int]) -> list[tuple[Sequence, int]]:
        """The sequences that may have filled a block or need another one, each with the number of its new tokens.

        If there are no blocks for the proposed drafts, they are dropped; if there are none for the drafter's
        lookahead, it drafts less.
        """
        # A sequence grows by at most 1 + k tokens per step, so its length shows whether it reaches the end of a block.
        size, lookahead = self.block_manager.block_size, self.drafts.num_lookahead_tokens
        if self.drafts.is_idle(rows.seqs):
            lookahead = 0
            eventful = [i for i, length in enumerate(lengths) if length % size <= 1]
        else:
            # Without the prefix cache no block is published.
            offset = size if self.block_manager.enable_prefix_caching else 1 << 62
            eventful = [
                i
                for i, (seq, length) in enumerate(zip(rows.seqs, lengths, strict=True))
                if length + lookahead + len(seq.spec_token_ids) > len(seq.block_table) * size
                or length >= seq.num_published_blocks * size + offset
            ]
        growths = [(rows.seqs[i], 1 + rows.seqs[i].num_drafts) for i in eventful]
        if lookahead and growths:
            further = [(seq, count + min(lookahead, seq.num_useful_drafts)) for seq, count in growths]
            if self.block_manager.can_append_all(further, spare=len(rows.seqs)):
                return further
        if self.mtp_k and growths and not self.block_manager.can_append_all(growths, spare=len(rows.seqs)):
            self.drafts.drop(rows.seqs)
            growths = [(seq, 1) for seq, _ in growths]
        return growths

    def _grow(self, step: StepBuilder, seq: Sequence, num_new_tokens: int) -> None:
        """Reserve blocks for a decode, preempting sequences if needed; of its owner's sequences, `seq` last."""
        if self.window is not None:
            self.block_manager.release_unseen(seq, len(seq.token_ids) - self.window)
        while (added := self.block_manager.may_append(seq, num_new_tokens)) is None:
            victim = self.running[-1] if len(self._owners()) == 1 else self._holdings().newest_of_most_blocks()
            step.appended_blocks = [gained for gained in step.appended_blocks if gained.slot != victim.slot]
            self.preempt(victim)
            if victim is seq:
                return
        if added:
            step.appended_blocks.append(AppendedBlocks(seq.slot, len(seq.block_table) - len(added), added))

    # -- reading steps ------------------------------------------------------------------------------------------------

    def begin_step(self, batch: ScheduledBatch, *, drafts_on_device: bool = False) -> None:
        """Record a submitted step. Its sequences get placeholders for the most tokens that it may sample.

        `drafts_on_device`: the next step of these rows may be scheduled before this one is read, and verifies drafts
        that the device makes in the meantime.
        """
        seqs, num_decodes = batch.sequences, batch.total_seqs_num_decode
        partial = frozenset(seq for seq in seqs[num_decodes:] if seq.num_computed_tokens < seq.num_tokens)
        verified = batch.scheduled_spec_decode_tokens
        step = _SubmittedStep(batch, partial, [], self.prev_time, drafts_on_device, dict(verified))
        for seq in seqs:
            seq.num_placeholder += step.most_tokens(seq) if verified else 1
        for seq in partial:
            seq.num_placeholder -= 1
        if self.use_spec and (verified or not self.drafts.pause_left):
            for seq, count in zip(seqs, batch.num_next_drafts or [0] * len(seqs), strict=True):
                seq.spec_token_ids = [UNREAD_DRAFT] * count if drafts_on_device else []
        self._submitted.append(step)
        self.block_manager.begin_step()

    def _may_follow(self, step: _SubmittedStep) -> bool:
        """Whether a step can be scheduled before this one is read.

        If a model drafts after this step is read, the next step waits for that. A step whose drafts the device makes
        is followed by decodes only, since only for decodes does the device compute the rows' first positions.
        """
        if step.drafts_on_device:
            return not (self._prefilling or (self.waiting and self._has_slot()))
        return self.drafts.may_follow_unread(step.batch)

    def _has_device_drafts(self) -> bool:
        """Whether the device drafts after the step submitted last, before that step is read."""
        return bool(self._submitted) and self._submitted[-1].drafts_on_device

    def read_step(self, fwd_output: ScheduledBatchOutput) -> list[RequestOutput]:
        """Process the output of the oldest submitted step. Tokens of sequences that no longer run are dropped.

        Sequences that a later step started from cached blocks of a row that failed are requeued.
        """
        batch, errors = self._submitted[0].batch, fwd_output.errors
        invalid = set[int]()
        if errors:
            rows = zip(batch.req_ids, batch.tables, strict=True)
            invalid.update(block_id for seq_id, table in rows if seq_id in errors for block_id in table)
            invalid.discard(RELEASED)
            # This includes blocks of sequences that have stopped running since.
            self.block_manager.forget_blocks(invalid)
        step, live = self._end_step()
        for seq in step.partial_prefills:
            fwd_output.token_ids.pop(seq.id, None)
        if batch.total_seqs_num_prefill:
            self.last_prompt_latency = self._clock() - step.time
        if step.drafts_on_device:
            made = fwd_output.draft_token_ids or {}
            for later in self._submitted:
                for seq_id, drafts in later.verified.items():
                    later.verified[seq_id] = made.get(seq_id, [])[: len(drafts)] if UNREAD_DRAFT in drafts else drafts
        _, outputs = self._take_tokens(live, fwd_output, step.verified)
        if invalid:
            started = (
                seq for later in self._submitted for seq in later.still_running() if seq in later.batch.new_seqs
            )
            self.retract([seq for seq in started if not invalid.isdisjoint(seq.block_table)])
        return outputs

    def note_duration(
        self, batch: ScheduledBatch, seconds: float, *, host_seconds: float = 0.0, drafts_on_device: bool = False
    ) -> None:
        """See `Drafts.note_duration`."""
        self.drafts.note_duration(batch, seconds, host_seconds=host_seconds, drafts_on_device=drafts_on_device)
        if self.step_budget is not None:
            self.step_budget.note(batch, seconds / self.drafts.num_rounds_read)

    def drop_steps(self) -> None:
        """Requeue the sequences of all submitted steps, none of which will be read, since the device failed."""
        for step in self._submitted:
            for table in step.batch.tables:
                self.block_manager.forget_blocks(table)
        while self._submitted:
            self.retract(self._end_step()[1])

    def _end_step(self) -> tuple[_SubmittedStep, list[Sequence]]:
        """Free the slots that the oldest submitted step held. Returns the step and its sequences that still run."""
        step = self._submitted.popleft()
        self.block_manager.end_step()
        self._free_slots += step.deferred_slots
        live = step.still_running()
        for seq in live:
            seq.num_placeholder -= step.most_tokens(seq) if step.verified else 1
        for seq in step.partial_prefills.intersection(live):
            seq.num_placeholder += 1
        return step, live

    def postprocess(
        self,
        seqs: list[Sequence],
        fwd_output: ScheduledBatchOutput,
        stream_output_queue: "SimpleQueue[list[RequestOutput]] | None" = None,
    ) -> list[Sequence]:
        """Process the output of the step scheduled last, which was not submitted. Returns the finished sequences.

        The step's list of `RequestOutput`s is put on the queue, if one is given. See
        docs/specification.md#postprocessing.
        """
        if self.prev_prompt:
            self.last_prompt_latency = self._clock() - self.prev_time
        verified = {seq.id: seq.spec_token_ids[: seq.num_drafts] for seq in seqs} if self.use_spec else {}
        finished, outputs = self._take_tokens(seqs, fwd_output, verified)
        if stream_output_queue is not None and outputs:
            stream_output_queue.put_nowait(outputs)
        return finished

    def _take_tokens(
        self, seqs: list[Sequence], fwd_output: ScheduledBatchOutput, verified: Mapping[int, list[int]]
    ) -> tuple[list[Sequence], list[RequestOutput]]:
        """Append a step's tokens to its sequences, and end those that finish. Returns the finished ones and all
        outputs.

        Tokens of a sequence that no longer runs are dropped, and so are tokens after a stop or after a prompt chunk.
        `verified`: the drafts that the step verified, by sequence id.
        """
        tokens_by_id, prompt_logprobs = fwd_output.token_ids, fwd_output.prompt_logprobs
        running, prefilling, now = SequenceStatus.RUNNING, self._prefilling, time.monotonic()
        finished: list[Sequence] = []
        outputs: list[RequestOutput] = []
        refusals = dict(fwd_output.refusals or ())
        if prompt_logprobs:
            # They are collected until the prompt is complete, and sent with its first output.
            for seq in seqs:
                if seq.prompt_logprobs is not None:
                    seq.prompt_logprobs += prompt_logprobs.get(seq.id, ())
        for seq in seqs:
            new_tokens = tokens_by_id.get(seq.id)
            if not new_tokens or seq.status is not running or (prefilling and seq in prefilling):
                continue
            token_ids, matcher = seq.token_ids, seq.matcher
            accepted: list[int] = []
            output = RequestOutput(seq.id, accepted, time=now - seq.sent_time)
            for token_id in new_tokens:
                if matcher is not None and token_id not in seq.end_tokens and not matcher.accept(token_id):
                    refusals[seq.id] = matcher.error or ""
                    break
                token_ids.append(token_id)
                accepted.append(token_id)
                if (
                    token_id in seq.end_tokens
                    or len(token_ids) >= seq.token_limit
                    or seq.stop_token_sequences
                    or matcher is not None
                ):
                    reason = self._leave_reason(seq, token_id)
                    if reason is not None:
                        seq.leave_reason = output.finish_reason = reason
                        output.finished = True
                        finished.append(seq)
                        break
            if matcher is not None:
                self._charge_grammar(seq)
            if not accepted:
                continue
            if seq.first_token_time == 0.0:
                _begin_answer(seq, output)
                if not seq.max_tokens:
                    # The request asked for no generated tokens.
                    token_ids.pop()
                    accepted.clear()
                    seq.leave_reason = output.finish_reason = "max_tokens"
            outputs.append(output)
        if fwd_output.vectors:
            outputs += self._take_vectors(seqs, fwd_output.vectors, now, finished)
        if self.use_spec and (verified or fwd_output.draft_token_ids or not self.drafts.pause_left):
            computed = {seq_id for step in self._submitted for seq_id in step.batch.req_ids}
            if without_token := self.drafts.take(seqs, fwd_output, verified, computed):
                self.retract(without_token)
            if fwd_output.verified_drafts:
                self._charge_rounds(seqs, fwd_output.verified_drafts)
        if fwd_output.logprobs:
            for output in outputs:
                rows = fwd_output.logprobs.get(output.request_id)
                output.logprobs = rows and rows[: len(output.output_tokens)]
        if finished:
            self._finish(finished)
        if fwd_output.errors:
            outputs += self._fail_rows(seqs, fwd_output.errors)
        if refusals:
            outputs += self._fail_rows(seqs, refusals, bad_request=True)
        return finished, outputs

    def _take_vectors(
        self, seqs: list[Sequence], vectors: Mapping[int, bytes], now: float, finished: list[Sequence]
    ) -> list[RequestOutput]:
        """End the sequences whose prompts a step has pooled, and add them to `finished`. Returns their outputs.

        Vectors of sequences that no longer run are dropped.
        """
        outputs = []
        for seq in seqs:
            vector = vectors.get(seq.id)
            if vector is None or seq.status is not SequenceStatus.RUNNING or seq in self._prefilling:
                continue
            seq.leave_reason = "pooled"
            output = RequestOutput(seq.id, [], finished=True, finish_reason="pooled", time=now - seq.sent_time)
            _begin_answer(seq, output)
            output.vector = vector
            finished.append(seq)
            outputs.append(output)
        return outputs

    def _set_ends(self, seq: Sequence) -> None:
        """Store on a sequence the tokens that end it and its maximum length."""
        # `ignore_eos` ignores the model's whole EOS list, which includes the config's `stop_token_ids`.
        model_tokens = () if seq.ignore_eos else (self.eos_token_id, *self.stop_token_ids)
        own = seq.sampling_params.stop_token_ids
        ends, of, with_model = self._latest_ends
        if own is None or own is not of or with_model is seq.ignore_eos:
            ends = frozenset((*model_tokens, *(own or ())))
            self._latest_ends = ends, own, not seq.ignore_eos
        # The choices of a request share one set of end tokens.
        seq.end_tokens = ends
        seq.token_limit = min(seq.num_prompt_tokens + seq.max_tokens, self.token_limit)

    def _leave_reason(self, seq: Sequence, token_id: int) -> str | None:
        """The reason why `seq` ends at `token_id`, its latest token; None if it continues.

        The first match in the order of docs/specification.md#stop-conditions counts. The front end matches stop
        strings, on text.
        """
        if not seq.token_limit:
            # A caller put the sequence into `waiting` or `running` directly, without `add`.
            self._set_ends(seq)
        if seq.stop_token_sequences and seq.ends_with_stop_sequence:
            return "stop_sequence"
        if not seq.ignore_eos and token_id == self.eos_token_id:
            return "eos"
        if token_id in seq.end_tokens:
            return f"stop_{token_id}"
        if seq.matcher is not None and seq.matcher.is_complete:
            return "grammar"
        return "max_tokens" if len(seq.token_ids) >= seq.token_limit else None

    # -- shares of owners ---------------------------------------------------------------------------------------------

    def _owners(self) -> set[str]:
        """The owners that have sequences."""
        rows = self._decode_rows
        decoding = (seq.owner for seq in self.running) if rows is None else rows.costs
        return {*self.waiting.owners, *(seq.owner for seq in self._prefilling), *decoding}

    def _charge_rounds(self, seqs: Iterable[Sequence], verified: Mapping[int, list[tuple[int, int]]]) -> None:
        """Charge the owners for the rounds of a step after the first one, for which they were charged before."""
        costs: dict[str, float] = {}
        for seq in seqs:
            further = verified[seq.id][1:]
            cost = sum(1 + num_drafts for num_drafts, _ in further) / seq.weight
            costs[seq.owner] = costs.get(seq.owner, 0.0) + cost
        for owner, cost in costs.items():
            self._shares.charge(owner, cost)

    def _charge_grammar(self, seq: Sequence) -> None:
        """Charge a sequence's owner for the time that its grammar took since the last charge."""
        matcher = seq.matcher
        if matcher is not None and matcher.uncharged_seconds and self.step_budget is not None:
            cost, matcher.uncharged_seconds = self.step_budget.num_tokens(matcher.uncharged_seconds), 0.0
            self._shares.charge(seq.owner, cost / seq.weight)

    def _forget_owners(self) -> None:
        """Remove the state of owners without sequences."""
        if not self.running and not self.waiting:
            self._shares.reset()
            self._held_back.clear()
            return
        if not self.waiting and not self._prefilling:
            self._shares.catch_up()
        if self._shares.is_crowded:
            self._shares.forget_all_but({seq.owner for seq in self.running} | self.waiting.owners)

    def _holdings(self) -> Holdings:
        return Holdings(self.running, self.waiting, self.limits.num_rows, len(self.block_manager.blocks))

    def _wait_with(self, owner: str) -> set[str]:
        """The owners that must wait when this owner's sequence found no slot or blocks; empty for all owners."""
        if len(self.waiting.owners) == 1:
            return set()
        holdings = self._holdings()
        if holdings[owner].in_shares >= 1.0:
            self._blocked = None
            self._shares.forgo(owner)
        return holdings.wait_with(owner)

    def _make_room(self, now: float) -> bool:
        """Preempt for the sequence that could not start in the last step. False if a step must be read first."""
        seq, self._blocked = self._blocked, None
        if seq is None or seq.status is not SequenceStatus.WAITING or now < self._next_room_check:
            return True
        if self.waiting.owners | {each.owner for each in self.running} == {seq.owner}:
            return True
        if not self._preempt_for(seq, now):
            self._blocked = seq
            return False
        self._next_room_check = now + _ROOM_CHECK_SECONDS
        return True

    def _preempt_for(self, seq: Sequence, now: float) -> bool:
        """Preempt until a waiting sequence can start, or nothing more may be preempted for it. False if a step must be
        read first.

        Only an owner below its fair share is helped, and only owners far beyond theirs are preempted; for an owner
        far below its share, owners anywhere beyond theirs.
        """
        while not (self._has_slot() and self.block_manager.can_allocate(seq)):
            holdings = self._holdings()
            own = holdings[seq.owner]
            needed = max(1 / self.limits.num_rows, seq.num_blocks / len(self.block_manager.blocks))
            victim = holdings.newest_of_largest(_OVER_SHARE if own.in_shares > _FAR_BELOW_SHARE else 1.0)
            if victim is None or victim.owner == seq.owner or (own.part and own.part + needed > own.share):
                break
            if self._submitted:
                return False
            self.preempt(victim)
            self._held_back[victim.owner] = now + _HOLD_BACK_SECONDS, holdings[victim.owner].share
            self._has_room = seq.owner
        return True

    def _owners_to_pass_over(self) -> set[str]:
        """Owners that were preempted recently and hold at least the share that was left to them."""
        self._held_back = {owner: held for owner, held in self._held_back.items() if held[0] > self.prev_time}
        if not self._held_back:
            return set()
        holdings = self._holdings()
        return {owner for owner, (_, share) in self._held_back.items() if holdings[owner].part >= share}

    # -- interposed steps ---------------------------------------------------------------------------------------------

    def would_interpose(self, seq: Sequence) -> bool:
        """Whether a new sequence would be interposed if its prompt is short. Thread-safe."""
        return self._has_slot() and _may_be_interposed(seq) and self._is_light(seq.owner)

    def may_pause(self, batch: ScheduledBatch) -> bool:
        """Whether a scheduled step may be paused, for `interpose`."""
        return self.step_budget is not None and self.step_budget.may_pause(batch)

    def interpose(self, paused: ScheduledBatch | None = None) -> tuple[ScheduledBatch, dict[int, Sequence]] | None:
        """Schedule a step to compute while the last scheduled step is paused, or before the next step; None if none is
        due.

        It computes whole short prompts of an owner with little recent service, so that they do not wait for a long
        step of other owners. They take no slot or blocks that a sequence of another owner with as little service waits
        for. Call `read_interposed` before `paused` continues.
        """
        if not self.waiting or self.step_budget is None or not self.step_budget.has_allowance:
            return None
        if not self.running and len(self.waiting.owners) == 1:
            # The next step is short enough.
            return None
        owner = self._shares.lightest(self._may_start())
        if owner is None or not self._is_light(owner) or self._is_waited_for(owner, self._blocked):
            return None
        step = self.step_budget.interposed_step(self.limits.num_tokens)
        first = self.waiting.first_of(owner)
        if paused is None and not self._submitted and self._is_short(step, first):
            # At most once for each interposed step, whose number is bounded.
            self._preempt_for(first, self._clock())
        self._take_short_prompts(step, owner, paused)
        if not step.seqs:
            return None
        step.num_next_drafts = self.drafts.num_next_interposed(len(step.seqs))
        return step.batch()

    def read_interposed(
        self, batch: ScheduledBatch, fwd_output: ScheduledBatchOutput, seconds: float
    ) -> list[RequestOutput]:
        """As `begin_step` and `read_step` together, for an interposed step that took `seconds`."""
        assert self.step_budget is not None, "steps are interposed where they are bounded by time"
        self.step_budget.note_interposed(batch, seconds)
        self.begin_step(batch)
        return self.read_step(fwd_output)

    def retract_interposed(self, seqs: Iterable[Sequence]) -> None:
        """As `retract`, for an interposed step. Regular steps compute its sequences again and isolate failures."""
        self.retract(seqs)
        if self.step_budget is not None:
            self.step_budget.note_failed_interposed()

    def note_idle_pause(self) -> None:
        """Record that a step was paused but no step was interposed."""
        if self.step_budget is not None:
            self.step_budget.note_idle_pause()

    def _may_start(self) -> Iterable[str]:
        """The latest owners of waiting sequences, except those that could start nothing now because they hold their
        share of what is used up."""
        owners: Iterable[str] = (each for each in self.waiting.latest_owners if each not in self._held_back)
        if self._has_slot() and self._blocked is None:
            return owners
        holdings = self._holdings()
        return (each for each in owners if holdings[each].in_shares < 1.0)

    def _is_light(self, owner: str) -> bool:
        """Whether short prompts of an owner would be interposed now. Thread-safe."""
        return self.step_budget is not None and self.step_budget.may_interpose(owner, self._shares.recent(owner))

    def _is_waited_for(self, owner: str, blocked: Sequence | None) -> bool:
        """Whether `blocked`, which waits for a slot or blocks, is of another owner with no more service than this
        one."""
        if blocked is None or blocked.status is not SequenceStatus.WAITING or blocked.owner == owner:
            return False
        return self._shares.recent(blocked.owner) <= self._shares.recent(owner)

    def _take_short_prompts(self, step: StepBuilder, owner: str, paused: ScheduledBatch | None) -> None:
        """Start an owner's waiting sequences whose whole prompts fit a step's tokens and time, in order."""
        while owner in self.waiting.owners and self._interposes(step, self.waiting.first_of(owner), paused):
            seq = self.waiting.take(owner)
            count = max(1, seq.num_tokens - self.block_manager.count_cached_tokens(seq))
            self._admit(step, seq, seq.num_tokens - count, count)

    def _interposes(self, step: StepBuilder, seq: Sequence, paused: ScheduledBatch | None) -> bool:
        """Whether a waiting sequence's whole prompt can be added to a step; if `paused`, that is interposed in it."""
        if not (self._is_short(step, seq) and self._has_slot() and self.block_manager.can_allocate(seq)):
            return False
        if paused is None or not self.block_manager.count_cached_tokens(seq):
            return True
        # The paused step may have published blocks that it is still writing, so cached blocks are checked against it.
        return paused.written_blocks.isdisjoint(self.block_manager.find_prefix(seq))

    def _is_short(self, step: StepBuilder, seq: Sequence) -> bool:
        """Whether a sequence's whole prompt fits a step's tokens and time, and may be interposed."""
        if not _may_be_interposed(seq):
            return False
        count = max(1, seq.num_tokens - self.block_manager.count_cached_tokens(seq))
        return count <= step.budget and self._chunk(step, seq.num_tokens - count, count) >= count

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
        self._preemptions += 1
        self.preempted.append(seq.id)

    def _finish(self, seqs: list[Sequence]) -> None:
        """Free what sequences hold whose last tokens are appended."""
        for seq in seqs:
            # A block with placeholders is not published, so publish it now that its tokens are known.
            self.block_manager.publish(seq, len(seq.token_ids) - 1)
            self._release(seq, SequenceStatus.FINISHED)
        self.running = deque(seq for seq in self.running if seq.status is SequenceStatus.RUNNING)

    def _fail_rows(
        self, seqs: Iterable[Sequence], errors: dict[int, str], bad_request: bool = False
    ) -> list[RequestOutput]:
        return [output for seq in seqs if seq.id in errors for output in self.fail([seq], errors[seq.id], bad_request)]

    def _remove(
        self, seqs: list[Sequence], reason: str, error: str | None = None, bad_request: bool = False
    ) -> list[RequestOutput]:
        for seq in seqs:
            seq.leave_reason = reason
            self._charge_grammar(seq)
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
            self.drafts.forget(seq)
        self.block_manager.deallocate(seq)
        seq.num_computed_tokens = 0
        seq.num_placeholder = 0
        seq.spec_token_ids = []
        if seq.slot >= 0:
            (self._submitted[-1].deferred_slots if self._submitted else self._free_slots).append(seq.slot)
            seq.slot = -1
        self._prefilling.pop(seq, None)

    # -- statistics and checks ----------------------------------------------------------------------------------------

    def stats(self, step_kind: str, step_seconds: float) -> SchedulerStats:
        """The current gauges and the counters so far, to be sent with the outputs of the step that was just run."""
        return SchedulerStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            kv_blocks_used=len(self.block_manager.used_block_ids),
            kv_blocks_total=len(self.block_manager.blocks),
            prefix_queried_tokens=self._prefix_queried_tokens,
            prefix_hit_tokens=self._prefix_hit_tokens,
            preemptions=self._preemptions,
            prefill_tokens=self._prefill_tokens,
            step_kind=step_kind,
            step_seconds=step_seconds,
            draft_tokens=self.drafts.num_proposed,
            accepted_draft_tokens=self.drafts.num_accepted,
            num_drafts=self.drafts.num_verifications,
            accepted_by_position=tuple(self.drafts.accepted_by_position),
        )

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless queues, slots and blocks agree. Called when idle and by the property tests."""
        self.block_manager.check_integrity(self.running)
        slots = [seq.slot for seq in self.running]
        slots += (slot for step in self._submitted for slot in step.deferred_slots)
        if sorted(slots + self._free_slots) != list(range(self._num_slots)):
            raise AssertionError(f"slots leak: {slots} running, {self._free_slots} free")
        if not self._submitted and any(seq.num_placeholder for seq in (*self.running, *self.waiting)):
            raise AssertionError("a sequence has a placeholder, but no step is submitted")
        for seq in self.running:
            if seq.status is not SequenceStatus.RUNNING:
                raise AssertionError(f"sequence {seq.id} runs with status {seq.status}")
        for seq in self.waiting:
            if seq.status is not SequenceStatus.WAITING or seq.block_table or seq.slot != -1:
                raise AssertionError(f"waiting sequence {seq.id} holds blocks or a slot")
        self.waiting.check_integrity()
        if any(seq not in self.running for seq in self._prefilling):
            raise AssertionError("a sequence prefills but does not run")

    def update_spec_stats(self, num_accepted_tokens: int) -> None:
        """Count the `mtp_k` drafts of one sequence; one of its `num_accepted_tokens` is the target's own token.

        Part of the contract (docs/specification.md#speculative-decoding). Kaon itself counts the verified drafts of
        each step.
        """
        self.drafts.count(num_accepted_tokens, self.mtp_k)

    @property
    def total_draft_tokens(self) -> int:
        """Number of draft tokens verified so far."""
        return self.drafts.num_proposed

    @property
    def total_accepted_tokens(self) -> int:
        """Number of draft tokens accepted so far."""
        return self.drafts.num_accepted
