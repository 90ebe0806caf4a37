"""The scheduler against a model of the KV cache: in every history, each step finds the KV it needs.

The fake worker stores, for each cache slot, the whole token prefix that its KV represents. Before a row attends, every
position of its context must have exactly its own prefix. The next token is a function of the tokens alone, so each
completion must equal the one that the sequence would get if it ran alone.
"""

from collections.abc import Collection
from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
)

from engine.batch import ScheduledBatch, ScheduledBatchOutput
from engine.core.scheduler import Scheduler
from engine.messages import PoolingParams, RequestOutput, TokenLogprobs
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from kvcache.block_manager import RELEASED

VOCAB = 5
EOS = 4


def next_token(tokens: list[int]) -> int:
    """The simulated model: the next token depends on the whole prefix."""
    value = 1
    for token in tokens:
        value = (value * 31 + token + 7) % 1009
    return value % VOCAB


def expected_completion(seq: Sequence, limit: int) -> list[int]:
    """The completion of `seq` if it runs alone."""
    params, completion = seq.sampling_params, list[int]()
    while len(completion) < min(params.max_tokens, limit - seq.num_prompt_tokens):
        completion.append(next_token(seq.prompt_token_ids + completion))
        if completion[-1] == EOS and not params.ignore_eos:
            break
        stops = (stop for stop in seq.stop_token_sequences if completion[-len(stop) :] == stop)
        if len(completion) >= params.min_tokens and any(stops):
            break
    return completion


def vector_of(tokens: list[int]) -> bytes:
    """The simulated model's vector of a pooled prompt."""
    return bytes(tokens)


POISON = (-1000,)
"""KV of a step that failed: no later step may read it."""


class Clock:
    """A clock that advances by a second each time it is read."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


class FakeWorker:
    """Stores rows by slot from the batches' contents, as the real worker does, and KV as prefixes."""

    def __init__(self, block_size: int, mtp_k: int, window: int | None = None, *, by_model: bool = False) -> None:
        """`by_model`: drafts are made like those of the runner's `ModelDrafter`, over caches of its own."""
        self.by_model = by_model
        self.drafter_kv: dict[tuple[int, int], tuple[int, ...]] = {}
        self.num_done: dict[int, int] = {}
        self.block_size = block_size
        self.window = window
        self.mtp_k = mtp_k
        self.kv: dict[tuple[int, int], tuple[int, ...]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.salts: dict[int, int] = {}
        self.tables: dict[int, list[int]] = {}
        self.pools: dict[int, bool] = {}

    def take_in(self, seq: Sequence) -> None:
        """Store the row of a sequence that starts."""
        self.tokens[seq.slot] = list(seq.token_ids)
        self.tables[seq.slot] = list(seq.block_table)
        self.salts[seq.slot] = -1 if seq.cache_salt is None else seq.cache_salt
        self.pools[seq.slot] = seq.pooling is not None
        self.num_done.pop(seq.slot, None)

    def forward(self, batch: ScheduledBatch, broken: Collection[int] = ()) -> ScheduledBatchOutput:
        """Compute a step. Sequences in `broken` write poison, and fail with all sequences that read it in this
        step."""
        for seq in batch.new_seqs:
            self.take_in(seq)
        for slot, start, block_ids in batch.appended_blocks:
            assert len(self.tables[slot]) == start
            self.tables[slot] += block_ids
        rows = list(
            zip(
                batch.req_ids,
                batch.slots.tolist(),
                batch.context_lens,
                batch.num_scheduled_tokens,
                strict=True,
            )
        )
        spans, poisoned = {}, set()
        for (req_id, slot, end, count), scheduled in zip(rows, batch.scheduled_tokens, strict=True):
            drafts = batch.scheduled_spec_decode_tokens.get(req_id, [])
            context = [*self.tokens[slot], *drafts][:end]
            assert scheduled == context[end - count :]
            spans[req_id] = context
            for position in range(end - count, end):
                cell, content = self.cell(slot, position), self.content(slot, context, position)
                # A full prefix hit computes its last token again; the existing entry stays.
                if req_id in broken and self.kv.get(cell) != content:
                    self.kv[cell] = POISON
                    poisoned.add(cell)
                else:
                    self.kv[cell] = content
        errors = {}
        for req_id, slot, end, count in rows:
            first = 0 if self.window is None else max(0, end - count - self.window + 1)
            cells = {position: self.cell(slot, position) for position in range(first, end)}
            if req_id in broken or not poisoned.isdisjoint(cells.values()):
                errors[req_id] = "not a number"
                continue
            for position, cell in cells.items():
                assert self.kv[cell] == self.content(slot, spans[req_id], position)
        output = self.sample(batch, [row for row in rows if row[0] not in errors])
        if self.by_model:
            self.draft(batch, rows, output, errors)
        output.errors = errors or None
        output.prompt_logprobs = self.read_prompts(batch)
        return output

    def draft(
        self,
        batch: ScheduledBatch,
        rows: list[tuple[int, int, int, int]],
        output: ScheduledBatchOutput,
        errors: Collection[int],
    ) -> None:
        """Write the drafter's entries of known tokens, and of drafts that have blocks; entries that are read must be
        right."""
        drafts = output.draft_token_ids or {}
        # While no row drafts for a long time, there are no numbers of drafts.
        most_drafts = batch.num_next_drafts or [0] * len(rows)
        for (req_id, slot, end, count), wanted in zip(rows, most_drafts, strict=True):
            if req_id in errors or self.pools[slot]:
                continue
            known, capacity = self.tokens[slot], len(self.tables[slot]) * self.block_size
            is_sampled = req_id in output.token_ids
            upto = len(known) if is_sampled else end
            for position in range(self.num_done.get(slot, end - count), min(upto, capacity)):
                self.drafter_kv[self.cell(slot, position)] = self.content(slot, known, position)
            self.num_done[slot] = min(upto, capacity)
            first = 0 if self.window is None else max(0, len(known) - self.window + 1)
            for position in range(first, self.num_done[slot]):
                assert self.drafter_kv[self.cell(slot, position)] == self.content(slot, known, position)
            most = max(0, min(wanted, capacity - upto + 1)) if is_sampled else 0
            if req_id in drafts:
                drafts[req_id] = drafts[req_id][:most]
                for position in range(upto, upto + len(drafts[req_id]) - 1):
                    context = [*known, *drafts[req_id]]
                    self.drafter_kv[self.cell(slot, position)] = self.content(slot, context, position)

    def read_prompts(self, batch: ScheduledBatch) -> dict[int, list[TokenLogprobs]]:
        """For each requested prompt token: how many tokens precede it, as its log probability."""
        computed = [
            (req_id, end - count + offset)
            for req_id, end, count in zip(batch.req_ids, batch.context_lens, batch.num_scheduled_tokens, strict=True)
            for offset in range(count)
        ]
        read = {}
        for span in batch.prompt_spans:
            places = computed[span.first : span.first + len(span.token_ids)]
            assert {req_id for req_id, _ in places} == {span.seq_id}
            read[span.seq_id] = [
                TokenLogprobs(token_id, -1.0 - position)
                for token_id, (_, position) in zip(span.token_ids, places, strict=True)
            ]
        return read

    def sample(self, batch: ScheduledBatch, rows: list[tuple[int, int, int, int]]) -> ScheduledBatchOutput:
        """Verify drafts and propose new ones: first a correct token, then a wrong one, so that some are rejected."""
        accepted: dict[int, tuple[int, ...]] = {}
        drafts: dict[int, list[int]] = {}
        vectors: dict[int, bytes] = {}
        for req_id, slot, end, _ in rows:
            known = self.tokens[slot]
            proposed = batch.scheduled_spec_decode_tokens.get(req_id, [])
            if end < len(known) + len(proposed):
                continue
            if self.pools[slot]:
                vectors[req_id] = vector_of(known)
                continue
            new = [next_token(known)]
            for draft in proposed:
                if draft != new[-1]:
                    break
                new.append(next_token(known + new))
            known += new
            accepted[req_id] = tuple(new)
            if self.mtp_k:
                right = next_token(known)
                drafts[req_id] = [right, (right + 1) % VOCAB, right, right][: self.mtp_k]
                if self.by_model:
                    # A random number of correct ones.
                    num_right = hash((*known,)) % (self.mtp_k + 1)
                    guessed: list[int] = []
                    for index in range(self.mtp_k):
                        right = next_token(known + guessed)
                        guessed.append(right if index < num_right else (right + 1) % VOCAB)
                    drafts[req_id] = guessed
        return ScheduledBatchOutput(accepted, drafts or None, vectors=vectors or None)

    def cell(self, slot: int, position: int) -> tuple[int, int]:
        block_id = self.tables[slot][position // self.block_size]
        assert block_id != RELEASED
        return block_id, position % self.block_size

    def content(self, slot: int, context: list[int], position: int) -> tuple[int, ...]:
        return (self.salts[slot], *context[: position + 1])


def duration(batch: ScheduledBatch) -> float:
    """Duration of a step on this slow device; every seventh step is disturbed."""
    tokens = batch.total_tokens_num
    return (1.0 + 0.5 * tokens + 0.01 * sum(batch.context_lens)) * (9.0 if sum(batch.context_lens) % 7 == 0 else 1.0)


class SchedulingMachine(RuleBasedStateMachine):
    """Random add, step, abort and preempt; integrity is checked after each."""

    live = Bundle("live")
    policy = "prefill_first"
    block_size = 4
    num_blocks = 12
    budget = 16
    mtp_k = 0
    looks_up = False
    """Whether drafts are looked up in earlier tokens, instead of made by the worker."""
    by_model = False
    """Whether a model drafts, and stores keys and values of drafts after a sequence's last token."""
    caching = True
    delay_factor = 0.0
    max_model_len: int | None = None
    window: int | None = None
    max_step_seconds = 0.0
    owners: tuple[str, ...] = ("",)
    splits_prompts = True
    """False: all sequences pool their prompts, each in one step."""

    def __init__(self) -> None:
        super().__init__()
        speculative = SimpleNamespace(num_speculative_tokens=self.mtp_k) if self.mtp_k else None
        if self.looks_up:
            vars(speculative).update(speculative_method="ngram", prompt_lookup_min=1, prompt_lookup_max=3)
        elif speculative is not None:
            speculative.drafts_by_model = self.by_model
        self.clock = Clock()
        self.scheduler = Scheduler(
            SimpleNamespace(
                max_num_seqs=4,
                max_num_batched_tokens=self.budget,
                kv_cache_block_size=self.block_size,
                num_kvcache_blocks=self.num_blocks,
                enable_prefix_caching=self.caching,
                scheduler_delay_factor=self.delay_factor,
                max_model_len=self.max_model_len,
                scheduling_policy=self.policy,
                max_step_seconds=self.max_step_seconds,
                bos_token_id=None,
                eos_token_id=EOS,
                stop_token_ids=[],
                speculative_config=speculative,
            ),
            window=self.window,
            splits_prompts=self.splits_prompts,
            clock=self.clock,
        )
        self.limit = self.max_model_len or self.block_size * self.num_blocks + 1
        self.worker = FakeWorker(
            self.block_size, 0 if self.looks_up else self.mtp_k, self.window, by_model=self.by_model
        )
        self.seqs: dict[int, Sequence] = {}
        self.outputs: dict[int, list[int]] = {}
        self.ended: dict[int, str] = {}
        self.read: dict[int, list[TokenLogprobs]] = {}
        self.vectors: dict[int, bytes] = {}

    def put_nowait(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            assert output.request_id not in self.ended, "output after the terminal one"
            self.outputs[output.request_id] += output.output_tokens
            assert output.finished == (output.finish_reason is not None)
            if output.prompt_logprobs is not None:
                assert output.request_id not in self.read, "a prompt's log probabilities are reported twice"
                self.read[output.request_id] = output.prompt_logprobs
            assert (output.vector is not None) == (output.finish_reason == "pooled")
            if output.vector is not None:
                self.vectors[output.request_id] = output.vector
            if output.finish_reason is not None:
                self.ended[output.request_id] = output.finish_reason

    @rule(
        target=live,
        prompt=st.lists(st.sampled_from([0, 0, 0, 1]), min_size=1, max_size=50),
        max_tokens=st.integers(0, 20),
        min_tokens=st.sampled_from([None, None, 1, 4]),
        stops=st.sampled_from([None, None, [[3]], [[0, 1], [2]]]),
        salt=st.sampled_from([None, None, 0, 7]),
        prompt_logprobs=st.sampled_from([None, None, 1]),
        priority=st.integers(-2, 2),
        pools=st.sampled_from([False, False, True]),
        data=st.data(),
    )
    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        min_tokens: int | None,
        stops: list[list[int]] | None,
        salt: int | None,
        prompt_logprobs: int | None,
        priority: int,
        pools: bool,
        data: st.DataObject,
    ) -> Sequence | MultipleResults[Sequence]:
        """`min_tokens` comes with `ignore_eos`: suppressing EOS is the sampler's task, which is not simulated."""
        # Pooled prompts have no entries of the drafter, which only lowers the acceptance rate of sequences that share
        # them.
        pools = (pools and not self.by_model) or not self.splits_prompts
        if pools:
            max_tokens, prompt_logprobs = 0, None
        params = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=min_tokens is not None,
            min_tokens=min(min_tokens or 0, max_tokens),
            prompt_logprobs=prompt_logprobs,
        )
        owner = data.draw(st.sampled_from(self.owners))
        seq = Sequence(
            prompt,
            self.block_size,
            params,
            stops,
            id=len(self.seqs),
            cache_salt=salt,
            priority=priority,
            owner=owner,
            weight=2.0 if owner == "heavy" else 1.0,
            pooling=PoolingParams() if pools else None,
        )
        seq.arrive_time = self.clock.now
        longest = self.limit - 1 if max_tokens else min(self.limit, self.block_size * self.num_blocks)
        if len(prompt) > longest:
            with pytest.raises(ValueError, match=f"at most {longest}"):
                self.scheduler.add(seq)
            return multiple()
        self.scheduler.add(seq)
        self.seqs[seq.id] = seq
        self.outputs[seq.id] = []
        return seq

    @precondition(lambda self: self.scheduler.has_requests())
    @rule(fault=st.sampled_from([None] * 8 + ["raises", "first row", "last row"]))
    def step(self, fault: str | None = None) -> None:
        scheduled = self.scheduler.schedule()
        assert scheduled is not None, "nothing is computed though there are requests"
        batch, seqs = scheduled
        assert batch.total_tokens_num == sum(batch.num_scheduled_tokens)
        self.check_size(batch)
        assert all(count > 0 for count in batch.num_scheduled_tokens)
        if self.policy == "prefill_first" and not self.max_step_seconds:
            assert not (batch.total_seqs_num_prefill and batch.total_seqs_num_decode)
        if fault == "raises":
            self.worker.forward(batch, broken=batch.req_ids)
            self.put_nowait(self.scheduler.fail(seqs.values(), fault))
            return
        if self.window is not None:
            for seq in list(seqs.values())[: batch.total_seqs_num_decode]:
                held = len(seq.block_table) - seq.num_released_blocks
                assert (held - 2) * self.block_size < self.window + 1 + 2 * self.mtp_k, "blocks held past the window"
        broken = {"first row": batch.req_ids[:1], "last row": batch.req_ids[-1:]}.get(fault or "", [])
        output = self.worker.forward(batch, broken)
        self.scheduler.postprocess(list(seqs.values()), output, self)
        self.scheduler.note_duration(batch, duration(batch))

    def check_size(self, batch: ScheduledBatch) -> None:
        """A step stays within its budget, as does each prompt that may not be split, unless it is alone."""
        is_alone = not self.splits_prompts and len(batch.req_ids) == 1
        assert is_alone or batch.total_tokens_num - batch.total_tokens_num_decode <= self.budget
        if not self.splits_prompts:
            assert batch.num_scheduled_tokens == batch.context_lens

    @rule(seq=consumes(live))
    def abort(self, seq: Sequence) -> None:
        outputs = self.scheduler.abort([seq.id])
        assert len(outputs) == (seq.id not in self.ended)
        self.put_nowait(outputs)
        assert self.scheduler.abort([seq.id]) == []

    @precondition(lambda self: self.scheduler.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.scheduler.preempt(data.draw(st.sampled_from(list(self.scheduler.running))))

    @invariant()
    def is_whole(self) -> None:
        self.scheduler.check_integrity()
        for seq in self.scheduler.running:
            end = -(-max(seq.token_limit, seq.num_prompt_tokens) // self.block_size)
            assert len(seq.block_table) <= end, "it has blocks for positions that it cannot reach"

    def teardown(self) -> None:
        for _ in range(2000):
            if self.scheduler.is_finished():
                break
            self.step()
        assert self.scheduler.is_finished(), "no progress"
        assert len(self.scheduler.block_manager.free_block_ids) == self.num_blocks
        assert self.ended.keys() == self.seqs.keys()
        for seq_id, seq in self.seqs.items():
            expected = expected_completion(seq, self.limit)
            if self.ended[seq_id] in ("abort", "error"):
                expected = expected[: len(self.outputs[seq_id])]
            assert self.outputs[seq_id] == expected
            if seq.pooling is not None and self.ended[seq_id] not in ("abort", "error"):
                assert self.vectors[seq_id] == vector_of(seq.prompt_token_ids)
            asked = seq.sampling_params.prompt_logprobs is not None
            if seq_id in self.read or (asked and self.ended[seq_id] not in ("abort", "error")):
                assert asked
                reported = [(each.token_id, each.logprob) for each in self.read[seq_id]]
                assert reported == [(token, -1.0 - place) for place, token in enumerate(seq.prompt_token_ids[1:])]


VARIANTS: dict[str, dict[str, object]] = {
    "prefill_first": {},
    "prefill_first_without_cache": {"caching": False},
    "mixed": {"policy": "mixed"},
    "mixed_with_tiny_steps": {"policy": "mixed", "budget": 5},
    "chunked_prompts": {"budget": 6},
    "blocks_of_one_token": {"block_size": 1, "num_blocks": 48},
    "short_context": {"max_model_len": 17, "num_blocks": 8},
    "cache_of_one_block_with_delay": {"block_size": 16, "num_blocks": 1, "delay_factor": 3.0},
    "delay": {"delay_factor": 5.0},
    "drafts": {"mtp_k": 1},
    "owners": {"owners": ("light", "heavy", "third")},
    "owners_in_few_blocks_mixed": {"owners": ("light", "heavy"), "num_blocks": 7, "policy": "mixed", "budget": 9},
    "bounded": {"max_step_seconds": 4.0},
    "bounded_owners": {"max_step_seconds": 2.5, "owners": ("light", "heavy", "third"), "num_blocks": 9},
    "bounded_owners_mixed_with_drafts": {
        "max_step_seconds": 1.5,
        "owners": ("light", "heavy"),
        "policy": "mixed",
        "mtp_k": 3,
    },
    "bounded_owners_in_a_window": {"max_step_seconds": 2.0, "owners": ("light", "heavy"), "window": 5},
    "whole_prompts": {"splits_prompts": False, "caching": False},
    "whole_prompts_bounded_mixed": {
        "splits_prompts": False,
        "caching": False,
        "policy": "mixed",
        "max_step_seconds": 2.0,
        "owners": ("light", "heavy"),
    },
    "window": {"window": 6},
    "window_mixed": {"window": 4, "policy": "mixed", "budget": 7},
    "window_of_one_token": {"window": 1, "block_size": 1, "num_blocks": 30, "budget": 4},
    "window_with_drafts": {"window": 3, "mtp_k": 3, "policy": "mixed"},
    "window_without_cache": {"window": 5, "caching": False, "budget": 6},
    "looked_up": {"mtp_k": 4, "looks_up": True},
    "looked_up_mixed_in_few_blocks": {"mtp_k": 4, "looks_up": True, "policy": "mixed", "num_blocks": 5},
    "by_model": {"mtp_k": 3, "by_model": True},
    "by_model_mixed_in_few_blocks": {
        "mtp_k": 4,
        "by_model": True,
        "policy": "mixed",
        "num_blocks": 6,
        "budget": 11,
    },
    "by_model_of_one_token_blocks": {"mtp_k": 2, "by_model": True, "block_size": 1, "num_blocks": 40},
    "by_model_bounded_owners_short_context": {
        "mtp_k": 3,
        "by_model": True,
        "max_step_seconds": 2.0,
        "owners": ("light", "heavy"),
        "max_model_len": 19,
    },
    "three_drafts_mixed": {"mtp_k": 3, "policy": "mixed"},
    "three_drafts_of_one_token_blocks": {"mtp_k": 3, "block_size": 1, "num_blocks": 30, "budget": 4},
}


SHORT = {
    "prefill_first",
    "mixed_with_tiny_steps",
    "blocks_of_one_token",
    "short_context",
    "cache_of_one_block_with_delay",
    "bounded_owners",
    "bounded_owners_mixed_with_drafts",
    "whole_prompts_bounded_mixed",
    "window_with_drafts",
    "window_without_cache",
    "looked_up_mixed_in_few_blocks",
    "three_drafts_of_one_token_blocks",
    "by_model_mixed_in_few_blocks",
    "by_model_of_one_token_blocks",
}
"""Settings of which every pair occurs together."""


@pytest.mark.parametrize(
    "variant", [pytest.param(each, marks=() if each in SHORT else pytest.mark.slow) for each in VARIANTS]
)
def test_every_step_finds_its_kv_and_every_completion_is_its_own(variant: str) -> None:
    machine = type(f"Machine_{variant}", (SchedulingMachine,), VARIANTS[variant])
    count = settings.default.max_examples * 2 // 5
    machine.TestCase.settings = settings(max_examples=count, stateful_step_count=60, deadline=None)
    machine.TestCase("runTest").runTest()
