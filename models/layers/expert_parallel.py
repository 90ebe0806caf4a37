"""Which experts a rank holds, and how tokens reach those of other replicas. Used by `FusedMoE`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from models.parallel import Exchange, TensorParallel

Compute: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""`(rows [n, size], counts [local experts], places [n])`: `rows[places]`, sorted by expert, through the experts."""


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

    def across(
        self, hidden: torch.Tensor, ids: torch.Tensor, compute: Compute, *, is_dummy: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the asked experts of all replicas make of this rank's tokens, and where each pair's row is.

        # [tokens, size], [tokens, top_k] int64 -> [tokens * top_k, size], [tokens, top_k] int64

        Rows of pairs that other ranks see to are 0, and all of them where the tokens are dummies (`is_dummy`), for
        which no expert of another replica works. Each row is computed whole, by one expert, and comes back to where it
        was sent from: what a token gets does not depend on who else sent any.
        """
        assert self.exchange is not None
        num_tokens, top_k = ids.shape
        num_local = len(self.local)
        num_replicas = len(self.asked) // num_local
        elsewhere = len(self.asked)
        numbers = (ids - self.asked.start).flatten()
        if is_dummy:
            numbers = torch.full_like(numbers, elsewhere)
        numbers = torch.where((numbers >= 0) & (numbers < elsewhere), numbers, elsewhere)
        order = numbers.argsort(stable=True)
        counts = numbers.bincount(minlength=elsewhere + 1)[:elsewhere].view(num_replicas, num_local)
        one_each = [1] * num_replicas
        # [replicas, local experts], what each replica asks of the experts here
        asked_here = self.exchange.all_to_all(counts, one_each, one_each)
        sent, received = counts.sum(1).tolist(), asked_here.sum(1).tolist()
        num_sent = sum(sent)
        arrived = self.exchange.all_to_all(hidden[order[:num_sent] // top_k], sent, received)
        # They come by replica, and of each by expert.
        experts = torch.arange(num_local, device=ids.device).repeat(num_replicas)
        by_expert = experts.repeat_interleave(asked_here.flatten()).argsort(stable=True)
        results = torch.empty_like(arrived)
        if len(arrived):
            results[by_expert] = compute(arrived, asked_here.sum(0), by_expert)
        products = hidden.new_zeros(num_tokens * top_k, hidden.shape[1])
        products[:num_sent] = self.exchange.all_to_all(results, received, sent)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=ids.device)
        return products, places.view(num_tokens, top_k)
