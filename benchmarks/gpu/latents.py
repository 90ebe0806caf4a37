"""Decodes over compressed latents, and steps of recurrent layers."""

from collections.abc import Callable, Iterator

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.case import Case, Values
from models.kernels.triton import gated_delta_net
from models.kernels.triton.latent_attention import latent_attention
from models.kernels.triton.reference import gated_delta_net as delta_reference
from models.kernels.triton.reference import latent_attention as latent_reference

_BLOCK_SIZE, _RANK, _ROPE = 16, 512, 64
_KEY = 128


def cases(bench: Bench) -> Iterator[Case]:
    """By batch and context."""
    for batch, context in bench.size(((1, 4096), (64, 4096), (16, 32768)), ((2, 40),)):
        yield Case(f"latent decode, {batch} x {context}", lambda b=batch, c=context: _latents(bench, b, c))  # type: ignore[misc]
    for batch in bench.size((1, 64, 256), (2,)):
        yield Case(f"delta net, {batch} decodes", lambda batch=batch: _delta(bench, [1] * batch, batch))  # type: ignore[misc]
    for tokens in bench.size((8192,), (20,)):
        yield Case(f"delta net, {tokens} tokens", lambda tokens=tokens: _delta(bench, [tokens], 0))  # type: ignore[misc]


def _latents(bench: Bench, batch: int, context: int) -> Values:
    heads, rank, rope = bench.size((128, _RANK, _ROPE), (4, 32, 16))
    blocks = -(-context // _BLOCK_SIZE)
    vectors = bench.random(batch * blocks, _BLOCK_SIZE, rank + rope)
    order = torch.randperm(batch * blocks, device=bench.device, dtype=torch.int32).view(batch, blocks)
    rows = torch.arange(batch, dtype=torch.int32, device=bench.device)
    lengths = torch.full((batch,), context, dtype=torch.int32, device=bench.device)
    q, q_rope = bench.random(batch, heads, rank), bench.random(batch, heads, rope)
    how = {"scale": (rank + rope) ** -0.5}

    def run(count: int) -> torch.Tensor:
        return latent_attention(
            q[:count], q_rope[:count], vectors, order, rows[:count], lengths[:count], longest=context, **how
        )

    few = min(batch, 4)
    expected = latent_reference.latent_attention(
        q[:few], q_rope[:few], vectors, order, rows[:few], lengths[:few], **how
    )
    checked = bench.checked(run(batch)[:few], expected)
    values = bench.kernel(
        lambda: run(batch),
        None,
        num_bytes=batch * context * (rank + rope) * vectors.element_size() + 2 * q.nbytes,
        operations=2.0 * batch * context * heads * (2 * rank + rope),
    )
    return {**values, **checked}


def _delta(bench: Bench, counts: list[int], decodes: int) -> Values:
    problem = DeltaProblem(bench, counts, decodes)
    # The reference goes token by token.
    few = problem if decodes else DeltaProblem(bench, [min(counts[0], 300)], 0)
    expected = few.run(delta_reference.delta_net)
    checked = bench.checked(few.run(gated_delta_net.delta_net), expected, 2e-2)
    values = bench.kernel(
        lambda: problem.run(gated_delta_net.delta_net),
        None,
        num_bytes=problem.num_bytes,
        operations=problem.operations,
    )
    return {**values, **checked}


class DeltaProblem:
    """Rows of a gated delta net."""

    def __init__(self, bench: Bench, counts: list[int], decodes: int) -> None:
        self._key_heads, value_heads, width, taps = bench.size((16, 32, _KEY, 4), (1, 2, 16, 4))
        group, tokens, rows = value_heads // self._key_heads, sum(counts), len(counts)
        channels = self._key_heads * (2 + group) * width
        self._projected = bench.random(tokens, self._key_heads * (2 + 2 * group) * width)
        self._ba = bench.random(tokens, 2 * value_heads)
        self._weights = (
            bench.random(channels, 1, taps, scale=0.5),
            bench.random(value_heads),
            bench.random(value_heads),
        )
        self._norm = bench.random(width), 1e-6
        self._inputs = bench.random(rows, channels, taps - 1)
        self._states = bench.random(rows, value_heads, width, width, dtype=torch.float32, scale=0.1)
        lengths = [count + 5 for count in counts] if decodes else counts
        slots = torch.arange(rows, device=bench.device)
        self._plan = gated_delta_net.make_plan(counts, lengths, slots, decodes)
        self.num_bytes = 2 * self._states.nbytes + 1.5 * self._projected.nbytes
        self.operations = 6.0 * tokens * value_heads * width * width
        """A token's products with its state: what it reads of it, what it adds, and what it takes."""

    def run(self, by: Callable[..., torch.Tensor]) -> torch.Tensor:
        """States go on from where the last run left them, except in a copy for the reference."""
        is_reference = by is delta_reference.delta_net
        mine = (self._inputs.clone(), self._states.clone()) if is_reference else (self._inputs, self._states)
        return by(self._projected, self._ba, *self._weights, self._norm, *mine, self._plan, key_heads=self._key_heads)
