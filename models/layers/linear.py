"""Linear layers sharded over tensor-parallel ranks: by column, by row, several in one, and QKV.

A column-parallel layer holds some of the output features, a row-parallel one some of the input features; the second
follows the first, and its partial sums are added up over the ranks. Weights are [out_features, in_features].
"""

import torch
import torch.nn.functional as F
from torch import nn

from models.layers.parameter import empty_parameter, require_shape
from models.parallel import SINGLE_RANK, TensorParallel


class _PackedLinear(nn.Module):
    """Output features of several checkpoint tensors, one after the other; the rank's part of each."""

    def __init__(
        self,
        in_features: int,
        parts: dict[str | int | None, tuple[int, int, int]],
        *,
        bias: bool,
    ) -> None:
        """`parts`: by shard, `(features in the checkpoint, features on this rank, first of them)`."""
        super().__init__()
        self.in_features = in_features
        self._parts: dict[str | int | None, tuple[int, int, int, int]] = {}
        row = 0
        for shard, (whole, local, first) in parts.items():
            self._parts[shard] = (whole, local, first, row)
            row += local
        self.weight = empty_parameter(row, in_features, weight_loader=self._load)
        self.bias = empty_parameter(row, weight_loader=self._load) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """# [tokens, in_features] -> [tokens, the rank's features]"""
        return F.linear(x, self.weight, self.bias)

    def _load(self, parameter: nn.Parameter, loaded: torch.Tensor, shard: str | int | None) -> None:
        whole, local, first, row = self._parts[shard]
        require_shape(loaded, (whole, *parameter.shape[1:]))
        parameter.data[row : row + local].copy_(loaded[first : first + local])


class ColumnParallelLinear(_PackedLinear):
    """One linear layer whose output features are shared out."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool = False, parallel: TensorParallel = SINGLE_RANK
    ) -> None:
        local = parallel.share(out_features, "out_features")
        super().__init__(in_features, {None: (out_features, local, parallel.rank * local)}, bias=bias)


class MergedColumnParallelLinear(_PackedLinear):
    """Several column-parallel layers of one input in one product; shards are numbered from 0."""

    def __init__(
        self,
        in_features: int,
        out_features: list[int],
        *,
        bias: bool = False,
        parallel: TensorParallel = SINGLE_RANK,
    ) -> None:
        parts: dict[str | int | None, tuple[int, int, int]] = {}
        for shard, features in enumerate(out_features):
            local = parallel.share(features, "out_features")
            parts[shard] = (features, local, parallel.rank * local)
        super().__init__(in_features, parts, bias=bias)


class QKVParallelLinear(_PackedLinear):
    """Query, key and value projections in one product, shared out by head; shards `q`, `k` and `v`.

    Where there are fewer key-value heads than ranks, neighbouring ranks hold the same one.
    """

    def __init__(
        self,
        in_features: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool = False,
        parallel: TensorParallel = SINGLE_RANK,
    ) -> None:
        local_heads = parallel.share(num_heads, "num_attention_heads")
        if num_kv_heads >= parallel.size:
            local_kv_heads = parallel.share(num_kv_heads, "num_key_value_heads")
            first_kv_head = parallel.rank * local_kv_heads
        elif parallel.size % num_kv_heads:
            raise ValueError(
                f"num_key_value_heads is {num_kv_heads}, which {parallel.size} tensor-parallel ranks cannot share "
                "evenly; choose a size that divides it or that it divides"
            )
        else:
            local_kv_heads = 1
            first_kv_head = parallel.rank * num_kv_heads // parallel.size
        query = (num_heads * head_dim, local_heads * head_dim, parallel.rank * local_heads * head_dim)
        key = (num_kv_heads * head_dim, local_kv_heads * head_dim, first_kv_head * head_dim)
        super().__init__(in_features, {"q": query, "k": key, "v": key}, bias=bias)
        self.num_heads, self.num_kv_heads = local_heads, local_kv_heads


class RowParallelLinear(nn.Module):
    """One linear layer whose input features are shared out; its output is whole on every rank."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool = False, parallel: TensorParallel = SINGLE_RANK
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.parallel = parallel
        local = parallel.share(in_features, "in_features")
        self.weight = empty_parameter(out_features, local, weight_loader=self._load)
        self.bias = empty_parameter(out_features, weight_loader=self._load) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """# [tokens, the rank's in_features] -> [tokens, out_features]"""
        # One rank alone adds the bias, or the sum would hold it once a rank.
        bias = self.bias if self.parallel.rank == 0 else None
        return self.parallel.all_reduce(F.linear(x, self.weight, bias))

    def _load(self, parameter: nn.Parameter, loaded: torch.Tensor, _shard: str | int | None) -> None:
        if parameter is self.bias:
            require_shape(loaded, tuple(parameter.shape))
            parameter.data.copy_(loaded)
            return
        out_features, local = parameter.shape
        require_shape(loaded, (out_features, self.in_features))
        parameter.data.copy_(loaded.narrow(1, self.parallel.rank * local, local))
