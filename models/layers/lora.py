"""`LinearLoRA`: one linear layer's low-rank products, by adapter. Filled by `models.lora.adapters`, used by the
layer."""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from models.attention.context import LoRARows, get_forward_context
from models.layers.parameter import require_shape


class Span(NamedTuple):
    """Output features that are contiguous both in the checkpoint's tensor and in the layer."""

    first: int
    """Index of the first feature in the checkpoint's tensor."""
    local: int
    """Number of features."""
    row: int
    """Index of the first feature in the layer."""


class OutputPart(NamedTuple):
    """The output features of a layer that come from one tensor of the checkpoint."""

    whole: int
    """Number of features in the checkpoint."""
    spans: tuple[Span, ...]
    """This rank's spans; several if the layer has another order of features."""
    pairs: tuple[int, int] | None = None
    """Features of a head, and how many of those are rotated, if the checkpoint rotates adjacent pairs and the layer
    halves; None if both have the same order."""

    def in_halves(self, rows: torch.Tensor) -> torch.Tensor:
        """Reorder the rotated pairs of each head in the checkpoint's rows for the layer. # [whole, ...] -> [whole,
        ...]"""
        if self.pairs is None:
            return rows
        head_dim, rotary_dim = self.pairs
        heads = torch.arange(len(rows), device=rows.device).view(-1, head_dim)
        rotated = heads[:, :rotary_dim].view(len(heads), rotary_dim // 2, 2).transpose(1, 2).flatten(1)
        # An index, by which quantised rows are reordered without being dequantised.
        return rows[torch.cat((rotated, heads[:, rotary_dim:]), dim=1).flatten()]

    @property
    def rows(self) -> slice:
        """The range of the layer's features from the part's first to its last, including others in between."""
        return slice(min(span.row for span in self.spans), max(span.row + span.local for span in self.spans))


class _Up(NamedTuple):
    """The second matrix of an adapter's product for one part of the output, scaled."""

    b: torch.Tensor  # [features of the part's rows, rank], 0 for those of other parts
    row: int
    """The part's first feature in the layer."""
    ranks: slice
    """The product's range in the LoRA ranks of all parts."""


class _Adapter(NamedTuple):
    """One adapter of the layer. The first matrices of all parts are one matrix, because they have the same input."""

    a: torch.Tensor  # [ranks of all parts, the rank's in_features]
    ups: tuple[_Up, ...]


class _FusedAdapters(NamedTuple):
    """All adapters as one product, in which the LoRA ranks of other adapters are masked for each token."""

    a: torch.Tensor  # [ranks of all adapters, the rank's in_features]
    b: torch.Tensor  # [the rank's features, ranks of all adapters]
    adapters: torch.Tensor  # [ranks of all adapters] int64, the adapter of each rank


class LinearLoRA:
    """Adds the product of each token's adapter to a layer's output.

    Sharded like the layer: with sharded outputs, B has this rank's rows; with sharded inputs, A has this rank's
    columns, and the product is a partial sum that is added before the all-reduce.
    """

    def __init__(
        self, in_features: int, inputs: slice, parts: Mapping[str | int | None, OutputPart], dtype: torch.dtype
    ) -> None:
        """`in_features`: those of the checkpoint. `inputs`: this rank's range of them."""
        self._in_features = in_features
        self._inputs = inputs
        self._parts = parts
        self._num_rows = max(part.rows.stop for part in parts.values())
        self._dtype = dtype
        self._adapters: dict[int, _Adapter] = {}
        self._fused: _FusedAdapters | None = None

    def add(
        self, adapter: int, shard: str | int | None, a: torch.Tensor, b: torch.Tensor, scale: float, rank: int
    ) -> None:
        """Add a product of adapter number `adapter` for one part. # [rank, in_features], [part's features, rank]

        With part None and several parts, B holds the rows of all parts. Raises `WeightShapeError` if a tensor has
        another shape.
        """
        parts = [self._parts[shard]] if shard in self._parts else list(self._parts.values())
        require_shape(a, (rank, self._in_features))
        require_shape(b, (sum(part.whole for part in parts), rank))
        a = a[:, self._inputs].to(self._dtype)
        before = self._adapters.get(adapter)
        first_rank = 0 if before is None else len(before.a)
        ups = () if before is None else before.ups
        first_row = 0
        for part in parts:
            rows = part.rows
            up = b.new_zeros(rows.stop - rows.start, rank, dtype=self._dtype)
            own = part.in_halves(b[first_row : first_row + part.whole])
            for first, local, row in part.spans:
                source = own[first : first + local]
                up[row - rows.start : row - rows.start + local] = source.float() * scale
            ups += (_Up(up, rows.start, slice(first_rank, first_rank + rank)),)
            first_row += part.whole
        # The tensors are copied, since the checkpoint's file must not stay mapped.
        self._adapters[adapter] = _Adapter(a.clone() if before is None else torch.cat([before.a, a]), ups)

    def remove(self, adapter: int) -> None:
        """Remove an adapter that no row uses any more. No effect if it does not change this layer."""
        # `_fused` stays, since captured graphs read it; they will replay only rows without an adapter.
        self._adapters.pop(adapter, None)

    def delta(self, adapter: int) -> torch.Tensor | None:
        """An adapter's change of the layer's weight, for layers that read the weight directly; None if it has none.

        # -> [the rank's features, the rank's in_features]
        """
        found = self._adapters.get(adapter)
        if found is None:
            return None
        delta = found.a.new_zeros(self._num_rows, found.a.shape[1])
        for b, row, ranks in found.ups:
            delta[row : row + len(b)] += b @ found.a[ranks]
        return delta

    def apply(self, output: torch.Tensor, x: torch.Tensor) -> None:
        """Add the adapters' products to `output`, in place. # [tokens, the rank's features], [tokens, the rank's
        in_features]"""
        step = get_forward_context()
        groups = step.lora
        if groups is None:
            return
        if len(x) != len(step.context.positions):
            raise RuntimeError(f"a layer with adapters got {len(x)} of a step's {len(step.context.positions)} tokens")
        if isinstance(groups, LoRARows):
            self._apply_by_row(output, x, groups.adapters)
            return
        for number, tokens in groups:
            adapter = self._adapters.get(number)
            if adapter is None:
                continue
            down = x[tokens] @ adapter.a.T  # [n, ranks]
            for b, row, ranks in adapter.ups:
                part = output[:, row : row + len(b)]
                if isinstance(tokens, slice):
                    part[tokens].addmm_(down[:, ranks], b.T)
                else:
                    part.index_add_(0, tokens, down[:, ranks] @ b.T)

    @property
    def num_ranks(self) -> int:
        """The sum of all adapters' LoRA ranks."""
        return sum(len(adapter.a) for adapter in self._adapters.values())

    @property
    def is_unused(self) -> bool:
        """Whether there is no adapter, and no captured graph reads this object."""
        return not self._adapters and self._fused is None

    def _apply_by_row(self, output: torch.Tensor, x: torch.Tensor, adapters: torch.Tensor) -> None:
        """As `apply`, without reading the tokens' adapters on the host. # adapters [tokens] int64"""
        if self._fused is None:
            if not self._adapters:
                return
            self._fused = self._fuse()
        a, b, owners = self._fused
        down = (x @ a.T).masked_fill_(adapters[:, None] != owners, 0.0)  # [tokens, ranks]
        output.addmm_(down, b.T)

    def _fuse(self) -> _FusedAdapters:
        first = next(iter(self._adapters.values())).a
        b = first.new_zeros(self._num_rows, self.num_ranks)
        column = 0
        for adapter in self._adapters.values():
            for up, row, ranks in adapter.ups:
                # Parts of one product share its LoRA ranks, and their rows may be interleaved.
                b[row : row + len(up), column + ranks.start : column + ranks.stop] += up
            column += len(adapter.a)
        owners = [number for number, adapter in self._adapters.items() for _ in range(len(adapter.a))]
        a = torch.cat([adapter.a for adapter in self._adapters.values()])
        return _FusedAdapters(a, b, torch.tensor(owners, device=first.device))


class ExpertProducts(NamedTuple):
    """An adapter's products of one projection of all experts on this rank, with its scale applied."""

    a: torch.Tensor  # [experts, rank, the rank's in_features]
    b: torch.Tensor  # [experts, the rank's out_features, rank]

    def add(self, output: torch.Tensor, x: torch.Tensor, counts: list[int]) -> None:
        """Add to the outputs of runs of rows, `counts[e]` of expert e. # [pairs, out], [pairs, in]"""
        start = 0
        for expert, count in enumerate(counts):
            run = slice(start, start + count)
            if count:
                output[run].addmm_(x[run] @ self.a[expert].T, self.b[expert].T)
            start += count


class ExpertAdapter(NamedTuple):
    """One adapter of a layer of experts."""

    first: ExpertProducts | None = None
    """Products of the gate and up projections."""
    second: ExpertProducts | None = None
    """Product of the down projection."""
