"""`FusedMoE`: the experts of a mixture-of-experts layer. Models route with `models.layers.routing`, then call it.

The (token, expert) pairs are sorted by expert, so that each active expert multiplies one contiguous run of rows.
`ExpertShare` defines which experts a rank holds.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from models.attention.context import get_forward_context
from models.errors import CheckpointError
from models.layers.linear import PackedLinear, RowParallelLinear
from models.layers.lora import ExpertAdapter, ExpertProducts
from models.layers.norm import RMSNorm
from models.layers.parameter import SourceNames, WeightPart, empty_parameter, fill_rows, packed_of, require_shape
from models.ops import triton
from models.ops.activation import gating_of, swiglu
from models.ops.aiter import operators as aiter_experts
from models.ops.cpu import dense as ops
from models.ops.cpu import experts as expert_ops
from models.ops.cpu.structures import MAX_EXPERTS
from models.ops.stored_weight import Feed, operand_of, stored_of
from models.ops.weight_formats import MixedStack, RoundedRows
from models.parallel.tensor_parallel import SINGLE_RANK, Exchange, TensorParallel, TokenExchange

if TYPE_CHECKING:
    from models.ops.self_test import Case


@dataclass(frozen=True, slots=True)
class ExpertShare:
    """The experts that a rank holds, and the experts whose results it provides to its replica."""

    asked: range
    """The experts whose (token, expert) pairs this rank provides to its replica."""
    local: range
    """The experts that this rank holds: a part of `asked`, or all."""
    exchange: Exchange | TokenExchange | None = None
    """The exchange with the ranks that hold the rest of `asked`."""

    @classmethod
    def of(cls, num_experts: int, parallel: TensorParallel) -> "ExpertShare":
        """The share of one rank. Raises `ValueError` if the number of ranks does not divide that of the experts."""
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


def grouped_linear(
    rows: torch.Tensor,
    weight: nn.Parameter,
    bias: torch.Tensor | None,
    counts: torch.Tensor,
    *,
    tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply runs of rows by their experts' weights: `counts[0]` rows by expert 0's, and so on; later rows are zero.

    # [pairs, in], [experts, out, in], [experts, out], [experts] int64 -> [pairs, out]

    With `tokens` [pairs] int64 the rows are `rows[tokens]`.
    """
    packed = packed_of(weight)
    if packed is not None:
        return ops.grouped_linear(rows, packed, bias, counts, tokens=tokens, out_features=weight.shape[1])
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


def leave_sum_open(layer: nn.Module) -> None:
    """Have an attention or feed-forward layer return its partial sum, which the next norm reduces over the ranks."""
    [last] = [
        module for module in layer.modules() if isinstance(module, RowParallelLinear | FusedMoE) and module.reduces
    ]
    last.reduces = False


_PLAIN_STACK, _OTHER_STACK = "stacked", "stacked, in another layout"
GATE, UP, DOWN = "gate", "up", "down"
"""Projections of one expert, in a weight part."""


def is_stacked(part: WeightPart) -> bool:
    """Whether a tensor of the checkpoint holds all experts of a layer."""
    return part in (_PLAIN_STACK, _OTHER_STACK)


def is_plain_stack(part: WeightPart) -> bool:
    """Whether a tensor holds all experts of a layer, each in the layout of checkpoints that are not stacked."""
    return part == _PLAIN_STACK


class Routed(NamedTuple):
    """The input of a layer of experts."""

    hidden: torch.Tensor  # [tokens, hidden_size]
    weights: torch.Tensor  # [tokens, top_k] float32
    ids: torch.Tensor  # [tokens, top_k] int64
    shared: torch.Tensor | None
    """This rank's partial sum of the shared experts' output. [tokens, hidden_size]"""
    gate: torch.Tensor | None
    """Logits of the gate on `shared`, [tokens, 1] float32; None without a gate."""
    rounded: RoundedRows | None = None
    """`hidden` already rounded for the experts' products, or None."""


class ExpertNames(NamedTuple):
    """The names of one expert's projections in a family's checkpoints."""

    gate: str | None = "gate_proj"
    """None if the experts have no gates."""
    up: str = "up_proj"
    down: str = "down_proj"
    stacked_gate_up: str = "experts.gate_up_proj"
    """The tensor of all experts' gates and ups, if they are stacked."""
    stacked_down: str = "experts.down_proj"


class SparseMoE(nn.Module):
    """A feed-forward layer of routed experts, chosen by `gate`, and shared experts, which every token uses."""

    def __init__(self, gate: nn.Module, experts: "FusedMoE", shared_experts: nn.Module | None = None) -> None:
        """`shared_experts` return this rank's partial sum of their output."""
        super().__init__()
        self.gate, self.experts, self.shared_experts = gate, experts, shared_experts
        self.feed: Feed | None = None
        """The format of the input from the preceding norm."""
        self._shared_feed: Feed | None = None

    @property
    def shared(self) -> nn.Module | None:
        """The shared experts."""
        return self.shared_experts

    def shared_gate(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Logits of the gate on the shared experts' output; None without a gate. # [tokens, 1] float32"""
        del hidden
        return None

    def follow(self, norm: RMSNorm) -> None:
        """As `ParallelLinear.follow`; the experts and the first layer of the shared experts read the same rows."""
        norm.feed = self.feed = Feed(self.experts.w13)
        first = getattr(self.shared, "gate_up_proj", None)
        if isinstance(first, PackedLinear):
            self._shared_feed = first.feed = Feed(first.weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """# [tokens, hidden_size] -> [tokens, hidden_size]"""
        rounded = None if self.feed is None else self.feed.take(hidden)
        if self._shared_feed is not None:
            self._shared_feed.give(hidden, rounded)
        shared = None if self.shared is None else self.shared(hidden)
        share = self.shared_gate(hidden)
        return self.experts(hidden, *self.gate(hidden), shared, share, rounded)  # type: ignore[no-any-return]


class StackProduct(NamedTuple):
    """The stack of experts that an adapter's product changes."""

    name: str
    is_first: bool
    """Whether it is the stack of gates and ups."""
    is_exchanged: bool
    """Whether the product's matrices have the stack's inputs and outputs exchanged."""


class AdapterError(Exception):
    """A layer of experts cannot apply an adapter; the message is the reason."""


class ExpertRow(NamedTuple):
    """The computation of one token's row by one expert of this rank, for an observer."""

    x: torch.Tensor  # [hidden_size]
    expert: torch.Tensor  # [] int64, index on this rank
    inner: torch.Tensor  # [intermediate size], after the activation
    out: torch.Tensor  # [hidden_size], without the routing weight


class FusedMoE(nn.Module):
    """Feed-forward experts, each split over the tensor-parallel ranks along its intermediate dimension.

    With expert parallelism a rank has some whole experts, instead of a shard of each. Checkpoints have a tensor per
    expert (`experts.3.gate_proj.weight`) or all experts stacked (`experts.gate_up_proj`).
    """

    observer: Callable[[ExpertRow], None] | None = None
    """Called in each pass with the `ExpertRow` of one token, unless replicas exchange tokens or aiter computes the
    layer."""
    has_plain_stacks: ClassVar[bool] = True
    """Whether a stack holds each expert's tensors contiguously, in the layout of checkpoints that are not stacked."""

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
        if num_experts > MAX_EXPERTS:
            raise CheckpointError(f"config.json gives a layer {num_experts} experts; it must be at most {MAX_EXPERTS}")
        self.num_experts, self.intermediate_size, self.parallel = num_experts, intermediate_size, parallel
        self.activation = activation
        self.reduces = True
        """False if the caller reduces the partial sums over the ranks."""
        self.share = ExpertShare.of(num_experts, parallel)
        self.local_experts = self.share.local
        self.split = parallel if parallel.experts is None else SINGLE_RANK
        """How each expert is sharded over ranks."""
        here, local = len(self.local_experts), self.split.share(intermediate_size, "the experts' intermediate size")
        self.names = names
        self.first_parts = 1 if names.gate is None else 2
        """Projections of an expert that share its input."""
        self.w13 = empty_parameter(
            here,
            self.first_parts * local,
            hidden_size,
            weight_loader=self._load_gate_up,
            sources=self._sources(self._first_names, names.stacked_gate_up, "weight"),
            is_product=True,
        )
        self.w2 = empty_parameter(
            here,
            hidden_size,
            local,
            weight_loader=self._load_down,
            sources=self._sources({names.down: DOWN}, names.stacked_down, "weight"),
            is_product=True,
        )
        self.w13_bias: nn.Parameter | None = None
        self.w2_bias: nn.Parameter | None = None
        if bias:
            self.w13_bias = empty_parameter(
                here,
                self.first_parts * local,
                weight_loader=self._load_gate_up,
                sources=self._sources(self._first_names, f"{names.stacked_gate_up}_bias", "bias"),
            )
            self.w2_bias = empty_parameter(
                here,
                hidden_size,
                weight_loader=self._load_down,
                sources=self._sources({names.down: DOWN}, f"{names.stacked_down}_bias", "bias"),
            )
        self._routed: set[tuple[int, bool, bool]] = set()
        """Calls recorded with suspended kernels: experts per token, and whether there were shared experts and a
        gate."""
        self.adapters: dict[int, ExpertAdapter] = {}
        """The adapters that change the experts, by number."""
        self.shuffled: aiter_experts.ExpertWeights | None = None
        """The weights in aiter's layout, if it computes the layer."""
        self.expert_map: torch.Tensor | None
        has_all = here == num_experts and not isinstance(self.share.exchange, TokenExchange)
        self.register_buffer("expert_map", None if has_all else self._expert_map(), persistent=False)

    def forward(
        self,
        hidden: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        shared: torch.Tensor | None = None,
        gate: torch.Tensor | None = None,
        rounded: RoundedRows | None = None,
    ) -> torch.Tensor:
        """The weighted sum of each token's experts, plus the output of shared experts, reduced over the ranks
        together.

        # [tokens, hidden_size], [tokens, top_k] float32, [tokens, top_k] int64 -> [tokens, hidden_size]

        `shared`: this rank's partial sum. `gate` [tokens, 1] float32: logits of the gate on `shared`; None without a
        gate. `rounded`: `hidden` already rounded for the experts' products, or None.
        """
        routed = Routed(hidden, weights, ids, shared, gate, rounded)
        part = self._part(routed)
        if self.adapters:
            self._replace_adapted(part, routed)
        return self._sum(part)

    @property
    def stacks(self) -> tuple[str, str]:
        """The names of the stacks of gates and ups, and of downs, in transformers' layer of experts."""
        first, second = (name.rpartition(".")[2] for name in (self.names.stacked_gate_up, self.names.stacked_down))
        return first, second

    def stack_of(self, a: torch.Tensor, b: torch.Tensor) -> "StackProduct | None":
        """The stack that an adapter's product changes, by its shape; None if it matches neither.

        PEFT before 0.19 exchanges inputs and outputs of most families. # [.., in_features], [out_features, ..]
        """
        hidden_size, inner = self.w13.shape[-1], self.intermediate_size
        whole = self.first_parts * inner
        gate_up, down = self.stacks
        shapes = {
            (whole, hidden_size): StackProduct(gate_up, is_first=True, is_exchanged=True),
            (hidden_size, inner): StackProduct(down, is_first=False, is_exchanged=True),
            (hidden_size, whole): StackProduct(gate_up, is_first=True, is_exchanged=False),
            (inner, hidden_size): StackProduct(down, is_first=False, is_exchanged=False),
        }
        return shapes.get((a.shape[-1], len(b)))

    def add_adapter(
        self, adapter: int, stack: "StackProduct", halves: tuple[torch.Tensor, torch.Tensor], scale: float, rank: int
    ) -> None:
        """Add adapter number `adapter`'s product of one stack, as PEFT saves it.

        # a: [experts * rank, in_features], b: [out_features, rank * experts]

        Raises:
            WeightShapeError: The product has another rank.
            AdapterError: The layer's implementation supports no such adapter.
        """
        reason = self._takes_no_adapter()
        if reason is not None:
            raise AdapterError(reason)
        a, b = halves
        require_shape(a, (self.num_experts * rank, a.shape[-1]))
        require_shape(b, (len(b), rank * self.num_experts))
        downs = a.reshape(self.num_experts, rank, -1)  # [experts, rank, in_features]
        ups = b.reshape(len(b), rank, self.num_experts).permute(2, 0, 1)  # [experts, out_features, rank]
        if stack.is_exchanged:
            downs, ups = ups.transpose(1, 2), downs.transpose(1, 2)
        local = self.w2.shape[2]
        mine = slice(self.split.rank * local, (self.split.rank + 1) * local)
        if stack.is_first:
            parts = self._rows_of_first(ups).reshape(self.num_experts, self.first_parts, self.intermediate_size, rank)
            ups = parts[:, :, mine].flatten(1, 2)
        else:
            downs = downs[:, :, mine]
        dtype = a.dtype
        product = ExpertProducts(downs.contiguous(), (ups.float() * scale).to(dtype).contiguous())
        before = self.adapters.get(adapter, ExpertAdapter())
        self.adapters[adapter] = before._replace(**{"first" if stack.is_first else "second": product})

    @staticmethod
    def _rows_of_first(rows: torch.Tensor) -> torch.Tensor:
        """Reorder rows of gates and ups from the checkpoint's order to the layer's. # [experts, rows, rank]"""
        return rows

    def _takes_no_adapter(self) -> str | None:
        """The reason why the layer supports no adapter; None if it does."""
        if self.parallel.experts is not None:
            return "enable_expert_parallel spreads the experts; leave it out"
        if self.shuffled is not None:
            return "aiter computes the experts; set attention_backend to triton"
        if not self._is_packed and _are_stored(self.w13, self.w2):
            return "the experts are computed from quantised weights; serve a checkpoint in 16 bits"
        return None

    def _replace_adapted(self, part: torch.Tensor, routed: Routed) -> None:
        """Recompute the rows of tokens whose adapter changes the experts, with the adapter's products."""
        for number, tokens in get_forward_context().lora or ():
            adapter = self.adapters.get(number)
            if adapter is not None:
                rows = Routed(*(None if each is None else each[tokens] for each in routed[:5]))  # type: ignore[arg-type]
                part[tokens] = self._adapted_part(rows, adapter)

    def _adapted_part(self, routed: Routed, adapter: ExpertAdapter) -> torch.Tensor:
        top_k = routed.ids.shape[1]
        experts = routed.ids.flatten()
        order = experts.argsort(stable=True)
        counts, tokens = experts.bincount(minlength=self.num_experts), order // top_k
        runs = counts.tolist()
        first = grouped_linear(routed.hidden, self.w13, self.w13_bias, counts, tokens=tokens)
        if adapter.first is not None:
            adapter.first.add(first, routed.hidden[tokens], runs)
        inner = self.activation(first)
        products = grouped_linear(inner, self.w2, self.outer_bias, counts)
        if adapter.second is not None:
            adapter.second.add(products, inner, runs)
        by_token = torch.empty_like(products)
        by_token[order] = products
        return self._weighted_sum(by_token.view(-1, top_k, products.shape[1]), routed)

    def _part(self, routed: Routed) -> torch.Tensor:
        """This rank's partial sum. # -> [tokens, hidden_size]"""
        hidden, weights, ids = routed[:3]
        exchange = self.share.exchange
        if isinstance(exchange, TokenExchange):
            return self._part_by_tokens(routed, exchange)
        if exchange is not None:
            return self._part_by_pairs(routed, exchange)
        if self.shuffled is not None:
            sums = aiter_experts.experts(hidden, self.shuffled, weights, ids.to(torch.int32))
            return self._add(sums, routed)
        if self._is_packed:
            return self._part_on_cpu(routed)
        return self._part_by_kernels(routed)

    def _part_by_kernels(self, routed: Routed) -> torch.Tensor:
        """The partial sum by Triton's kernels if available, or by torch."""
        hidden, w13, w2 = routed.hidden, self.w13, self.w2
        if hidden.dtype is w13.dtype and triton.runs(hidden, operator="moe") and _are_for_kernels(w13, w2):
            return self._part_by_triton(routed, w13, w2)
        return self._part_by_torch(routed)

    def shuffle(self) -> bool:
        """Have aiter compute the filled layer. Returns False if aiter has no kernels for it.

        The weights are reordered for its kernels, and nothing else may read them afterwards.
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
        """The weights, if they are in 16 bits or in FP8 with scales per block; None otherwise."""
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

    def _part_by_torch(self, routed: Routed) -> torch.Tensor:
        top_k = routed.ids.shape[1]
        if triton.is_idle():
            self._routed.add((top_k, routed.shared is not None, routed.gate is not None))
        experts = routed.ids.flatten()
        if self.expert_map is not None:
            experts = self.expert_map[experts]
        order = experts.argsort(stable=True)
        counts = experts.bincount(minlength=len(self.local_experts))[: len(self.local_experts)]
        # Restore the order of tokens, so that the sum over top_k needs no atomic additions.
        products = routed.hidden.new_empty(len(order), routed.hidden.shape[1])
        products[order] = self._products(routed.hidden, counts, order // top_k)
        return self._weighted_sum(products.view(len(routed.hidden), top_k, -1), routed)

    def _part_on_cpu(self, routed: Routed) -> torch.Tensor:
        """The partial sum by CPU operators only, so that the pass can be recorded."""
        counts, tokens, pair_rows = expert_ops.sort_pairs(routed.ids, self.num_experts, first=self.local_experts.start)
        products = self._products(routed.hidden, counts[: len(self.local_experts)], tokens)
        return self._combine(products, pair_rows, routed)

    def _part_by_tokens(self, routed: Routed, exchange: TokenExchange) -> torch.Tensor:
        """Compute this replica's experts for the tokens of all replicas, whose numbers the replicas have agreed on."""
        hidden, weights, ids = routed[:3]
        dp_metadata, num_rows = get_forward_context().dp_metadata, len(hidden)
        # A captured graph has the same number of rows on all replicas.
        most = num_rows if dp_metadata is None else max(1, dp_metadata.max_tokens_across_dp)
        experts = self.parallel.experts
        if dp_metadata is not None and experts is not None and dp_metadata.is_dummy(experts.replica):
            ids = torch.full_like(ids, self.num_experts)
        # The index `num_experts` marks padding: no rank has such an expert.
        columns = (F.pad(ids.int(), (0, 0, 0, most - num_rows), value=self.num_experts), weights.float(), hidden)
        packed = torch.cat([F.pad(_bytes(each), (0, 0, 0, most - len(each))) for each in columns], 1)
        arrived = exchange.gather(packed)
        widths = [4 * ids.shape[1], 4 * ids.shape[1], hidden.itemsize * hidden.shape[1]]
        all_ids, all_weights, all_hidden = (
            part.contiguous().view(dtype)
            for part, dtype in zip(
                torch.split(arrived, widths, 1), (torch.int32, torch.float32, hidden.dtype), strict=True
            )
        )
        parts = self._part_by_kernels(Routed(all_hidden, all_weights, all_ids.to(ids.dtype), None, None))
        return self._add(exchange.add_back(parts)[:num_rows], routed)

    def _part_by_pairs(self, routed: Routed, exchange: Exchange) -> torch.Tensor:
        """Compute the pairs of this replica's experts and send the results to the replica of each token, which sums
        them."""
        dp_metadata = get_forward_context().dp_metadata
        assert dp_metadata is not None, "replicas that exchange tokens agree on their numbers of tokens"
        asked, local = self.share.asked, self.share.local
        products, pair_rows = exchange.across(
            asked, local, routed.hidden, routed.ids, self._products, dp_metadata.num_tokens_across_dp
        )
        if self._is_packed:
            return self._combine(products, pair_rows, routed)
        return self._weighted_sum(products[pair_rows], routed)

    def _products(self, hidden: torch.Tensor, counts: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The outputs of the local experts for their runs of `hidden[tokens]`; 0 after the last run.

        # [rows, hidden_size], [local experts], [pairs] int64 -> [pairs, hidden_size]
        """
        inner = self.activation(grouped_linear(hidden, self.w13, self.w13_bias, counts, tokens=tokens))
        products = grouped_linear(inner, self.w2, self.outer_bias, counts)
        if self.observer is not None:
            used = counts[: len(self.local_experts)] > 0
            first = torch.where(used.any(), used.to(torch.int64).argmax(), -1)
            self.observer(ExpertRow(hidden[tokens[0]], first, inner[0], products[0]))
        return products

    @property
    def outer_bias(self) -> torch.Tensor | None:
        """The bias of the down projection; on one rank only if experts are sharded, since the sum must contain it
        once."""
        return None if self.split.rank else self.w2_bias

    def _combine(self, products: torch.Tensor, pair_rows: torch.Tensor, routed: Routed) -> torch.Tensor:
        """As `_weighted_sum`, by operators. # [pairs, hidden_size], [tokens, top_k] the row of each pair"""
        return expert_ops.combine(products, routed.weights, pair_rows, routed.shared, routed.gate)

    def _weighted_sum(self, by_token: torch.Tensor, routed: Routed) -> torch.Tensor:
        """This rank's partial sum of each token's experts. # [tokens, top_k, hidden_size]"""
        combined = (by_token * routed.weights.unsqueeze(-1)).sum(1)  # float32, the dtype of the weights
        return self._add(combined.to(by_token.dtype), routed)

    def _sum(self, part: torch.Tensor) -> torch.Tensor:
        """Reduce partial sums over the ranks, unless the caller does."""
        return self.parallel.all_reduce(part) if self.reduces else part

    @staticmethod
    def _add(sums: torch.Tensor, routed: Routed) -> torch.Tensor:
        shared, gate = routed.shared, routed.gate
        if shared is None:
            return sums
        return sums + (shared if gate is None else (shared * gate.sigmoid()).to(shared.dtype))

    def _part_by_triton(self, routed: Routed, w13: nn.Parameter, w2: nn.Parameter) -> torch.Tensor:
        """The partial sum on a GPU, without reading the routing on the host."""
        import models.ops.triton.expert_products as products_kernels
        import models.ops.triton.expert_routing as routing_kernels

        hidden, weights, ids, shared, gate, rounded = routed
        expert_map = self.expert_map
        experts = ids if expert_map is None else expert_map[ids]
        num_pairs, held = ids.numel(), len(self.local_experts)
        pairs = routing_kernels.moe_sort(experts, held, routing_kernels.block_of(num_pairs, self.num_experts))
        gating = gating_of(self.activation)
        inner = products_kernels.grouped_products(
            hidden, operand_of(w13), self.w13_bias, pairs, num_pairs, gating, rounded=rounded
        )
        if gating is None:
            inner = self.activation(inner)
        products = products_kernels.grouped_products(inner, operand_of(w2), self.outer_bias, pairs, num_pairs)
        if self.observer is not None:
            self.observer(ExpertRow(hidden[0], experts[0, 0], inner[0], products[0]))
        return routing_kernels.moe_combine(products, weights, experts, held, shared, gate)

    def kernel_cases(self, dtype: torch.dtype, max_tokens: int) -> "Iterator[Case]":
        """The self-test cases of the calls that a pass with suspended kernels recorded."""
        from models.ops.triton.cases.experts import ExpertsCase, SortCase

        for top_k, has_shared_expert, has_gate in sorted(self._routed):
            weights = operand_of(self.w13), operand_of(self.w2)
            parts = {len(own) for weight in weights if isinstance(weight, MixedStack) for own in weight.experts}
            for held in sorted({len(self.local_experts), *parts}):
                yield SortCase(held, self.num_experts, top_k, max_tokens)
            yield ExpertsCase(
                *weights,
                gating_of(self.activation),
                self.activation,
                self.num_experts,
                top_k,
                dtype,
                max_tokens,
                self.w13_bias,
                self.w2_bias,
                self.expert_map,
                has_shared_expert=has_shared_expert,
                has_gate=has_shared_expert and has_gate,
            )

    def _expert_map(self) -> torch.Tensor:
        """Each expert's index on this rank; one past the last index for experts of other ranks and for padding."""
        indices = torch.full((self.num_experts + 1,), len(self.local_experts))
        indices[self.local_experts.start : self.local_experts.stop] = torch.arange(len(self.local_experts))
        return indices

    @property
    def _first_names(self) -> dict[str, str]:
        gate, up = self.names.gate, self.names.up
        return {up: UP} if gate is None else {gate: GATE, up: UP}

    def _sources(self, parts: dict[str, str], stacked: str, kind: str) -> tuple[SourceNames, ...]:
        each = {
            f"experts.{expert}.{name}.{kind}": (expert, part)
            for expert in range(self.num_experts)
            for name, part in parts.items()
        }
        return each, {stacked: _PLAIN_STACK if self.has_plain_stacks else _OTHER_STACK}

    def _load_gate_up(self, parameter: nn.Parameter, loaded: torch.Tensor, shard: WeightPart) -> None:
        """Load the rank's rows of gate, where there are gates, then of up."""
        whole, local = self.intermediate_size, parameter.shape[1] // self.first_parts
        first = self.split.rank * local
        if is_stacked(shard):
            require_shape(loaded, (self.num_experts, self.first_parts * whole, *parameter.shape[2:]))
            for index, number in enumerate(self.local_experts):
                for row in range(self.first_parts):
                    start = row * whole + first
                    fill_rows(parameter, row * local, loaded[number][start : start + local], index)
            return
        assert isinstance(shard, tuple)
        number, part = shard
        require_shape(loaded, (whole, *parameter.shape[2:]))
        if number in self.local_experts:
            row = local if part == UP and self.first_parts > 1 else 0
            fill_rows(parameter, row, loaded[first : first + local], number - self.local_experts.start)

    def _load_down(self, parameter: nn.Parameter, loaded: torch.Tensor, shard: WeightPart) -> None:
        """Load the rank's columns, or the whole bias."""
        hidden_size = parameter.shape[1]
        columns = () if parameter is self.w2_bias else (self.intermediate_size,)
        if is_stacked(shard):
            require_shape(loaded, (self.num_experts, hidden_size, *columns))
            for index, number in enumerate(self.local_experts):
                fill_rows(parameter, 0, self._columns(loaded[number], parameter), index)
            return
        assert isinstance(shard, tuple)
        number, _ = shard
        require_shape(loaded, (hidden_size, *columns))
        if number in self.local_experts:
            fill_rows(parameter, 0, self._columns(loaded, parameter), number - self.local_experts.start)

    def _columns(self, loaded: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
        if parameter is self.w2_bias:
            return loaded
        local = parameter.shape[2]
        return loaded.narrow(-1, self.split.rank * local, local)


def _bytes(rows: torch.Tensor) -> torch.Tensor:
    return rows.contiguous().view(torch.uint8)


def _are_stored(*weights: nn.Parameter) -> bool:
    return any(stored_of(weight) is not None for weight in weights)


def _are_for_kernels(*weights: nn.Parameter) -> bool:
    return all(stored_of(weight) is not None or triton.runs(weight, operator="moe") for weight in weights)
