"""`Scheduler`: decides which tokens each step computes.

For each step the engine core calls `schedule()`, launches the model, calls `begin_step()`, and calls `read_step()` at
once or after it launched the next step. `postprocess()` combines `begin_step()` and `read_step()`, for callers that
read each step at once. The contract is docs/specification.md#scheduler.

The scheduler chooses. `StepBudget` computes how much fits a step, `SequencePool` has what sequences hold, and
`SubmittedSteps` appends the sampled tokens. The order of this file: the queue, the two phases of a step, the reading
of steps, the shares of owners, interposed steps, statistics and checks.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from queue import SimpleQueue
from typing import Any

from engine.batch import AppendedBlocks, DecodeRows, ScheduledBatch, ScheduledBatchOutput, StepBuilder
from engine.core.sequence_pool import SequencePool
from engine.core.step_budget import StepBudget, StepLimits
from engine.core.submitted_steps import SubmittedSteps
from engine.core.waiting_queue import CREDIT_TOKENS, WaitingQueue
from engine.fair_shares import FairShares
from engine.messages import RequestOutput, SchedulerStats
from engine.sequence import Sequence, SequenceStatus, SequenceType
from engine.speculative.drafts import Drafts
from kvcache.block_manager import BlockManager
from models.config.rope import RopeContext

DEFAULT_AGING_SECONDS = 10.0
"""Seconds of waiting that count as much as one unit of priority; `Config` has the same default."""

_MANY_SLOTS = 64
"""Least number of slots of which one is reserved for interposed steps of owners that hold none, while several owners
have sequences. No slot is freed while a step runs, so a step that uses all slots would otherwise not be paused."""
_OVER_SHARE = 1.25
"""An owner that holds more than this multiple of its fair share of slots or blocks is preempted for waiting owners."""
_FAR_BELOW_SHARE = 0.5
"""For an owner that holds at most this part of its fair share, any owner that holds more than its own is preempted."""
_HOLD_BACK_SECONDS = 10.0
"""Seconds for which a preempted owner starts nothing beyond its share, so that others can use the freed room."""
_ROOM_CHECK_SECONDS = 0.05
"""Seconds between two computations of the owners' holdings."""
_MOST_FOUND = 32768
"""Cached tokens after which no further prompt starts in a step of several owners. Finding and sharing their blocks
takes 8 to 20 ms, during which no stream continues, and a cached prompt takes only one of the step's tokens. Prompts
that are short without cached blocks are still interposed."""
_MOST_EXAMINED = 8
"""Most owners whose next prompts are examined for one interposed step, which is chosen before each step and in each
pause."""


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
        self.splits_prompts = splits_prompts
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
        num_slots = max(1, min(self.max_num_seqs, self.max_num_batched_tokens))
        self.limits = StepLimits(self.max_num_batched_tokens, num_slots)
        self._reserves_slot = max_interposed_tokens > 0 and num_slots >= _MANY_SLOTS
        self._shares = FairShares(CREDIT_TOKENS)
        self._pool = SequencePool(
            self.block_manager,
            WaitingQueue(getattr(config, "priority_aging_seconds", DEFAULT_AGING_SECONDS), self._shares),
            self.drafts,
            self.limits,
            window=window,
            rope=rope,
            tokens_of=None if self.step_budget is None else self.step_budget.num_tokens,
        )
        self._submitted = SubmittedSteps(self._pool, self.drafts, config, self.token_limit)
        self._blocked: Sequence | None = None
        """The sequence that was next in the last step but could not start, for want of a slot or blocks."""
        self._favoured: str | None = None
        """The owner for whose sequence others were preempted; it starts before they can start again."""
        self._next_room_check = 0.0
        self._held_back: dict[str, tuple[float, float]] = {}
        """Preempted owners: the time until which each starts nothing beyond a share of all slots and blocks, and that
        share."""
        self._clock = clock
        self._num_found = 0
        """Cached tokens of the prompts that started since the scheduling of the latest step began."""

    # -- the queue ----------------------------------------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. Raises `ValueError` for one that does not fit an empty cache, and so could never start."""
        longest = self.token_limit - 1 if seq.max_tokens else self.longest_prompt
        if seq.num_tokens > longest:
            room = " leave room for an answer" if seq.max_tokens else " fit"
            raise ValueError(f"the prompt has {seq.num_tokens} tokens; at most {longest}{room}")
        self._submitted.set_ends(seq)
        if self.is_finished():
            self._held_back.clear()
        self._pool.add(seq)

    def extend(self, seqs: Iterable[Sequence]) -> None:
        """Queue sequences in order."""
        for seq in seqs:
            self.add(seq)

    def abort(self, seq_ids: Collection[int]) -> list[RequestOutput]:
        """End these sequences now and free their blocks. Returns their terminal outputs. Unknown ids are ignored."""
        ids = set(seq_ids)
        return self._pool.remove([seq for seq in self._pool if seq.id in ids], "abort")

    def retract(self, seqs: Iterable[Sequence]) -> None:
        """Requeue the sequences of a step that raised, since none of its results are valid."""
        self._pool.retract(seqs)

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
        return self._pool.fail(seqs, error, bad_request)

    def preempt(self, seq: Sequence) -> None:
        """Free a running sequence's blocks. It waits at the head of its owner's queue and prefills again."""
        self._pool.preempt(seq)

    @property
    def waiting(self) -> WaitingQueue:
        """Sequences that wait to be started, or to be started again."""
        return self._pool.waiting

    @property
    def running(self) -> deque[Sequence]:
        """Running sequences, in order of admission."""
        return self._pool.running

    def take_preempted(self) -> list[int]:
        """Return the ids of the sequences that were preempted since the last call."""
        ids, self._pool.preempted = self._pool.preempted, []
        return ids

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
        if self._pool.prefilling or self.waiting:
            prompt = next(iter(self._pool.prefilling)) if self._pool.prefilling else self.waiting[0]
            return True, prompt.num_tokens - max(prompt.num_computed_tokens, prompt.num_cached_tokens)
        return False, len(self.running)

    # -- one step -----------------------------------------------------------------------------------------------------

    def schedule(self) -> tuple[ScheduledBatch, dict[int, Sequence]] | None:
        """Choose the tokens of the next step and reserve its blocks; None if there is nothing to compute.

        Also returns None if a submitted step must be read first: no sequence is preempted while a step is unread.
        """
        if not self._submitted.may_follow(is_awaited=self._is_awaited):
            return None
        now = self._clock()
        blocked = self._blocked
        if blocked is not None and not self._make_room(now):
            return None
        self.limits.note_step()
        self.drafts.begin_step()
        self._num_found = 0
        step = StepBuilder(self.limits.num_tokens, self.mtp_k)
        may_admit = self._passed_delay(now)
        self._shares.set_time(now)
        if self.step_budget is not None:
            self.step_budget.begin_step(self._pool.owners, now, has_slot=self._pool.has_slot())
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
        is_current = not self._submitted or self._submitted.has_device_drafts
        step.num_next_drafts = self.drafts.num_next(step.seqs.values(), step.num_decodes, is_current=is_current)
        if step.drafts and not step.num_prefills and not self._is_awaited:
            step.num_rounds = self.drafts.num_rounds
        return step.batch()

    def schedule_only(self, seqs: Collection[Sequence]) -> tuple[ScheduledBatch, dict[int, Sequence]] | None:
        """As `schedule`, for `seqs` only; others are preempted if these need their blocks."""
        chosen = set(seqs)
        self._blocked = None
        with self._pool.only(chosen):
            scheduled = self.schedule()
        self._blocked = None
        if scheduled is None:
            holding = [seq for seq in self.running if seq not in chosen]
            if holding and not chosen.isdisjoint(self.waiting):
                self.preempt(holding[-1])
                return self.schedule_only(seqs)
        return scheduled

    @property
    def _is_awaited(self) -> bool:
        """Whether a sequence waits for a step that computes its prompt."""
        return bool(self._pool.prefilling) or (bool(self.waiting) and self._pool.has_slot(self._num_reserved))

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
        if not self._pool.prefilling and not (may_admit and self.waiting):
            return
        started: dict[str, deque[Sequence]] = {}
        for seq in self._pool.prefilling:
            started.setdefault(seq.owner, deque()).append(seq)
        if self.step_budget is not None:
            self.step_budget.give_prompts_time(step)
        served = self._shares.served
        passed_over = self._owners_to_pass_over() if self._held_back else set[str]()
        for each in passed_over:
            self._shares.forgo(each)
        favoured, self._favoured = self._favoured, None
        if favoured is not None and favoured in self.waiting.owners and may_admit:
            # Owners that are served before it would take the freed room. If it cannot start yet, it is served in its
            # turn below.
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
            if seq not in self._pool.prefilling:
                started[owner].popleft()
                if not started[owner]:
                    del started[owner]

    def _add_short_prompts(self, step: StepBuilder, passed_over: Collection[str], blocked: Sequence | None) -> None:
        """Add whole short prompts of the least served owner beyond the step's time, if it was served at most nine
        tenths of the mean lately. In chunks of what other owners' decodes leave of a small model's step they would
        take many steps.
        """
        if self.step_budget is None or not self.step_budget.seconds_to_add():
            return
        owners = self._shares.from_lightest(each for each in self.waiting.latest_owners if each not in passed_over)
        if not owners or self._yields_to_blocked(owner := owners[0], blocked):
            return
        seconds = self.step_budget.seconds_to_add(self._shares.recent(owner))
        if seconds > 0.0:
            rest, step.seconds, before = step.seconds, seconds, step.num_prefills
            self._take_short_prompts(step, owner, is_regular=True)
            self.step_budget.note_added(seconds - step.seconds)
            step.seconds, step.num_added = rest, step.num_prefills - before

    def _start(self, step: StepBuilder, owner: str) -> bool:
        """Start the first waiting sequence of an owner. Returns False if it, and all others, must wait."""
        seq = self.waiting.first_of(owner)
        if not self._pool.has_slot(self._num_reserved):
            self._blocked = seq
            return False
        if self._has_found_most:
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

    @property
    def _has_found_most(self) -> bool:
        """Whether so many cached tokens were found that the step must begin."""
        return self._num_found >= _MOST_FOUND and self.step_budget is not None and not self.step_budget.is_alone

    @property
    def _num_reserved(self) -> int:
        """Number of slots that are reserved for interposed steps."""
        return int(self._reserves_slot and self.step_budget is not None and not self.step_budget.is_alone)

    def _may_split(self, step: StepBuilder, num_new: int) -> bool:
        """Whether a prompt that exceeds the rest of the budget may start with a chunk."""
        if not self.splits_prompts:
            return False
        if self.mixed or self.step_budget is not None:
            return True
        return num_new > self.limits.num_tokens and not step.num_prefills

    def _chunk(self, step: StepBuilder, start: int, num_left: int) -> int:
        """Return how many of a prompt's next `num_left` tokens, after `start` others, the step computes."""
        count = min(num_left, step.budget)
        return count if self.step_budget is None else self.step_budget.chunk(step, start, count)

    def _admit(self, step: StepBuilder, seq: Sequence, start: int, count: int) -> None:
        """Start a sequence that was taken from the queue: the step computes its tokens `[start, start + count)`."""
        self._pool.admit(seq, start, start + count)
        self._num_found += seq.num_cached_tokens
        step.new_seqs.append(seq)
        self._add_prefill(step, seq, count)

    def _add_prefill(self, step: StepBuilder, seq: Sequence, count: int) -> None:
        seq.type = SequenceType.PREFILL
        if self.step_budget is not None:
            self.step_budget.take(step, seq.num_computed_tokens, count)
        seq.num_computed_tokens += count
        self._shares.serve(seq.owner, count / seq.weight)
        if seq.num_computed_tokens == seq.num_tokens:
            self._pool.end_prompt(seq)
        step.add_prefill(seq, count)

    def _schedule_decodes(self, step: StepBuilder) -> bool:
        """Add one token and its drafts of every sequence whose prompt is computed. False if a step must be read first.

        An unread step that verifies drafts must be, because its rows continue after the accepted drafts. A sequence
        costs Python work only in steps in which it needs or fills a block, one in `block_size`.
        """
        rows, lengths = self._pool.decode_rows()
        if self._submitted:
            if not self._submitted.has_device_drafts and self._submitted.verify_drafts:
                return False
            rows, lengths = rows.continuing()
            if not rows.seqs:
                return True
            if self._submitted.has_device_drafts and max(lengths) + self.mtp_k > self.token_limit:
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
        if self._pool.has_changed:
            # A sequence was preempted, so the rows have changed.
            return self._schedule_decodes(step)
        step.add_decodes(rows, lengths)
        for owner, cost in rows.costs.items():
            self._shares.charge(owner, cost)
        costs: dict[str, float] = {}
        for seq_id, tokens in step.drafts.items():
            seq = step.seqs[seq_id]
            costs[seq.owner] = costs.get(seq.owner, 0.0) + len(tokens) / seq.weight
        for owner, cost in costs.items():
            self._shares.charge(owner, cost)
        return True

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
            # Drafts and lookahead together end at the last position that the sequence may have.
            further = [(seq, min(count + lookahead, 1 + seq.num_useful_drafts)) for seq, count in growths]
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
            victim = self.running[-1] if len(self._pool.owners) == 1 else self._pool.holdings().newest_of_most_blocks()
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
        self._submitted.begin(batch, self.prev_time, drafts_on_device=drafts_on_device)

    def read_step(self, fwd_output: ScheduledBatchOutput) -> list[RequestOutput]:
        """Process the output of the oldest submitted step. Tokens of sequences that no longer run are dropped.

        Sequences that a later step started from cached blocks of a row that failed are requeued.
        """
        outputs, prompt_time = self._submitted.read(fwd_output)
        if prompt_time is not None:
            self.last_prompt_latency = self._clock() - prompt_time
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
        self._submitted.drop()

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
        finished, outputs = self._submitted.take_tokens(seqs, fwd_output, verified)
        if stream_output_queue is not None and outputs:
            stream_output_queue.put_nowait(outputs)
        return finished

    # -- shares of owners ---------------------------------------------------------------------------------------------

    def _wait_with(self, owner: str) -> set[str]:
        """The owners that must wait when this owner's sequence found no slot or blocks; empty for all owners."""
        if len(self.waiting.owners) == 1:
            return set()
        holdings = self._pool.holdings()
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
        if not self._preempt_for(seq, now, self._num_reserved):
            self._blocked = seq
            return False
        self._next_room_check = now + _ROOM_CHECK_SECONDS
        return True

    def _preempt_for(self, seq: Sequence, now: float, num_reserved: int) -> bool:
        """Preempt until a waiting sequence can start such that `num_reserved` slots remain free, or until nothing more
        may be preempted for it. False if a step must be read first.

        Only an owner below its fair share is helped, and only owners far beyond theirs are preempted; for an owner
        far below its share, owners anywhere beyond theirs.
        """
        while not (self._pool.has_slot(num_reserved) and self.block_manager.can_allocate(seq)):
            holdings = self._pool.holdings()
            own = holdings[seq.owner]
            needed = max(1 / self.limits.num_rows, seq.num_blocks / len(self.block_manager.blocks))
            victim = holdings.newest_of_largest(_OVER_SHARE if own.in_shares > _FAR_BELOW_SHARE else 1.0)
            if victim is None or victim.owner == seq.owner or (own.part and own.part + needed > own.share):
                break
            if self._submitted:
                return False
            self.preempt(victim)
            self._held_back[victim.owner] = now + _HOLD_BACK_SECONDS, holdings[victim.owner].share
            self._favoured = seq.owner
        return True

    def _owners_to_pass_over(self) -> set[str]:
        """Owners that were preempted recently and hold at least the share that was left to them."""
        self._held_back = {owner: held for owner, held in self._held_back.items() if held[0] > self.prev_time}
        if not self._held_back:
            return set()
        holdings = self._pool.holdings()
        return {owner for owner, (_, share) in self._held_back.items() if holdings[owner].part >= share}

    # -- interposed steps ---------------------------------------------------------------------------------------------

    @property
    def interposes(self) -> bool:
        """Whether steps may be interposed in others."""
        return self.step_budget is not None and self.step_budget.max_interposed_tokens > 0

    def would_interpose(self, seq: Sequence) -> bool:
        """Whether a new sequence would be interposed if its prompt is short. Thread-safe."""
        has_slot = self._pool.has_slot(self._reserved_from(seq.owner))
        if self.step_budget is None or not has_slot or not _may_be_interposed(seq):
            return False
        return self.step_budget.may_interpose(seq.owner, self._shares.recent(seq.owner), self._shares.least_recent())

    def may_pause(self, batch: ScheduledBatch) -> bool:
        """Whether a scheduled step may be paused, for `interpose`."""
        return self.step_budget is not None and self.step_budget.may_pause(batch)

    def interpose(self, paused: ScheduledBatch | None = None) -> tuple[ScheduledBatch, dict[int, Sequence]] | None:
        """Schedule a step to compute while the last scheduled step is paused, or before the next step; None if none is
        due.

        It computes whole short prompts of the owner with the least recent service that has such a prompt, so that they
        do not wait for a long step of other owners. They take no slot or blocks that a sequence of another owner with
        as little service waits for. Call `read_interposed` before `paused` continues.
        """
        if not self.waiting or self.step_budget is None or not self.step_budget.has_allowance:
            return None
        if not self.running and len(self.waiting.owners) == 1:
            # The next step is short enough.
            return None
        owners = [each for each in self._may_start() if self._may_be_short(self.waiting.first_of(each))]
        if not owners:
            return None
        least, num_preemptions = self._shares.least_recent(), self._pool.num_preemptions
        for owner in self._shares.from_lightest(owners)[:_MOST_EXAMINED]:
            service = self._shares.recent(owner)
            may_interpose = self.step_budget.may_interpose(owner, service, least)
            if not may_interpose or self._yields_to_blocked(owner, self._blocked):
                return None
            step = self.step_budget.interposed_step(self.limits.num_tokens, service, least)
            first = self.waiting.first_of(owner)
            may_preempt = paused is None and not self._submitted and self._pool.num_preemptions == num_preemptions
            if may_preempt and self._is_short(step, first):
                # At most for one owner at a time: what was preempted may not suffice for it.
                self._preempt_for(first, self._clock(), self._reserved_from(owner))
            self._take_short_prompts(step, owner, paused)
            if step.seqs:
                step.num_next_drafts = self.drafts.num_next_interposed(len(step.seqs))
                return step.batch()
        return None

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
        share of the slots and blocks. If only the reserved slot is free: those of them that hold no slot, if any."""
        owners: Iterable[str] = (each for each in self.waiting.latest_owners if each not in self._held_back)
        has_slot = self._pool.has_slot(self._num_reserved)
        if has_slot and self._blocked is None:
            return owners
        holdings = self._pool.holdings()
        below = [each for each in owners if holdings[each].in_shares < 1.0]
        return below if has_slot else [each for each in below if not holdings[each].sequences] or below

    def _yields_to_blocked(self, owner: str, blocked: Sequence | None) -> bool:
        """Whether an owner must not start short prompts, because `blocked` waits for a slot or blocks, and its owner
        has no more service than this one."""
        if blocked is None or blocked.status is not SequenceStatus.WAITING or blocked.owner == owner:
            return False
        return self._shares.recent(blocked.owner) <= self._shares.recent(owner)

    def _reserved_from(self, owner: str) -> int:
        """Number of slots that remain free when a sequence of an owner is interposed. Thread-safe."""
        return self._num_reserved if self._pool.holds_slot(owner) else 0

    def _take_short_prompts(
        self, step: StepBuilder, owner: str, paused: ScheduledBatch | None = None, *, is_regular: bool = False
    ) -> None:
        """Start an owner's waiting sequences whose whole prompts fit a step's tokens and time, in order, such that the
        reserved slot remains free for owners that hold none, and always in a regular step."""
        while (
            owner in self.waiting.owners
            and self._pool.has_slot(self._num_reserved if is_regular else self._reserved_from(owner))
            and self._fits(step, self.waiting.first_of(owner), paused)
        ):
            seq = self.waiting.take(owner)
            count = max(1, seq.num_tokens - self.block_manager.count_cached_tokens(seq))
            self._admit(step, seq, seq.num_tokens - count, count)

    def _fits(self, step: StepBuilder, seq: Sequence, paused: ScheduledBatch | None) -> bool:
        """Whether a waiting sequence's whole prompt can be added to a step; if `paused`, that is interposed in it."""
        if not (self._is_short(step, seq) and self.block_manager.can_allocate(seq)):
            return False
        if paused is None or not self.block_manager.count_cached_tokens(seq):
            return True
        # The paused step may have published blocks that it is still writing, so cached blocks are checked against it.
        return paused.written_blocks.isdisjoint(self.block_manager.find_prefix(seq))

    def _may_be_short(self, seq: Sequence) -> bool:
        """Whether a sequence's whole prompt may fit an interposed step; if not, this is found in constant time."""
        if self.step_budget is None or not _may_be_interposed(seq):
            return False
        most = min(self.step_budget.max_interposed_tokens, self.limits.num_tokens)
        return self.block_manager.may_have_cached(seq, seq.num_tokens - most)

    def _is_short(self, step: StepBuilder, seq: Sequence) -> bool:
        """Whether a sequence's whole prompt fits a step's tokens and time, and may be interposed.

        When the most cached tokens were found, a prompt that is short only because of cached blocks must wait.
        """
        if self.step_budget is None or not _may_be_interposed(seq):
            return False
        if self._has_found_most and seq.num_tokens > self.step_budget.max_interposed_tokens:
            return False
        count = max(1, seq.num_tokens - self.block_manager.count_cached_tokens(seq))
        return count <= step.budget and self._chunk(step, seq.num_tokens - count, count) >= count

    # -- statistics and checks ----------------------------------------------------------------------------------------

    def stats(self, step_kind: str, step_seconds: float) -> SchedulerStats:
        """The current gauges and the counters so far, to be sent with the outputs of the step that was just run."""
        return SchedulerStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            kv_blocks_used=len(self.block_manager.used_block_ids),
            kv_blocks_total=len(self.block_manager.blocks),
            prefix_queried_tokens=self._pool.prefix_queried_tokens,
            prefix_hit_tokens=self._pool.prefix_hit_tokens,
            preemptions=self._pool.num_preemptions,
            step_kind=step_kind,
            step_seconds=step_seconds,
            draft_tokens=self.drafts.num_proposed,
            accepted_draft_tokens=self.drafts.num_accepted,
            num_drafts=self.drafts.num_verifications,
            accepted_by_position=tuple(self.drafts.accepted_by_position),
        )

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless queues, slots and blocks agree. Called when idle and by the property tests."""
        self._pool.check_integrity()

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
