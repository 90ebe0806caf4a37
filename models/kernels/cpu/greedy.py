"""`GreedyHead`: the likeliest tokens from a model's final hidden states, as one call. Used by the model runner."""

import ctypes
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from models.kernels.cpu import structures
from models.kernels.cpu.library import Library, Operations
from models.kernels.cpu.program import NotRecordable, operators_of
from models.kernels.cpu.structures import Step


class GreedyHead:
    """The choice that `compute_logits` and an argmax would make, without the logits between them."""

    def __init__(
        self, native: Library, product: structures.Linear, vocab_size: int, max_rows: int, kept: list[torch.Tensor]
    ) -> None:
        """`product` makes the logits of at least `vocab_size` tokens; `kept` is the memory of its weight."""
        self._library = native
        self._head = structures.GreedyHead(
            weight=product.weight,
            bias=product.bias,
            in_features=product.in_features,
            out_features=vocab_size,
            max_rows=max_rows,
        )
        self._operations = Operations((self._head, structures.GreedyChoice(ctypes.addressof(self._head))))
        self._kept = kept
        self._step = Step()
        self.max_rows = max_rows
        self._make_room(native.threads)

    def _make_room(self, threads: int) -> None:
        """For what each of so many threads sees."""
        self._peaks = np.zeros((threads, self.max_rows), dtype=np.float32)
        self._tokens = np.zeros((threads, self.max_rows), dtype=np.int64)
        self._head.peaks, self._head.tokens = self._peaks.ctypes.data, self._tokens.ctypes.data

    @classmethod
    def of(
        cls, native: Library, compute_logits: Callable[[torch.Tensor], torch.Tensor], hidden_size: int, max_rows: int
    ) -> "GreedyHead | None":
        """That of a model whose logits are one product in bfloat16 with a packed weight; None for any other."""
        try:
            arguments, weights, logits = operators_of(compute_logits, max_rows, hidden_size)
        except NotRecordable:
            return None
        [product] = arguments if len(arguments) == 1 else [None]
        if not isinstance(product, structures.Linear) or product.out != logits.data_ptr() or not product.is_float:
            return None
        # A vocabulary may be smaller than its weight, which is filled up.
        return cls(native, product, logits.shape[1], max_rows, weights)

    def choose(self, hidden: torch.Tensor) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Each row's likeliest token and its logit, valid until the next call. # [rows, hidden_size] -> 2 x [rows]

        `hidden` is bfloat16, of at most `max_rows` rows. Of equal logits the first wins, and a NaN before any number.
        """
        num_rows = len(hidden)
        if self._library.threads != len(self._peaks):
            self._make_room(self._library.threads)
        self._head.x, self._head.x_stride = hidden.data_ptr(), hidden.stride(0)
        self._step.num_tokens = num_rows
        self._library.run(self._operations, self._step)
        return self._tokens[0, :num_rows], self._peaks[0, :num_rows]
