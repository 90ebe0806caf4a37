"""Torch references and self-test cases of expert routing and of mixtures of experts."""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from models.ops.self_test import FLOAT32, Case, Finding, Problems, exact_match, relative_error, rounding_bound
from models.ops.triton.cases.elementwise import reference_gated
from models.ops.triton.cases.quantized_products import as_multiplied, ends_of, part_of, product_of, random_weight
from models.ops.triton.expert_products import grouped_products
from models.ops.triton.expert_routing import SortedPairs, block_of, moe_combine, moe_route, moe_sort
from models.ops.types import SILU, Gating
from models.ops.weight_formats import MixedStack, StackOperand, expert_of

# Routing. A stable sort, since `topk` leaves the order of equal scores undefined.


def reference_moe_route(
    logits: torch.Tensor,
    top_k: int,
    *,
    sigmoid: bool,
    renormalize: bool,
    correction: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    scaling_factor: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the kernel's launcher."""
    scores = logits.float().sigmoid() if sigmoid else logits.float().softmax(-1)
    choice = scores if correction is None else scores + correction
    if top_groups < num_groups:
        groups = choice.view(len(choice), num_groups, -1)
        counted = 1 if correction is None else 2
        goodness = groups.sort(-1, descending=True).values[..., :counted].sum(-1)
        best = goodness.argsort(dim=-1, descending=True, stable=True)[:, :top_groups]
        left_out = torch.ones_like(goodness, dtype=torch.bool).scatter_(-1, best, False)
        choice = groups.masked_fill(left_out[..., None], -torch.inf).flatten(1)
    ids = choice.argsort(dim=-1, descending=True, stable=True)[:, :top_k]
    weights = scores.gather(-1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scaling_factor, ids


# Sorting of pairs: the expert and the pairs of each block, in order.


def reference_moe_sort(ids: torch.Tensor, num_experts: int, block: int) -> list[tuple[int, list[int]]]:
    """Blocks of up to `block` pairs, as they follow each other. # ids [tokens, top_k] int64"""
    experts = ids.flatten()
    blocks = []
    for expert in range(num_experts):
        pairs = (experts == expert).nonzero()[:, 0].tolist()
        blocks += [(expert, pairs[first : first + block]) for first in range(0, len(pairs), block)]
    return blocks


# Products of experts in float32, and the weighted sum of each token's experts.


def reference_moe_gemm(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    ids: torch.Tensor,
    *,
    gating: Gating | None = None,
) -> torch.Tensor:
    """Each pair's row by its expert's weight; zero for experts of other ranks. # ids [tokens, top_k] int64"""
    experts = ids.flatten()
    pairs = rows.repeat_interleave(len(experts) // len(rows), 0).float()
    here = experts < len(weight)
    products = pairs.new_zeros(len(experts), weight.shape[1])
    chosen = weight[experts[here]].float()
    products[here] = (chosen @ pairs[here, :, None])[:, :, 0]
    if bias is not None:
        products[here] += bias[experts[here]].float()
    if gating is not None:
        products = reference_gated(products, gating.activation, alpha=gating.alpha, limit=gating.limit)
    return products.to(rows.dtype)


def reference_moe_combine(
    products: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    num_experts: int,
    shared: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
) -> torch.Tensor:
    """As the kernel's launcher."""
    by_token = products.float().view(*ids.shape, -1).masked_fill((ids >= num_experts)[..., None], 0.0)
    total = (by_token * weights[..., None]).sum(1).to(products.dtype)
    if shared is None:
        return total
    return total + (shared if gate is None else (shared.float() * gate.sigmoid()).to(shared.dtype))


_TOKENS = 9
_PAIRS = 16
"""Pairs that are compared."""
_PAIRS_OF_AN_EXPERT = (16, 128)
"""Pairs of an expert above which `block_of` takes larger blocks."""
_SUMS = 32
"""Tokens whose sums are compared."""
_STEEPEST = 1.13
"""The largest slope of an activation."""


@dataclass(frozen=True, slots=True)
class RouteCase(Case):
    """The choice of each token's experts."""

    operator: ClassVar[str] = "moe"
    experts: int
    top_k: int
    sigmoid: bool
    renormalize: bool
    has_correction: bool = False
    num_groups: int = 1
    top_groups: int = 1
    scaling_factor: float = 1.0

    def compare(self, problems: Problems) -> Iterator[Finding]:
        """See `Case`: chosen experts must score as high as the best and have their own weights; near ties may go
        either way.
        """
        logits = problems.normal(_TOKENS, self.experts, scale=2.0)
        correction = problems.normal(self.experts, scale=0.1) if self.has_correction else None
        how: dict[str, Any] = {
            "sigmoid": self.sigmoid,
            "num_groups": self.num_groups,
            "top_groups": self.top_groups,
            "correction": correction,
        }
        weights, ids = moe_route(
            logits, self.top_k, renormalize=self.renormalize, scaling_factor=self.scaling_factor, **how
        )
        of = f"a choice of {self.top_k} of {self.experts} experts"
        ordered = ids.sort(-1).values
        is_choice = bool(((ids >= 0) & (ids < self.experts)).all() and (ordered[:, 1:] > ordered[:, :-1]).all())
        yield Finding(of, exact_match(is_choice))
        _, best = reference_moe_route(logits, self.top_k, renormalize=False, **how)
        every = logits.sigmoid() if self.sigmoid else logits.softmax(-1)
        goodness = every if correction is None else every + correction
        found, expected = (goodness.gather(-1, each).sort(-1).values for each in (ids, best))
        yield Finding(
            of, relative_error(found, expected, rounding_bound(torch.float32) * expected.abs().clamp(min=1e-3))
        )
        exact = every.gather(-1, ids)
        if self.renormalize:
            exact = exact / (exact.sum(-1, keepdim=True) + 1e-20)
        exact = exact * self.scaling_factor
        yield Finding(f"weights of {of}", relative_error(weights, exact, rounding_bound(torch.float32) * exact.abs()))


@dataclass(frozen=True, slots=True)
class SortCase(Case):
    """The order of pairs by expert, which later kernels take addresses from.

    It is compared before anything else: it rests on sorts, histograms and gathers within a program, which differ most
    between waves of 32 and of 64 lanes, and a wrong address may end the process.
    """

    operator: ClassVar[str] = "moe"
    gives_addresses: ClassVar[bool] = True
    held: int
    """Experts of this rank."""
    num_experts: int
    top_k: int
    max_tokens: int

    def compare(self, problems: Problems) -> Iterator[Finding]:
        """See `Case`: pairs of one chunk and of several, of experts in every order, in blocks of each size in use."""
        sizes = {(each + 1) * self.num_experts // self.top_k + 1 for each in _PAIRS_OF_AN_EXPERT}
        for tokens in sorted({min(tokens, self.max_tokens) for tokens in (1, 5, 300, 1100, *sizes)}):
            ids = problems.distinct_rows(self.num_experts, tokens, self.top_k)
            ids = torch.where(ids < self.held, ids, self.num_experts)
            block = block_of(ids.numel(), self.num_experts)
            found = _blocks(moe_sort(ids, self.held, block))
            of = f"the order of {tokens} tokens by {self.top_k} of {self.num_experts} experts"
            yield Finding(of, exact_match(found == reference_moe_sort(ids.cpu(), self.held, block)))


@dataclass(frozen=True, slots=True)
class ExpertsCase(Case):
    """A layer of experts, with its own weights, of which no copy is made."""

    operator: ClassVar[str] = "moe"
    w13: StackOperand
    w2: StackOperand
    gating: Gating | None
    """None where the kernels have no such activation, and the layer's own computes it."""
    activation: Callable[[torch.Tensor], torch.Tensor]
    num_experts: int
    top_k: int
    dtype: torch.dtype
    max_tokens: int
    """Of a step."""
    w13_bias: torch.Tensor | None = None
    w2_bias: torch.Tensor | None = None
    expert_map: torch.Tensor | None = None
    """[num_experts], the index of each expert on this rank, beyond its own for others; None: it has all."""
    has_shared_expert: bool = False
    """Whether a shared expert's output is added to the sum."""
    has_gate: bool = False
    """Whether a gate scales the shared expert's output."""

    @property
    def key(self) -> Hashable:
        weights = tuple(
            tuple(
                (part.shape, part.dtype)
                if isinstance(part, torch.Tensor)
                else (part.kind, part.shape, part.scales.shape)
                for part in (weight.parts if isinstance(weight, MixedStack) else (weight,))
            )
            for weight in (self.w13, self.w2)
        )
        forms = self.w13_bias is not None, self.has_shared_expert, self.has_gate, self.gating
        return weights, forms, self.top_k, self.num_experts

    def compare(self, problems: Problems) -> Iterator[Finding]:
        """See `Case`: steps of as many tokens as select each block size."""
        num = self.num_experts
        for each in (0, *_PAIRS_OF_AN_EXPERT):
            tokens = (each + 1) * num // self.top_k + 1 if each else min(3, self.max_tokens)
            if tokens <= self.max_tokens:
                yield from self._of_tokens(problems, tokens)

    def _of_tokens(self, problems: Problems, tokens: int) -> Iterator[Finding]:
        held = self.w13.shape[0]
        hidden = problems.normal(tokens, self.w13.shape[2], dtype=self.dtype)
        chosen = problems.distinct_rows(self.num_experts, tokens, self.top_k)
        ids = chosen if self.expert_map is None else self.expert_map[chosen]
        num_pairs, of = ids.numel(), f"{tokens} tokens by {self.top_k} of {self.num_experts} experts"
        block = block_of(num_pairs, self.num_experts)
        pairs = moe_sort(ids, held, block)
        yield Finding(f"the order of {of}", exact_match(_blocks(pairs) == reference_moe_sort(ids.cpu(), held, block)))

        gating = self.gating
        inner = grouped_products(hidden, self.w13, self.w13_bias, pairs, num_pairs, gating)
        compared = problems.sample(num_pairs, _PAIRS)
        experts = ids.flatten()[compared].tolist()
        here = [(pair, expert) for pair, expert in zip(compared, experts, strict=True) if expert < held]
        first, second = _Side(self.w13, self.w13_bias, gating), _Side(self.w2, self.w2_bias, None)
        for pair, expert in here:
            row = hidden[pair // self.top_k]
            yield Finding(f"gates of {of}", first.error(row, expert, inner[pair], self.dtype))
        if gating is None:
            inner = self.activation(inner)
        products = grouped_products(inner, self.w2, self.w2_bias, pairs, num_pairs)
        for pair, expert in here:
            yield Finding(f"products of {of}", second.error(inner[pair], expert, products[pair], self.dtype))
        yield from self._sums(problems, products, ids, of)

    def _sums(self, problems: Problems, products: torch.Tensor, ids: torch.Tensor, of: str) -> Iterator[Finding]:
        held, tokens, last = self.w13.shape[0], len(ids), slice(-_SUMS, None)
        weights = problems.near_one(*ids.shape) / ids.shape[1]
        routed = products.view(*ids.shape, -1)[last].flatten(0, 1), weights[last], ids[last], held
        total, magnitude = (reference_moe_combine(each.float(), *routed[1:]) for each in (routed[0], routed[0].abs()))
        bound = rounding_bound(self.dtype) * total.abs() + FLOAT32 * magnitude
        shared = gate = None
        if self.has_shared_expert:
            shared = problems.normal(tokens, products.shape[1], dtype=self.dtype)
            gate = problems.normal(tokens, 1) if self.has_gate else None
            of_last = shared[last].float(), None if gate is None else gate[last]
            routed_total, total = total, reference_moe_combine(routed[0].float(), *routed[1:], *of_last)
            bound = bound + rounding_bound(self.dtype) * ((total - routed_total).abs() + total.abs())
        found = moe_combine(products, weights, ids, held, shared, gate)
        yield Finding(f"the sum of {of}", relative_error(found[last], total, bound))


class _Side(NamedTuple):
    """One of a layer's two products."""

    weight: StackOperand
    bias: torch.Tensor | None
    gating: Gating | None

    def error(self, row: torch.Tensor, expert: int, found: torch.Tensor, dtype: torch.dtype) -> float:
        """The relative error of one pair's product. # [inputs], [outputs]"""
        x = as_multiplied(row[None], expert_of(self.weight, expert)[0])
        worst = 0.0
        for some in ends_of(len(found)):
            exact, bound = self._product(x, expert, some, dtype)
            if self.gating is not None:
                behind = slice(some.start + len(found), some.stop + len(found))
                up, up_bound = self._product(x, expert, behind, dtype)
                activation, alpha, limit = self.gating
                gate, size = exact, up.abs() + 1
                exact = reference_gated(torch.cat((gate, up), -1), activation, alpha=alpha, limit=limit)
                bound = _STEEPEST * bound * (size + up_bound) + gate.abs() * (up_bound + FLOAT32 * size)
            worst = max(worst, relative_error(found[None, some], exact, bound + rounding_bound(dtype) * exact.abs()))
        return worst

    def _product(
        self, x: torch.Tensor, expert: int, some: slice, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        of_form, at = expert_of(self.weight, expert)
        weight = part_of(of_form, (at, some), dtype)
        return product_of(x, weight, None if self.bias is None else self.bias[expert, some], dtype)


def _blocks(pairs: SortedPairs) -> list[tuple[int, list[int]]]:
    """The sorted pairs in the reference's form."""
    table = pairs.pairs.view(-1, pairs.block).cpu()
    count = int(pairs.num_blocks)
    experts, rows = pairs.block_experts[:count].tolist(), pairs.block_rows[:count].tolist()
    return [(expert, table[nth, :row].tolist()) for nth, (expert, row) in enumerate(zip(experts, rows, strict=True))]


def _random_experts(
    device: torch.device,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    kind: str | None = None,
    *,
    max_tokens: int,
    activation: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> ExpertsCase:
    """Two of each token's experts; `shape`: experts, hidden size and intermediate size; `activation`: instead of
    SwiGLU. Dense layers have a shared expert.
    """
    problems, (experts, hidden, inner) = Problems(device), shape
    w13, w2 = (
        problems.normal(experts, *size, dtype=dtype, scale=size[-1] ** -0.5)
        if kind is None
        else _mixed(problems, experts, *size, dtype=dtype)
        if kind == "mixed"
        else random_weight(problems, kind, experts, *size, dtype=dtype)
        for size in ((2 * inner, hidden), (hidden, inner))
    )
    gating = Gating(SILU) if activation is None else None
    is_dense, by = kind is None, activation or _up
    return ExpertsCase(
        w13, w2, gating, by, experts, 2, dtype, max_tokens, has_shared_expert=is_dense, has_gate=activation is None
    )


def _mixed(problems: Problems, experts: int, *size: int, dtype: torch.dtype) -> MixedStack:
    """The last expert dense, those before it by turns in FP8 and in 8-bit integers."""
    homes = (*((expert % 2, expert // 2) for expert in range(experts - 1)), (2, 0))
    counts = experts // 2, (experts - 1) // 2
    quantized = (
        random_weight(problems, kind, count, *size, dtype=dtype)
        for kind, count in zip(("fp8", "int8"), counts, strict=True)
    )
    dense = problems.normal(1, *size, dtype=dtype, scale=size[-1] ** -0.5)
    return MixedStack.of((*quantized, dense), homes, problems.device)


def _up(gate_up: torch.Tensor) -> torch.Tensor:
    """An activation that no kernel has. # [tokens, 2 * features] -> [tokens, features]"""
    return gate_up.chunk(2, -1)[1]


def common_cases(device: torch.device) -> tuple[Case, ...]:
    """Eight experts of a model with a hidden size of 4096."""
    route = RouteCase(8, 2, sigmoid=False, renormalize=True)
    return SortCase(8, 8, 2, 2048), route, _random_experts(device, (8, 4096, 768), torch.bfloat16, max_tokens=2048)


def small_cases(device: torch.device) -> dict[str, Case]:
    """Sizes for Triton's interpreter."""
    cases: dict[str, Case] = {
        "the order of pairs": SortCase(12, 16, 3, 300),
        "routes by softmax": RouteCase(12, 4, sigmoid=False, renormalize=True),
        "routes by groups": RouteCase(32, 4, True, True, True, 4, 2, 2.5),
    }
    forms: dict[str, dict[str, Any]] = {
        "experts in bf16": {"dtype": torch.bfloat16},
        "experts in fp16 with an activation of its own": {"dtype": torch.float16, "activation": _up},
        "experts in FP8": {"dtype": torch.bfloat16, "kind": "fp8"},
        "experts in MXFP4": {"dtype": torch.bfloat16, "kind": "mxfp4"},
        "experts in 8-bit integers": {"dtype": torch.bfloat16, "kind": "int8"},
        "experts in three forms": {"dtype": torch.bfloat16, "kind": "mixed"},
    }
    return cases | {name: _random_experts(device, (4, 64, 64), max_tokens=40, **form) for name, form in forms.items()}
