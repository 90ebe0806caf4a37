"""Linear layers sharded over tensor-parallel ranks: by column, by row, several in one, and QKV.

A column-parallel layer holds some of the output features, a row-parallel one some of the input features; the second
follows the first, and its partial sums are added up over the ranks. Weights are [out_features, in_features].
"""

import logging

import torch
import torch.nn.functional as F
from torch import nn

from models.layers.lora import LinearLoRA, OutputPart
from models.layers.parameter import Shard, empty_parameter, fill_rows, onednn_of, packed_of, require_shape
from models.ops import aiter
from models.ops.activation import GatedActivation, operator_of
from models.ops.aiter import operators as dense
from models.ops.cpu import dense as ops
from models.ops.cpu import experts as expert_ops
from models.ops.cpu import runtime
from models.ops.stored_weight import stored_of
from models.parallel.tensor_parallel import SINGLE_RANK, TensorParallel

# [product] `linear`: a product with a weight, wherever it lies. Called by the layers.


def linear(x: torch.Tensor, weight: nn.Parameter, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight.T + bias`. # [tokens, in_features] -> [tokens, out_features]"""
    packed = packed_of(weight)
    if packed is not None:
        return ops.linear(x, packed, bias)
    stored = stored_of(weight)
    if stored is not None:
        return stored.linear(x, bias)
    by_onednn = onednn_of(weight)
    if by_onednn is None:
        if aiter.runs("gemm", x, weight):
            return dense.linear(x, weight, bias)
        return F.linear(x, weight, bias)
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, by_onednn, bias, "none", [], "")
    return out


def gated_linear(
    x: torch.Tensor, weight: nn.Parameter, bias: torch.Tensor | None, activation: GatedActivation
) -> torch.Tensor:
    """`activation(linear(x, weight, bias))`, the same bits. # [tokens, in_features] -> [tokens, out_features / 2]"""
    packed, operator = packed_of(weight), operator_of(activation)
    if packed is not None and operator is not None and ops.gates(packed):
        return ops.gated_linear(x, packed, bias, operator)
    return activation(linear(x, weight, bias))


def logits(x: torch.Tensor, weight: nn.Parameter, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight.T + bias` as float32. # [rows, in_features] -> [rows, out_features]"""
    packed = packed_of(weight)
    return linear(x, weight, bias).float() if packed is None else ops.linear(x, packed, bias, dtype=torch.float32)


def float_logits(x: torch.Tensor, weight: nn.Parameter) -> torch.Tensor:
    """`x @ weight.T` in float32, by a float32 weight. # [rows, in_features] -> [rows, out_features]"""
    return expert_ops.float_linear(x, weight) if runtime.runs(x) else F.linear(x.float(), weight)


def rows_of(
    weight: nn.Parameter, ids: torch.Tensor, scale: float = 1.0, *, first_row: int | None = None
) -> torch.Tensor:
    """A weight's rows by number, scaled. # [tokens] int64 -> [tokens, in_features]

    `first_row`: that the weight begins with, where it has some of the rows only; the others are 0.
    """
    packed = packed_of(weight)
    if packed is not None:
        return ops.embed(ids, packed, scale, first_row or 0)
    if first_row is not None:
        ids = ids - first_row
        elsewhere = (ids < 0) | (ids >= len(weight))
        return rows_of(weight, ids.masked_fill(elsewhere, 0), scale).masked_fill_(elsewhere[:, None], 0.0)
    rows = F.embedding(ids, weight)
    return rows if scale == 1.0 else rows * scale


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


# [embedding] Token embedding and language-model head, the vocabulary shared out over tensor-parallel ranks.


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


# [onednn] Products' weights as oneDNN, which torch has within it, reads them: for hosts without the compiled
# operators.
#
# Called by the loader once a model is filled. A packed weight takes the plain one's place, so each is stored once.

_log = logging.getLogger(__name__)


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this torch on this processor multiplies packed weights of a type."""
    return (
        dtype is torch.bfloat16
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def pack_filled_products(model: nn.Module) -> None:
    """Pack every bfloat16 weight that is one product's alone: none that is also read row by row, or one of a stack."""
    read_by_row = {id(module.weight) for module in model.modules() if type(module) is VocabParallelEmbedding}
    for parameter in model.parameters():
        if parameter.dim() == 2 and getattr(parameter, "is_product", False) and id(parameter) not in read_by_row:
            weight = parameter.data
            # The number of rows is a hint.
            parameter.onednn = torch.ops.mkldnn._reorder_linear_weight(weight, 1)  # type: ignore[attr-defined]
            # Whoever reads it in another way finds no numbers.
            parameter.data = torch.full((1,), torch.nan, dtype=weight.dtype).expand(weight.shape)
    _log.info("Products run on weights that oneDNN packs")
