"""The CPU operators that choose tokens: in-place changes of logits, argmax, top-k, sampling, and the greedy head.

The first functions work on rows of float32 logits and are called by the sampler. `GreedyHead` computes the argmax
tokens from a model's final hidden states without writing logits, and `SampledHead` samples tokens; the model
runner and `DraftChain` call them. The result of a row depends neither on other rows nor on the number of threads.
"""

import ctypes
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from models.ops.cpu import runtime, structures
from models.ops.cpu import runtime as library
from models.ops.cpu.program import NotRecordable, operators_of
from models.ops.cpu.runtime import Library, Operations
from models.ops.cpu.structures import LOOKED_AT, MAX_LARGEST, WEIGHED, Step

_SMALLEST_PIECE = 8192
"""Number of values per thread from which another thread makes a row faster."""


def chooses(values: torch.Tensor) -> bool:
    """Whether the operators support these rows of logits. # [R, V]"""
    return (
        runtime.active()
        and values.device.type == "cpu"
        and values.dtype is torch.float32
        and values.stride(1) == 1
        and 0 < values.shape[1] <= structures.MAX_DRAWN
    )


def largest(values: torch.Tensor, k: int) -> torch.Tensor:
    """Return the indices of the `k` largest values of each row, descending; equal values by index.

    A NaN is larger than any number, unless its sign bit is set. `k` is from 1 to min(V, `MAX_LARGEST`).
    # [R, V] -> [R, k] int64
    """
    num_rows, width = values.shape
    pieces = _pieces(num_rows, width)
    best, found, ended = _room(num_rows, pieces, k)
    ids = torch.empty(num_rows, k, dtype=torch.int64)
    arguments = structures.Largest(
        values.data_ptr(),
        values.stride(0),
        width,
        pieces,
        k,
        best.ctypes.data,
        found.ctypes.data,
        ended.ctypes.data,
        ids.data_ptr(),
    )
    runtime.current().run(arguments, Step(num_tokens=num_rows), ())
    return ids


def draw(
    logits: torch.Tensor,
    peaks: torch.Tensor,
    *,
    rows: npt.NDArray[np.int64],
    temperature: npt.NDArray[np.float32],
    top_k: npt.NDArray[np.int64],
    top_p: npt.NDArray[np.float64],
    min_p: npt.NDArray[np.float64],
    row_keys: npt.NDArray[np.uint64],
    filtered: npt.NDArray[np.bool_],
    probabilities: torch.Tensor | None = None,
) -> npt.NDArray[np.int64]:
    """Sample a token for each of D rows of the logits, like `engine.sampling.torch_ops`. # [N, V], [N], 7 x [D] -> [D]

    `peaks`: the rows' maxima, which must be finite. `top_k`: 1 to V. `row_keys`: keys of the noise
    (`models.ops.counter_rng`). `probabilities`: receives the distributions that were sampled.
    # [D, V] float32, contiguous
    """
    columns = (rows, temperature, top_k, top_p, min_p, row_keys, filtered)
    tokens = np.empty(len(rows), np.int64)
    room = _DrawRoom(logits, len(rows), top_k, _pieces(len(rows), logits.shape[1]))
    arguments = structures.Draw(*room.arguments(logits, peaks, columns, tokens))
    arguments.probabilities = None if probabilities is None else probabilities.data_ptr()
    runtime.current().run(arguments, Step(num_tokens=len(rows)), ())
    return tokens


def verify_drafts(
    logits: torch.Tensor,
    peaks: torch.Tensor,
    tokens: npt.NDArray[np.int64],
    *,
    rows: npt.NDArray[np.int64],
    temperature: npt.NDArray[np.float32],
    top_k: npt.NDArray[np.int64],
    top_p: npt.NDArray[np.float64],
    min_p: npt.NDArray[np.float64],
    row_keys: npt.NDArray[np.uint64],
    filtered: npt.NDArray[np.bool_],
    firsts: npt.NDArray[np.int64],
    drafts: npt.NDArray[np.int64],
    probabilities: npt.NDArray[np.uint64],
    numbers: npt.NDArray[np.float64],
) -> None:
    """Like `draw`, but with rejection sampling in rows that verify a draft; writes `tokens`. # [D]

    `firsts`: the index of the first row of each sequence, followed by D. Rows of a sequence after a rejected draft
    leave their tokens unchanged. `drafts`: -1 in rows without a draft. `probabilities`: addresses of the distributions
    from which drafts were sampled. `numbers`: uniform in [0, 1). # [sequences + 1], 3 x [D]
    """
    columns = (rows, temperature, top_k, top_p, min_p, row_keys, filtered)
    room = _DrawRoom(logits, len(rows), top_k, 1)
    arguments = structures.VerifyDrafts(*room.arguments(logits, peaks, columns, tokens))
    arguments.firsts, arguments.drafts = firsts.ctypes.data, drafts.ctypes.data
    arguments.probabilities_of_drafts, arguments.numbers = probabilities.ctypes.data, numbers.ctypes.data
    runtime.current().run(arguments, Step(num_tokens=len(firsts) - 1), ())


class _DrawRoom:
    """Scratch memory of the sampling operators, which process each row in `pieces`."""

    def __init__(self, logits: torch.Tensor, num_rows: int, top_k: npt.NDArray[np.int64], pieces: int) -> None:
        self._pieces = pieces
        self._most = int(top_k[top_k <= MAX_LARGEST].max(initial=LOOKED_AT))
        self._best, self._found, self._ended = _room(num_rows, pieces, self._most)
        self._masses = np.empty((num_rows, -(-logits.shape[1] // WEIGHED)), np.float64)
        self._scores = np.empty((num_rows, pieces), np.float64)

    def arguments(
        self,
        logits: torch.Tensor,
        peaks: torch.Tensor,
        columns: tuple[npt.NDArray[Any], ...],
        tokens: npt.NDArray[np.int64],
    ) -> tuple[int, ...]:
        """Return the fields of `structures.Draw` up to `tokens`. `columns`: the arrays of `draw`, in order."""
        return (
            logits.data_ptr(),
            logits.stride(0),
            logits.shape[1],
            self._pieces,
            peaks.data_ptr(),
            *(each.ctypes.data for each in columns),
            self._masses.ctypes.data,
            self._best.ctypes.data,
            self._scores.ctypes.data,
            self._found.ctypes.data,
            self._most,
            self._ended.ctypes.data,
            tokens.ctypes.data,
        )


def _pieces(num_rows: int, width: int) -> int:
    """Return the number of tasks per row: one if there are at least as many rows as threads."""
    native = library.load_library()
    assert native is not None, "operators run, so their library was loaded"
    return max(1, min(-(-native.threads // max(1, num_rows)), width // _SMALLEST_PIECE))


def _room(
    num_rows: int, pieces: int, most: int
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """Allocate scratch for the best values of each piece, their number, and the number of finished pieces."""
    best = np.empty((num_rows, pieces, most), np.uint64)
    return best, np.empty((num_rows, pieces), np.int64), np.zeros(num_rows, np.int32)


# Heads, which compute the next tokens from final hidden states in one call.

_Product: TypeAlias = structures.Linear | structures.QuantizedLinear


def _product(
    compute_logits: Callable[[torch.Tensor], torch.Tensor], hidden_size: int, max_rows: int
) -> tuple[_Product, list[torch.Tensor], int] | None:
    """Return the product that computes a model's logits, the memory of its weight, and the size of the vocabulary,
    which may be smaller than the weight's rows; None if the logits are not one product with a packed bfloat16 or
    rounded weight."""
    try:
        arguments, weights, logits = operators_of(compute_logits, max_rows, hidden_size)
    except NotRecordable:
        return None
    [product] = arguments if len(arguments) == 1 else [None]
    if not isinstance(product, _Product) or product.out != logits.data_ptr() or not product.is_float:
        return None
    return product, weights, logits.shape[1]


class Head:
    """Operators of a program that compute a model's logits and choose a token for each row."""

    def __init__(self, product: _Product, kept: list[torch.Tensor], max_rows: int) -> None:
        """`kept`: the memory of the product's weight."""
        self._kept = kept
        self._product = product
        self.max_rows = max_rows
        self.token_ids = np.zeros(max_rows, dtype=np.int64)
        """Receives the chosen tokens."""
        self.peaks = np.zeros(max_rows, dtype=np.float32)
        """Receives the largest logit of each row."""


class GreedyHead(Head):
    """The argmax of `compute_logits`, computed without writing the logits to memory."""

    def __init__(
        self,
        native: Library,
        product: _Product,
        vocab_size: int,
        max_rows: int,
        kept: list[torch.Tensor],
    ) -> None:
        """`product`: computes the logits of at least `vocab_size` tokens. `kept`: the memory of its weight."""
        super().__init__(product, kept, max_rows)
        self._library = native
        self.vocab_size = vocab_size
        self._head = structures.GreedyHead(
            weight=product.weight,
            bias=product.bias,
            in_features=product.in_features,
            out_features=vocab_size,
            max_rows=max_rows,
            bits=product.bits if isinstance(product, structures.QuantizedLinear) else 16,
        )
        choice = structures.GreedyChoice(
            ctypes.addressof(self._head), self.peaks.ctypes.data, self.token_ids.ctypes.data
        )
        self._operations = Operations((self._head, choice))
        self._step = Step()
        self._make_room(native.threads)

    def _make_room(self, threads: int) -> None:
        """Allocate the maxima of each thread."""
        self._peaks_by_thread = np.zeros((threads, self.max_rows), dtype=np.float32)
        self._tokens_by_thread = np.zeros((threads, self.max_rows), dtype=np.int64)
        self._head.peaks, self._head.tokens = self._peaks_by_thread.ctypes.data, self._tokens_by_thread.ctypes.data

    @classmethod
    def of(
        cls, native: Library, compute_logits: Callable[[torch.Tensor], torch.Tensor], hidden_size: int, max_rows: int
    ) -> "GreedyHead | None":
        """Build the head of a model, or return None if its logits are not one product with a packed bfloat16 or
        rounded weight."""
        found = _product(compute_logits, hidden_size, max_rows)
        if found is None:
            return None
        product, weights, vocab_size = found
        return cls(native, product, vocab_size, max_rows, weights)

    def choose(self, hidden: torch.Tensor) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Return each row's argmax token and its logit, valid until the next call. # [rows, hidden_size] -> 2 x [rows]

        `hidden`: bfloat16, at most `max_rows` rows. Among equal logits the first one is chosen; a NaN precedes
        numbers.
        """
        num_rows = len(hidden)
        self.read_from(hidden.data_ptr(), hidden.stride(0))
        self._step.num_tokens = num_rows
        self._library.run(self._operations, self._step)
        return self.token_ids[:num_rows], self.peaks[:num_rows]

    def read_from(self, address: int, stride: int) -> None:
        """Make the operators read hidden states at `address`, with `stride` elements from row to row."""
        if self._library.threads != len(self._peaks_by_thread):
            self._make_room(self._library.threads)
        self._head.x, self._head.x_stride = address, stride

    @property
    def arguments(self) -> tuple[structures.Arguments, ...]:
        """The arguments of the head's operators."""
        return self._operations.arguments


class SampledHead(Head):
    """`compute_logits` and the sampler, for rows whose sampling parameters are all among those of `Sampling`."""

    def __init__(self, head: GreedyHead, logits: torch.Tensor, by: structures.Sampling) -> None:
        """Uses the product of `head`. `logits`: scratch memory of at least `head.max_rows * head.vocab_size` elements,
        which several heads may share. # [elements] float32
        """
        super().__init__(type(head._product).from_buffer_copy(head._product), head._kept, head.max_rows)
        self._logits, self._vocab_size = logits, head.vocab_size
        self.by = by
        self._product.out, self._product.out_stride = logits.data_ptr(), head.vocab_size
        self._product.out_features = head.vocab_size

    def read_from(self, address: int, stride: int) -> None:
        """Make the operators read hidden states at `address`, with `stride` elements from row to row."""
        self._product.x, self._product.x_stride = address, stride

    def choosing(self, slots: npt.NDArray[np.int64], token_offset: int) -> tuple[structures.Arguments, ...]:
        """Return the operators that choose a token for the position `token_offset` after each of the step's positions.

        `slots`: the sequences' slots. # [max_rows]
        """
        sample = structures.SampleTokens(
            self._logits.data_ptr(),
            self._vocab_size,
            ctypes.addressof(self.by),
            slots.ctypes.data,
            token_offset,
            self.peaks.ctypes.data,
            self.token_ids.ctypes.data,
        )
        return self._product, sample
