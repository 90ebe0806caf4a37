"""`FusedMoE`: the experts of a mixture-of-experts layer. Models route with `models.layers.routing`, then call it.

The (token, expert) pairs are sorted by expert, so that each active expert multiplies one contiguous run of rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from models.attention.context import get_forward_context
from models.layers.parameter import Shard, Spelling, empty_parameter, fill_rows, packed_of, require_shape
from models.ops import triton
from models.ops.activation import gating_of, swiglu
from models.ops.aiter import operators as aiter_experts
from models.ops.cpu import dense as ops
from models.ops.cpu import experts as expert_ops
from models.ops.stored_weight import operand_of, stored_of
from models.parallel.tensor_parallel import SINGLE_RANK, Exchange, TensorParallel

if TYPE_CHECKING:
    pass


# [expert_parallel] `ExpertShare`: which experts a rank holds, and which it sees to for its replica. Used by
# `FusedMoE`.


@dataclass(frozen=True, slots=True)
class ExpertShare:
    """The experts of one rank."""

    asked: range
    """Those whose pairs of a token and an expert this rank sees to, for its replica."""
    local: range
    """Those that it holds: a part of `asked`, or all."""
    exchange: Exchange | None = None
    """With the ranks that hold the rest of `asked`."""

    @classmethod
    def of(cls, num_experts: int, parallel: TensorParallel) -> "ExpertShare":
        """Raises `ValueError` where the ranks do not divide the experts."""
        experts = parallel.experts
        if experts is None:
            return cls(range(num_experts), range(num_experts))
        if num_experts % (parallel.size * experts.num_replicas):
            replicas = "" if experts.num_replicas == 1 else f" in each of {experts.num_replicas} replicas"
            plural = "" if parallel.size == 1 else "s"
            raise ValueError(
                f"a layer has {num_experts} experts, which {parallel.size} rank{plural}{replicas} do not divide "
                f"evenly; choose sizes that do, or leave enable_expert_parallel out"
            )
        num_asked = num_experts // parallel.size
        num_local = num_asked // experts.num_replicas
        first_asked = parallel.rank * num_asked
        first_local = first_asked + experts.replica * num_local
        return cls(
            range(first_asked, first_asked + num_asked),
            range(first_local, first_local + num_local),
            experts.exchange,
        )


# [grouped_linear] `grouped_linear`: runs of rows, each by its own expert's weight. Called by `FusedMoE`.


def grouped_linear(
    rows: torch.Tensor,
    weight: nn.Parameter,
    bias: torch.Tensor | None,
    counts: torch.Tensor,
    *,
    tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """The first `counts[0]` rows through expert 0, the next `counts[1]` through expert 1 ...; past the last run, zero.

    # [pairs, in], [experts, out, in], [experts, out], [experts] int64 -> [pairs, out]

    With `tokens` [pairs] int64 the rows are `rows[tokens]`.
    """
    packed = packed_of(weight)
    if packed is not None:
        return ops.grouped_linear(rows, packed, bias, counts, tokens=tokens)
    if tokens is not None:
        rows = rows[tokens]
    runs = counts.tolist()
    out = rows.new_empty(len(rows), weight.shape[1])
    out[sum(runs) :] = 0
    start = 0
    for expert, count in enumerate(runs):
        if count:
            run = slice(start, start + count)
            out[run] = F.linear(rows[run], weight[expert], None if bias is None else bias[expert])
            start += count
    return out


_STACKED = "stacked"
_GATE, _UP, _DOWN = "gate", "up", "down"


class Routed(NamedTuple):
    """What a layer of experts computes of."""

    hidden: torch.Tensor  # [tokens, hidden_size]
    weights: torch.Tensor  # [tokens, top_k] float32
    ids: torch.Tensor  # [tokens, top_k] int64
    beside: torch.Tensor | None
    """What every rank has of each token besides, [tokens, hidden_size]."""
    gate: torch.Tensor | None
    """[tokens, 1] float32, logits of the share of `beside` that a token takes; None: all of it."""


class ExpertNames(NamedTuple):
    """How a family's checkpoints name the projections of one expert."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


class SparseMoE(nn.Module):
    """The feed-forward layer that routes: `gate` gives weights and ids, shared experts see every token."""

    def __init__(self, gate: nn.Module, experts: "FusedMoE", shared_experts: nn.Module | None = None) -> None:
        super().__init__()
        self.gate, self.experts, self.shared_experts = gate, experts, shared_experts

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """# [tokens, hidden_size] -> [tokens, hidden_size]"""
        beside = None if self.shared_experts is None else self.shared_experts(hidden)
        return self.experts(hidden, *self.gate(hidden), beside)  # type: ignore[no-any-return]


class FusedMoE(nn.Module):
    """Gated feed-forward experts, each split over the tensor-parallel ranks along its intermediate dimension.

    With expert parallelism a rank has some of them, whole, instead of a part of each.
    Read from checkpoints with a tensor an expert (`experts.3.gate_proj.weight`) or with all experts stacked
    (`experts.gate_up_proj`).
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        *,
        activation: Callable[[torch.Tensor], torch.Tensor] = swiglu,
        bias: bool = False,
        names: ExpertNames = ExpertNames(),  # noqa: B008, immutable
        parallel: TensorParallel = SINGLE_RANK,
    ) -> None:
        super().__init__()
        self.num_experts, self.intermediate_size, self.parallel = num_experts, intermediate_size, parallel
        self.activation = activation
        self.share = ExpertShare.of(num_experts, parallel)
        self.local_experts = self.share.local
        self.split = parallel if parallel.experts is None else SINGLE_RANK
        """How each expert is shared out."""
        here, local = len(self.local_experts), self.split.share(intermediate_size, "the experts' intermediate size")
        self.w13 = empty_parameter(
            here,
            2 * local,
            hidden_size,
            weight_loader=self._load_gate_up,
            sources=self._sources({names.gate: _GATE, names.up: _UP}, "gate_up_proj", "weight"),
            is_product=True,
        )
        self.w2 = empty_parameter(
            here,
            hidden_size,
            local,
            weight_loader=self._load_down,
            sources=self._sources({names.down: _DOWN}, "down_proj", "weight"),
            is_product=True,
        )
        self.w13_bias: nn.Parameter | None = None
        self.w2_bias: nn.Parameter | None = None
        if bias:
            self.w13_bias = empty_parameter(
                here,
                2 * local,
                weight_loader=self._load_gate_up,
                sources=self._sources({names.gate: _GATE, names.up: _UP}, "gate_up_proj_bias", "bias"),
            )
            self.w2_bias = empty_parameter(
                here,
                hidden_size,
                weight_loader=self._load_down,
                sources=self._sources({names.down: _DOWN}, "down_proj_bias", "bias"),
            )
        self.shuffled: aiter_experts.ExpertWeights | None = None
        """The weights as aiter reads them, where it computes the layer."""
        self.expert_map: torch.Tensor | None
        self.register_buffer("expert_map", None if here == num_experts else self._expert_map(), persistent=False)

    def forward(
        self,
        hidden: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        beside: torch.Tensor | None = None,
        gate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The sum of each token's experts by their weights, and of what is `beside` them on every rank.

        # [tokens, hidden_size], [tokens, top_k] float32, [tokens, top_k] int64 -> [tokens, hidden_size]

        `gate` [tokens, 1] float32: logits of the share of `beside` that a token takes; None: all of it.
        """
        routed = Routed(hidden, weights, ids, beside, gate)
        if self.share.exchange is not None:
            return self._across_replicas(routed)
        if self.shuffled is not None:
            sums = aiter_experts.experts(hidden, self.shuffled, weights, ids.to(torch.int32))
            return self._add(self.parallel.all_reduce(sums), routed)
        w13, w2 = self.w13, self.w2
        if packed_of(w13) is not None and packed_of(w2) is not None:
            return self._by_operators(routed)
        if hidden.dtype is w13.dtype and triton.runs(hidden, operator="moe") and _are_for_kernels(w13, w2):
            return self._by_kernels(routed, w13, w2)
        return self._by_torch(routed)

    def shuffle(self) -> bool:
        """Have aiter compute the filled layer; False where it has no kernels for one like this.

        The weights are put in the order that its kernels load them in, and nothing else may read them afterwards.
        """
        is_alike = self.activation is swiglu and self.w13_bias is None
        is_all_here = self.expert_map is None and self.share.exchange is None
        weights = self._for_aiter() if is_alike and is_all_here else None
        if weights is None or not all(aiter_experts.can_shuffle(weight) for weight in weights[:2]):
            return False
        for weight in weights[:2]:
            aiter_experts.shuffle(weight)
        self.shuffled = weights
        return True

    def _for_aiter(self) -> aiter_experts.ExpertWeights | None:
        """The weights, where they are in 16 bits or in FP8 with scales of blocks."""
        if any(weight.dtype not in (torch.bfloat16, torch.float16) for weight in (self.w13, self.w2)):
            return None
        first, second = stored_of(self.w13), stored_of(self.w2)
        if first is not None and second is not None:
            w13, w2 = first.fp8_blocks(), second.fp8_blocks()
            return None if w13 is None or w2 is None else aiter_experts.ExpertWeights(w13[0], w2[0], w13[1], w2[1])
        return aiter_experts.ExpertWeights(self.w13, self.w2) if first is None and second is None else None

    @property
    def _is_packed(self) -> bool:
        return packed_of(self.w13) is not None and packed_of(self.w2) is not None

    def _by_torch(self, routed: Routed) -> torch.Tensor:
        top_k = routed.ids.shape[1]
        experts = routed.ids.flatten()
        if self.expert_map is not None:
            experts = self.expert_map[experts]
        order = experts.argsort(stable=True)
        counts = experts.bincount(minlength=len(self.local_experts))[: len(self.local_experts)]
        # Back in the order of tokens, so that a sum over top_k needs no atomic additions.
        products = routed.hidden.new_empty(len(order), routed.hidden.shape[1])
        products[order] = self._products(routed.hidden, counts, order // top_k)
        return self._added_up(products.view(len(routed.hidden), top_k, -1), routed)

    def _by_operators(self, routed: Routed) -> torch.Tensor:
        """`forward` without anything of torch's, so that it may be recorded."""
        counts, tokens, places = expert_ops.sort_pairs(routed.ids, self.num_experts, first=self.local_experts.start)
        products = self._products(routed.hidden, counts[: len(self.local_experts)], tokens)
        return self._combined(products, places, routed)

    def _across_replicas(self, routed: Routed) -> torch.Tensor:
        """`forward` where other replicas have some of the experts, and ask those that are here."""
        dp_metadata = get_forward_context().dp_metadata
        assert dp_metadata is not None, "replicas that exchange tokens agree on how many each has"
        asked, local, exchange = self.share.asked, self.share.local, self.share.exchange
        assert exchange is not None
        products, places = exchange.across(
            asked, local, routed.hidden, routed.ids, self._products, dp_metadata.num_tokens_across_dp
        )
        if self._is_packed:
            return self._combined(products, places, routed)
        return self._added_up(products[places], routed)

    def _products(self, hidden: torch.Tensor, counts: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """What the local experts make of their runs of `hidden[tokens]`; 0 past the last.

        # [rows, hidden_size], [local experts], [pairs] int64 -> [pairs, hidden_size]
        """
        inner = grouped_linear(hidden, self.w13, self.w13_bias, counts, tokens=tokens)
        return grouped_linear(self.activation(inner), self.w2, self._outer_bias, counts)

    @property
    def _outer_bias(self) -> torch.Tensor | None:
        """One rank alone adds the bias of experts that all have a part of, or the sum would hold it once a rank."""
        return None if self.split.rank else self.w2_bias

    def _combined(self, products: torch.Tensor, places: torch.Tensor, routed: Routed) -> torch.Tensor:
        """As `_added_up`, by operators. # [pairs, hidden_size], [tokens, top_k]"""
        _, weights, _, beside, gate = routed
        if self.parallel.rank:  # One rank alone adds what all have.
            beside = gate = None
        return self.parallel.all_reduce(expert_ops.combine(products, weights, places, beside, gate))

    def _added_up(self, by_token: torch.Tensor, routed: Routed) -> torch.Tensor:
        """The layer's output, of what each token's experts made of it. # [tokens, top_k, hidden_size]"""
        combined = (by_token * routed.weights.unsqueeze(-1)).sum(1)  # float32 as the weights are
        return self._add(self.parallel.all_reduce(combined.to(by_token.dtype)), routed)

    @staticmethod
    def _add(sums: torch.Tensor, routed: Routed) -> torch.Tensor:
        _, _, _, beside, gate = routed
        if beside is None:
            return sums
        return sums + (beside if gate is None else (beside * gate.sigmoid()).to(beside.dtype))

    def _by_kernels(self, routed: Routed, w13: nn.Parameter, w2: nn.Parameter) -> torch.Tensor:
        """`forward` on a GPU, where the host learns nothing of who goes where."""
        import models.ops.triton.expert_products as products_kernels
        import models.ops.triton.expert_routing as routing_kernels

        hidden, weights, ids, beside, gate = routed
        expert_map = self.expert_map
        experts = ids if expert_map is None else expert_map[ids]
        num_pairs, held = ids.numel(), len(self.local_experts)
        pairs = routing_kernels.moe_sort(experts, held, routing_kernels.block_of(num_pairs, self.num_experts))
        gating = gating_of(self.activation)
        inner = products_kernels.grouped_products(hidden, operand_of(w13), self.w13_bias, pairs, num_pairs, gating)
        if gating is None:
            inner = self.activation(inner)
        products = products_kernels.grouped_products(inner, operand_of(w2), self._outer_bias, pairs, num_pairs)
        if self.parallel.size == 1:
            return routing_kernels.moe_combine(products, weights, experts, held, beside, gate)
        return self._add(
            self.parallel.all_reduce(routing_kernels.moe_combine(products, weights, experts, held)), routed
        )

    def _expert_map(self) -> torch.Tensor:
        """By expert, its place on this rank; past the last place for the experts of other ranks."""
        places = torch.full((self.num_experts,), len(self.local_experts))
        places[self.local_experts.start : self.local_experts.stop] = torch.arange(len(self.local_experts))
        return places

    def _sources(self, parts: dict[str, str], stacked: str, kind: str) -> tuple[Spelling, Spelling]:
        each = {
            f"experts.{expert}.{name}.{kind}": (expert, part)
            for expert in range(self.num_experts)
            for name, part in parts.items()
        }
        return each, {f"experts.{stacked}": _STACKED}

    def _load_gate_up(self, parameter: nn.Parameter, loaded: torch.Tensor, shard: Shard) -> None:
        """Rows of the rank's part: gate before up."""
        whole, local = self.intermediate_size, parameter.shape[1] // 2
        first = self.split.rank * local
        if shard == _STACKED:
            require_shape(loaded, (self.num_experts, 2 * whole, *parameter.shape[2:]))
            mine = loaded[self.local_experts.start : self.local_experts.stop]
            for place, one in enumerate(mine):
                fill_rows(parameter, 0, one[first : first + local], place)
                fill_rows(parameter, local, one[whole + first : whole + first + local], place)
            return
        assert isinstance(shard, tuple)
        expert, part = shard
        require_shape(loaded, (whole, *parameter.shape[2:]))
        if expert in self.local_experts:
            row = local if part == _UP else 0
            fill_rows(parameter, row, loaded[first : first + local], expert - self.local_experts.start)

    def _load_down(self, parameter: nn.Parameter, loaded: torch.Tensor, shard: Shard) -> None:
        """Columns of the rank's part; a bias whole."""
        hidden_size = parameter.shape[1]
        columns = () if parameter is self.w2_bias else (self.intermediate_size,)
        if shard == _STACKED:
            require_shape(loaded, (self.num_experts, hidden_size, *columns))
            for place, one in enumerate(loaded[self.local_experts.start : self.local_experts.stop]):
                fill_rows(parameter, 0, self._columns(one, parameter), place)
            return
        assert isinstance(shard, tuple)
        expert, _ = shard
        require_shape(loaded, (hidden_size, *columns))
        if expert in self.local_experts:
            fill_rows(parameter, 0, self._columns(loaded, parameter), expert - self.local_experts.start)

    def _columns(self, loaded: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
        if parameter is self.w2_bias:
            return loaded
        local = parameter.shape[2]
        return loaded.narrow(-1, self.split.rank * local, local)


def _are_for_kernels(*weights: nn.Parameter) -> bool:
    return all(stored_of(weight) is not None or triton.runs(weight, operator="moe") for weight in weights)
