"""Token embedding and language-model head, the vocabulary shared out over tensor-parallel ranks."""

import torch
from torch import nn

from models.layers.parameter import Shard, empty_parameter, fill_rows, require_shape
from models.layers.product import logits, rows_of
from models.parallel import SINGLE_RANK, TensorParallel


class VocabParallelEmbedding(nn.Module):
    """Rows of the vocabulary, as many on each rank; rows past its end are zero, so that any size divides it."""

    def __init__(
        self, vocab_size: int, hidden_size: int, *, scale: float = 1.0, parallel: TensorParallel = SINGLE_RANK
    ) -> None:
        """`scale`: of the rows when they are read."""
        super().__init__()
        self.scale = scale
        self.vocab_size = vocab_size
        self.parallel = parallel
        self.num_rows = -(-vocab_size // parallel.size)
        self.first_row = parallel.rank * self.num_rows
        # At 4 bits, errors of the embedding and the head reach the scores directly.
        self.weight = empty_parameter(
            self.num_rows, hidden_size, weight_loader=self._load, is_product=True, fewest_bits=8
        )

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """# [tokens] int64 -> [tokens, hidden_size]"""
        if self.parallel.size == 1:
            return rows_of(self.weight, input_ids, self.scale)
        return self.parallel.all_reduce(rows_of(self.weight, input_ids, self.scale, first_row=self.first_row))

    def _load(self, parameter: nn.Parameter, loaded: torch.Tensor, _shard: Shard) -> None:
        require_shape(loaded, (self.vocab_size, parameter.shape[1]))
        part = loaded[self.first_row : self.first_row + self.num_rows]
        fill_rows(parameter, 0, part)
        fill_rows(parameter, len(part), part.new_zeros(self.num_rows - len(part), part.shape[1]))


class ParallelLMHead(VocabParallelEmbedding):
    """Scores of the vocabulary's tokens; may share its weight with the embedding."""

    gives_parts = False
    """Whether each rank is given its own tokens' logits, and not rank 0 those of all."""

    def tie(self, embedding: VocabParallelEmbedding) -> None:
        """Use the embedding's weight from here on."""
        self.weight = embedding.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """# [rows, hidden_size] -> [rows, vocab_size] float32; on ranks behind the first, and in parts, their own"""
        own = logits(hidden, self.weight)
        if self.gives_parts:
            return own[:, : max(0, self.vocab_size - self.first_row)]
        return self.parallel.gather(own)[:, : self.vocab_size]
