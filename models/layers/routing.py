"""Routers of mixtures of experts: they select the experts of each token and their weights, which `FusedMoE` reads.

Among equal scores, all implementations select the expert of the lowest index.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn

from models.config.fields import Fields
from models.errors import CheckpointError
from models.layers.linear import float_logits, logits
from models.layers.parameter import WeightPart, empty_parameter, load_whole
from models.ops import triton
from models.ops.cpu import experts as expert_ops
from models.ops.cpu import runtime, structures
from models.ops.torch_ops import top_k_lower_first

if TYPE_CHECKING:
    from models.ops.self_test import Case

Scoring: TypeAlias = Literal["sigmoid", "softmax"]
_SCORINGS = {"sigmoid": structures.SIGMOID, "softmax": structures.SOFTMAX}


def softmax_top_k(logits: torch.Tensor, top_k: int, *, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Select the top-k experts by probability. `renormalize`: scale their weights to a sum of 1 (Mixtral, Qwen3).

    # [tokens, experts] -> [tokens, top_k] float32, [tokens, top_k] int64
    """
    weights, ids = top_k_lower_first(logits.softmax(-1, dtype=torch.float32), top_k)
    return (weights / weights.sum(-1, keepdim=True) if renormalize else weights), ids


def grouped_top_k(
    logits: torch.Tensor,
    top_k: int,
    *,
    renormalize: bool,
    scoring: Scoring = "sigmoid",
    correction_bias: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    scaling_factor: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select the top-k experts within the top groups of experts (DeepSeek-V2, section 2.2; DeepSeek-V3, section
    2.1.2).

    A correction bias [experts] is added to the scores for the selection but not for the weights. A group's score is
    the sum of its two best experts' scores if there is a correction bias, else its best expert's score.

    # [tokens, experts] -> [tokens, top_k] float32, [tokens, top_k] int64
    """
    logits = logits.float()
    scores = logits.sigmoid() if scoring == "sigmoid" else logits.softmax(-1)
    choice = scores if correction_bias is None else scores + correction_bias
    if top_groups < num_groups:
        groups = choice.view(len(choice), num_groups, -1)
        group_scores = groups.amax(-1) if correction_bias is None else groups.topk(2, dim=-1).values.sum(-1)
        _, best = top_k_lower_first(group_scores, top_groups)
        excluded = torch.ones_like(group_scores, dtype=torch.bool).scatter_(-1, best, False)
        choice = groups.masked_fill(excluded.unsqueeze(-1), -torch.inf).flatten(-2)
    _, ids = top_k_lower_first(choice, top_k)
    weights = scores.gather(-1, ids)
    if renormalize:
        # The epsilon avoids 0 / 0 if all scores of a token underflow in float32.
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scaling_factor, ids


def sparse_mixer(logits: torch.Tensor, jitter: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Select two experts, one after the other (GRIN, Liu et al., 2024, section 2.2, without its noise).

    Each selection takes the best expert that is left. Its weight is its softmax probability among the experts left
    whose score is within a relative distance of `2 * jitter` of the best one; the distance is relative to the larger
    absolute value of the two scores.

    # [tokens, experts] -> [tokens, 2] float32, [tokens, 2] int64
    """
    scores = left = logits.float()
    weights, ids = [], []
    for _ in range(2):
        best, chosen = top_k_lower_first(left, 1)
        distance = (best - scores) / torch.maximum(scores.abs(), best)
        weights.append(left.masked_fill(distance > 2 * jitter, -torch.inf).softmax(-1).gather(-1, chosen))
        ids.append(chosen)
        left = left.scatter(-1, chosen, -torch.inf)
    return torch.cat(weights, -1), torch.cat(ids, -1)


def experts_per_token(fields: Fields, eligible: int) -> int:
    """Read `num_experts_per_tok` of config.json, which may be at most `eligible`."""
    top_k = fields.integer("num_experts_per_tok")
    if top_k > eligible:
        raise fields.invalid("num_experts_per_tok", f"at most {eligible}, the experts that a token may choose from")
    return top_k


def groups_of_experts(fields: Fields, num_experts: int, *, corrected: bool) -> tuple[int, int]:
    """Read `n_group` and `topk_group` of config.json: the number of groups, and of those selected per token.

    `corrected`: whether the router has a correction bias.
    """
    num_groups, top_groups = fields.integer("n_group"), fields.integer("topk_group")
    if top_groups > num_groups:
        raise fields.invalid("topk_group", f"at most n_group, {num_groups}")
    # With a correction bias, a group's score is the sum of its two best experts' scores.
    minimum = 2 if corrected and top_groups < num_groups else 1
    if num_experts % num_groups or num_experts < minimum * num_groups:
        raise fields.invalid("n_group", f"a divisor of n_routed_experts, {num_experts}, for {minimum} or more a group")
    return num_groups, top_groups


class GroupedRouter(nn.Module):
    """The `gate` of DeepSeek and GLM, in float32, because rounding would change the selection among close scores."""

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        renormalize: bool,
        scoring: Scoring = "sigmoid",
        has_correction_bias: bool = True,
        correction_name: str | None = None,
        num_groups: int = 1,
        top_groups: int = 1,
        scaling_factor: float = 1.0,
    ) -> None:
        """`correction_name`: name of the correction bias in checkpoints, relative to the router's parent; None if it
        is `e_score_correction_bias` of the router.
        """
        super().__init__()
        self.top_k, self.renormalize, self.scaling_factor = top_k, renormalize, scaling_factor
        self.scoring, self.num_groups, self.top_groups = scoring, num_groups, top_groups
        self.weight = empty_parameter(num_experts, hidden_size, weight_loader=load_whole, dtype=torch.float32)
        self.e_score_correction_bias = (
            empty_parameter(
                num_experts,
                weight_loader=_load_correction,
                dtype=torch.float32,
                sources=() if correction_name is None else ({correction_name: None},),
            )
            if has_correction_bias
            else None
        )

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """# [tokens, hidden_size] -> [tokens, top_k] float32, [tokens, top_k] int64"""
        scores = float_logits(hidden, self.weight)
        if runtime.runs(hidden):
            return expert_ops.route(
                scores,
                self.top_k,
                scoring=_SCORINGS[self.scoring],
                renormalize=self.renormalize,
                correction=self.e_score_correction_bias,
                num_groups=self.num_groups,
                top_groups=self.top_groups,
                scaling_factor=self.scaling_factor,
            )
        if triton.runs(scores, operator="moe"):
            import models.ops.triton.expert_routing as kernels

            return kernels.moe_route(
                scores,
                self.top_k,
                sigmoid=self.scoring == "sigmoid",
                renormalize=self.renormalize,
                correction=self.e_score_correction_bias,
                num_groups=self.num_groups,
                top_groups=self.top_groups,
                scaling_factor=self.scaling_factor,
            )
        return grouped_top_k(
            scores,
            self.top_k,
            renormalize=self.renormalize,
            scoring=self.scoring,
            correction_bias=self.e_score_correction_bias,
            num_groups=self.num_groups,
            top_groups=self.top_groups,
            scaling_factor=self.scaling_factor,
        )

    def kernel_cases(self, dtype: torch.dtype, max_tokens: int) -> "Iterator[Case]":
        """Yield the check case of the routing kernel."""
        from models.ops.triton.cases.experts import RouteCase

        del dtype, max_tokens
        yield RouteCase(
            len(self.weight),
            self.top_k,
            self.scoring == "sigmoid",
            self.renormalize,
            self.e_score_correction_bias is not None,
            self.num_groups,
            self.top_groups,
            self.scaling_factor,
        )


def _load_correction(parameter: nn.Parameter, loaded: torch.Tensor, part: WeightPart) -> None:
    """Load a bias of shape [experts] or [1, experts]."""
    load_whole(parameter, loaded[0] if loaded.dim() == 2 and len(loaded) == 1 else loaded, part)


class SoftmaxRouter(nn.Module):
    """The `gate` of Mixtral and Qwen3: softmax over all experts, then top-k."""

    def __init__(
        self, hidden_size: int, num_experts: int, top_k: int, *, renormalize: bool, scales_name: str | None = None
    ) -> None:
        """`scales_name`: name in checkpoints of a factor per expert for the weights, relative to the router's parent;
        None if there is none.
        """
        super().__init__()
        self.expert_scales = (
            None
            if scales_name is None
            else empty_parameter(
                num_experts, weight_loader=load_whole, dtype=torch.float32, sources=({scales_name: None},)
            )
        )
        self.top_k, self.renormalize = top_k, renormalize
        # This weight is not quantised: it is small, and rounding would change the selection of experts.
        self.weight = empty_parameter(
            num_experts,
            hidden_size,
            weight_loader=load_whole,
            is_product=True,
            min_bits=16,
        )

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """# [tokens, hidden_size] -> [tokens, top_k] float32, [tokens, top_k] int64"""
        scores, scales = logits(hidden, self.weight), self.expert_scales
        if runtime.runs(hidden):
            return expert_ops.route(
                scores, self.top_k, scoring=structures.SOFTMAX, renormalize=self.renormalize, expert_scales=scales
            )
        if triton.runs(scores, operator="moe"):
            import models.ops.triton.expert_routing as kernels

            weights, ids = kernels.moe_route(scores, self.top_k, sigmoid=False, renormalize=self.renormalize)
        else:
            weights, ids = softmax_top_k(scores, self.top_k, renormalize=self.renormalize)
        return (weights if scales is None else weights * scales[ids]), ids

    def kernel_cases(self, dtype: torch.dtype, max_tokens: int) -> "Iterator[Case]":
        """Yield the check case of the routing kernel."""
        from models.ops.triton.cases.experts import RouteCase

        del dtype, max_tokens
        yield RouteCase(len(self.weight), self.top_k, sigmoid=False, renormalize=self.renormalize)


class HashRouter(nn.Module):
    """The `gate` of DeepSeek-V4: selects a token's experts by a table of token ids, or by score.

    Their weights are the scores in both cases.
    """

    def __init__(
        self, hidden_size: int, num_experts: int, top_k: int, *, scaling_factor: float, vocab_size: int | None
    ) -> None:
        """`vocab_size`: token ids of the table; None if experts are selected by score."""
        super().__init__()
        self.top_k, self.scaling_factor = top_k, scaling_factor
        self.weight = empty_parameter(num_experts, hidden_size, weight_loader=load_whole, dtype=torch.float32)
        self.tid2eid: nn.Parameter | None = None
        self.e_score_correction_bias: nn.Parameter | None = None
        if vocab_size is not None:
            self.tid2eid = empty_parameter(vocab_size, top_k, weight_loader=self._load_table, dtype=torch.int64)
        else:
            self.e_score_correction_bias = empty_parameter(num_experts, weight_loader=load_whole, dtype=torch.float32)

    def forward(self, hidden: torch.Tensor, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """# [tokens, hidden_size], [tokens] int64 -> [tokens, top_k] float32, [tokens, top_k] int64"""
        logits = float_logits(hidden, self.weight)
        if runtime.runs(hidden):
            return expert_ops.route(
                logits,
                self.top_k,
                scoring=structures.SQRT_SOFTPLUS,
                renormalize=True,
                correction=self.e_score_correction_bias,
                scaling_factor=self.scaling_factor,
                table=None if self.tid2eid is None else (self.tid2eid, input_ids),
            )
        scores = F.softplus(logits).sqrt()
        if self.tid2eid is not None:
            ids: torch.Tensor = self.tid2eid[input_ids]
        else:
            assert self.e_score_correction_bias is not None, "a router has one of the two"
            ids = top_k_lower_first(scores + self.e_score_correction_bias, self.top_k)[1]
        weights = scores.gather(1, ids)
        return weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.scaling_factor, ids

    def _load_table(self, parameter: nn.Parameter, loaded: torch.Tensor, part: WeightPart) -> None:
        if loaded.numel() and not 0 <= int(loaded.min()) <= int(loaded.max()) < len(self.weight):
            raise CheckpointError(
                f"a table of experts by token names experts from {int(loaded.min())} to {int(loaded.max())}, but "
                f"n_routed_experts is {len(self.weight)}; download the checkpoint again"
            )
        load_whole(parameter, loaded, part)


class SparseMixerRouter(nn.Module):
    """The `gate` of Phi-3.5-MoE: `sparse_mixer` of the logits, in torch on every device."""

    def __init__(self, hidden_size: int, num_experts: int, *, jitter: float) -> None:
        """`jitter`: see `sparse_mixer`."""
        super().__init__()
        self.jitter = jitter
        # This weight is not quantised: it is small, and rounding would change the selection of experts.
        self.weight = empty_parameter(num_experts, hidden_size, weight_loader=load_whole, is_product=True, min_bits=16)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """# [tokens, hidden_size] -> [tokens, 2] float32, [tokens, 2] int64"""
        return sparse_mixer(logits(hidden, self.weight), self.jitter)
