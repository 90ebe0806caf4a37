"""`ExpertShare`: which experts a rank holds, and which it sees to for its replica. Used by `FusedMoE`."""

from dataclasses import dataclass

from models.parallel import Exchange, TensorParallel


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
