"""`record`: records a model's forward pass as a program of operators. Used by the model runner.

If a model's code only calls operators and views of their tensors, its pass is the same list of operators for any
number of tokens. The list is recorded once, with memory for the largest step, and then runs for each step in one call,
without Python between the operators.
"""

import ctypes
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from models.ops.cpu import runtime
from models.ops.cpu.runtime import Library, Operations
from models.ops.cpu.structures import Arguments, OnStep, Step
from models.ops.memory import mapped_zeros

_Memory = npt.NDArray[np.uint8]


class NotRecordable(Exception):
    """The model's code computes with other functions than the operators."""


class Program:
    """A recorded pass, for steps of up to `max_tokens` tokens."""

    def __init__(
        self,
        library: Library,
        operations: Operations,
        output: torch.Tensor,
        kept: list[Any],
        num_bytes: int,
        states: torch.Tensor | None = None,
        others: Sequence[torch.Tensor] = (),
    ) -> None:
        """`states`: the memory from which the pass reads its third argument, if any. `others`: additional outputs."""
        self._library = library
        self.states = states
        """The memory of the third argument; None if the pass has two arguments. # [max_tokens, columns]"""
        self._others = others
        self._operations = operations
        self.output = output
        """The memory of the output. # [max_tokens, features]"""
        self._kept = kept
        self.max_tokens = len(output)
        self.num_bytes = num_bytes
        """Bytes that a step of `max_tokens` commits, including this process's part of shared memory."""

    def run(
        self, input_ids: torch.Tensor, positions: torch.Tensor, step: Step, states: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run the pass; the output is valid until the next run.

        # 2 x [tokens] int64, [tokens, columns] -> [tokens, features]
        """
        self.give(input_ids, positions, step, states)
        self._library.run(self._operations, step)
        return self.output[: step.num_tokens]

    def run_with_pauses(
        self, input_ids: torch.Tensor, positions: torch.Tensor, step: Step, on_pause: Callable[[], object]
    ) -> torch.Tensor:
        """`run`, but whenever the library is interrupted, `on_pause` is called, which may run other programs."""
        self.give(input_ids, positions, step)
        done, count = 0, len(self._operations)
        while (done := done + self._library.run(self._operations, step, done, may_pause=True)) < count:
            on_pause()
        return self.output[: step.num_tokens]

    def give(
        self, input_ids: torch.Tensor, positions: torch.Tensor, step: Step, states: torch.Tensor | None = None
    ) -> None:
        """Store the arguments of `run` where the operators read them."""
        if states is not None:
            assert self.states is not None, "the pass was recorded with states"
            if states.is_contiguous():
                # torch would copy a large tensor on its own threads, which then spin on cores that the operators need.
                ctypes.memmove(self.states.data_ptr(), states.data_ptr(), states.numel() * states.itemsize)
            else:
                self.states[: len(states)] = states
        step.input_ids, step.positions = input_ids.data_ptr(), positions.data_ptr()

    @property
    def arguments(self) -> tuple[Arguments, ...]:
        """The arguments of each operator of the pass."""
        return self._operations.arguments

    def others(self, num_tokens: int) -> list[torch.Tensor]:
        """Return the additional outputs of the last run, of `num_tokens` tokens. # each [tokens, features]"""
        return [output[:num_tokens] for output in self._others]


def record(
    library: Library,
    forward: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]],
    max_tokens: int,
    columns: int = 0,
) -> Program:
    """Record `forward(input_ids, positions)` without computing it. Raises `NotRecordable`.

    With `columns`, `forward` has a third argument of rows with so many features. If it returns several tensors, the
    first one is the program's output, and the others are additional outputs.
    """
    recorder = _Recorder(max_tokens)
    with _sent_to(recorder), torch.inference_mode():
        places = torch.zeros(max_tokens, dtype=torch.int64).as_subclass(_Rows)
        given = [recorder.rows(max_tokens, columns)] if columns else []
        outputs = forward(places, places, *given)
        with torch._C.DisableTorchFunctionSubclass():
            found = outputs if isinstance(outputs, tuple) else (outputs,)
            output, *others = [each.as_subclass(torch.Tensor) for each in found]
            states = given[0].as_subclass(torch.Tensor) if given else None
    return Program(library, Operations(recorder.arguments), output, recorder.kept, recorder.num_bytes, states, others)


def operators_of(
    compute: Callable[[torch.Tensor], torch.Tensor], num_rows: int, columns: int
) -> tuple[list[Arguments], list[torch.Tensor], torch.Tensor]:
    """Record `compute` on bfloat16 rows. Raises `NotRecordable`.

    Returns the arguments of its operators, the memory to which they point, and the output, whose values are not
    computed.
    """
    recorder = _Recorder(num_rows)
    with _sent_to(recorder), torch.inference_mode():
        output = compute(recorder.rows(num_rows, columns))
        with torch._C.DisableTorchFunctionSubclass():
            output = output.as_subclass(torch.Tensor)
    return recorder.arguments, recorder.constants, output


class _Recorder:
    """The runtime that records operators. Memory of tensors that the code has released is reused by later
    operators."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.arguments: list[Arguments] = []
        self.memory: list[_Memory] = []
        self.constants: list[Any] = []
        self._free: dict[int, list[_Memory]] = defaultdict(list)
        self._inner: dict[tuple[int, int], _Recorder] = {}
        """Recorders of operators on an inner step, by `most_rows` and `num_sharers`; see `on`."""

    @property
    def kept(self) -> list[Any]:
        """All objects to which the operators point."""
        return [*self.memory, *self.constants, *(inner.kept for inner in self._inner.values())]

    @property
    def num_bytes(self) -> int:
        """Bytes of the memory, including this process's part of shared memory."""
        inner = sum(each.num_bytes // num_sharers for (_, num_sharers), each in self._inner.items())
        return inner + sum(map(len, self.memory))

    def rows(self, num_rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """See `Runtime`."""
        self.per_token(num_rows)  # Raises `NotRecordable` unless the rows are a multiple of the step's tokens.
        return self.fixed(num_rows * columns, dtype).view(num_rows, columns)

    def fixed(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """See `Runtime`."""
        num_bytes = size * dtype.itemsize
        free = self._free[num_bytes]
        if not free:
            self.memory.append(np.frombuffer(mapped_zeros(num_bytes), dtype=np.uint8))
            free.append(self.memory[-1])
        memory = free.pop()
        view = memory[:]
        # The view lives as long as any tensor over it.
        weakref.finalize(view, free.append, memory)
        return torch.from_numpy(view).view(dtype).as_subclass(_Rows)

    def per_token(self, num_rows: int) -> int:
        """See `Runtime`."""
        if num_rows % self.max_tokens:
            raise NotRecordable(f"an operator has {num_rows} rows where the step has {self.max_tokens} tokens")
        return num_rows // self.max_tokens

    def run(self, arguments: Arguments, step: Step, kept: tuple[torch.Tensor | None, ...]) -> None:
        """See `Runtime`."""
        del step  # Each run has its own step.
        self.arguments.append(arguments)
        self.constants.extend(tensor for tensor in kept if tensor is not None and not isinstance(tensor, _Rows))

    @contextmanager
    def on(self, step: Step, most_rows: int, num_sharers: int) -> Iterator[int]:
        """See `Runtime`."""
        # All layers share one inner recorder, so that they use the same memory, one after the other.
        inner = self._inner.setdefault((most_rows, num_sharers), _Recorder(most_rows))
        before = len(inner.arguments)
        with _sent_to(inner):
            yield most_rows
        for arguments in inner.arguments[before:]:
            self.arguments.append(OnStep(arguments.kind, ctypes.addressof(arguments), ctypes.addressof(step)))
        self.constants += inner.arguments[before:]
        self.constants.append(step)


_LOOKS = frozenset(
    {
        torch.Tensor.__len__,
        torch.Tensor.chunk,
        torch.Tensor.data_ptr,
        torch.Tensor.device.__get__,
        torch.Tensor.dim,
        torch.Tensor.dtype.__get__,  # type: ignore[attr-defined]
        torch.Tensor.shape.__get__,  # type: ignore[attr-defined]
        torch.Tensor.size,
        torch.Tensor.split,
        torch.Tensor.stride,
        torch.Tensor.unsqueeze,
        torch.Tensor.view,
    }
)
"""Functions of tensors that read no values: properties and views."""


class _Rows(torch.Tensor):
    """A tensor of the recorded pass, of which code may take views, but with which it must not compute.

    It uses `__torch_function__`, since a dispatch mode imports torch's compiler, which takes half a second.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        is_slicing = func is torch.Tensor.__getitem__ and not _holds_tensor(args[1])
        if not (is_slicing or func in _LOOKS):
            raise NotRecordable(f"the model's code calls {getattr(func, '__name__', func)}")
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def _holds_tensor(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, torch.Tensor | list) for part in parts)


@contextmanager
def _sent_to(recorder: _Recorder) -> Iterator[None]:
    before = runtime.redirect(recorder)
    try:
        yield
    finally:
        runtime.redirect(before)
