"""Runs dummy steps at the start, which measure a GPU's memory and compile its kernels before the first request.

The model runner calls it. Triton compiles a kernel for each tile size that a number of tokens selects, for each
variant, and for each specialisation on its arguments. Numbers of tokens in powers of two select each tile size of the
table; decodes, prompts, chunks of prompts and mixed steps select each variant. Kernels that were compiled before are
read from Triton's cache.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
import torch

from engine.batch import ScheduledBatch, StepOutOfMemory
from engine.messages import PoolingParams
from engine.runner.device import oom_at_start, oom_in_step
from engine.runner.device_batch import DeviceInputs
from engine.sequence import Sequence as EngineSequence
from engine.speculative.drafts import max_verified_rows
from models.attention.backend import AttentionBackend, AttentionBatch
from models.attention.context import Context
from models.parallel.tensor_parallel import TensorParallel

_log = logging.getLogger(__name__)

_CHUNK = 24
"""Tokens of a chunk after a computed context; like most chunks, not a power of two."""


class WarmUpRow(NamedTuple):
    """A row of a step that computes the last `tokens` of a sequence of `context` tokens."""

    context: int
    tokens: int


class WarmUpStep(NamedTuple):
    """Rows of a step, decodes first."""

    rows: Sequence[WarmUpRow]
    num_decodes: int = 0


class StepSizes(NamedTuple):
    """The limits of a step's size."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    num_drafts: int = 0
    """The most drafts that a row verifies."""


def compile_kernels(sizes: StepSizes, run: Callable[[WarmUpStep], None], parallel: TensorParallel) -> None:
    """Run steps that compile the kernels of all requests. Steps that run out of memory are skipped.

    Each rank, and each replica in lockstep, runs the steps without collectives, so that none waits for another that
    skips a step. Replicas that exchange pairs of tokens and experts cannot: there such a step raises
    `StepOutOfMemory`.
    """
    exchange = None if parallel.experts is None else parallel.experts.exchange
    is_in_lockstep = exchange is not None and parallel.token_exchange is None
    start, num_steps = time.perf_counter(), 0
    left_out: list[str] = []
    for step in warm_up_steps(sizes):
        num_steps += 1
        try:
            with oom_in_step(), nullcontext() if is_in_lockstep else parallel.without_collectives():
                run(step)
        except StepOutOfMemory as error:
            if is_in_lockstep:
                raise
            left_out.append(str(error))
    _log.info("Kernels were compiled, or found compiled, in %.1f s", time.perf_counter() - start)
    if left_out:
        _log.warning(
            "%d of %d steps of the warm-up were left out, so that kernels may be compiled while requests wait: %s",
            len(left_out),
            num_steps,
            left_out[0],
        )


def run_largest_step(sizes: StepSizes, run: Callable[[WarmUpStep], None]) -> None:
    """Run the step that takes most memory: the most tokens of a step in the most rows.

    Raises `ValueError`, a sentence, where the device has too little.
    """
    num_tokens = sizes.max_num_batched_tokens
    num_rows = min(sizes.max_num_seqs, num_tokens)
    length, longer = divmod(num_tokens, num_rows)
    lengths = [length + 1] * longer + [length] * (num_rows - longer)
    rows = [WarmUpRow(min(each, sizes.max_model_len), min(each, sizes.max_model_len)) for each in lengths]
    with oom_at_start(
        f"a step of max_num_batched_tokens {num_tokens}, in addition to the model,", "lower max_num_batched_tokens"
    ):
        run(WarmUpStep(rows))
        if sizes.num_drafts:
            # A step that verifies drafts samples more tokens than it has rows, and prompts may end in it as well.
            num_rows = _most_verifying(sizes)
            verifying = _verification(sizes, num_rows)
            left = num_tokens - sum(row.tokens for row in verifying.rows)
            ending = [WarmUpRow(1, 1)] * min(sizes.max_num_seqs - num_rows, left)
            run(WarmUpStep([*verifying.rows, *ending], num_rows))


def warm_up_steps(sizes: StepSizes) -> Iterator[WarmUpStep]:
    """The steps of the warm-up, all within the limits, smallest first."""
    max_num_batched_tokens, max_num_seqs, max_model_len, num_drafts = sizes
    for tokens in _powers_of_two(min(max_num_batched_tokens, max_num_seqs * max_model_len)):
        whole, rest = divmod(tokens, max_model_len)
        lengths = [max_model_len] * whole + [rest] * (rest > 0)
        yield WarmUpStep([WarmUpRow(length, length) for length in lengths])
    short = min(2, max_model_len)
    for rows in _powers_of_two(min(max_num_seqs, max_num_batched_tokens)):
        # Some layers use other kernels for a long context.
        contexts = [max_model_len] + [short] * (rows - 1)
        yield WarmUpStep([WarmUpRow(context, 1) for context in contexts], rows)
        yield WarmUpStep([WarmUpRow(short, 1)] * rows, rows)
    if num_drafts:
        for rows in _powers_of_two(_most_verifying(sizes)):
            yield _verification(sizes, rows)
    chunk = WarmUpRow(max_model_len, min(_CHUNK, max_model_len, max_num_batched_tokens))
    yield WarmUpStep([chunk])
    if max_num_seqs > 1 and chunk.tokens < max_num_batched_tokens:
        yield WarmUpStep([WarmUpRow(short, 1), chunk], 1)


def _most_verifying(sizes: StepSizes) -> int:
    """The most rows that verify drafts in one step."""
    by_choices = max_verified_rows(sizes.max_num_seqs, sizes.num_drafts)
    return max(1, min(sizes.max_num_seqs, by_choices, sizes.max_num_batched_tokens // (1 + sizes.num_drafts)))


def _verification(sizes: StepSizes, num_rows: int) -> WarmUpStep:
    """Rows that verify drafts, the first after a long context."""
    tokens = min(1 + sizes.num_drafts, sizes.max_model_len, sizes.max_num_batched_tokens)
    contexts = [sizes.max_model_len] + [tokens] * (num_rows - 1)
    return WarmUpStep([WarmUpRow(context, tokens) for context in contexts], num_rows)


def dummy_batch(step: WarmUpStep, block_size: int, block: int, pooling: PoolingParams | None = None) -> ScheduledBatch:
    """A step of dummy sequences, all of whose tokens go to one block. A decode's tokens after the first are drafts.

    `pooling`: of their prompts, where the model generates nothing.
    """
    rows, num_decodes = step
    num_drafts = [row.tokens - 1 if index < num_decodes else 0 for index, row in enumerate(rows)]
    seqs = [
        EngineSequence([0] * (row.context - drafts), block_size, id=-1 - index, pooling=pooling)
        for index, (row, drafts) in enumerate(zip(rows, num_drafts, strict=True))
    ]
    for slot, (seq, row) in enumerate(zip(seqs, rows, strict=True)):
        seq.slot, seq.block_table = slot, [block] * -(-row.context // block_size)
    num_tokens = sum(row.tokens for row in rows)
    num_decoded = sum(row.tokens for row in rows[:num_decodes])
    return ScheduledBatch(
        {seq.id: seq for seq in seqs},
        [row.tokens for row in rows],
        num_tokens,
        total_tokens_num_prefill=num_tokens - num_decoded,
        total_tokens_num_decode=num_decoded,
        total_seqs_num=len(seqs),
        total_seqs_num_prefill=len(seqs) - num_decodes,
        total_seqs_num_decode=num_decodes,
        is_dummy_run=True,
        scheduled_spec_decode_tokens={
            seq.id: [0] * drafts for seq, drafts in zip(seqs, num_drafts, strict=True) if drafts
        },
        context_lens=[row.context for row in rows],
        new_seqs=seqs,
    )


def dummy_prompt(
    backend: AttentionBackend, block: int, block_size: int, device: torch.device, *, have_states: bool
) -> tuple[Context, DeviceInputs]:
    """A dummy prompt of one token in `block`, of which nothing is sampled."""
    one = np.ones(1, np.int64)
    metadata = backend.build_metadata(
        AttentionBatch(
            query_lens=one,
            seq_lens=one,
            block_tables=np.array([[block]], np.int32),
            slot_mapping=np.array([block * block_size]),
            num_decodes=0,
            states=np.zeros(1, np.int64) if have_states else None,
        )
    )
    positions, token = torch.zeros(2, 1, dtype=torch.int64, device=device)
    none = token[:0]
    return Context(positions, is_prefill=True, batch_size=1), DeviceInputs(token, positions, none, none, metadata)


def _powers_of_two(most: int) -> list[int]:
    """The powers of two below `most`, and `most` itself."""
    return sorted({*(1 << power for power in range(most.bit_length())), most})
