"""`Sentinel`: recomputes samples of decode steps by torch at intervals, and compares them with the served results.

At each interval it copies the operators' results for the first row of a decode step: one layer's attention, one linear
layer, one expert, and with several ranks the sum of one all-reduce. Two steps later, when the device has completed the
step, it recomputes them in plain torch, one operator per step, and only if that takes at most a small share of a
step's time; the others are compared when the engine is idle. The host never waits for the device. A difference larger
than rounding explains is a mismatch, and its operator is left to torch.

A captured graph copies the first row's tensors into buffers on each replay, from another layer for each graph size.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from engine.config.config import Config
from engine.runner.device import Download
from engine.runner.device_batch import DeviceBatch
from engine.runner.input_batch import StepInputs
from models.attention.backend import AttentionBackend, AttentionMetaData
from models.layers.attention import Attention
from models.layers.base import CausalLM
from models.layers.linear import PackedLinear
from models.layers.moe import ExpertRow, FusedMoE
from models.layers.recomputed import product_error, recompute_attention, recompute_expert
from models.ops.paged_attention import first_seen
from models.ops.self_test import FAILURE_FACTOR
from models.ops.types import AttentionOptions, KVCacheTensor
from models.parallel.tensor_parallel import TensorParallel

_log = logging.getLogger(__name__)

OPERATORS = ("attention", "linear", "moe", "all_reduce")
"""The operators that are compared, by their names in `kernel_backend`."""
_INTERVAL = 4096
"""Decode steps of a GPU between two comparisons."""
_BUDGET = 0.01
"""The most host time of a comparison, as a share of a step's time."""
_LATER = 2
"""Steps after which the device has completed a step, since no more are in flight."""
_MAX_CONTEXT = 2048
"""The longest context, in tokens, over which attention is compared, since its keys and values are copied."""
_IDLE = 10.0
"""Seconds between two steps above which the engine counts as idle between them."""
_FORGETTING = 0.1
"""The weight of the newest measurement in the mean times of steps and comparisons."""


class Mismatch(NamedTuple):
    """A difference that rounding does not explain."""

    operator: str
    what: str
    """Description of the operator's shapes."""
    error: float
    """The error relative to the largest that rounding explains."""


@dataclass(slots=True)
class Tap:
    """Copies of the first row's tensors in one pass. Each replay of a captured graph overwrites its copies."""

    layer: int
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    attention: tuple[KVCacheTensor, AttentionOptions, torch.Tensor | None, bool] | None = None
    """The cache, options and sinks of the layer, and whether values have the layout of the CPU's operators."""
    linear: PackedLinear | None = None
    experts: FusedMoE | None = None
    num_calls: dict[str, int] = field(default_factory=dict)

    def copy(self, **tensors: torch.Tensor) -> None:
        """Copy tensors, into the same memory on every call."""
        for name, tensor in tensors.items():
            if name in self.tensors:
                self.tensors[name].copy_(tensor)
            else:
                self.tensors[name] = tensor.clone()

    def is_next(self, operator: str) -> bool:
        """Count a call of an operator. Returns whether it is the chosen layer's."""
        number = self.num_calls[operator] = self.num_calls.get(operator, -1) + 1
        return number == self.layer


class _Comparison(NamedTuple):
    """A comparison that has not been computed yet."""

    operator: str
    what: str
    step: int
    """Number of the step whose results are compared."""
    compute: Callable[[int], torch.Tensor | None]
    """Enqueues the comparison; for `moe` it receives the expert's index. # -> [] float32"""
    expert: Download | None = None


class _Reading(NamedTuple):
    """An enqueued comparison, whose error is being copied to the host."""

    comparison: _Comparison
    step: int
    error: Download


class Sentinel:
    """Compares the results of one rank. All ranks count the same steps, and so compare sums in the same steps."""

    def __init__(
        self,
        model: CausalLM,
        backend: AttentionBackend,
        parallel: TensorParallel,
        device_batch: DeviceBatch,
        interval: int,
    ) -> None:
        """`interval`: decode steps between two comparisons."""
        self._parallel, self._device_batch = parallel, device_batch
        self._interval, self._budget = interval, _BUDGET
        self.backend = backend
        """The layers whose attention is observed."""
        modules = list(cast(nn.Module, model).modules())
        self._linear = [
            each for each in modules if isinstance(each, PackedLinear) and type(each).forward is PackedLinear.forward
        ]
        self._experts = [each for each in modules if isinstance(each, FusedMoE)]
        self._num_layers = max(1, sum(isinstance(each, Attention) for each in modules))
        self._of_graphs: dict[int, Tap] = {}
        self._next_layer = 0
        self._num_steps = 0
        self._last_step = 0.0
        self.is_rehearsing = False
        self.is_observing = False
        """Whether the running pass must run operator by operator."""
        self._tap: Tap | None = None
        self._waiting: deque[_Comparison] = deque()
        self._reading: _Reading | None = None
        self._step_seconds: float | None = None
        self._host_seconds: float | None = None
        """Mean host time to launch a step, where the host runs ahead of the device."""
        self._seconds: dict[str, float] = {}
        """Mean host time of a comparison, by operator."""
        self.num_checks = 0
        self.mismatches: list[Mismatch] = []
        """Numbers since the start."""
        self._found: set[str] = set()
        """Operators with a mismatch on this rank."""
        self._agreed: set[str] = set()
        """Operators with a mismatch on any rank, equal on all ranks."""
        self._taken: set[str] = set()
        self._shared: tuple[Download, int] | None = None

    # A step

    def is_due(self, inputs: StepInputs) -> bool:
        """Count a step, and return whether its pass is to be observed."""
        if inputs.num_decodes < len(inputs.query_lens) or inputs.query_len > 1 or len(inputs.pooled):
            return False
        if self.is_rehearsing:
            return True
        self._num_steps += 1
        self._time_step()
        self._advance()
        return self._num_steps % self._interval == 0

    @contextmanager
    def observing(self, graph_size: int) -> Iterator[None]:
        """A context for the pass of a step that is due."""
        tap = self._of_graphs.get(graph_size)
        if graph_size == 0:
            tap = Tap(self._choose_layer())
            self.is_observing = True
            try:
                with self._tapped(tap):
                    yield
            finally:
                self.is_observing = False
        else:
            yield
        self._tap = tap

    def rehearse(self, run: Callable[[], None]) -> None:
        """Compare a dummy decode that `run` computes, at the start, to measure how long comparisons take."""
        self.is_rehearsing = True
        try:
            run()
            while self.catch_up():
                pass
        finally:
            self.is_rehearsing = False
        self.num_checks = 0
        self.mismatches.clear()
        self._found.clear()

    def note_step(self, inputs: StepInputs, metadata: AttentionMetaData) -> None:
        """Plan the comparisons of a step whose pass was observed."""
        tap, self._tap = self._tap, None
        if tap is None:
            return
        if self._parallel.size > 1 and not self.is_rehearsing:
            self._compare_sums(tap.tensors.get("sum"))
        if self._waiting:
            return  # Comparisons of an earlier step are still pending.
        tensors = {name: tensor.clone() for name, tensor in tap.tensors.items()}
        if tap.attention is not None:
            self._plan_attention(tap, tensors, int(inputs.seq_lens[0]), metadata)
        if tap.linear is not None:
            x, found, layer = tensors["linear_in"], tensors["linear_out"], tap.linear
            what = f"a linear layer of {x.shape[-1]} to {found.shape[-1]} features in {x.dtype}"
            self._plan("linear", what, lambda _: product_error(x, layer.weight, layer.bias, found))
        if tap.experts is not None:
            row = ExpertRow(*(tensors[f"expert_{name}"] for name in ExpertRow._fields))
            module = tap.experts
            what = f"an expert of {row.x.shape[-1]} to {row.inner.shape[-1]} features in {row.x.dtype}"
            self._plan("moe", what, lambda expert: recompute_expert(module, expert, row), row.expert)

    def _plan_attention(
        self, tap: Tap, tensors: dict[str, torch.Tensor], length: int, metadata: AttentionMetaData
    ) -> None:
        assert tap.attention is not None
        cache, options, sinks, is_paired = tap.attention
        first = first_seen(length, 1, options)
        seen = length - first
        if seen > _MAX_CONTEXT:
            return
        block_size = cache.k_cache.shape[2]
        blocks = metadata.block_tables[0, first // block_size : -(-length // block_size)].long()
        keys = slice(first % block_size, first % block_size + seen)
        # Copy the keys and values: the sequence may end, and others reuse its blocks, before the comparison.
        k, v = (_rows_of(pages, blocks) for pages in (cache.k_cache, cache.v_cache))
        q, found = tensors["q"], tensors["attended"]
        what = f"attention of {q.shape[0]} heads to {k.shape[1]} of {q.shape[1]} in {q.dtype} over {seen} tokens"
        self._plan(
            "attention", what, lambda _: recompute_attention(q, k, v, keys, options, sinks, found, is_paired=is_paired)
        )

    def _plan(
        self,
        operator: str,
        what: str,
        compute: Callable[[int], torch.Tensor | None],
        expert: torch.Tensor | None = None,
    ) -> None:
        download = None if expert is None else self._device_batch.downloads.begin(expert.view(1))
        self._waiting.append(_Comparison(operator, what, self._num_steps, compute, download))

    def _time_step(self) -> None:
        """Measure, at the start of a step, the time since the previous one, unless the engine was idle in between."""
        now = time.perf_counter()
        seconds, self._last_step = now - self._last_step, now
        before = self._step_seconds
        if before is None:
            self._step_seconds = None if seconds > _IDLE else seconds
        elif seconds < _IDLE and seconds < 4 * before:
            self._step_seconds = before + _FORGETTING * (seconds - before)

    # Comparisons

    def catch_up(self) -> bool:
        """Compare one operator or read one result while idle. Returns whether more remain."""
        if self._reading is not None:
            self._read(self._reading)
        elif self._waiting:
            self._begin(self._waiting.popleft())
        return self._reading is not None or bool(self._waiting)

    def _advance(self) -> None:
        """Start at most one comparison between two steps, if it is affordable."""
        if self._shared is not None and self._num_steps - self._shared[1] >= min(_LATER, self._interval):
            self._read_shared(self._shared[0])
        if self._reading is not None and self._num_steps - self._reading.step >= _LATER:
            self._read(self._reading)
        if self._reading is None and self._waiting and self._num_steps - self._waiting[0].step >= _LATER:
            if self._is_affordable(self._waiting[0].operator):
                self._begin(self._waiting.popleft())
            else:
                # Another operator may take less time; the remaining ones are compared when the engine is idle.
                self._waiting.rotate(-1)

    def _is_affordable(self, operator: str) -> bool:
        seconds, of_step = self._seconds.get(operator), self._step_seconds
        if seconds is None or of_step is None:
            return False
        if self._host_seconds is not None and seconds <= (of_step - self._host_seconds) / 2:
            return True  # The host's wait for the device hides the comparison.
        return seconds <= self._budget * of_step

    def note_host_seconds(self, seconds: float) -> None:
        """Record how long the host took to launch a step ahead of the device."""
        before = self._host_seconds
        self._host_seconds = seconds if before is None else before + _FORGETTING * (seconds - before)

    def _begin(self, comparison: _Comparison) -> None:
        start = time.perf_counter()
        downloads = self._device_batch.downloads
        expert = 0
        if comparison.expert is not None:
            expert = int(comparison.expert.wait()[0])
            downloads.give_back(comparison.expert)
        with torch.inference_mode():
            error = comparison.compute(expert)
            if error is not None:
                sent = downloads.begin(error.double().view(1).view(torch.int64))
                self._reading = _Reading(comparison, self._num_steps, sent)
        seconds, before = time.perf_counter() - start, self._seconds.get(comparison.operator)
        self._seconds[comparison.operator] = seconds if before is None else before + _FORGETTING * (seconds - before)

    def _read(self, reading: _Reading) -> None:
        error = float(reading.error.wait().view(torch.float64)[0])
        self._device_batch.downloads.give_back(reading.error)
        self._reading = None
        self.num_checks += 1
        if not error <= FAILURE_FACTOR:
            self._report(Mismatch(reading.comparison.operator, reading.comparison.what, error))

    def _report(self, mismatch: Mismatch) -> None:
        operator, what, error = mismatch
        self.mismatches.append(mismatch)
        self._found.add(operator)
        _log.error("A decode step does not equal torch: %s, off by %.3g times what rounding explains", what, error)

    def _compare_sums(self, total: torch.Tensor | None) -> None:
        """Compare a sum's bits over the ranks, and share each rank's mismatches. All ranks call this together."""
        parallel, ranks = self._parallel, self._parallel.size
        device = self._device_batch.device.torch_device
        own = torch.zeros(1, dtype=torch.int64, device=device)
        if total is not None:
            own = total.contiguous().view(torch.uint8).long().sum().view(1) % (1 << 20)
        first = parallel.broadcast(own.clone())
        flags = torch.zeros(1, ranks + len(OPERATORS), device=device)
        flags[0, parallel.rank] = (own != first).float()[0]
        for index, operator in enumerate(OPERATORS):
            flags[0, ranks + index] = float(operator in self._found)
        # The sum that shares the flags may be wrong too, so any value other than 0 counts as set.
        flags = parallel.all_reduce(flags)
        self._shared = self._device_batch.downloads.begin(flags.double().view(-1).view(torch.int64)), self._num_steps
        self.num_checks += 1

    def _read_shared(self, download: Download) -> None:
        """Read the mismatches that all ranks had found by the last comparison of sums."""
        ranks = self._parallel.size
        found = download.wait().view(torch.float64).tolist()
        self._device_batch.downloads.give_back(download)
        self._shared = None
        differing = [rank for rank in range(ranks) if found[rank] != 0]
        if differing:
            if len(differing) > ranks // 2 and ranks > 2:
                differing = [rank for rank in range(ranks) if rank not in differing]
            named = ", ".join(map(str, differing)) if ranks > 2 else "0 and 1"
            self._report(Mismatch("all_reduce", f"the sum of an all-reduce differs on ranks {named}", float("inf")))
        self._agreed |= {operator for index, operator in enumerate(OPERATORS) if found[ranks + index] != 0}
        if differing:
            self._agreed.add("all_reduce")

    def take_found(self) -> set[str]:
        """Operators that were found to be wrong since the last call, on any rank. All ranks return the same in the
        same step."""
        found = self._found if self._parallel.size == 1 else self._agreed
        new = found - self._taken
        self._taken |= new
        return new

    # The choice and the copying of results

    def _choose_layer(self) -> int:
        layer, self._next_layer = self._next_layer, (self._next_layer + 1) % self._num_layers
        return layer

    @contextmanager
    def of_graph(self, size: int) -> Iterator[None]:
        """A context for a pass that is captured or compared with its graph."""
        tap = self._of_graphs.setdefault(size, Tap(self._choose_layer()))
        with self._tapped(tap):
            yield

    @contextmanager
    def _tapped(self, tap: Tap) -> Iterator[None]:
        """A context in which the results of the chosen layer are copied."""
        tap.num_calls.clear()
        removers: list[Callable[[], Any]] = []
        for layer in self._linear:
            hook = layer.register_forward_hook(lambda layer, x, out: _copy_product(tap, layer, x[0], out))
            removers.append(hook.remove)
        experts = self._experts[tap.layer % len(self._experts)] if self._experts else None
        if experts is not None:
            experts.observer = lambda row: _copy_expert(tap, experts, row)
        self._parallel.observer = lambda total: _copy_sum(tap, total)
        backend = self.backend
        backend.observer = lambda *call: _copy_attention(tap, *call)
        try:
            yield
        finally:
            backend.observer = self._parallel.observer = None
            if experts is not None:
                experts.observer = None
            for remove in removers:
                remove()


def _copy_product(tap: Tap, layer: nn.Module, x: torch.Tensor, out: torch.Tensor) -> None:
    assert isinstance(layer, PackedLinear)
    # LoRA adapters change the output, so it cannot be compared.
    if tap.is_next("linear") and layer.lora is None:
        tap.linear = layer
        tap.copy(linear_in=x[0], linear_out=out[0])


def _copy_expert(tap: Tap, module: FusedMoE, row: ExpertRow) -> None:
    tap.experts = module
    tap.copy(**{f"expert_{name}": tensor for name, tensor in row._asdict().items()})


def _copy_sum(tap: Tap, total: torch.Tensor) -> None:
    if tap.is_next("all_reduce"):
        tap.copy(sum=total[0])


def _copy_attention(
    tap: Tap,
    q: torch.Tensor,
    out: torch.Tensor,
    cache: KVCacheTensor,
    options: AttentionOptions,
    sinks: torch.Tensor | None,
    is_paired: bool,
) -> None:
    if not tap.is_next("attention"):
        return
    tap.attention = cache, options, sinks, is_paired
    tap.copy(q=q[0], attended=out[0])


def _rows_of(pages: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """A copy of some blocks, including padding. # [all blocks, Hkv, block, D] -> [blocks, Hkv, block, padded D]"""
    pages = pages.as_strided((*pages.shape[:-1], pages.stride(2)), pages.stride())
    if pages.dtype.itemsize == 1:
        return pages.view(torch.uint8)[blocks].view(pages.dtype)
    return pages[blocks]


def sentinel_interval(config: Config, device: torch.device) -> int:
    """Decode steps between two comparisons; 0 where nothing is compared."""
    if config.sentinel_interval is not None:
        return config.sentinel_interval
    return 0 if device.type == "cpu" else _INTERVAL
