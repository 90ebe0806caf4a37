"""Host time of launching operators: a recorder of launches, the operators of decode steps, and the measurement."""

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeAlias

import torch
import triton
from triton.backends.amd.compiler import HIPBackend
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction, create_function_from_signature

from benchmarks.gpu.bench import Bench, Case, Values
from benchmarks.gpu.kernels import DeltaProblem, Problem, random_mxfp4
from models.layers.moe import FusedMoE
from models.layers.norm import RMSNorm
from models.ops.activation import swiglu
from models.ops.triton import gated_delta as gated_delta_net
from models.ops.triton import logits as sampling
from models.ops.triton import sampling as draw
from models.ops.triton.cache_store import latent_store, vector_store
from models.ops.triton.configs import target_of
from models.ops.triton.expert_products import moe_four_bit_gemm, moe_fp8_gemm, moe_gemm
from models.ops.triton.expert_routing import SortedPairs, block_of, moe_combine, moe_route, moe_sort
from models.ops.triton.latent_attention import indexer_scores, latent_attention
from models.ops.triton.logits import logprobs
from models.ops.triton.probe_kernel import probe_kernel
from models.ops.triton.quantized_products import four_bit_linear, fp8_linear
from models.ops.types import SILU, AttentionInputs, Gating, HeadNorms
from models.ops.weight_formats import FP8_GROUP, FourBitWeight, FP8Weight


@triton.jit
def empty_kernel():  # type: ignore[no-untyped-def]
    """A grid of any form."""
    return


# Records every launch of a kernel while it is entered, with the compiler and with the interpreter. For the benchmark,
# which repeats launches, and for the test that serving needs no kernel that the warm-up did not compile.

Signature: TypeAlias = tuple[str, ...]
"""The key by which Triton compiles: a kernel's name, and each argument's type or constant with its specialisation."""

_KIND: Any = type(probe_kernel)
"""`DirectKernel`, or `InterpretedFunction` where kernels are interpreted."""


class Launches:
    """Records launches in order. Not thread-safe."""

    def __init__(self) -> None:
        self.made: list[Callable[[], object]] = []
        """A function for each launch that repeats it."""
        self.made_by_triton: list[Callable[[], object]] = []
        """The same, by Triton's own path."""
        self.signatures: dict[Signature, int] = {}
        """Number of launches by specialisation."""

    def __enter__(self) -> Self:
        self._launch_on = launch_on = _KIND.__getitem__

        def heard_on(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
            def heard(*arguments: Any, **options: Any) -> Any:
                self.made.append(functools.partial(_launch, kernel, grid, arguments, options))
                by_triton = functools.partial(kernel.run, *arguments, grid=grid, warmup=False, **options)
                self.made_by_triton.append(by_triton)
                signature = signature_of(kernel, arguments, options)
                self.signatures[signature] = self.signatures.get(signature, 0) + 1
                return launch_on(kernel, grid)(*arguments, **options)

            return heard

        _KIND.__getitem__ = heard_on
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _KIND.__getitem__ = self._launch_on


def _launch(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """The specialisation as text."""
    kernel[grid](*arguments, **options)


def signature_of(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Signature:
    """Specialise by Triton's own rules for AMD's GPUs, which depend on more properties of pointers than NVIDIA's."""
    _, specialization, rest = _binder(kernel.fn, *_hints(kernel))(*arguments, **options)
    return (kernel.fn.__name__, *map(str, specialization), str(sorted(rest.items())))


@functools.cache
def _binder(function: Any, plain: tuple[Any, ...], unaligned: tuple[Any, ...]) -> Any:
    """The JIT function of a kernel, which may be interpreted here."""
    compiled = JITFunction(function, do_not_specialize=list(plain), do_not_specialize_on_alignment=list(unaligned))
    backend = HIPBackend(GPUTarget("hip", "gfx942", 64))
    return create_function_from_signature(compiled.signature, compiled.params, backend)


def _hints(kernel: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Arguments of `@triton.jit` that are not specialised; the interpreter stores them in another attribute."""
    kept = kernel.kwargs if hasattr(kernel, "kwargs") else vars(kernel)
    plain, unaligned = (kept.get(name) or () for name in ("do_not_specialize", "do_not_specialize_on_alignment"))
    return tuple(plain), tuple(unaligned)


# The operators of decode steps as their layers call them, each on a small problem: of a Qwen3, a mixture of experts, a
# DeepSeek, a gated delta net, of quantised weights, and of sampling.

Call: TypeAlias = Callable[[], object]

_ROWS = 4
_EXPERTS, _TOP_K = 8, 2
_PAIRS = _ROWS * _TOP_K
_WIDTH = 256
"""Number of rows that are multiplied by a quantised weight."""
_VOCABULARY = 1024


def _norm(bench: Bench) -> Call:
    x, layer = bench.random(_ROWS, 1024), _norm_layer(bench, 1024)
    return lambda: layer(x)


def _add_norm(bench: Bench) -> Call:
    x, residual, layer = bench.random(_ROWS, 1024), bench.random(_ROWS, 1024), _norm_layer(bench, 1024)
    return lambda: layer.add_norm(x, residual)


def _norm_layer(bench: Bench, size: int) -> RMSNorm:
    layer = RMSNorm(size, 1e-6)
    layer.weight.data = bench.random(size)
    return layer


def _gated(bench: Bench) -> Call:
    x = bench.random(_ROWS, 2048)
    return lambda: swiglu(x)


def _attention(bench: Bench) -> Call:
    """Inputs in the layout of the projections' output: queries, keys and values of a row are adjacent."""
    rows = Problem(bench, [1] * _ROWS, [40] * _ROWS)
    heads, kv_heads, head_dim = rows.heads, rows.kv_heads, rows.head_dim
    qkv = bench.random(_ROWS, heads + 2 * kv_heads, head_dim)
    q, k, v = qkv.split_with_sizes([heads, kv_heads, kv_heads], dim=1)
    norms = HeadNorms(*(_norm_layer(bench, head_dim).operand for _ in range(2)))
    cos, sin = (bench.random(_ROWS, 1, head_dim, dtype=torch.float32) for _ in range(2))
    inputs = AttentionInputs(rows.options, None, norms, (cos, sin))
    return lambda: rows.backend.forward(q, k, v, rows.cache, rows.metadata, inputs)


def _decode(bench: Bench) -> Call:
    return Problem(bench, [1] * _ROWS, [40] * _ROWS).decode


def _ids(bench: Bench) -> torch.Tensor:
    return torch.randint(0, _EXPERTS, (_ROWS, _TOP_K), device=bench.device)


def _sorted_pairs(bench: Bench) -> SortedPairs:
    return moe_sort(_ids(bench), _EXPERTS, block_of(_PAIRS, _EXPERTS))


def _route(bench: Bench) -> Call:
    logits = bench.random(_ROWS, _EXPERTS, dtype=torch.float32)
    return lambda: moe_route(logits, _TOP_K, sigmoid=False, renormalize=True)


def _sort(bench: Bench) -> Call:
    ids = _ids(bench)
    return lambda: moe_sort(ids, _EXPERTS, 16)


def _gate_up(bench: Bench) -> Call:
    rows, weight, pairs = bench.random(_ROWS, 64), bench.random(_EXPERTS, 128, 64), _sorted_pairs(bench)
    return lambda: moe_gemm(rows, weight, None, pairs, _PAIRS, gating=Gating(SILU))


def _down(bench: Bench) -> Call:
    rows, weight, pairs = bench.random(_PAIRS, 64), bench.random(_EXPERTS, 64, 64), _sorted_pairs(bench)
    return lambda: moe_gemm(rows, weight, None, pairs, _PAIRS)


def _combine(bench: Bench) -> Call:
    products, ids = bench.random(_PAIRS, 64), _ids(bench)
    weights = torch.rand(_ROWS, _TOP_K, device=bench.device)
    return lambda: moe_combine(products, weights, ids, _EXPERTS)


def _experts(bench: Bench) -> Call:
    layer = FusedMoE(64, 64, _EXPERTS)
    for weight in (layer.w13, layer.w2):
        weight.data = bench.random(*weight.shape)
    hidden, ids, weights = bench.random(_ROWS, 64), _ids(bench), torch.rand(_ROWS, _TOP_K, device=bench.device)
    return lambda: layer(hidden, weights, ids)


class _Latents:
    """Rows of a paged cache of latents."""

    heads, rank, rope, nope = 16, 64, 16, 32

    def __init__(self, bench: Bench) -> None:
        self.vectors = bench.random(3 * _ROWS, 16, self.rank + self.rope)
        blocks = torch.arange(3 * _ROWS, dtype=torch.int32, device=bench.device)
        self.tables = blocks.view(_ROWS, 3)
        self.rows = torch.arange(_ROWS, dtype=torch.int32, device=bench.device)
        self.lengths = torch.full((_ROWS,), 40, dtype=torch.int32, device=bench.device)
        self.slots = torch.arange(_ROWS, device=bench.device)


def _latent_store(bench: Bench) -> Call:
    at = _Latents(bench)
    q, latent = bench.random(_ROWS, at.heads, at.nope + at.rope), bench.random(_ROWS, at.rank + at.rope)
    cos, sin = (bench.random(_ROWS, 1, at.rope, dtype=torch.float32) for _ in range(2))
    norm = bench.random(at.rank), 1e-6
    return lambda: latent_store(
        q, latent, at.vectors, at.slots, norm=norm, rotation=(cos, sin), is_interleaved=True, scale=1.0
    )


def _latent_decode(bench: Bench) -> Call:
    at = _Latents(bench)
    q, q_rope = bench.random(_ROWS, at.heads, at.rank), bench.random(_ROWS, at.heads, at.rope)
    return lambda: latent_attention(
        q, q_rope, at.vectors, at.tables, at.rows, at.lengths, longest=40, scale=at.rank**-0.5
    )


def _index(bench: Bench) -> Call:
    at = _Latents(bench)
    q, weights = bench.random(_ROWS, at.heads, at.rank + at.rope), bench.random(_ROWS, at.heads, dtype=torch.float32)
    return lambda: indexer_scores(q, weights, at.vectors, at.tables, at.rows, at.lengths, 40)


def _index_store(bench: Bench) -> Call:
    at = _Latents(bench)
    keys = bench.random(_ROWS, at.rank + at.rope)
    return lambda: vector_store(keys, at.vectors, at.slots)


def _delta(bench: Bench) -> Call:
    problem = DeltaProblem(bench, [1] * _ROWS, _ROWS)
    return lambda: problem.run(gated_delta_net.delta_net)


def _fp8_weight(bench: Bench, *experts: int) -> FP8Weight:
    codes = bench.random(*experts, _WIDTH, _WIDTH).to(
        getattr(torch, f"float8_{target_of(bench.device).fp8 or 'e4m3fn'}")
    )
    return FP8Weight(codes, torch.ones(*experts, _WIDTH, _WIDTH // FP8_GROUP, device=bench.device))


def _int4_weight(bench: Bench) -> FourBitWeight:
    packed, zeros = (
        torch.randint(0, 16, (_WIDTH, columns), dtype=torch.uint8, device=bench.device)
        for columns in (_WIDTH // 2, _WIDTH // FP8_GROUP)
    )
    return FourBitWeight(packed, bench.random(_WIDTH, _WIDTH // FP8_GROUP), zeros)


def _fp8(bench: Bench) -> Call:
    x, weight = bench.random(_ROWS, _WIDTH), _fp8_weight(bench)
    return lambda: fp8_linear(x, weight)


def _int4(bench: Bench) -> Call:
    x, weight = bench.random(_ROWS, _WIDTH), _int4_weight(bench)
    return lambda: four_bit_linear(x, weight)


def _fp8_experts(bench: Bench) -> Call:
    rows, weight, pairs = bench.random(_ROWS, _WIDTH), _fp8_weight(bench, _EXPERTS), _sorted_pairs(bench)
    return lambda: moe_fp8_gemm(rows, weight, None, pairs, _PAIRS, gating=Gating(SILU))


def _mxfp4_experts(bench: Bench) -> Call:
    rows, weight, pairs = (
        bench.random(_ROWS, _WIDTH),
        random_mxfp4(bench, _EXPERTS, _WIDTH, _WIDTH),
        _sorted_pairs(bench),
    )
    return lambda: moe_four_bit_gemm(rows, weight, None, pairs, _PAIRS, gating=Gating(SILU))


def _logits(bench: Bench) -> torch.Tensor:
    return bench.random(_ROWS, _VOCABULARY, dtype=torch.float32)


def _argmax(bench: Bench) -> Call:
    logits = _logits(bench)
    return lambda: sampling.argmax(logits)


def _draw(bench: Bench, *, is_filtered: bool) -> Call:
    logits, tokens = _logits(bench), torch.zeros(_ROWS, dtype=torch.int64, device=bench.device)
    columns = torch.zeros(draw.NUM_COLUMNS, _ROWS, dtype=torch.int64)
    columns[draw.ROW] = torch.arange(_ROWS)
    columns[draw.TEMPERATURE] = torch.ones(_ROWS).view(torch.int32).long()
    columns[draw.TOP_P] = torch.full((_ROWS,), 0.9, dtype=torch.float64).view(torch.int64)
    columns[draw.TOP_K], columns[draw.IS_FILTERED] = _VOCABULARY, is_filtered
    # Rows without a peak are left unchanged. Without it, repeated kernels would append to the arrays that the operator
    # allocates for each call.
    sent, peaks = columns.to(bench.device), torch.full((_ROWS,), torch.inf, device=bench.device)
    return lambda: draw.draw(logits, peaks, tokens, sent, has_filtered=is_filtered)


def _adjust(bench: Bench) -> Call:
    logits, rows = _logits(bench), torch.arange(_ROWS, device=bench.device)
    values = torch.ones(_ROWS, device=bench.device)
    return lambda: sampling.adjust(logits, rows, rows, values, sampling.FREQUENCY)


def _mask(bench: Bench) -> Call:
    logits, rows = _logits(bench), torch.arange(_ROWS, device=bench.device)
    masks = torch.full((_ROWS, _VOCABULARY // 32), -1, dtype=torch.int32, device=bench.device)
    return lambda: sampling.mask(logits, rows, masks)


def _logprobs(bench: Bench) -> Call:
    logits, tokens = _logits(bench), torch.zeros(_ROWS, dtype=torch.int64, device=bench.device)
    return lambda: logprobs(logits, tokens, 3)


OPERATORS: Mapping[str, Callable[[Bench], Call]] = {
    "norm": _norm,
    "norm with residual": _add_norm,
    "SwiGLU": _gated,
    "attention: store, decode, merge": _attention,
    "attention decode and merge": _decode,
    "argmax": _argmax,
    "experts' routes": _route,
    "experts: sort, products, sum": _experts,
    "experts' sort": _sort,
    "experts' gate and up": _gate_up,
    "experts' product": _down,
    "experts' sum": _combine,
    "latents' store": _latent_store,
    "latent decode and merge": _latent_decode,
    "indexer's store": _index_store,
    "indexer's scores": _index,
    "delta net: convolution, step, norm": _delta,
    "FP8 product": _fp8,
    "4-bit product": _int4,
    "FP8 experts' gate and up": _fp8_experts,
    "4-bit experts' gate and up": _mxfp4_experts,
    "sampling": lambda bench: _draw(bench, is_filtered=False),
    "sampling by top-p": lambda bench: _draw(bench, is_filtered=True),
    "penalties": _adjust,
    "masks": _mask,
    "log probabilities": _logprobs,
}


# Host time of calling operators outside graphs, beyond Triton's launches in them.

_CALLS = 50
"""Fewer calls than the device queues; otherwise the host would wait for it."""
_ROUNDS = 31


def launch_cases(bench: Bench) -> Iterator[Case]:
    """Measure each operator of a decode step, and all of them together."""
    x = bench.random(4, 1024)
    yield Case("an empty kernel", lambda: _median_of(bench, lambda: empty_kernel[(1,)]()))
    yield Case("a tensor's allocation", lambda: _median_of(bench, lambda: x.new_empty(4, 1024)))
    for name, make in OPERATORS.items():
        yield Case(name, lambda make=make: measure_launch(bench, make(bench)))  # type: ignore[misc]


def measure_launch(bench: Bench, call: Callable[[], object]) -> Values:
    """Time an operator; its launches alone, with the same arguments; and these by Triton's own path."""
    with torch.inference_mode():
        call()
        with Launches() as launches:
            call()

        def launch_again() -> None:
            for launch in launches.made:
                launch()

        def launch_by_triton() -> None:
            for launch in launches.made_by_triton:
                launch()

        whole, ours, tritons = _host_us(bench, call, launch_again, launch_by_triton)
    beyond = [one - other for one, other in zip(whole, ours, strict=True)]
    count = len(launches.made)
    return {
        "us": statistics.median(whole),
        "its launches, us": statistics.median(ours),
        "by Triton's path, us": statistics.median(tritons),
        "kernels": str(count),
        "a launch, us": statistics.median(ours) / max(count, 1),
        "beyond, us a kernel": statistics.median(beyond) / max(count, 1),
    }


def _median_of(bench: Bench, call: Callable[[], object]) -> Values:
    (took,) = _host_us(bench, call)
    return {"us": statistics.median(took)}


def _host_us(bench: Bench, *calls: Callable[[], object]) -> Sequence[list[float]]:
    """Seconds of one call of each, by round; nothing waits for them. Within a round they alternate, so that they are
    comparable."""
    count, rounds = (1, 1) if bench.is_dry else (_CALLS, _ROUNDS)
    found: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, took in zip(calls, found, strict=True):
            call()
            bench.synchronize()
            begin = time.perf_counter()
            for _ in range(count):
                call()
            took.append((time.perf_counter() - begin) / count * 1e6)
    bench.synchronize()
    return found
