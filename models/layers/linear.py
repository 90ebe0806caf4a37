"""Linear layers, embedding and head, sharded over tensor-parallel ranks, and the product that all of them use.

A column-parallel layer is sharded by output features, a row-parallel one by input features. A row-parallel layer reads
the output of a column-parallel one, and its partial sums are reduced over the ranks. Weights are [out_features,
in_features]. `linear` multiplies by dense weights, weights packed for the CPU operators or oneDNN, and quantised ones.
"""

import logging

import torch
import torch.nn.functional as F
from torch import nn

from models.layers.lora import LinearLoRA, OutputPart, Span
from models.layers.norm import RMSNorm
from models.layers.parameter import (
    SourceNames,
    WeightPart,
    empty_parameter,
    fill_rows,
    is_product,
    keep_for_onednn,
    onednn_of,
    packed_of,
    require_shape,
)
from models.ops import aiter, triton
from models.ops.activation import GatedActivation, gated_for, gating_of
from models.ops.aiter import operators as dense
from models.ops.cpu import dense as ops
from models.ops.cpu import experts as expert_ops
from models.ops.cpu import runtime
from models.ops.stored_weight import Feed, dense_linear, stored_of
from models.ops.weight_formats import RoundedRows
from models.parallel.tensor_parallel import SINGLE_RANK, TensorParallel

_log = logging.getLogger(__name__)


def linear(
    x: torch.Tensor, weight: nn.Parameter, bias: torch.Tensor | None = None, rounded: RoundedRows | None = None
) -> torch.Tensor:
    """`x @ weight.T + bias`. # [tokens, in_features] -> [tokens, out_features]

    `rounded`: `x` already rounded as the product by this weight would round it, or None.
    """
    packed = packed_of(weight)
    if packed is not None:
        return ops.linear(x, packed, bias)
    stored = stored_of(weight)
    if stored is not None:
        return stored.linear(x, bias, rounded)
    by_onednn = onednn_of(weight)
    if by_onednn is None:
        if aiter.runs("gemm", x, weight):
            return dense.linear(x, weight, bias)
        return dense_linear(x, weight, bias)
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, by_onednn, bias, "none", [], "")
    return out


def gated_linear(
    x: torch.Tensor,
    weight: nn.Parameter,
    bias: torch.Tensor | None,
    activation: GatedActivation,
    rounded: RoundedRows | None = None,
    feed: Feed | None = None,
) -> torch.Tensor:
    """`activation(linear(x, weight, bias))`, bit for bit. # [tokens, in_features] -> [tokens, out_features / 2]

    `rounded`: as in `linear`. `feed`: the format in which the next product reads the result.
    """
    packed, gating = packed_of(weight), gating_of(activation)
    if packed is not None and gating is not None and ops.supports_gated_linear(packed):
        return ops.gated_linear(x, packed, bias, gating.activation, alpha=gating.alpha, limit=gating.limit)
    product = linear(x, weight, bias, rounded)
    return activation(product) if feed is None else gated_for(product, activation, feed)


def round_for(x: torch.Tensor, *layers: "PackedLinear") -> RoundedRows | None:
    """`x` rounded as the products of several layers round it, so that it is rounded once; None if at most one does."""
    first = layers[0].feed
    rounded = None if first is None else first.take(x)
    if rounded is None and len(x) and triton.runs(x, operator="linear"):
        stored = [stored for layer in layers if (stored := stored_of(layer.weight)) is not None]
        if sum(each.rounding_of(x) is not None for each in stored) > 1:
            from models.ops.triton.quantized_products import quantize_groups

            return quantize_groups(x)
    return rounded


def logits(x: torch.Tensor, weight: nn.Parameter, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight.T + bias` as float32. # [rows, in_features] -> [rows, out_features]"""
    packed = packed_of(weight)
    return linear(x, weight, bias).float() if packed is None else ops.linear(x, packed, bias, dtype=torch.float32)


def float_logits(x: torch.Tensor, weight: nn.Parameter) -> torch.Tensor:
    """`x @ weight.T` in float32; the weight is float32. # [rows, in_features] -> [rows, out_features]"""
    return expert_ops.float_linear(x, weight) if runtime.runs(x) else dense_linear(x.float(), weight)


def rows_of(
    weight: nn.Parameter, ids: torch.Tensor, scale: float = 1.0, *, first_row: int | None = None
) -> torch.Tensor:
    """Look up and scale rows of a weight. # [tokens] int64 -> [tokens, in_features]

    `first_row`: index of the first row of this rank's shard; the result is 0 for rows of other ranks.
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
    """Base of linear layers, with the attributes that LoRA adapters need."""

    in_features: int
    """Number of input features of the whole layer."""
    inputs: slice
    """The range of this rank's input features."""
    weight: nn.Parameter
    parts: dict[str | int | None, OutputPart]
    """The output features of each checkpoint tensor."""
    lora: LinearLoRA | None = None
    """The adapters of this layer; None if no adapter changes it."""
    feed: Feed | None = None
    """The format of the input from the preceding norm or activation."""

    def follow(self, norm: RMSNorm) -> None:
        """Have the preceding norm round its rows to FP8 if this weight is FP8; the layer must be the norm's first
        reader."""
        norm.feed = self.feed = Feed(self.weight)

    def make_lora(self, dtype: torch.dtype) -> LinearLoRA:
        """The layer's adapters, which are created with weights of `dtype` if there are none yet."""
        if self.lora is None:
            self.lora = LinearLoRA(self.in_features, self.inputs, self.parts, dtype)
        return self.lora


class PackedLinear(ParallelLinear):
    """One product for the output features of several checkpoint tensors, each sharded over the ranks."""

    def __init__(
        self,
        in_features: int,
        parts: dict[str | int | None, OutputPart],
        *,
        bias: bool = False,
        sources: tuple[SourceNames, ...] = (),
    ) -> None:
        """`sources`: see `empty_parameter`."""
        super().__init__()
        self.in_features = in_features
        self.inputs = slice(0, in_features)
        self.parts = parts
        row = max(part.rows.stop for part in parts.values())
        self.weight = empty_parameter(row, in_features, weight_loader=self._load, is_product=True, sources=sources)
        self.bias = empty_parameter(row, weight_loader=self._load) if bias else None

    def forward(self, x: torch.Tensor, rounded: RoundedRows | None = None) -> torch.Tensor:
        """# [tokens, in_features] -> [tokens, the rank's features]; `rounded`: see `linear`"""
        if rounded is None and self.feed is not None:
            rounded = self.feed.take(x)
        output = linear(x, self.weight, self.bias, rounded)
        if self.lora is not None:
            self.lora.apply(output, x)
        return output

    def gated(self, x: torch.Tensor, activation: GatedActivation, feed: Feed | None = None) -> torch.Tensor:
        """`activation` of the output, by one fused operator if available.

        `feed`: the format in which the next product reads it. # [tokens, in_features] -> [tokens, the rank's features
        / 2]
        """
        if self.lora is not None:
            return activation(self(x))
        rounded = None if self.feed is None else self.feed.take(x)
        return gated_linear(x, self.weight, self.bias, activation, rounded, feed)

    def _load(self, parameter: nn.Parameter, loaded: torch.Tensor, part: WeightPart) -> None:
        """Fill one part; with part None and several parts, all of them from one concatenated tensor."""
        assert not isinstance(part, tuple), "a linear layer has no experts"
        parts = [self.parts[part]] if part in self.parts else list(self.parts.values())
        require_shape(loaded, (sum(each.whole for each in parts), *parameter.shape[1:]))
        start = 0
        for each in parts:
            own = each.in_halves(loaded[start : start + each.whole])
            for first, local, row in each.spans:
                fill_rows(parameter, row, own[first : first + local])
            start += each.whole


def _one_after_another(parts: dict[str | int | None, tuple[int, int, int]]) -> dict[str | int | None, OutputPart]:
    """For each part: `(features in the checkpoint, first on this rank, features on this rank)`, in the layer's
    order."""
    found: dict[str | int | None, OutputPart] = {}
    row = 0
    for shard, (whole, first, local) in parts.items():
        found[shard] = OutputPart(whole, (Span(first, local, row),))
        row += local
    return found


class ColumnParallelLinear(PackedLinear):
    """One linear layer whose output features are sharded."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool = False, parallel: TensorParallel = SINGLE_RANK
    ) -> None:
        local = parallel.share(out_features, "out_features")
        super().__init__(
            in_features, _one_after_another({None: (out_features, parallel.rank * local, local)}), bias=bias
        )


class MergedColumnParallelLinear(PackedLinear):
    """Several column-parallel layers of one input in one product; parts are indexed from 0."""

    def __init__(
        self,
        in_features: int,
        out_features: list[int],
        *,
        bias: bool = False,
        parallel: TensorParallel = SINGLE_RANK,
        sources: tuple[SourceNames, ...] = (),
    ) -> None:
        """`sources`: see `empty_parameter`."""
        parts: dict[str | int | None, tuple[int, int, int]] = {}
        for shard, features in enumerate(out_features):
            local = parallel.share(features, "out_features")
            parts[shard] = (features, parallel.rank * local, local)
        super().__init__(in_features, _one_after_another(parts), bias=bias, sources=sources)


class QKVParallelLinear(PackedLinear):
    """Query, key and value projections in one product, sharded by head; parts `q`, `k` and `v`.

    If there are fewer key-value heads than ranks, consecutive ranks hold the same head.
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
        paired_dims: int = 0,
        kinds: str = "qkv",
        value_dim: int | None = None,
        is_grouped: bool = False,
    ) -> None:
        """`paired_dims`: number of leading dimensions of a head that the checkpoint rotates as adjacent pairs; the
        layer reorders them for `models.ops.torch_ops.rotate`. `kinds`: which of the three projections exist.
        `value_dim`: elements of a head's value, by default `head_dim`. `is_grouped`: whether the checkpoint has one
        tensor, in which the query heads of each KV head precede its key and its value; without pairs, of all kinds.
        """
        local_heads = parallel.share(num_heads, "num_attention_heads")
        if num_kv_heads >= parallel.size:
            local_kv_heads = parallel.share(num_kv_heads, "num_key_value_heads")
            first_kv_head = parallel.rank * local_kv_heads
        elif parallel.size % num_kv_heads:
            raise ValueError(
                f"tensor_parallel_size is {parallel.size}, which neither divides num_key_value_heads, {num_kv_heads}, "
                "nor is a multiple of it; choose a size that is or does"
            )
        else:
            local_kv_heads = 1
            first_kv_head = parallel.rank * num_kv_heads // parallel.size
        heads = {
            "q": (num_heads, parallel.rank * local_heads, local_heads, head_dim),
            "k": (num_kv_heads, first_kv_head, local_kv_heads, head_dim),
            "v": (num_kv_heads, first_kv_head, local_kv_heads, head_dim if value_dim is None else value_dim),
        }
        sizes = {kind: (whole * dim, first * dim, local * dim) for kind, (whole, first, local, dim) in heads.items()}
        parts = _one_after_another({kind: sizes[kind] for kind in kinds})
        if paired_dims:
            parts |= {kind: parts[kind]._replace(pairs=(head_dim, paired_dims)) for kind in kinds if kind in "qk"}
        if is_grouped:
            queries = range(parallel.rank * local_heads, (parallel.rank + 1) * local_heads)
            kv_heads = range(first_kv_head, first_kv_head + local_kv_heads)
            parts = {None: _grouped(num_heads, num_kv_heads, head_dim, queries, kv_heads)}
        super().__init__(in_features, parts, bias=bias)
        self.num_heads, self.num_kv_heads = local_heads, local_kv_heads


def _grouped(num_heads: int, num_kv_heads: int, head_dim: int, queries: range, kv_heads: range) -> OutputPart:
    """The part of a tensor `[KV head, its query heads, its key, its value]` that fills queries, keys, then values.

    `queries`, `kv_heads`: this rank's.
    """
    shared = num_heads // num_kv_heads
    heads = [head // shared * (shared + 2) + head % shared for head in queries]
    heads += [head * (shared + 2) + shared for head in kv_heads]
    heads += [head * (shared + 2) + shared + 1 for head in kv_heads]
    spans = (Span(head * head_dim, head_dim, row * head_dim) for row, head in enumerate(heads))
    return OutputPart((num_heads + 2 * num_kv_heads) * head_dim, tuple(spans))


class RowParallelLinear(ParallelLinear):
    """One linear layer whose input features are sharded; its output is whole on every rank."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        parallel: TensorParallel = SINGLE_RANK,
        reduces: bool = True,
    ) -> None:
        """`reduces`: False if the caller reduces the partial sums over the ranks."""
        super().__init__()
        self.in_features, self.reduces = in_features, reduces
        self.parallel = parallel
        local = parallel.share(in_features, "in_features")
        self.inputs = slice(parallel.rank * local, (parallel.rank + 1) * local)
        self.parts = {None: OutputPart(out_features, (Span(0, out_features, 0),))}
        self.weight = empty_parameter(out_features, local, weight_loader=self._load, is_product=True)
        self.bias = empty_parameter(out_features, weight_loader=self._load) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """# [tokens, the rank's in_features] -> [tokens, out_features], or this rank's partial sum"""
        # Only one rank adds the bias, since the sum over ranks must contain it once.
        bias = self.bias if self.parallel.rank == 0 else None
        output = linear(x, self.weight, bias, None if self.feed is None else self.feed.take(x))
        if self.lora is not None:
            self.lora.apply(output, x)
        return self.parallel.all_reduce(output) if self.reduces else output

    def _load(self, parameter: nn.Parameter, loaded: torch.Tensor, _part: WeightPart) -> None:
        if parameter is self.bias:
            require_shape(loaded, tuple(parameter.shape))
            parameter.data.copy_(loaded)
            return
        out_features, local = parameter.shape
        require_shape(loaded, (out_features, self.in_features))
        fill_rows(parameter, 0, loaded.narrow(1, self.parallel.rank * local, local))


class VocabParallelEmbedding(nn.Module):
    """Token embedding, sharded by rows of the vocabulary: each rank has equally many, the last ones with padding."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        scale: float = 1.0,
        num_ids: int = 0,
        parallel: TensorParallel = SINGLE_RANK,
    ) -> None:
        """`scale` multiplies the rows when they are read. `num_ids`: number of token ids; those past the checkpoint's
        rows have a copy of row 0, as padding then has too. Other padding is zero."""
        super().__init__()
        self.scale = scale
        self.vocab_size = vocab_size
        self.has_more_ids = num_ids > vocab_size
        self.parallel = parallel
        self.num_rows = -(-max(num_ids, vocab_size) // parallel.size)
        self.first_row = parallel.rank * self.num_rows
        # Rounding errors of the embedding and the head affect the logits directly, so 4 bits are too few.
        self.weight = empty_parameter(
            self.num_rows, hidden_size, weight_loader=self._load, is_product=True, min_bits=8
        )

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """# [tokens] int64 -> [tokens, hidden_size]"""
        if self.parallel.size == 1:
            return rows_of(self.weight, input_ids, self.scale)
        return self.parallel.all_reduce(rows_of(self.weight, input_ids, self.scale, first_row=self.first_row))

    def _load(self, parameter: nn.Parameter, loaded: torch.Tensor, _part: WeightPart) -> None:
        require_shape(loaded, (self.vocab_size, parameter.shape[1]))
        part = loaded[self.first_row : self.first_row + self.num_rows]
        fill_rows(parameter, 0, part)
        other = loaded[:1] if self.has_more_ids else part.new_zeros(1, part.shape[1])
        fill_rows(parameter, len(part), other.repeat(self.num_rows - len(part), 1))


class ParallelLMHead(VocabParallelEmbedding):
    """Logits of the vocabulary's tokens; may share its weight with the embedding."""

    gives_parts = False
    """Whether each rank returns the logits of its shard, instead of rank 0 returning all logits."""

    def __init__(
        self, vocab_size: int, hidden_size: int, *, bias: bool = False, parallel: TensorParallel = SINGLE_RANK
    ) -> None:
        super().__init__(vocab_size, hidden_size, parallel=parallel)
        self.bias = empty_parameter(self.num_rows, weight_loader=self._load_bias) if bias else None

    def tie(self, embedding: VocabParallelEmbedding) -> None:
        """Use the embedding's weight from now on."""
        self.weight = embedding.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """# [rows, hidden_size] -> [rows, vocab_size] float32; with `gives_parts`, or on other ranks than 0, of the
        rank's shard
        """
        own = logits(hidden, self.weight, self.bias)
        if self.gives_parts:
            return own[:, : max(0, self.vocab_size - self.first_row)]
        return self.parallel.gather(own)[:, : self.vocab_size]

    def _load_bias(self, parameter: nn.Parameter, loaded: torch.Tensor, _part: WeightPart) -> None:
        require_shape(loaded, (self.vocab_size,))
        part = loaded[self.first_row : self.first_row + self.num_rows]
        parameter.data[: len(part)].copy_(part)
        parameter.data[len(part) :].zero_()


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN, in this torch and on this processor, supports packed weights of a dtype."""
    return (
        dtype is torch.bfloat16
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def pack_filled_products(model: nn.Module) -> None:
    """Pack the bfloat16 weights of a filled model for oneDNN, on hosts without the compiled operators.

    Weights that are also read by row, and stacks of weights, are not packed. A packed weight replaces the dense one.
    """
    read_by_row = {id(module.weight) for module in model.modules() if type(module) is VocabParallelEmbedding}
    for parameter in model.parameters():
        if parameter.dim() == 2 and is_product(parameter) and id(parameter) not in read_by_row:
            weight = parameter.data
            # The number of tokens is only a hint for the packed layout.
            keep_for_onednn(parameter, torch.ops.mkldnn._reorder_linear_weight(weight, 1))
            # NaN in the dense weight exposes any code that still reads it.
            parameter.data = torch.full((1,), torch.nan, dtype=weight.dtype).expand(weight.shape)
    _log.info("Products run on weights that oneDNN packs")
