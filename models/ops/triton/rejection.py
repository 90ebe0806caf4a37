"""Which drafts of each row are kept, and the token after them. For drafts that are made on the device.

No method of drafting makes them there yet: those that are looked up are compared on the host. Only tests call this.

Drafts chosen without chance are compared with what the target samples at their places by numbers of (seed, position):
the tokens are those without drafts. Drafts drawn from probabilities of their own are kept with probability
min(1, p / q), and the first that is not is replaced by a draw from max(p - q, 0) (Leviathan et al., 2023).
"""

import torch
import triton
import triton.language as tl

from models.ops.triton.configs import launch_of
from models.ops.triton.grids import cdiv, next_power_of_2
from models.ops.triton.sampling import acceptance_number, random_bits, share_of

RUN = 256
"""Tokens whose weights are added up before a draw looks for the run it falls into."""
_ONE = tl.constexpr(2.0**40)


@triton.jit(do_not_specialize=["num_rows", "places"])
def keep_equal_kernel(
    sampled,  # [drafts + rows] int64
    drafts,  # [drafts] int64
    first_drafts,  # [rows + 1] int32
    kept,  # [rows, places] int64, -1 past the last
    num_kept,  # [rows] int32
    num_rows,
    places,
    ROWS: tl.constexpr,
    PLACES: tl.constexpr,  # `places` filled up to a power of two
):
    """ROWS rows with all of their drafts. Grid: (tiles of rows,)."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < num_rows
    first = tl.load(first_drafts + rows, mask=inside, other=0)
    number = tl.load(first_drafts + rows + 1, mask=inside, other=0) - first
    nth = tl.arange(0, PLACES)[None, :]
    is_draft = nth < number[:, None]
    draft = tl.load(drafts + first[:, None] + nth, mask=is_draft, other=-1)
    at = (first + rows)[:, None] + nth
    token = tl.load(sampled + at, mask=inside[:, None] & (nth <= number[:, None]), other=-1)
    # The first place whose draft is not what was sampled, or that has none, ends the row.
    ended = tl.min(tl.where(is_draft & (draft == token), PLACES, nth), 1)
    stored = tl.where(nth <= ended[:, None], token, -1)
    tl.store(kept + rows[:, None] * places + nth, stored, mask=inside[:, None] & (nth < places))
    tl.store(num_kept + rows, ended + 1, mask=inside)


@triton.jit(do_not_specialize=["places"])
def keep_likely_kernel(
    target,  # [drafts + rows, V] float32
    proposed,  # [drafts, V] float32
    drafts,  # [drafts] int64
    first_drafts,  # [rows + 1] int32
    keys,  # [rows] int64
    positions,  # [rows] int64, of the row's first draft
    kept,  # [rows, places] int64
    num_kept,  # [rows] int32
    vocab_size,
    places,
):
    """One row's drafts, one after the other, until one is not kept. Grid: (rows,)."""
    row = tl.program_id(0)
    first = tl.load(first_drafts + row)
    number = tl.load(first_drafts + row + 1) - first
    key, position = tl.load(keys + row), tl.load(positions + row)
    ended = number
    for nth in range(number):
        token = tl.load(drafts + first + nth)
        p = tl.load(target + (first + row + nth).to(tl.int64) * vocab_size + token).to(tl.float64)
        q = tl.load(proposed + (first + nth).to(tl.int64) * vocab_size + token).to(tl.float64)
        is_kept = acceptance_number(key, position + nth) * q < p
        ended = tl.where(is_kept, ended, tl.minimum(ended, nth))
        tl.store(kept + row * places + nth, tl.where(ended > nth, token, -1))
    for nth in range(number, places):
        tl.store(kept + row * places + nth, -1)
    tl.store(num_kept + row, ended + 1)


@triton.jit
def _leftover(target, proposed, ids, vocab_size, has_proposed):
    """What tokens weigh of `max(p - q, 0)`, and of `p` after the last draft. # -> int64"""
    p = tl.load(target + ids, mask=ids < vocab_size, other=0.0)
    q = tl.load(proposed + ids, mask=(ids < vocab_size) & has_proposed, other=0.0)
    return (tl.maximum(p - q, 0.0) * _ONE).to(tl.int64)


@triton.jit
def weigh_leftover_kernel(
    target,
    proposed,
    first_drafts,
    num_kept,
    masses,  # [rows, runs] int64
    vocab_size,
    RUN: tl.constexpr,
    TILE: tl.constexpr,
):
    """A tile of one row's leftover. Grid: (tiles, rows)."""
    row = tl.program_id(1)
    first = tl.load(first_drafts + row)
    ended = tl.load(num_kept + row) - 1
    has_proposed = first + ended < tl.load(first_drafts + row + 1)
    of_target = target + (first + row + ended).to(tl.int64) * vocab_size
    of_proposed = proposed + (first + ended).to(tl.int64) * vocab_size
    ids = tl.program_id(0) * TILE + tl.arange(0, TILE)
    weights = _leftover(of_target, of_proposed, ids, vocab_size, has_proposed)
    of_runs = tl.sum(tl.reshape(weights, [TILE // RUN, RUN]), 1)
    first_run = (row * tl.num_programs(0) + tl.program_id(0)) * (TILE // RUN)
    tl.store(masses + first_run + tl.arange(0, TILE // RUN), of_runs)


@triton.jit(do_not_specialize=["places"])
def draw_leftover_kernel(
    target,
    proposed,
    drafts,
    first_drafts,
    keys,
    positions,
    kept,
    num_kept,
    masses,
    vocab_size,
    places,
    runs,
    RUN: tl.constexpr,
    RUNS: tl.constexpr,  # `runs` filled up to a power of two
):
    """One row's last token, by the number of its position. Grid: (rows,)."""
    row = tl.program_id(0)
    first = tl.load(first_drafts + row)
    ended = tl.load(num_kept + row) - 1
    has_proposed = first + ended < tl.load(first_drafts + row + 1)
    of_target = target + (first + row + ended).to(tl.int64) * vocab_size
    of_proposed = proposed + (first + ended).to(tl.int64) * vocab_size
    lanes = tl.arange(0, RUNS)
    running = tl.cumsum(tl.load(masses + row * runs + lanes, mask=lanes < runs, other=0), 0)
    total = tl.max(running, 0)
    target_mass = share_of(random_bits(tl.load(keys + row), tl.load(positions + row) + ended), total)
    run = tl.sum((running <= target_mass).to(tl.int32), 0)
    below = tl.max(tl.where(running <= target_mass, running, 0), 0)
    ids = run * RUN + tl.arange(0, RUN)
    weights = _leftover(of_target, of_proposed, ids, vocab_size, has_proposed)
    is_passed = (weights > 0) & (tl.cumsum(weights, 0) + below > target_mass)
    token = tl.min(tl.where(is_passed, ids, vocab_size - 1), 0).to(tl.int64)
    if (total == 0) & has_proposed:
        # Both give every token the same probability, but for roundings: the draft is a draw from the target's.
        token = tl.load(drafts + first + ended)
    tl.store(kept + row * places + ended, token)


def keep_equal(
    sampled: torch.Tensor, drafts: torch.Tensor, first_drafts: torch.Tensor, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Drafts as far as they are what the target sampled, and its token after them.

    # sampled [drafts + rows], drafts [drafts] int64, first_drafts [rows + 1] int32; a row has `most` drafts at most
    # -> [rows, most + 1] int64, -1 past a row's last; [rows] int32, tokens of a row, 1 and more
    """
    num_rows = len(first_drafts) - 1
    kept = drafts.new_empty(num_rows, most + 1)
    num_kept = drafts.new_empty(num_rows, dtype=torch.int32)
    launch = launch_of("keep_equal", drafts.device)
    keep_equal_kernel[(cdiv(num_rows, launch.blocks["ROWS"]),)](
        sampled,
        drafts,
        first_drafts,
        kept,
        num_kept,
        num_rows,
        most + 1,
        PLACES=next_power_of_2(most + 1),
        **launch.keywords,
    )
    return kept, num_kept


def keep_likely(
    target: torch.Tensor,
    proposed: torch.Tensor,
    drafts: torch.Tensor,
    first_drafts: torch.Tensor,
    keys: torch.Tensor,
    positions: torch.Tensor,
    most: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Drafts as far as chance keeps them, and a draw from what is left of the target's distribution. As `keep_equal`.

    # target [drafts + rows, V], proposed [drafts, V] float32 probabilities, keys, positions [rows] int64
    """
    num_rows, vocab_size = len(keys), target.shape[1]
    kept = drafts.new_empty(num_rows, most + 1)
    num_kept = drafts.new_empty(num_rows, dtype=torch.int32)
    pieces = launch_of("weigh", drafts.device)
    tiles = cdiv(vocab_size, pieces.blocks["TILE"])
    runs = tiles * (pieces.blocks["TILE"] // RUN)
    masses = drafts.new_empty(num_rows * runs)
    row = launch_of("keep_likely", drafts.device)
    keep_likely_kernel[(num_rows,)](
        target, proposed, drafts, first_drafts, keys, positions, kept, num_kept, vocab_size, most + 1, **row.keywords
    )
    weigh_leftover_kernel[(tiles, num_rows)](
        target, proposed, first_drafts, num_kept, masses, vocab_size, RUN=RUN, **pieces.keywords
    )
    draw_leftover_kernel[(num_rows,)](
        target,
        proposed,
        drafts,
        first_drafts,
        keys,
        positions,
        kept,
        num_kept,
        masses,
        vocab_size,
        most + 1,
        runs,
        RUN=RUN,
        RUNS=next_power_of_2(runs),
        **row.keywords,
    )
    return kept, num_kept
