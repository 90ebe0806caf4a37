"""`TensorParallel`: which shard of each layer a rank holds, and how the ranks' partial results become one."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch

Compute: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""`(rows [n, size], counts [local experts], tokens [pairs])`: `rows[tokens]`, by expert, through the experts."""


class Collectives(Protocol):
    """Communication among the ranks of one tensor-parallel group. All ranks make the same calls in the same order."""

    @property
    def are_captured(self) -> bool:
        """Whether a graph of the device's captures them, where it has graphs."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `x`, on every rank; may overwrite `x`."""

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """On rank 0 all ranks' `x` side by side along the last dimension, in rank order; elsewhere `x` as it is."""

    def capturing(self) -> AbstractContextManager[None]:
        """Around the capture of a graph, and nothing that runs. An exception leaves it on all ranks, or on none."""


class Exchange(Protocol):
    """Communication among the ranks that have the same place in their replicas. All make the same calls in order."""

    def across(
        self,
        asked: range,
        local: range,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        compute: Compute,
        num_tokens_across_dp: tuple[int, ...],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the `asked` experts of all replicas make of this rank's tokens, and where each pair's row is.

        # [tokens, size], [tokens, top_k] int64 -> [rows, size], [tokens, top_k] int64

        `local`: those of `asked` that this rank computes. Rows of pairs that are not asked are 0, and all of them
        where the tokens are a dummy's, which count as 0 among those of all replicas (`num_tokens_across_dp`). Each row
        is computed whole, by one expert: what a token gets does not depend on who else sent any.
        """

    @property
    def num_bytes(self) -> int:
        """Of memory that replicas share, this one's part that the largest step commits."""

    def check(self) -> None:
        """Raise what `across` would have raised, had it not been a part of a recorded step."""


@dataclass(frozen=True, slots=True)
class ExpertParallel:
    """Whole experts on each rank, in place of a part of every expert; of one replica, or of all that exchange tokens.

    A rank computes for its replica what experts of its share are asked, and the other ranks of the replica the rest.
    The share is spread over the ranks of that place in all replicas.
    """

    replica: int = 0
    num_replicas: int = 1
    exchange: Exchange | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.replica < self.num_replicas:
            raise ValueError(f"the replica is {self.replica}; it must be between 0 and {self.num_replicas - 1}")
        if self.num_replicas > 1 and self.exchange is None:
            raise ValueError(f"{self.num_replicas} replicas share the experts out, but nothing joins them")


class _Alone:
    """Whether a rank exchanges nothing for now."""

    is_alone = False


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """A rank of a tensor-parallel group. One rank alone needs no collectives: its results are whole already."""

    rank: int = 0
    size: int = 1
    collectives: Collectives | None = None
    experts: ExpertParallel | None = None
    """How experts are shared out, where each is whole on one rank."""
    _state: _Alone = field(default_factory=_Alone, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"tensor-parallel rank is {self.rank}; it must be between 0 and {self.size - 1}")
        if self.size > 1 and self.collectives is None:
            raise ValueError(f"tensor-parallel size is {self.size}, but the ranks have no collectives to join them")

    @property
    def is_captured(self) -> bool:
        """Whether a graph captures what the ranks exchange in a pass."""
        return self.collectives is None or self.collectives.are_captured

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.collectives is None or self._state.is_alone else self.collectives.all_reduce(x)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        if self.collectives is None:
            return x
        if self._state.is_alone:
            # Copies, as the parts of the others take memory too.
            return x if self.rank else torch.cat([x.clone() for _ in range(self.size)], -1)
        return self.collectives.gather(x)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """For a pass whose results are nobody's: as much memory, but no other rank waits for what this one leaves out.

        Sums are this rank's part of them, and what is gathered is its own, as often as there are ranks.
        """
        self._state.is_alone = True
        try:
            yield
        finally:
            self._state.is_alone = False

    def agree(self, is_so: bool, device: torch.device) -> bool:
        """Whether something is so on all ranks, each of which asks."""
        if self.size == 1:
            return is_so
        return int(self.all_reduce(torch.full((1, 1), float(is_so), device=device)).item()) == self.size

    def capturing(self) -> AbstractContextManager[None]:
        """See `Collectives`."""
        return nullcontext() if self.collectives is None else self.collectives.capturing()

    def share(self, total: int, what: str) -> int:
        """A rank's part of `total`. Raises `ValueError` where the group's size does not divide it."""
        if total % self.size:
            raise ValueError(
                f"{what} is {total}, which {self.size} tensor-parallel ranks do not divide evenly; choose a size "
                f"that divides it"
            )
        return total // self.size


SINGLE_RANK = TensorParallel()
