"""`warm_up_steps`: the steps that a GPU's kernels are compiled by before the first request. Run by the model runner.

Triton compiles a kernel anew for each tile that a number of tokens calls for, for other forms of it, and for what it
knows of its arguments. Numbers of tokens by powers of two meet each tile of the table; decodes, prompts, chunks of
prompts and both together, each form. What was compiled before is read from Triton's cache.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from engine.batch import ScheduledBatch
from engine.sequence import Sequence as EngineSequence

_CHUNK = 24
"""Tokens of a chunk behind what was computed: no power of two, as most are."""


class WarmUpRow(NamedTuple):
    """A row of a step that computes the last `tokens` of a sequence of `context` tokens."""

    context: int
    tokens: int


class WarmUpStep(NamedTuple):
    """Rows, of which the first ones decode."""

    rows: Sequence[WarmUpRow]
    num_decodes: int


def warm_up_steps(*, max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int) -> Iterator[WarmUpStep]:
    """All within a step's limits, the smallest first."""
    for tokens in _powers_of_two(min(max_num_batched_tokens, max_num_seqs * max_model_len)):
        whole, rest = divmod(tokens, max_model_len)
        lengths = [max_model_len] * whole + [rest] * (rest > 0)
        yield WarmUpStep([WarmUpRow(length, length) for length in lengths], 0)
    short = min(2, max_model_len)
    for rows in _powers_of_two(min(max_num_seqs, max_num_batched_tokens)):
        # Some layers look at a long context in another way.
        contexts = [max_model_len] + [short] * (rows - 1)
        yield WarmUpStep([WarmUpRow(context, 1) for context in contexts], rows)
        yield WarmUpStep([WarmUpRow(short, 1)] * rows, rows)
    chunk = WarmUpRow(max_model_len, min(_CHUNK, max_model_len, max_num_batched_tokens))
    yield WarmUpStep([chunk], 0)
    if max_num_seqs > 1 and chunk.tokens < max_num_batched_tokens:
        yield WarmUpStep([WarmUpRow(short, 1), chunk], 1)


def dummy_batch(rows: Sequence[WarmUpRow], num_decodes: int, block_size: int, block: int) -> ScheduledBatch:
    """A step of sequences that are nobody's, all of whose tokens go to one block."""
    seqs = [EngineSequence([0] * row.context, block_size, id=-1 - place) for place, row in enumerate(rows)]
    for slot, seq in enumerate(seqs):
        seq.slot, seq.block_table = slot, [block] * seq.num_blocks
    num_tokens = sum(row.tokens for row in rows)
    return ScheduledBatch(
        {seq.id: seq for seq in seqs},
        [row.tokens for row in rows],
        num_tokens,
        total_tokens_num_prefill=num_tokens - num_decodes,
        total_tokens_num_decode=num_decodes,
        total_seqs_num=len(seqs),
        total_seqs_num_prefill=len(seqs) - num_decodes,
        total_seqs_num_decode=num_decodes,
        is_dummy_run=True,
        new_seqs=seqs,
    )


def _powers_of_two(most: int) -> list[int]:
    """And the number itself."""
    return sorted({*(1 << power for power in range(most.bit_length())), most})
