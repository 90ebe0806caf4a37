"""`AllToAllExchange`: tokens to the experts of other replicas and back, by a library's all-to-alls."""

from abc import ABC, abstractmethod

import torch

from models.parallel import Compute


class AllToAllExchange(ABC):
    """Two all-to-alls a layer: every replica's tokens to all others, and what the experts made of them back.

    How many come is known before, of the step and of what the tokens ask, so nobody has to tell it first. A token goes
    to each replica once, not to each expert.
    """

    @abstractmethod
    def all_to_all(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """To each replica so many of the rows, in the order of replicas; what they sent here, in that order.

        # [sum of sent, ...] -> [sum of received, ...]
        """

    def across(
        self,
        asked: range,
        local: range,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        compute: Compute,
        num_tokens_across_dp: tuple[int, ...],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Exchange`."""
        num_replicas, num_local = len(num_tokens_across_dp), len(local)
        replica = (local.start - asked.start) // num_local
        num_own, top_k = num_tokens_across_dp[replica], ids.shape[1]
        all_hidden, all_ids = self._gather(hidden[:num_own], ids[:num_own], num_tokens_across_dp, replica)

        # Pairs that are asked here, by replica and in the order of its tokens; then by expert.
        experts = (all_ids - local.start).flatten()
        here = ((experts >= 0) & (experts < num_local)).nonzero().flatten()
        order = experts[here].argsort(stable=True)
        counts = experts[here].bincount(minlength=num_local)
        answers = hidden.new_empty(len(here), hidden.shape[1])
        if len(here):
            answers[order] = compute(all_hidden, counts, here[order] // top_k)

        # Which replica answers each own pair; past the last where none does.
        answerers = (ids[:num_own] - asked.start).flatten()
        answerers = torch.where((answerers >= 0) & (answerers < len(asked)), answerers // num_local, num_replicas)
        by_answerer = answerers.argsort(stable=True)
        ends = torch.tensor(num_tokens_across_dp).cumsum(0) * top_k
        up_to = torch.searchsorted(here, ends.to(here.device))
        received = answerers.bincount(minlength=num_replicas + 1)[:num_replicas]
        sent = up_to.diff(prepend=up_to.new_zeros(1))
        to_each, from_each = torch.stack((sent, received)).tolist()
        products = hidden.new_zeros(ids.numel() + 1, hidden.shape[1])
        products[: sum(from_each)] = self.all_to_all(answers, to_each, from_each)
        places = torch.full((ids.numel(),), ids.numel(), device=ids.device)
        places[by_answerer[: sum(from_each)]] = torch.arange(sum(from_each), device=ids.device)
        return products, places.view(ids.shape)

    def _gather(
        self, hidden: torch.Tensor, ids: torch.Tensor, num_tokens: tuple[int, ...], replica: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens of all replicas, and whom they ask. # [own, size], [own, top_k] -> [all, size], [all, top_k]"""
        own_ids, own_hidden = (part.contiguous().view(torch.uint8) for part in (ids.int(), hidden))
        own = torch.cat((own_ids, own_hidden), 1).repeat(len(num_tokens), 1)
        arrived = self.all_to_all(own, [num_tokens[replica]] * len(num_tokens), list(num_tokens))
        all_ids, all_hidden = arrived[:, : own_ids.shape[1]], arrived[:, own_ids.shape[1] :]
        return all_hidden.contiguous().view(hidden.dtype), all_ids.contiguous().view(torch.int32).long()
