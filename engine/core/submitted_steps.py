"""`SubmittedSteps`: the steps that are submitted and not read, and what their outputs do to the sequences.

`begin` gives a step's sequences placeholders for the tokens that it samples. `read` replaces them by these tokens, and
ends the sequences that they complete (docs/specification.md#stop-conditions).
"""

import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from engine.batch import UNREAD_DRAFT, ScheduledBatch, ScheduledBatchOutput
from engine.core.sequence_pool import SequencePool
from engine.messages import RequestOutput
from engine.sequence import Sequence, SequenceStatus
from engine.speculative.drafts import Drafts
from kvcache.block_manager import RELEASED


class _SubmittedStep(NamedTuple):
    """A step that was submitted to the device and is not read yet."""

    batch: ScheduledBatch
    partial_prefills: frozenset[Sequence]
    """Sequences that get no token from the step, because it computes a chunk before their prompt's end."""
    time: float
    """Time at which the step was scheduled, on the scheduler's clock."""
    drafts_on_device: bool
    """Whether the device verifies the step and makes its rows' next drafts before the step is read."""

    verified: dict[int, list[int]]
    """The drafts that the step verifies, by sequence id, once the step that made them is read."""

    def add_placeholders(self, seqs: Iterable[Sequence], sign: int) -> None:
        """Add the most tokens that the step samples for each of its sequences; subtract them if `sign` is -1."""
        drafts = self.batch.scheduled_spec_decode_tokens
        for seq in seqs:
            seq.num_placeholder += sign * (1 + len(drafts.get(seq.id, ()))) if drafts else sign
        for seq in self.partial_prefills.intersection(seqs):
            seq.num_placeholder -= sign

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


class SubmittedSteps:
    """Steps in order of submission. It appends the tokens of each to its sequences when it is read."""

    def __init__(self, pool: SequencePool, drafts: Drafts, config: Any, token_limit: int) -> None:
        """`config` is the scheduler's. `token_limit`: the most tokens of any sequence."""
        self._pool, self._drafts = pool, drafts
        self._eos_token_id: int | None = config.eos_token_id
        self._stop_token_ids = frozenset(config.stop_token_ids or ())
        self._token_limit = token_limit
        self._latest_ends: tuple[frozenset[int | None], list[int] | None, bool] = frozenset(), None, False
        """The end tokens of the sequence added last, the request's own list, and whether the model's are included."""
        self._steps: deque[_SubmittedStep] = deque()

    def __bool__(self) -> bool:
        """Return whether any step is unread."""
        return bool(self._steps)

    def begin(self, batch: ScheduledBatch, now: float, *, drafts_on_device: bool) -> None:
        """Record a step that was submitted, and was scheduled at `now`.

        Its sequences get placeholders for the most tokens that it may sample.

        `drafts_on_device`: the next step of these rows may be scheduled before this one is read, and verifies drafts
        that the device makes in the meantime.
        """
        seqs, num_decodes = batch.sequences, batch.total_seqs_num_decode
        partial = frozenset(seq for seq in seqs[num_decodes:] if seq.num_computed_tokens < seq.num_tokens)
        verified = batch.scheduled_spec_decode_tokens
        step = _SubmittedStep(batch, partial, now, drafts_on_device, dict(verified))
        step.add_placeholders(seqs, 1)
        if self._drafts.are_on and (verified or not self._drafts.pause_left):
            for seq, count in zip(seqs, batch.num_next_drafts or [0] * len(seqs), strict=True):
                seq.spec_token_ids = [UNREAD_DRAFT] * count if drafts_on_device else []
        self._steps.append(step)
        self._pool.begin_step()

    def may_follow(self, *, is_awaited: bool) -> bool:
        """Return whether a step can be scheduled before the one submitted last is read. `is_awaited`: a prompt waits.

        If a model drafts after that step is read, the next step waits for that. A step whose drafts the device makes
        is followed by decodes only, since only for decodes does the device compute the rows' first positions.
        """
        if not self._steps:
            return True
        latest = self._steps[-1]
        return not is_awaited if latest.drafts_on_device else self._drafts.may_follow_unread(latest.batch)

    @property
    def has_device_drafts(self) -> bool:
        """Whether the device drafts after the step submitted last, before that step is read."""
        return bool(self._steps) and self._steps[-1].drafts_on_device

    @property
    def verify_drafts(self) -> bool:
        """Whether any of the steps verifies drafts."""
        return any(each.batch.scheduled_spec_decode_tokens for each in self._steps)

    def read(self, fwd_output: ScheduledBatchOutput) -> tuple[list[RequestOutput], float | None]:
        """Process the output of the oldest step. Returns its outputs, and when it was scheduled if it had a prompt.

        Tokens of sequences that no longer run are dropped. Sequences that a later step started from cached blocks of a
        row that failed are requeued.
        """
        batch, errors = self._steps[0].batch, fwd_output.errors
        invalid = set[int]()
        if errors:
            rows = zip(batch.req_ids, batch.tables, strict=True)
            invalid.update(block_id for seq_id, table in rows if seq_id in errors for block_id in table)
            invalid.discard(RELEASED)
            # This includes blocks of sequences that have stopped running since.
            self._pool.block_manager.forget_blocks(invalid)
        step, live = self._end_step()
        for seq in step.partial_prefills:
            fwd_output.token_ids.pop(seq.id, None)
        if step.drafts_on_device:
            made = fwd_output.draft_token_ids or {}
            for later in self._steps:
                for seq_id, drafts in later.verified.items():
                    later.verified[seq_id] = made.get(seq_id, [])[: len(drafts)] if UNREAD_DRAFT in drafts else drafts
        _, outputs = self.take_tokens(live, fwd_output, step.verified)
        if invalid:
            started = (seq for later in self._steps for seq in later.still_running() if seq in later.batch.new_seqs)
            self._pool.retract([seq for seq in started if not invalid.isdisjoint(seq.block_table)])
        return outputs, step.time if batch.total_seqs_num_prefill else None

    def drop(self) -> None:
        """Requeue the sequences of all steps, none of which will be read, since the device failed."""
        for step in self._steps:
            for table in step.batch.tables:
                self._pool.block_manager.forget_blocks(table)
        while self._steps:
            self._pool.retract(self._end_step()[1])

    def _end_step(self) -> tuple[_SubmittedStep, list[Sequence]]:
        """Free what the oldest step held. Returns the step and its sequences that still run."""
        step = self._steps.popleft()
        self._pool.end_step()
        live = step.still_running()
        step.add_placeholders(live, -1)
        return step, live

    def take_tokens(
        self, seqs: list[Sequence], fwd_output: ScheduledBatchOutput, verified: Mapping[int, list[int]]
    ) -> tuple[list[Sequence], list[RequestOutput]]:
        """Append a step's tokens to its sequences, and end those that finish. Returns the finished ones and all
        outputs.

        Tokens of a sequence that no longer runs are dropped, and so are tokens after a stop or after a prompt chunk.
        `verified`: the drafts that the step verified, by sequence id.
        """
        tokens_by_id, prompt_logprobs = fwd_output.token_ids, fwd_output.prompt_logprobs
        running, prefilling, now = SequenceStatus.RUNNING, self._pool.prefilling, time.monotonic()
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
            if (
                matcher is None
                and not seq.stop_token_sequences
                and len(token_ids) + len(new_tokens) < seq.token_limit
                and seq.end_tokens.isdisjoint(new_tokens)
            ):
                # None of them ends the answer.
                token_ids += new_tokens
                accepted += new_tokens
                new_tokens = ()
            for token_id in new_tokens:
                if matcher is not None and token_id not in seq.end_tokens and not matcher.accept(token_id):
                    refusals[seq.id] = matcher.error or ""
                    break
                token_ids.append(token_id)
                accepted.append(token_id)
                reason = self._leave_reason(seq, token_id)
                if reason is not None:
                    seq.leave_reason = output.finish_reason = reason
                    output.finished = True
                    finished.append(seq)
                    break
            if matcher is not None:
                self._pool.charge_grammar(seq)
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
        if self._drafts.are_on and (verified or fwd_output.draft_token_ids or not self._drafts.pause_left):
            computed = {seq_id for step in self._steps for seq_id in step.batch.req_ids}
            if without_token := self._drafts.take(seqs, fwd_output, verified, computed):
                # A row may have ended at a stop before the round in which it got no token.
                self._pool.retract(seq for seq in without_token if seq.leave_reason is None)
            if fwd_output.verified_drafts:
                self._charge_rounds(seqs, fwd_output.verified_drafts)
        if fwd_output.logprobs:
            for output in outputs:
                rows = fwd_output.logprobs.get(output.request_id)
                output.logprobs = rows and rows[: len(output.output_tokens)]
        if finished:
            self._pool.finish(finished)
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
            if vector is None or seq.status is not SequenceStatus.RUNNING or seq in self._pool.prefilling:
                continue
            seq.leave_reason = "pooled"
            output = RequestOutput(seq.id, [], finished=True, finish_reason="pooled", time=now - seq.sent_time)
            _begin_answer(seq, output)
            output.vector = vector
            finished.append(seq)
            outputs.append(output)
        return outputs

    def set_ends(self, seq: Sequence) -> None:
        """Store on a sequence the tokens that end it and its maximum length."""
        # `ignore_eos` ignores the model's whole EOS list, which includes the config's `stop_token_ids`.
        model_tokens = () if seq.ignore_eos else (self._eos_token_id, *self._stop_token_ids)
        own = seq.sampling_params.stop_token_ids
        ends, of, with_model = self._latest_ends
        if own is None or own is not of or with_model is seq.ignore_eos:
            ends = frozenset((*model_tokens, *(own or ())))
            self._latest_ends = ends, own, not seq.ignore_eos
        # The choices of a request share one set of end tokens.
        seq.end_tokens = ends
        seq.token_limit = min(seq.num_prompt_tokens + seq.max_tokens, self._token_limit)

    def _leave_reason(self, seq: Sequence, token_id: int) -> str | None:
        """The reason why `seq` ends at `token_id`, its latest token; None if it continues.

        The first match in the order of docs/specification.md#stop-conditions counts. The front end matches stop
        strings, on text.
        """
        if not seq.token_limit:
            # A caller put the sequence into `waiting` or `running` directly, without `add`.
            self.set_ends(seq)
        if seq.stop_token_sequences and seq.ends_with_stop_sequence:
            return "stop_sequence"
        if not seq.ignore_eos and token_id == self._eos_token_id:
            return "eos"
        if token_id in seq.end_tokens:
            return f"stop_{token_id}"
        if seq.matcher is not None and seq.matcher.is_complete:
            return "grammar"
        return "max_tokens" if len(seq.token_ids) >= seq.token_limit else None

    def _charge_rounds(self, seqs: Iterable[Sequence], verified: Mapping[int, list[tuple[int, int]]]) -> None:
        """Charge the owners for the rounds of a step after the first one, for which they were charged before."""
        costs: dict[str, float] = {}
        for seq in seqs:
            further = verified[seq.id][1:]
            cost = sum(1 + num_drafts for num_drafts, _ in further) / seq.weight
            costs[seq.owner] = costs.get(seq.owner, 0.0) + cost
        for owner, cost in costs.items():
            self._pool.shares.charge(owner, cost)

    def _fail_rows(
        self, seqs: Iterable[Sequence], errors: dict[int, str], bad_request: bool = False
    ) -> list[RequestOutput]:
        return [
            output
            for seq in seqs
            if seq.id in errors
            for output in self._pool.fail([seq], errors[seq.id], bad_request)
        ]
