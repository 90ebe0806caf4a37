"""`Scheduler`: decides which tokens each step computes, and takes the sampled tokens back (specification §1 and §5).

Called by the engine core, step by step: `schedule()`, the model, `postprocess()`; or, one step ahead, `schedule()`,
`submitted.begin()`, and later `submitted.read()`. How blocks are found is the block manager's room; why a sequence
stops is `engine.core.scheduler`'.
"""

import logging
import operator
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from engine.batch import AppendedBlocks, ScheduledBatch, ScheduledBatchOutput, StepLimits
from engine.core.waiting_queue import WaitingQueue
from engine.messages import RequestOutput, SchedulerStats, TokenLogprobs, terminal_output
from engine.sequence import Sequence, SequenceStatus, SequenceType
from engine.speculative.drafts import Drafts
from kvcache.block_manager import RELEASED, BlockManager

# [submitted_steps] `SubmittedSteps`: the steps that were given to the device and are not read yet. Owned by the
# scheduler.
#
# A sequence that leaves meanwhile keeps its slot, as its blocks are kept by the block manager, until the step
# submitted last has been read: no submitted step computes for a slot, or over a block, that changes hands.


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


# [step_builder] `StepBuilder`: gathers what the scheduler puts into one step, and makes the `ScheduledBatch` of it.


class DecodeRows:
    """The sequences that decode, and what of them stays the same from step to step."""

    def __init__(self, seqs: Iterable[Sequence]) -> None:
        self.seqs = list(seqs)
        self.by_id = {seq.id: seq for seq in self.seqs}
        self.token_ids = [seq.token_ids for seq in self.seqs]
        self.counts = [1] * len(self.seqs)
        self.limits = [seq.token_limit for seq in self.seqs]
        for seq in self.seqs:
            seq.type = SequenceType.DECODE

    def going_on(self) -> tuple["DecodeRows", list[int]]:
        """Those that a token still unread will not bring to their limit, and their lengths with it."""
        lengths = [len(seq.token_ids) + seq.num_placeholder for seq in self.seqs]
        if not any(map(operator.ge, lengths, self.limits)):
            return self, lengths
        rows = DecodeRows(seq for seq, length in zip(self.seqs, lengths, strict=True) if length < seq.token_limit)
        return rows, [seq.num_tokens for seq in rows.seqs]


class StepBuilder:
    """The step being scheduled: what it computes so far, and the token budget that is left."""

    def __init__(self, budget: int, num_drafts: int) -> None:
        self.budget = budget
        self.num_drafts = num_drafts
        self.seqs: dict[int, Sequence] = {}
        self.counts: list[int] = []
        self.context_lens: list[int] = []
        self.drafts: dict[int, list[int]] = {}
        self.num_decodes = 0
        self.num_decode_tokens = 0
        self.new_seqs: list[Sequence] = []
        self.appended_blocks: list[AppendedBlocks] = []

    @property
    def num_prefills(self) -> int:
        return len(self.seqs) - self.num_decodes

    def add_prefill(self, seq: Sequence, count: int) -> None:
        """Compute the next `count` tokens of a prompt; `seq.num_computed_tokens` counts them already."""
        self.seqs[seq.id] = seq
        self.counts.append(count)
        self.context_lens.append(seq.num_computed_tokens)
        self.budget -= count

    def add_decodes(self, rows: DecodeRows, lengths: list[int]) -> None:
        """Compute the last known token of running sequences of these lengths, and their drafts. Comes first."""
        for seq, length in zip(rows.seqs, lengths, strict=True):
            seq.num_computed_tokens = length
        self.seqs = rows.by_id.copy()
        self.num_decodes = len(rows.seqs)
        self.counts, self.context_lens = rows.counts.copy(), lengths
        if self.num_drafts:
            drafts = ((seq.id, seq.spec_token_ids[: seq.num_drafts]) for seq in rows.seqs)
            self.drafts = {seq_id: tokens for seq_id, tokens in drafts if tokens}
            drafted = [len(self.drafts.get(seq.id, ())) for seq in rows.seqs]
            self.counts = [1 + count for count in drafted]
            self.context_lens = [length + count for length, count in zip(lengths, drafted, strict=True)]
        self.num_decode_tokens = sum(self.counts)
        # A device may compute all drafts of each row where one has any.
        self.budget -= self.num_decodes * (1 + self.num_drafts) if self.drafts else self.num_decodes

    def batch(self) -> tuple[ScheduledBatch, dict[int, Sequence]]:
        total = sum(self.counts)
        batch = ScheduledBatch(
            self.seqs,
            self.counts,
            total,
            total - self.num_decode_tokens,
            self.num_decode_tokens,
            len(self.seqs),
            self.num_prefills,
            self.num_decodes,
            num_spec_step=self.num_drafts,
            scheduled_spec_decode_tokens=self.drafts,
            context_lens=self.context_lens,
            new_seqs=self.new_seqs,
            appended_blocks=self.appended_blocks,
        )
        return batch, self.seqs


# [first_outputs] What the scheduler tells with a sequence's first output, and of its prompt. Called by its
# `postprocess`.


def tell_first_token(seq: Sequence, output: RequestOutput) -> None:
    """Add to a sequence's first output what is known only now."""
    seq.first_token_time = time.time()
    output.queue_time = max(0.0, seq.schedule_time - seq.arrive_time)
    output.num_cached_tokens = min(seq.num_cached_tokens, seq.num_prompt_tokens)
    if seq.prompt_logprobs is not None:
        output.prompt_logprobs, seq.prompt_logprobs = seq.prompt_logprobs, None


def take_token_back(seq: Sequence, output: RequestOutput) -> None:
    """End a sequence that wanted its prompt computed and nothing more: the token sampled behind it is dropped."""
    seq.token_ids.pop()
    output.output_tokens.clear()
    seq.leave_reason = output.finish_reason = "max_tokens"


def keep_prompt_logprobs(seqs: Iterable[Sequence], told: dict[int, list[TokenLogprobs]]) -> None:
    """Add what a step computed of its prompts, until all of it is sent with the first output."""
    for seq in seqs:
        if seq.id in told and seq.prompt_logprobs is not None:
            seq.prompt_logprobs += told[seq.id]


# [stops] Token-level stop conditions (specification §5.3); text-level stop strings are the front end's.


class StopConditions:
    """Decides why a sequence ends at the token it was just given.

    `token_limit` bounds a sequence's length whatever it asked for: the context, or the cache where that is smaller.
    """

    def __init__(self, eos_token_id: int | None, stop_token_ids: Collection[int], token_limit: int | None) -> None:
        self.eos_token_id = eos_token_id
        self.stop_token_ids = frozenset(stop_token_ids)
        self.token_limit = token_limit

    def prepare(self, seq: Sequence) -> None:
        """Note on a new sequence what can end it: `seq.end_tokens`, and its length in tokens, `seq.token_limit`."""
        model_tokens = () if seq.ignore_eos else (self.eos_token_id, *self.stop_token_ids)
        seq.end_tokens = frozenset((*model_tokens, *(seq.sampling_params.stop_token_ids or ())))
        seq.token_limit = seq.num_prompt_tokens + seq.max_tokens
        if self.token_limit is not None:
            seq.token_limit = min(seq.token_limit, self.token_limit)

    def leave_reason(self, seq: Sequence, token_id: int) -> str | None:
        """Why `seq` ends at `token_id`, its latest token; None: it goes on. First match in the order of the spec.

        `ignore_eos` ignores the model's whole EOS list, of which `stop_token_ids` is the rest, but not the stop
        tokens and sequences that the request itself names.
        """
        if not seq.token_limit:
            self.prepare(seq)
        if seq.stop_token_sequences and self._ends_with_stop_sequence(seq):
            return "stop_sequence"
        if not seq.ignore_eos:
            if token_id == self.eos_token_id:
                return "eos"
            if token_id in self.stop_token_ids:
                return f"stop_{token_id}"
        own = seq.sampling_params.stop_token_ids
        if own and token_id in own:
            return f"stop_{token_id}"
        if seq.matcher is not None and seq.matcher.is_complete:
            return "grammar"
        if len(seq.token_ids) >= seq.token_limit:
            return "max_tokens"
        return None

    @staticmethod
    def _ends_with_stop_sequence(seq: Sequence) -> bool:
        """Whether the completion (a stop sequence never reaches into the prompt) ends with one of them."""
        generated = len(seq.token_ids) - seq.num_prompt_tokens
        if generated < seq.sampling_params.min_tokens:
            return False
        return any(
            0 < len(stop) <= generated and seq.token_ids[-len(stop) :] == stop for stop in seq.stop_token_sequences
        )


__all__ = ["OutputQueue", "ScheduledBatch", "ScheduledBatchOutput", "Scheduler"]

logger = logging.getLogger(__name__)

DEFAULT_AGING_SECONDS = 10.0
"""Waiting that a step of priority weighs as much as; `Config` has the same."""


class Scheduler:
    """Continuous batching over `waiting` and `running` sequences.

    Under `prefill_first` a step computes waiting prompts or, when none can start, one token of every running
    sequence. Under `mixed` it computes the decodes first and fills the rest of its token budget with prompt chunks.
    Constructed from any object with the specification's attributes; ours have defaults.
    """

    def __init__(self, config: Any, *, window: int | None = None, blocks_at_first: int | None = None) -> None:
        """`window`: tokens that a query sees in the model's widest layer, its own included; None: all before it.

        With one, a sequence gives the blocks back that none of its later tokens sees. `blocks_at_first`: of the cache,
        which grows with its use; None: all.
        """
        self.max_num_seqs: int = config.max_num_seqs
        self.max_num_batched_tokens: int = config.max_num_batched_tokens
        self.bos_token_id: int | None = getattr(config, "bos_token_id", None)
        self.eos_token_id: int | None = config.eos_token_id
        self.stop_token_ids: Collection[int] = config.stop_token_ids or ()
        self.block_manager = BlockManager(config, blocks_at_first=blocks_at_first)
        self.window = window
        self.waiting = WaitingQueue(getattr(config, "priority_aging_seconds", DEFAULT_AGING_SECONDS))
        self.running: deque[Sequence] = deque()
        self.prev_time = 0.0
        self.prev_prompt = False
        self.last_prompt_latency = 0.0
        self.delay_factor: float = config.scheduler_delay_factor
        self.drafts = Drafts(config, config.max_num_seqs)
        self.use_spec, self.mtp_k = self.drafts.are_on, self.drafts.most
        self.mixed: bool = getattr(config, "scheduling_policy", "prefill_first") == "mixed"

        # A sequence's last token needs no KV: nothing comes after it.
        holds = len(self.block_manager.blocks) * self.block_manager.block_size + 1
        max_model_len: int | None = getattr(config, "max_model_len", None)
        self.token_limit = holds if max_model_len is None else min(holds, max_model_len)
        self.longest_prompt = min(holds - 1, self.token_limit)
        """Tokens of a prompt behind which nothing is generated."""
        self.stops = StopConditions(self.eos_token_id, self.stop_token_ids, self.token_limit)

        # Every running sequence decodes in each step, so no more may run than a step has tokens for.
        self._num_slots = max(1, min(self.max_num_seqs, self.max_num_batched_tokens // self.drafts.tokens_a_row))
        self.limits = StepLimits(self.max_num_batched_tokens, self._num_slots)
        self._free_slots = list(reversed(range(self._num_slots)))
        self._prefilling: list[Sequence] = []
        """Running sequences whose prompt is computed in part, in order of admission."""
        self.submitted = SubmittedSteps(self, self.block_manager, self._free_slots)
        self._decode_rows: DecodeRows | None = None
        """Running sequences whose prompt is computed; None after any of them came or went."""
        self._prefix_queried_tokens = 0
        self._prefix_hit_tokens = 0
        self._preemptions = 0
        self._prefill_tokens = 0

    # -- the queue ----------------------------------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. Raises `ValueError` for one that an empty cache could not hold: it would never start."""
        longest = self.token_limit - 1 if seq.max_tokens else self.longest_prompt
        if seq.num_tokens > longest:
            room = " leave room for an answer" if seq.max_tokens else " fit"
            raise ValueError(f"the prompt has {seq.num_tokens} tokens; at most {longest}{room}")
        self.stops.prepare(seq)
        if seq.num_completion_tokens:
            # It was running before: nobody who came later is served before it.
            self.waiting.append_front(seq)
        else:
            self.waiting.append(seq)

    def extend(self, seqs: Iterable[Sequence]) -> None:
        """Queue sequences in order."""
        for seq in seqs:
            self.add(seq)

    def abort(self, seq_ids: Collection[int]) -> list[RequestOutput]:
        """End these sequences now and free their blocks; their terminal outputs. Ids not live are ignored."""
        ids = set(seq_ids)
        return self._remove([seq for seq in (*self.running, *self.waiting) if seq.id in ids], "abort")

    def retract(self, seqs: Iterable[Sequence]) -> None:
        """Have the sequences of a step that raised wait again: nothing of what it computed is there."""
        # The last one first: they wait in their order.
        for seq in reversed(list(seqs)):
            if seq.status is SequenceStatus.RUNNING:
                self.block_manager.forget(seq)
                self.preempt(seq)

    def shrink_steps(self, num_tokens: int, num_rows: int) -> bool:
        """Have less in a step from here on, as one of so much ran out of memory. False: it cannot be less."""
        if self.drafts.rest():
            return True
        if not self.limits.shrink(num_tokens, num_rows):
            return False
        while len(self.running) > self.limits.num_rows:
            self.preempt(self.running[-1])
        return True

    def fail(self, seqs: Iterable[Sequence], error: str, bad_request: bool = False) -> list[RequestOutput]:
        """End sequences that a step could not compute; `error` is the sentence their clients get.

        `bad_request` says that they asked for what cannot be.

        Their blocks were published when the step was scheduled: nobody may find in them what was never written.
        """
        live = [seq for seq in seqs if not seq.is_finished]
        for seq in live:
            self.block_manager.forget(seq)
        return self._remove(live, "error", error, bad_request)

    def is_finished(self) -> bool:
        """Whether nothing is waiting or running."""
        return not self.waiting and not self.running

    def has_requests(self) -> bool:
        """Whether anything is waiting or running."""
        return not self.is_finished()

    def get_request_counts(self) -> tuple[int, int]:
        """(running, waiting)."""
        return len(self.running), len(self.waiting)

    def get_num_unfinished_requests(self) -> int:
        """Sequences waiting or running."""
        return len(self.waiting) + len(self.running)

    def get_next_batch_info(self) -> tuple[bool, int]:
        """(whether the next step would prefill, how many tokens its first prompt, or all its decodes, have)."""
        prompts = self._prefilling or self.waiting
        if prompts:
            return True, prompts[0].num_tokens - max(prompts[0].num_computed_tokens, prompts[0].num_cached_tokens)
        return False, len(self.running)

    # -- one step -----------------------------------------------------------------------------------------------

    def schedule(self) -> tuple[ScheduledBatch, dict[int, Sequence]] | None:
        """Choose the next step's work and reserve its blocks; None when there is none.

        Also None where a submitted step must be read before more can be done: nobody is preempted meanwhile.
        """
        self.limits.note_step()
        self.drafts.begin_step()
        step = StepBuilder(self.limits.num_tokens, self.mtp_k)
        may_admit = self._passed_delay(time.time())
        if self.mixed:
            if self._schedule_decodes(step):
                self._schedule_prefills(step, may_admit)
        else:
            self._schedule_prefills(step, may_admit)
            if not step.num_prefills:
                self._schedule_decodes(step)
        self.prev_prompt = step.num_prefills > 0
        return step.batch() if step.seqs else None

    def schedule_only(self, seqs: Collection[Sequence]) -> tuple[ScheduledBatch, dict[int, Sequence]] | None:
        """As `schedule`, as if there were nothing but `seqs`; others are preempted where these need their blocks."""
        chosen = set(seqs)
        waiting, running, prefilling = self.waiting, self.running, self._prefilling
        self.waiting = waiting.only(chosen)
        self.running = deque(seq for seq in running if seq in chosen)
        self._prefilling = [seq for seq in prefilling if seq in chosen]
        self._decode_rows = None
        try:
            scheduled = self.schedule()
        finally:
            self.running = deque((*(seq for seq in running if seq not in chosen), *self.running))
            self._prefilling = [*(seq for seq in prefilling if seq not in chosen), *self._prefilling]
            self._decode_rows = None
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

    def postprocess(
        self,
        seqs: list[Sequence],
        fwd_output: ScheduledBatchOutput,
        stream_output_queue: OutputQueue | None = None,
        verified: Mapping[int, list[int]] | None = None,
    ) -> list[Sequence]:
        """Give the step's sequences their tokens, stop and free the finished ones; returns those.

        Tokens of a sequence that is no longer running (aborted or preempted meanwhile) are dropped, as are tokens
        sampled past a stop, or after a part of a prompt. With a queue, it is given one list of `RequestOutput`s.
        `verified`: the step's drafts by sequence; None: those that the sequences have now.
        """
        tokens_by_id = fwd_output.token_ids
        running, prefilling = SequenceStatus.RUNNING, self._prefilling
        if fwd_output.prompt_logprobs:
            keep_prompt_logprobs(seqs, fwd_output.prompt_logprobs)
        finished: list[Sequence] = []
        outputs: list[RequestOutput] = []
        refusals = dict(fwd_output.refusals or ())
        for seq in seqs:
            new_tokens = tokens_by_id.get(seq.id)
            if not new_tokens or seq.status is not running or (prefilling and seq in prefilling):
                continue
            token_ids, matcher = seq.token_ids, seq.matcher
            accepted: list[int] = []
            output = RequestOutput(seq.id, accepted)
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
                    reason = self.stops.leave_reason(seq, token_id)
                    if reason is not None:
                        seq.leave_reason = output.finish_reason = reason
                        output.finished = True
                        finished.append(seq)
                        break
            if not accepted:
                continue
            if seq.first_token_time == 0.0:
                tell_first_token(seq, output)
                if not seq.max_tokens:
                    take_token_back(seq, output)
            outputs.append(output)
            if seq.stream_callback is not None:
                seq.stream_callback(output)
        if self.use_spec:
            self.retract(self.drafts.take(seqs, fwd_output, verified))
        if fwd_output.logprobs:
            for output in outputs:
                rows = fwd_output.logprobs.get(output.request_id)
                output.logprobs = rows and rows[: len(output.output_tokens)]
        for seq in finished:
            # A block that the last tokens filled was not published while they were placeholders.
            self.block_manager.publish(seq, len(seq.token_ids) - 1)
            self._release(seq, SequenceStatus.FINISHED)
        if finished:
            self.running = deque(seq for seq in self.running if seq.status is running)
        if fwd_output.errors:
            outputs += self._fail_rows(seqs, fwd_output.errors)
        if refusals:
            outputs += self._fail_rows(seqs, refusals, bad_request=True)
        if stream_output_queue is not None and outputs:
            stream_output_queue.put_nowait(outputs)
        return finished

    def preempt(self, seq: Sequence) -> None:
        """Take a running sequence's blocks back; it waits at the head of the queue and prefills again."""
        if self.running and self.running[-1] is seq:
            self.running.pop()
        elif seq in self.running:
            self.running.remove(seq)
        self._release(seq, SequenceStatus.WAITING)
        self.waiting.appendleft(seq)
        self._preemptions += 1

    def update_spec_stats(self, num_accepted_tokens: int) -> None:
        """Count one verified draft: `num_accepted_tokens` were emitted, one of them the target model's own."""
        self.drafts.count(num_accepted_tokens, self.mtp_k)

    @property
    def total_draft_tokens(self) -> int:
        """Draft tokens verified so far."""
        return self.drafts.num_proposed

    @property
    def total_accepted_tokens(self) -> int:
        """Of them, those that the model would have chosen."""
        return self.drafts.num_accepted

    # -- watching -----------------------------------------------------------------------------------------------

    def stats(self, step_kind: str, step_seconds: float) -> SchedulerStats:
        """Gauges now and counters so far, told with the step that was just run."""
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
        )

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless queues, slots and blocks agree. Run when idle and by the property tests."""
        self.block_manager.check_integrity(self.running)
        slots = [*(seq.slot for seq in self.running), *self.submitted.kept_slots]
        if sorted(slots + self._free_slots) != list(range(self._num_slots)):
            raise AssertionError(f"slots leak: {slots} running, {self._free_slots} free")
        if not self.submitted and any(seq.num_placeholder for seq in (*self.running, *self.waiting)):
            raise AssertionError("a sequence waits for a token that no step brings")
        for seq in self.running:
            if seq.status is not SequenceStatus.RUNNING:
                raise AssertionError(f"sequence {seq.id} runs with status {seq.status}")
        for seq in self.waiting:
            if seq.status is not SequenceStatus.WAITING or seq.block_table or seq.slot != -1:
                raise AssertionError(f"waiting sequence {seq.id} holds blocks or a slot")
        if any(seq not in self.running for seq in self._prefilling):
            raise AssertionError("a sequence prefills that does not run")

    # -- the two phases -----------------------------------------------------------------------------------------

    def _passed_delay(self, now: float) -> bool:
        """Whether waiting prompts may start (specification §1.3)."""
        if self.prev_prompt:
            self.last_prompt_latency = now - self.prev_time
        self.prev_time, self.prev_prompt = now, False
        if self.delay_factor <= 0 or not self.waiting or not self.running:
            return True
        waited = now - min(seq.arrive_time for seq in self.waiting)
        return waited > self.delay_factor * self.last_prompt_latency

    def _schedule_prefills(self, step: StepBuilder, may_admit: bool) -> None:
        """Go on with prompts begun, then start waiting ones, in order, while budget, slots and blocks last."""
        for seq in list(self._prefilling):
            count = min(seq.num_tokens - seq.num_computed_tokens, step.budget)
            if count <= 0:
                return
            if self.window is not None:
                self.block_manager.release_unseen(seq, seq.num_computed_tokens - self.window + 1)
            self.block_manager.publish(seq, seq.num_computed_tokens + count)
            self._add_prefill(step, seq, count)
        while (
            may_admit
            and self.waiting
            and self._free_slots
            and step.budget > 0
            and len(self.running) < self.limits.num_rows
        ):
            seq = self.waiting[0]
            num_cached = self.block_manager.count_cached_tokens(seq)
            num_new = max(1, seq.num_tokens - num_cached)
            count = min(num_new, step.budget)
            if count < num_new and not self._may_split(step, num_new):
                break
            if not self.block_manager.can_allocate(seq):
                break
            self.waiting.popleft()
            self._admit(step, seq, seq.num_tokens - num_new, count)

    def _may_split(self, step: StepBuilder, num_new: int) -> bool:
        """Whether a prompt that the step's rest cannot hold starts with a part of it."""
        return self.mixed or (num_new > self.limits.num_tokens and not step.num_prefills)

    def _admit(self, step: StepBuilder, seq: Sequence, start: int, count: int) -> None:
        """Start a waiting sequence: its tokens `[start, start + count)` are computed in this step."""
        self._prefix_queried_tokens += seq.num_tokens
        self.block_manager.allocate(seq, start + count)
        if self.window is not None:
            self.block_manager.release_unseen(seq, start - self.window + 1)
        self._prefix_hit_tokens += seq.num_cached_tokens
        seq.slot = self._free_slots.pop()
        seq.status = SequenceStatus.RUNNING
        seq.num_computed_tokens = start
        if seq.schedule_time == 0.0:
            seq.schedule_time = time.time()
        self.running.append(seq)
        self._prefilling.append(seq)
        step.new_seqs.append(seq)
        self._add_prefill(step, seq, count)

    def _add_prefill(self, step: StepBuilder, seq: Sequence, count: int) -> None:
        seq.type = SequenceType.PREFILL
        seq.num_computed_tokens += count
        self._prefill_tokens += count
        if seq.num_computed_tokens == seq.num_tokens:
            self._prefilling.remove(seq)
            self._decode_rows = None
        step.add_prefill(seq, count)

    def _schedule_decodes(self, step: StepBuilder) -> bool:
        """One token, and its drafts, of every sequence whose prompt is computed; False: a step must be read first.

        A step that verifies drafts is one: where its rows go on depends on how many are accepted.

        Python looks closely only at a sequence that needs a block or fills one, one step in `block_size`.
        """
        rows = self._decode_rows
        if rows is None or len(rows.seqs) + len(self._prefilling) != len(self.running):
            rows = self._decode_rows = DecodeRows(seq for seq in self.running if seq not in self._prefilling)
            if self.window is not None:
                # A prompt just computed would hold all its blocks until the sequence needs another.
                for seq in rows.seqs:
                    self.block_manager.release_unseen(seq, len(seq.token_ids) - self.window)
        lengths = list(map(len, rows.token_ids))
        if self.submitted:
            if self.submitted.verify_drafts:
                return False
            rows, lengths = rows.going_on()
            if not rows.seqs:
                return True
        self.drafts.propose(rows.seqs, step.budget)
        # A sequence grows by at most 1 + k tokens a step: these are all that may cross a block boundary in this one.
        size, k = self.block_manager.block_size, self.mtp_k
        eventful = [i for i, length in enumerate(lengths) if (length + k) % size <= 2 * k + 1]
        growths = [(rows.seqs[i], 1 + rows.seqs[i].num_drafts) for i in eventful]
        if k and not self.block_manager.can_append_all(growths, spare=len(rows.seqs)):
            self.drafts.drop(rows.seqs)
            growths = [(seq, 1) for seq, _ in growths]
        if self.submitted and not self.block_manager.can_append_all(growths):
            return False
        for seq, count in growths:
            if seq.status is SequenceStatus.RUNNING:
                self._grow(step, seq, count)
        if self._decode_rows is None:
            return self._schedule_decodes(step)
        step.add_decodes(rows, lengths)
        return True

    def _grow(self, step: StepBuilder, seq: Sequence, num_new_tokens: int) -> None:
        """Reserve blocks for a decode, preempting from the tail of `running`, `seq` itself last, to free some."""
        if self.window is not None:
            self.block_manager.release_unseen(seq, len(seq.token_ids) - self.window)
        while (added := self.block_manager.may_append(seq, num_new_tokens)) is None:
            victim = self.running[-1]
            self.preempt(victim)
            if victim is seq:
                return
        if added:
            step.appended_blocks.append(AppendedBlocks(seq.slot, len(seq.block_table) - len(added), added))

    # -- leaving ------------------------------------------------------------------------------------------------

    def _fail_rows(
        self, seqs: Iterable[Sequence], errors: dict[int, str], bad_request: bool = False
    ) -> list[RequestOutput]:
        return [output for seq in seqs if seq.id in errors for output in self.fail([seq], errors[seq.id], bad_request)]

    def _remove(
        self, seqs: list[Sequence], reason: str, error: str | None = None, bad_request: bool = False
    ) -> list[RequestOutput]:
        for seq in seqs:
            seq.leave_reason = reason
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
            seq.leave_time = time.time()
        self.block_manager.deallocate(seq)
        seq.num_computed_tokens = 0
        seq.num_placeholder = 0
        seq.spec_token_ids = []
        if seq.slot >= 0:
            if not self.submitted.keep(seq.slot):
                self._free_slots.append(seq.slot)
            seq.slot = -1
        if seq in self._prefilling:
            self._prefilling.remove(seq)
