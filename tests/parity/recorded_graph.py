"""`RecordedGraph`: repeats the operations of a pass like a captured graph: operators and launches, without Python.

Numbers from the host keep their values, and results their addresses. Operations that a capture cannot contain are
errors: an operator whose result the host waits for, or whose shape depends on it, tensors of the host's numbers, and
tensors without an explicit device. Memory of the capture is filled with garbage before each replay, since a capture
computes nothing; memory that existed before, such as a KV cache, has been written once more than on a GPU.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

from engine.runner.device import Graph
from tests.parity.delayed_device import DelayedDevice

_GARBAGE = 0xFF
"""Value of each byte: floats are NaN, and integers negative."""
_REFUSED_TAGS = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
)
_REFUSED_CALLS = frozenset(
    {
        torch.tensor,
        torch.as_tensor,
        torch.asarray,
        torch.ops.aten.lift_fresh.default,  # The dispatcher's view of `torch.from_numpy` and `torch.Tensor([1.0])`.
        torch.Tensor.new_tensor,
        torch.Tensor.cpu,
        torch.Tensor.numpy,
        torch.Tensor.tolist,
        torch.Tensor.pin_memory,
    }
)
"""Operations that the dispatcher does not see on a CPU."""
_ON_A_DEVICE = frozenset(
    {
        torch.arange,
        torch.empty,
        torch.eye,
        torch.full,
        torch.linspace,
        torch.ones,
        torch.rand,
        torch.randint,
        torch.randn,
        torch.scalar_tensor,
        torch.zeros,
    }
)
"""Functions that create their tensor on the host unless a device is given."""
_INDEXING = frozenset({torch.Tensor.__getitem__, torch.Tensor.__setitem__})
_ALLOCATIONS = ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty_strided")


class NotCapturable(AssertionError):
    """A graph cannot contain this operation."""


@dataclass(frozen=True, slots=True)
class _Operator:
    """An operation that returns new tensors, or writes to given ones."""

    function: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    made: Mapping[int, torch.Tensor]
    """Memory of its results that are new."""

    def __call__(self) -> None:
        if self.function._schema.name.startswith(_ALLOCATIONS):
            return
        results = _tensors(self.function(*self.args, **self.kwargs))
        for number, place in self.made.items():
            place.copy_(results[number])


class RecordedGraph:
    """Records operations while it is created; see the module's docstring."""

    def __init__(self, run: Callable[[], None] | None = None) -> None:
        """`run`: the pass; None to record until `end`."""
        self._work: list[Callable[[], object]] = []
        self._made: list[torch.Tensor] = []
        self._recording = ExitStack()
        launch = InterpretedFunction.run

        def recorded(kernel: Any, *args: Any, **kwargs: Any) -> None:
            self._work.append(lambda: launch(kernel, *args, **kwargs))
            with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
                launch(kernel, *args, **kwargs)

        patch = self._recording.enter_context(pytest.MonkeyPatch.context())
        self._recording.enter_context(_Calls())
        self._recording.enter_context(_Operators(self._record))
        patch.setattr(InterpretedFunction, "run", recorded)
        if run is not None:
            with self._recording:
                run()
            self._forget()

    def end(self) -> None:
        """Stop recording."""
        self._recording.close()

    def replay(self) -> None:
        """Repeat all operations."""
        self._forget()
        with torch.inference_mode():
            for work in self._work:
                work()

    def _record(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], results: Any) -> None:
        given = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
        made = {
            number: each
            for number, each in enumerate(_tensors(results))
            if each.untyped_storage().data_ptr() not in given
        }
        if made or function._schema.is_mutable:
            self._made += made.values()
            self._work.append(_Operator(function, args, kwargs, made))

    def _forget(self) -> None:
        with torch.inference_mode():
            for tensor in self._made:
                storage = tensor.untyped_storage()
                torch.empty(0, dtype=torch.uint8).set_(storage).fill_(_GARBAGE)


class _Operators(TorchDispatchMode):
    def __init__(self, record: Callable[..., None]) -> None:
        super().__init__()
        self._record = record

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        tags = [tag.name for tag in _REFUSED_TAGS if tag in function.tags]
        if function is torch.ops.aten.index.Tensor or "index_put" in function._schema.name:
            # The shape of an index operation's result follows from its operands' shapes.
            is_masked = any(index.dtype is torch.bool for index in _tensors(args[1]))
            tags = ["a mask is made positions, whose number the host waits for"] if is_masked else []
        if tags:
            raise NotCapturable(f"{function}: {', '.join(tags)}")
        results = function(*args, **(kwargs or {}))
        self._record(function, args, kwargs or {}, results)
        return results


class _Calls(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        given = kwargs or {}
        if function in _REFUSED_CALLS or (function in _INDEXING and _is_list(args[1])):
            raise NotCapturable(f"{function} reads or brings numbers of the host")
        if function in _ON_A_DEVICE and given.get("device") is None:
            raise NotCapturable(f"{function} makes a tensor on the host: it names no device")
        return function(*args, **given)


def _is_list(index: Any) -> bool:
    indexes = index if isinstance(index, tuple) else (index,)
    return any(isinstance(each, (list, np.ndarray)) for each in indexes)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class RecordingDevice(DelayedDevice):
    """A late device that captures like a GPU."""

    has_graphs = True

    def __init__(self, *, has_pieces: bool = False) -> None:
        super().__init__()
        self.num_replayed = 0
        self.has_pieces = has_pieces

    def capture(self, run: Callable[[], None]) -> "_Counted":
        """See `Device`."""
        return _Counted(self, RecordedGraph(run))

    def capture_pieces(self, run: Callable[[Callable[[], None]], None]) -> list[Graph]:
        """See `Device`."""
        graphs = [RecordedGraph()]

        def cut() -> None:
            graphs[-1].end()
            graphs.append(RecordedGraph())

        try:
            run(cut)
        finally:
            graphs[-1].end()
        return [_Counted(self, graph) for graph in graphs]


@dataclass(frozen=True, slots=True)
class _Counted:
    device: RecordingDevice
    graph: RecordedGraph

    def replay(self) -> None:
        """See `Graph`."""
        self.device.num_replayed += 1
        self.graph.replay()
