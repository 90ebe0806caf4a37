"""`TensorParallel`: the shard of each layer that a rank holds, and the collectives that combine partial results."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch

from models.ops.types import NormWeight

Compute: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Called with rows [n, size], counts [local experts] and tokens [pairs]: the experts' outputs for `rows[tokens]`."""


class Collectives(Protocol):
    """Collectives of the ranks of one tensor-parallel group. All ranks make the same calls in the same order."""

    @property
    def are_captured(self) -> bool:
        """Whether captured graphs, if the device has any, can include the collectives."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `x`, on every rank; may overwrite `x`."""

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, norm: NormWeight
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """`RMSNorm.add_norm` of the sum of all ranks' `x`, as one operator; None, on all ranks alike, for other sums.

        # [tokens, size] each
        """

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """On rank 0 all ranks' `x` concatenated along the last dimension, in rank order; on other ranks `x` itself."""

    def broadcast(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Rank 0's token ids, on every rank; may overwrite `token_ids`. # [n] int64, of one length on all ranks"""

    def capturing(self) -> AbstractContextManager[None]:
        """A context for the capture of a graph, in which nothing runs. An exception is raised on all ranks or on
        none.
        """


class TokenExchange(ABC):
    """Exchange among the ranks of equal index in all replicas, in pieces whose sizes the host knows.

    Every replica receives the tokens of all, computes those routed to its experts, and returns a row for each token.
    So nothing is read from the device, and graphs can capture it. All ranks make the same calls in the same order.
    """

    are_captured = False
    """Whether captured graphs, if the device has any, can include the exchange."""

    def __init__(self, replica: int, num_replicas: int) -> None:
        self._replica, self._num_replicas = replica, num_replicas
        self.is_suspended = False
        """Whether only this replica's rows are used, several times: as much memory, and no communication."""

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Gather equally many rows from all replicas, in order. # [n, ...] -> [replicas * n, ...]"""
        if self.is_suspended:
            return rows.repeat(self._num_replicas, *[1] * (rows.dim() - 1))
        return self._all_gather(rows)

    def add_back(self, parts: torch.Tensor) -> torch.Tensor:
        """The sum of all replicas' results for this replica's rows, added in the order of replicas.

        # [replicas * n, size] -> [n, size]
        """
        received = parts if self.is_suspended else self._all_to_all(parts)
        by_replica = received.view(self._num_replicas, -1, *parts.shape[1:])
        total = by_replica[0].float()
        for part in by_replica[1:]:
            total = total + part
        return total.to(parts.dtype)

    def all_agree(self, is_so: bool, device: torch.device) -> bool:
        """Whether something holds on all replicas, all of which call this."""
        return bool(self.gather(torch.full((1,), is_so, dtype=torch.uint8, device=device)).min().item())

    @abstractmethod
    def _all_gather(self, rows: torch.Tensor) -> torch.Tensor:
        """See `gather`."""

    @abstractmethod
    def _all_to_all(self, rows: torch.Tensor) -> torch.Tensor:
        """Send equal pieces, one to each replica. Returns the received ones in the order of replicas. # [replicas * n,
        ...]"""

    @property
    def num_bytes(self) -> int:
        """Bytes of shared memory that this replica commits."""
        return 0

    def check(self) -> None:  # noqa: B027, for all of them
        """Nothing: an exchange that fails raises."""


class Exchange(Protocol):
    """Exchange among the ranks of equal index in all replicas. All ranks make the same calls in the same order.

    Each pair of a token and an expert is computed separately, so that results equal those of one replica bit for bit.
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
        """The outputs of the `asked` experts, held by all replicas, for this rank's tokens, and the row of each pair.

        # [tokens, size], [tokens, top_k] int64 -> [rows, size], [tokens, top_k] int64

        `local`: those of `asked` that this rank holds. Rows of pairs for other experts are 0, and so are all rows of
        a dummy step, which has 0 tokens in `num_tokens_across_dp`. Each row is computed by one expert in one product,
        so that a token's result does not depend on other replicas' tokens.
        """

    @property
    def num_bytes(self) -> int:
        """Bytes of shared memory that this replica commits for the largest step."""

    def check(self) -> None:
        """Raise the error of an `across` that ran inside a recorded step."""


@dataclass(frozen=True, slots=True)
class ExpertParallel:
    """Expert parallelism: whole experts on each rank instead of a shard of every expert, in one or several replicas.

    Each rank of a replica provides an equal share of the experts. With several replicas that share is held by the
    ranks of the same index in all of them, which exchange tokens.
    """

    replica: int = 0
    num_replicas: int = 1
    exchange: Exchange | TokenExchange | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.replica < self.num_replicas:
            raise ValueError(f"replica is {self.replica}; it must be between 0 and {self.num_replicas - 1}")
        if self.num_replicas > 1 and self.exchange is None:
            raise ValueError(f"num_replicas is {self.num_replicas}, but there is no exchange between them; give one")


@dataclass(slots=True, eq=False)
class TensorParallel:
    """A rank of a tensor-parallel group. A group of one rank needs no collectives."""

    rank: int = 0
    size: int = 1
    collectives: Collectives | None = None
    experts: ExpertParallel | None = None
    """The distribution of whole experts over ranks; None if each rank holds a shard of every expert."""
    observer: Callable[[torch.Tensor], None] | None = field(default=None, init=False, repr=False)
    """Called with the result of each all-reduce."""
    _skips_collectives: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"tensor-parallel rank is {self.rank}; it must be between 0 and {self.size - 1}")
        if self.size > 1 and self.collectives is None:
            raise ValueError(f"tensor-parallel size is {self.size}, but the ranks have no collectives; give them")

    @property
    def is_captured(self) -> bool:
        """Whether graphs can capture the collectives of a forward pass."""
        exchange = self.token_exchange
        is_captured = self.collectives is None or self.collectives.are_captured
        return is_captured and (exchange is None or exchange.are_captured)

    @property
    def token_exchange(self) -> TokenExchange | None:
        """How replicas exchange tokens, where that is by pieces of known sizes."""
        exchange = None if self.experts is None else self.experts.exchange
        return exchange if isinstance(exchange, TokenExchange) else None

    @property
    def is_alone(self) -> bool:
        """Whether a pass communicates with no other rank or replica by pieces of known sizes."""
        return self.size == 1 and self.token_exchange is None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `x`, by the collectives that `engine.runner.build` chose."""
        if self.collectives is None or self._skips_collectives:
            return x
        total = self.collectives.all_reduce(x)
        if self.observer is not None:
            self.observer(total)
        return total

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, norm: NormWeight
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """See `Collectives`."""
        if self.collectives is None or self._skips_collectives:
            return None
        summed = self.collectives.add_norm(x, residual, norm)
        if summed is not None and self.observer is not None:
            self.observer(summed[1])
        return summed

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        if self.collectives is None:
            return x
        if self._skips_collectives:
            # The copies take the memory that the other ranks' shards would.
            return x if self.rank else torch.cat([x.clone() for _ in range(self.size)], -1)
        return self.collectives.gather(x)

    def broadcast(self, token_ids: torch.Tensor) -> torch.Tensor:
        """See `Collectives`."""
        return token_ids if self.collectives is None else self.collectives.broadcast(token_ids)

    @contextmanager
    def without_collectives(self) -> Iterator[None]:
        """A context in which passes take as much memory as usual, but communicate with no other rank.

        Their results are unused: an all-reduce returns this rank's partial sum, and a gather repeats its tensor.
        """
        exchange = self.token_exchange
        self._skips_collectives = True
        if exchange is not None:
            exchange.is_suspended = True
        try:
            yield
        finally:
            self._skips_collectives = False
            if exchange is not None:
                exchange.is_suspended = False

    def all_agree(self, is_so: bool, device: torch.device) -> bool:
        """Whether something holds on all ranks of all replicas that exchange tokens, all of which call this."""
        exchange = self.token_exchange
        if exchange is not None:
            is_so = exchange.all_agree(is_so, device)
        if self.size == 1:
            return is_so
        return int(self.all_reduce(torch.full((1, 1), float(is_so), device=device)).item()) == self.size

    def capturing(self) -> AbstractContextManager[None]:
        """See `Collectives`."""
        return nullcontext() if self.collectives is None else self.collectives.capturing()

    def share(self, total: int, what: str) -> int:
        """A rank's share of `total`. Raises `ValueError` where the group's size does not divide it."""
        if total % self.size:
            raise ValueError(
                f"tensor_parallel_size is {self.size}, which does not divide {what}, {total}; choose a size "
                "that divides it"
            )
        return total // self.size


SINGLE_RANK = TensorParallel()
