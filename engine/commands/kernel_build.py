"""The child process of `kaon kernels build`: `python -m engine.commands.kernel_build TARGET [flags of kaon serve]`.

It runs the start of a server on an emulated device: kernels are compiled into Triton's cache but not run, and
torch skips large computations. The compiled kernels are those that a start on that GPU looks up, since the launches
are the same, with arguments of the same types, alignments and sizes. An error is one sentence on stderr; the exit code
is 0 if everything was compiled, else 1.
"""

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_any, tree_map_only

from engine.config.config import Config
from engine.config.paths import resolve_checkpoint
from engine.config.settings import load_config
from engine.runner.build import dtype_of, read_checkpoint
from engine.runner.device import DeviceMemory, EagerGraph, Graph, HostDevice
from engine.runner.loaded_model import LoadedModel, load_model
from engine.runner.memory_sizing import KVCacheSize
from engine.runner.start import start_runner
from models.attention.triton import TritonAttentionBackend
from models.ops import triton
from models.ops.triton.configs import TARGETS, Target
from models.ops.types import NormWeight
from models.parallel.tensor_parallel import TensorParallel

_CPU = torch.device("cpu")
_LARGE = 1 << 15
"""Number of elements above which a tensor's values are not computed."""
_PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"})
"""Operators that are skipped for tensors of any size."""
_FRESH_BYTES = 32 << 20
"""Bytes from which an allocation is mapped from the system: zeros, without committed pages."""
_CACHE_BYTES = 2**31 + 2**28
"""Every cache of more than 2 GiB uses the same kernels."""
_MUCH = 1 << 44
"""Bytes of emulated device memory, more than the start of any model takes."""


class Idle(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here.
    """A mode in which torch returns tensors of the right shapes and types, and computes only with small ones."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See the class."""
        del types
        kwargs = kwargs or {}
        is_product = func._schema.name in _PRODUCTS
        if func.is_view or not (is_product or tree_any(_is_large, (args, kwargs))):
            made = func(*args, **kwargs)
            # No kernel writes tokens and lengths, so they must be initialised to valid values.
            if "empty" in func.name() and made.nbytes < _FRESH_BYTES:
                made.zero_()
            return made
        if func._schema.is_mutable:
            return kwargs.get("out", args[0]) if func._schema.returns else None
        try:
            return tree_map_only(torch.Tensor, _unwritten, func(*_on_meta(args), **_on_meta(kwargs)))
        except (NotImplementedError, RuntimeError):
            # The values decide the shape of the result, so they must be computed.
            return func(*args, **kwargs)


def _is_large(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() > _LARGE


def _on_meta(values: Any) -> Any:
    return tree_map_only(
        (torch.Tensor, torch.device),
        lambda each: each.to("meta") if isinstance(each, torch.Tensor) else torch.device("meta"),
        values,
    )


def _unwritten(like: torch.Tensor) -> torch.Tensor:
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    return made if made.nbytes >= _FRESH_BYTES else made.zero_()


class _AbsentMemory(DeviceMemory):
    """Emulated memory without a practical limit, so that only the settings and the model limit the sizes."""

    def __init__(self) -> None:
        super().__init__(_CPU)

    def total(self) -> int:
        return _MUCH

    def free(self) -> int:
        return _MUCH

    def held(self) -> int:
        return 0

    def in_use(self) -> int:
        return 0

    def peak(self) -> int:
        return 0

    def give_back(self) -> None:
        pass

    def reset_peak(self) -> None:
        pass


class AbsentDevice(HostDevice):
    """An emulated GPU: each call is complete when it returns, and a graph is the call itself."""

    has_graphs = True
    has_pieces = True
    is_host = False
    computes = False

    def __init__(self) -> None:
        self.memory: DeviceMemory | None = _AbsentMemory()

    def capture_pieces(self, run: Callable[[Callable[[], None]], None]) -> list[Graph]:
        """See `Device`."""
        cuts: list[None] = []
        run(lambda: cuts.append(None))
        return [EagerGraph(lambda: None) for _ in range(len(cuts) + 1)]


class _SameEverywhere:
    """Collectives that assume that all ranks compute the same values."""

    are_captured = True

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x * self._size

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, norm: NormWeight) -> None:
        del x, residual, norm

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x if self._rank else torch.cat([x] * self._size, -1)

    def broadcast(self, token_ids: torch.Tensor) -> torch.Tensor:
        return token_ids

    def capturing(self) -> AbstractContextManager[None]:
        return nullcontext()


class Compiled(NamedTuple):
    """Numbers of kernels that the start on one target needed."""

    new: int
    """Kernels that were compiled."""
    found: int
    """Kernels that were in the cache already."""


def build(config: Config, target: Target) -> Compiled:
    """Compile what a start on such a GPU would. Raises `ValueError` with one sentence if it cannot serve the model.

    The process cannot be used for anything else afterwards: its CPU tensors are treated as tensors of the GPU.
    """
    from triton import knobs

    from models.ops.triton.probe_kernel import largest_error

    # Kernels are counted by binary, since several specialisations may share one.
    by_hit: dict[bool, set[str]] = {True: set(), False: set()}

    def count(*, metadata: dict[str, Any], cache_hit: bool, **_: object) -> None:
        by_hit[cache_hit].add(metadata["hash"])

    parallel = config.parallel_config
    if parallel.enable_expert_parallel:
        raise ValueError(
            "enable_expert_parallel is set, but kernels are built ahead only for models whose ranks hold a part of "
            "every expert; leave it out"
        )
    torch.set_num_threads(1)
    knobs.compilation.listener = count
    triton.start(_CPU, target)
    if config.batch_invariant:
        triton.keep_invariant()
    size = parallel.tensor_parallel_size
    with Idle():  # type: ignore[no-untyped-call]
        largest_error(_CPU)
        # Rank 0 adds the biases and samples; all others compute alike.
        for rank in sorted({0, size - 1}):
            loaded = _load(config, rank, size)
            start_runner(loaded, rendezvous=lambda: None, agree=partial(_blocks, loaded))
    return Compiled(len(by_hit[False]), len(by_hit[True] - by_hit[False]))


def _load(config: Config, rank: int, size: int) -> LoadedModel:
    """Load one rank's model without reading its large weights."""
    path = resolve_checkpoint(config.model)
    config, model_config, pooling = read_checkpoint(config, path)
    return load_model(
        config.model_copy(update={"cpu_operators": False}),
        path,
        model_config,
        _CPU,
        dtype_of(config, model_config),
        operators=None,
        parallel=TensorParallel(rank, size, _SameEverywhere(rank, size)) if size > 1 else TensorParallel(),
        available_bytes=_MUCH,
        backend=TritonAttentionBackend(_CPU),
        device_api=AbsentDevice(),
        pooling=pooling,
    )


def _blocks(loaded: LoadedModel, fits: KVCacheSize) -> tuple[int, int]:
    """Blocks and slots of the cache: as served, but of at most a little more than 2 GiB."""
    enough = _CACHE_BYTES // max(1, loaded.layer_caches().block_bytes) + 1
    return min(fits.num_blocks, enough), fits.num_slots


def main() -> int:
    """See the module."""
    from triton import knobs

    arch, *flags = sys.argv[1:]
    start = time.perf_counter()
    try:
        made = build(load_config(flags), TARGETS[arch])
    except (ValueError, MemoryError) as error:
        sys.stderr.write(f"kaon kernels: {error or 'memory ran out'}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    took = time.perf_counter() - start
    sys.stdout.write(
        f"{arch}: {made.new} kernels compiled in {took:.0f} s, {made.found} found compiled, in {knobs.cache.dir}\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
