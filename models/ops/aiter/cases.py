"""Small problems for each operator of aiter, which the probe compares with torch.

`Sizes` describes the served model, so that the probe computes problems of the model's own sizes.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.nn.functional as F

from models.ops import paged_attention as reference
from models.ops.aiter import attention
from models.ops.aiter import operators as dense
from models.ops.aiter import operators as experts
from models.ops.self_test import FAILURE_FACTOR, Finding, relative_error
from models.ops.types import AttentionOptions, KVCacheTensor
from models.ops.weight_formats import FP8_GROUP


class Sizes(NamedTuple):
    """Sizes of one rank's part of a model; the defaults are for models whose configuration does not name them."""

    hidden: int = 1024
    inner: int = 3072
    """Features of the dense feed-forward layers."""
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 128
    block: int = 16
    """Tokens of a KV-cache block."""
    experts: int = 8
    top_k: int = 2
    expert_inner: int = 512
    has_windows: bool = False
    """Whether layers have windows: what other rows store in blocks before a window must not matter then."""
    has_fp8_experts: bool = False
    """Whether the experts are stored in FP8 with a scale for each block of 128 x 128."""


_EPS = 1e-6
_ROUNDED = 0.05
"""Largest difference between sums of 16-bit products in two orders, for numbers of about 1."""
_ROUNDED_TO_FP8 = 0.1
_BEYOND_32_BITS = 2**31
"""Elements of a cache beyond which offsets need 64 bits."""

Comparison = Callable[[Sizes, torch.device], Iterator[Finding]]
"""Computes the problems of one operator by the library and by torch."""
_Attend = Callable[[KVCacheTensor, AttentionOptions, torch.Tensor | None], torch.Tensor]


def _norm(sizes: Sizes, device: torch.device) -> Iterator[Finding]:
    for size, dtype in _widths(sizes.hidden):
        x, residual = (_small(4, size, dtype=dtype, device=device, shift=shift) for shift in (0, 3))
        weight = residual[1].contiguous()
        normed, summed = dense.add_rms_norm(x, residual, weight, _EPS)
        yield _finding("a norm with a sum", normed, _rms_norm(x + residual, weight))
        yield _finding("the sum of a norm", summed, x + residual)
        yield _finding("a norm", dense.rms_norm(x, weight, _EPS), _rms_norm(x, weight))


def _rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x.float(), x.shape[1:], weight.float(), _EPS)


def _activation(sizes: Sizes, device: torch.device) -> Iterator[Finding]:
    for size, dtype in _widths(sizes.inner):
        gate, up = (_small(4, size, dtype=dtype, device=device, shift=shift) for shift in (0, 3))
        gate_up = torch.cat((gate, up), 1)
        yield _finding("SwiGLU", dense.silu_and_mul(gate_up), F.silu(gate.float()) * up.float())
        by_tanh = F.gelu(gate.float(), approximate="tanh") * up.float()
        yield _finding("GeGLU", dense.gelu_tanh_and_mul(gate_up), by_tanh)


def _attention(sizes: Sizes, device: torch.device) -> Iterator[Finding]:
    """A batch of decodes, prompts and chunks of prompts; then a batch of decodes, one of them with a long context, for
    which the library has other kernels.
    """
    mixed = _Step(sizes, [1, 1, 1, 7, 40], [5, 300, 17, 30, 40], device)
    yield from mixed.findings(functools.partial(_attend_unified, mixed), attention.takes_unified)
    decodes = _Step(sizes, [1] * 4, [5, 300, 17, 1500], device)
    for what, options, sinks in decodes.options():
        if attention.takes_unified(options, sinks):
            yield decodes.finding(f"{what}, decodes only", functools.partial(_attend_unified, decodes), options, sinks)


def _attend_unified(
    step: "_Step", cache: KVCacheTensor, options: AttentionOptions, sinks: torch.Tensor | None
) -> torch.Tensor:
    out = torch.zeros_like(step.q)
    attention.unified(step.q, out, cache, step.rows, options, sinks)
    return out


def _prefill(sizes: Sizes, device: torch.device) -> Iterator[Finding]:
    """Prompts, and chunks after a prefix, in 16-bit types; a long prompt, for which the library has other kernels."""
    for dtype, window in ((torch.bfloat16, None), (torch.bfloat16, 20), (torch.float16, None)):
        for queries, lengths in (([5, 131, 40], [5, 131, 110]), ([1100], [1100])):
            what = f"prompts of up to {max(queries)} tokens in {dtype}{'' if window is None else ' with a window'}"
            yield _finding(what, *_prompts(sizes, queries, lengths, dtype, window, device))


def _prompts(
    sizes: Sizes, queries: list[int], lengths: list[int], dtype: torch.dtype, window: int | None, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the library and what the reference computes. # [tokens, Hq, D] each"""

    def values(tokens: int, heads: int, shift: int) -> torch.Tensor:
        made = _small(tokens, heads * sizes.head_dim, dtype=dtype, device=device, shift=shift)
        return made.view(tokens, heads, sizes.head_dim)

    q = values(sum(queries), sizes.heads, 1)
    k, v = (values(sum(lengths), sizes.kv_heads, shift) for shift in (2, 5))
    starts, key_starts = (
        torch.tensor([0, *itertools.accumulate(each)], dtype=torch.int32, device=device) for each in (queries, lengths)
    )
    options = AttentionOptions(sizes.head_dim**-0.5, sliding_window=window)
    found = attention.varlen(
        q,
        k,
        v,
        starts,
        key_starts,
        max(queries),
        max(lengths),
        scale=options.scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=sizes.heads != sizes.kv_heads,
    )
    by_row = (torch.split(each, counts) for each, counts in ((q, queries), (k, lengths), (v, lengths)))
    expected = [
        reference.attend_row(
            of_row.float(), keys.transpose(0, 1).float(), of_keys.transpose(0, 1).float(), options, None
        )
        for of_row, keys, of_keys in zip(*by_row, strict=True)
    ]
    return found, torch.cat(expected)


def _decode(sizes: Sizes, device: torch.device) -> Iterator[Finding]:
    step = _Step(sizes, [1] * 4, [5, 300, 17, 700], device)

    def attend(cache: KVCacheTensor, options: AttentionOptions, _sinks: torch.Tensor | None) -> torch.Tensor:
        out = torch.zeros_like(step.q)
        attention.paged(step.q, out, cache, step.rows, options)
        return out

    yield from step.findings(attend, attention.takes_paged)


class _Step:
    """A step over a paged cache in which other layers' blocks lie between this layer's, as in Kaon's."""

    def __init__(self, sizes: Sizes, queries: list[int], lengths: list[int], device: torch.device) -> None:
        self._sizes, self._device, self._lengths = sizes, device, lengths
        starts = torch.tensor([0, *queries]).cumsum(0)
        counts = [-(-length // sizes.block) for length in lengths]
        self._num_blocks = sum(counts) + 1
        # In descending order, so that blocks of a row are not contiguous.
        blocks = iter(range(self._num_blocks - 1, 0, -1))
        tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
        for row, count in enumerate(counts):
            tables[row, :count] = torch.tensor([next(blocks) for _ in range(count)])
        self.rows = attention.Rows(
            starts.to(device, torch.int32),
            torch.tensor(lengths, dtype=torch.int32, device=device),
            tables.to(device),
            max(queries),
            max(lengths),
        )
        self.q = self._values(int(starts[-1]), sizes.heads, 1)

    def _values(self, tokens: int, heads: int, shift: int) -> torch.Tensor:
        """# [tokens, heads, head_dim] bf16"""
        size = heads * self._sizes.head_dim
        values = _small(tokens, size, dtype=torch.bfloat16, device=self._device, shift=shift)
        return values.view(tokens, heads, self._sizes.head_dim)

    def cache(self, dtype: torch.dtype = torch.bfloat16) -> KVCacheTensor:
        """Keys and values of one layer; those of the layers around it are NaN. # [blocks, Hkv, block, D] x 2"""
        heads, block, head_dim = self._sizes.kv_heads, self._sizes.block, self._sizes.head_dim
        shape = self._num_blocks, 4 * heads, block, head_dim
        pool = torch.full(shape, torch.nan, dtype=torch.bfloat16, device=self._device).to(dtype)
        for part, shift in ((slice(heads, 2 * heads), 2), (slice(2 * heads, 3 * heads), 5)):
            values = self._values(self._num_blocks * heads * block, 1, shift)
            pool[:, part] = values.view(self._num_blocks, heads, block, head_dim).to(dtype)
        return KVCacheTensor(pool[:, heads : 2 * heads], pool[:, 2 * heads : 3 * heads])

    def options(self) -> Iterator[tuple[str, AttentionOptions, torch.Tensor | None]]:
        """The options of attention that models use."""
        scale = self._sizes.head_dim**-0.5
        yield "without options", AttentionOptions(scale), None
        yield "with a window", AttentionOptions(scale, sliding_window=20), None
        yield "with a soft cap", AttentionOptions(scale, soft_cap=2.0), None
        sinks = _small(1, self._sizes.heads, dtype=torch.bfloat16, device=self._device)[0]
        yield "with sinks", AttentionOptions(scale), sinks

    def findings(
        self,
        attend: _Attend,
        takes: Callable[[AttentionOptions, torch.Tensor | None], bool],
    ) -> Iterator[Finding]:
        """Comparisons with all options, over a cache in FP8, and over one with blocks far apart."""
        for what, options, sinks in self.options():
            if takes(options, sinks):
                yield self.finding(what, attend, options, sinks)
        options = AttentionOptions(self._sizes.head_dim**-0.5, k_scale=0.5, v_scale=2.0)
        yield self.finding("over a cache in FP8", attend, options, None, _fp8(self._device))
        yield from self.far_finding(attend)

    def finding(
        self,
        what: str,
        attend: _Attend,
        options: AttentionOptions,
        sinks: torch.Tensor | None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> Finding:
        """The comparison with these options."""
        cache, rows = self.cache(dtype), self.rows
        if options.sliding_window is not None and self._sizes.has_windows:
            self._give_back(cache, options.sliding_window)
        expected = reference.attend(self.q, cache, rows.starts, rows.lengths, rows.tables, options, sinks)
        return _finding(f"attention {what}", attend(cache, options, sinks), expected)

    def _give_back(self, cache: KVCacheTensor, window: int) -> None:
        """Fill blocks before the rows' windows, which other rows may own by then, with NaN."""
        starts = self.rows.starts.tolist()
        for row, length in enumerate(self._lengths):
            first_seen = max(0, length - (starts[row + 1] - starts[row]) - window + 1)
            blocks = self.rows.tables[row, : first_seen // self._sizes.block].long()
            cache.k_cache[blocks] = cache.v_cache[blocks] = torch.nan

    def far_finding(self, attend: _Attend) -> Iterator[Finding]:
        """A comparison over a cache whose offsets need 64 bits, where the device has memory for one."""
        page = self._sizes.kv_heads * self._sizes.block * self._sizes.head_dim
        stride = _BEYOND_32_BITS // (self._num_blocks - 1) + 2 * page
        elements = stride * self._num_blocks
        if self._device.type == "cpu" or torch.cuda.mem_get_info(self._device)[0] < 4 * elements:
            return
        pool = torch.empty(elements, dtype=torch.bfloat16, device=self._device)
        near = self.cache()
        strides = stride, *near.k_cache.stride()[1:]
        far = KVCacheTensor(
            *(pool.as_strided(near.k_cache.shape, strides, first) for first in (0, page)),
        )
        far.k_cache.copy_(near.k_cache)
        far.v_cache.copy_(near.v_cache)
        options, rows = AttentionOptions(self._sizes.head_dim**-0.5), self.rows
        expected = reference.attend(self.q, near, rows.starts, rows.lengths, rows.tables, options)
        yield _finding("attention over a cache of more than 4 GiB", attend(far, options, None), expected)


def _moe(sizes: Sizes, device: torch.device) -> Iterator[Finding]:
    """Few tokens and many: the library selects kernels by their number."""
    hidden, inner, num = sizes.hidden, sizes.expert_inner, sizes.experts
    made = torch.Generator(device).manual_seed(0)
    w13 = torch.randn(num, 2 * inner, hidden, generator=made, device=device) * hidden**-0.5
    w2 = torch.randn(num, hidden, inner, generator=made, device=device) * inner**-0.5
    yield from _experts_of(experts.ExpertWeights(w13.bfloat16(), w2.bfloat16()), sizes.top_k, _ROUNDED)
    if not sizes.has_fp8_experts or hidden % FP8_GROUP or inner % FP8_GROUP:
        return
    w13_codes, w13_blocks = _in_blocks(w13 * hidden**0.5, made)
    w2_codes, w2_blocks = _in_blocks(w2 * inner**0.5, made)
    weights = experts.ExpertWeights(w13_codes, w2_codes, w13_blocks * hidden**-0.5, w2_blocks * inner**-0.5)
    yield from _experts_of(weights, sizes.top_k, _ROUNDED_TO_FP8)


def _experts_of(weights: experts.ExpertWeights, top_k: int, limit: float) -> Iterator[Finding]:
    """Comparisons with these weights, which are not shuffled yet and are shuffled here."""
    num, hidden, _ = weights.w2.shape
    device = weights.w2.device
    made = torch.Generator(device).manual_seed(1)
    problems = []
    for tokens in (1, 40, 1100):
        x = torch.randn(tokens, hidden, generator=made, device=device).bfloat16()
        routed, ids = torch.randn(tokens, num, generator=made, device=device).softmax(-1).topk(top_k)
        problems.append((x, routed, ids.to(torch.int32), _by_torch(x, weights, routed, ids)))
    for weight in weights[:2]:
        experts.shuffle(weight)
    for x, routed, ids, expected in problems:
        found = experts.experts(x, weights, routed, ids)
        what = f"experts of {len(x)} tokens" + ("" if weights.w2_scales is None else " in FP8")
        yield _finding_of_largest(what, found, expected, limit)


def _by_torch(
    x: torch.Tensor, weights: experts.ExpertWeights, routed: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in sorted(set(ids.flatten().tolist())):
        tokens, slots = (ids == expert).nonzero(as_tuple=True)
        w13, w2 = (
            weight[expert].float() * (1.0 if scales is None else _spread(scales[expert]))
            for weight, scales in ((weights.w13, weights.w13_scales), (weights.w2, weights.w2_scales))
        )
        gate, up = F.linear(x[tokens].float(), w13).chunk(2, -1)
        inner = (F.silu(gate) * up).to(x.dtype).float()
        out.index_add_(0, tokens, F.linear(inner, w2) * routed[tokens, slots, None])
    return out


def _in_blocks(weight: torch.Tensor, made: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight in FP8, and random scales of its blocks. # [..., outputs, inputs]"""
    *stack, outputs, inputs = weight.shape
    shape = *stack, outputs // FP8_GROUP, inputs // FP8_GROUP
    return weight.to(_fp8(weight.device)), torch.rand(shape, generator=made, device=weight.device) + 0.5


def _spread(blocks: torch.Tensor) -> torch.Tensor:
    """Expand the scale of each block to its numbers. # [outputs / 128, inputs / 128] -> [outputs, inputs]"""
    return blocks.repeat_interleave(FP8_GROUP, 0).repeat_interleave(FP8_GROUP, 1)


def _linear(sizes: Sizes, device: torch.device) -> Iterator[Finding]:
    """Products of FP8 with scales of blocks."""
    inputs, outputs = (-(-size // FP8_GROUP) * FP8_GROUP for size in (sizes.hidden, sizes.inner))
    made = torch.Generator(device).manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=made, device=device)
    codes, blocks = _in_blocks(weight, made)
    for rows in (1, 7, 200):
        x = torch.randn(rows, inputs, generator=made, device=device).to(_fp8(device))
        scales = torch.rand(rows, inputs // FP8_GROUP, generator=made, device=device) + 0.5
        expected = F.linear(x.float() * scales.repeat_interleave(FP8_GROUP, 1), codes.float() * _spread(blocks))
        found = dense.fp8_linear(x, scales, codes, blocks, torch.bfloat16)
        yield _finding_of_largest(f"an FP8 product of {rows} tokens", found, expected, _ROUNDED_TO_FP8)


def _gemm(sizes: Sizes, device: torch.device) -> Iterator[Finding]:
    made = torch.Generator(device).manual_seed(0)
    weight = torch.randn(sizes.inner, sizes.hidden, generator=made, device=device).bfloat16()
    bias = 8 * torch.randn(sizes.inner, generator=made, device=device).bfloat16()
    for rows in (1, 7, 257):
        x = torch.randn(rows, sizes.hidden, generator=made, device=device).bfloat16()
        expected = F.linear(x.float(), weight.float())
        yield _finding_of_largest(f"a product of {rows} tokens", dense.linear(x, weight, None), expected)
        yield _finding_of_largest(
            f"a product of {rows} tokens with a bias", dense.linear(x, weight, bias), expected + bias
        )


def _all_reduce(_sizes: Sizes, _device: torch.device) -> Iterator[Finding]:
    """None: the ranks compare their sums together, in `all_reduce`."""
    return iter(())


def _widths(own: int) -> tuple[tuple[int, torch.dtype], ...]:
    """Sizes and types to compare: the library selects kernels by them."""
    return (128, torch.bfloat16), (896, torch.float16), (8192, torch.bfloat16), (own, torch.bfloat16)


def _small(rows: int, size: int, *, dtype: torch.dtype, device: torch.device, shift: int = 0) -> torch.Tensor:
    """Small numbers, never all zero in a row. # [rows, size]"""
    indices = torch.arange(rows * size, device=device).view(rows, size)
    return (((indices + shift) % 11 - 4) / 4).to(dtype)


def _fp8(device: torch.device) -> torch.dtype:
    """The FP8 type of the hardware."""
    if device.type == "cpu" or not torch.cuda.get_device_properties(device).gcnArchName.startswith("gfx942"):
        return torch.float8_e4m3fn
    return torch.float8_e4m3fnuz


def _finding(problem: str, found: torch.Tensor, expected: torch.Tensor, tolerance: float = _ROUNDED) -> Finding:
    """A comparison that fails where a number is off by more than `tolerance`."""
    bound = torch.full_like(expected, tolerance / FAILURE_FACTOR, dtype=torch.float32)
    return Finding(problem, relative_error(found, expected, bound))


def _finding_of_largest(
    problem: str, found: torch.Tensor, expected: torch.Tensor, tolerance: float = _ROUNDED
) -> Finding:
    """As `_finding`, with the tolerance as a share of the largest number."""
    return _finding(problem, found, expected, tolerance * float(expected.abs().max()))


COMPARISONS: Mapping[str, Comparison] = MappingProxyType(
    {
        "norm": _norm,
        "activation": _activation,
        "attention": _attention,
        "prefill": _prefill,
        "decode": _decode,
        "moe": _moe,
        "linear": _linear,
        "gemm": _gemm,
        "all_reduce": _all_reduce,
    }
)
"""By operator; the most common ones first, so that a broken library is found soon."""
