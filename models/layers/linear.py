"""Linear layers sharded over tensor-parallel ranks: by column, by row, several in one, and QKV.

A column-parallel layer holds some of the output features, a row-parallel one some of the input features; the second
follows the first, and its partial sums are added up over the ranks. Weights are [out_features, in_features].
"""

import torch
from torch import nn

from models.layers.activation import GatedActivation
from models.layers.parameter import Shard, empty_parameter, fill_rows, require_shape
from models.layers.product import gated_linear, linear
from models.lora.layer import LinearLoRA, OutputPart
from models.parallel import SINGLE_RANK, TensorParallel


class ParallelLinear(nn.Module):
    """What adapters need of any of these layers."""

    in_features: int
    """Of the whole layer."""
    inputs: slice
    """This rank's among them."""
    parts: dict[str | int | None, OutputPart]
    """Where the output features of each tensor of the checkpoint are, by shard."""
    lora: LinearLoRA | None = None
    """What adapters add to the output; None where no adapter has a part in this layer."""

    def make_lora(self, dtype: torch.dtype) -> LinearLoRA:
        """Let adapters take part, if they do not yet; the weights of theirs will be of `dtype`."""
        if self.lora is None:
            self.lora = LinearLoRA(self.in_features, self.inputs, self.parts, dtype)
        return self.lora


class _PackedLinear(ParallelLinear):
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
        self.inputs = slice(0, in_features)
        self.parts = {}
        row = 0
        for shard, (whole, local, first) in parts.items():
            self.parts[shard] = OutputPart(whole, local, first, row)
            row += local
        self.weight = empty_parameter(row, in_features, weight_loader=self._load, is_product=True)
        self.bias = empty_parameter(row, weight_loader=self._load) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """# [tokens, in_features] -> [tokens, the rank's features]"""
        output = linear(x, self.weight, self.bias)
        if self.lora is not None:
            self.lora.apply(output, x)
        return output

    def gated(self, x: torch.Tensor, activation: GatedActivation) -> torch.Tensor:
        """`activation` of the output, without the memory between where one operator computes both.

        # [tokens, in_features] -> [tokens, the rank's features / 2]
        """
        if self.lora is not None:
            return activation(self(x))
        return gated_linear(x, self.weight, self.bias, activation)

    def _load(self, parameter: nn.Parameter, loaded: torch.Tensor, shard: Shard) -> None:
        """Fill one part; with shard None of a layer of several, all of them from a tensor that holds them in order."""
        assert not isinstance(shard, tuple), "experts are no part of a linear layer"
        parts = [self.parts[shard]] if shard in self.parts else list(self.parts.values())
        require_shape(loaded, (sum(part.whole for part in parts), *parameter.shape[1:]))
        start = 0
        for whole, local, first, row in parts:
            fill_rows(parameter, row, loaded[start + first : start + first + local])
            start += whole


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


class RowParallelLinear(ParallelLinear):
    """One linear layer whose input features are shared out; its output is whole on every rank."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool = False, parallel: TensorParallel = SINGLE_RANK
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.parallel = parallel
        local = parallel.share(in_features, "in_features")
        self.inputs = slice(parallel.rank * local, (parallel.rank + 1) * local)
        self.parts = {None: OutputPart(out_features, out_features, 0, 0)}
        self.weight = empty_parameter(out_features, local, weight_loader=self._load, is_product=True)
        self.bias = empty_parameter(out_features, weight_loader=self._load) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """# [tokens, the rank's in_features] -> [tokens, out_features]"""
        # One rank alone adds the bias, or the sum would hold it once a rank.
        bias = self.bias if self.parallel.rank == 0 else None
        output = linear(x, self.weight, bias)
        if self.lora is not None:
            self.lora.apply(output, x)
        return self.parallel.all_reduce(output)

    def _load(self, parameter: nn.Parameter, loaded: torch.Tensor, _shard: Shard) -> None:
        if parameter is self.bias:
            require_shape(loaded, tuple(parameter.shape))
            parameter.data.copy_(loaded)
            return
        out_features, local = parameter.shape
        require_shape(loaded, (out_features, self.in_features))
        fill_rows(parameter, 0, loaded.narrow(1, self.parallel.rank * local, local))
