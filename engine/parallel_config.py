"""`ParallelConfig`: the section of `Config` on processes, devices and hosts."""

from ipaddress import ip_address
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from engine.section import Section

_MAX_PORT = 65535
CLUSTER_KEY_ENV = "KAON_CLUSTER_KEY"
"""The environment's name for the key that hosts know each other by: no setting, since flags can be seen by others."""


class ParallelConfig(Section):
    """How the model is spread over processes and devices."""

    tensor_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes that each layer is shared out over: one a GPU, or a part of the CPU's cores each."""

    data_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1
    """Engine cores that each hold the whole model and a KV cache, and answer requests of their own."""

    data_parallel_placement: Literal["prefix", "round_robin"] = "prefix"
    """Which of them computes a request: the least busy, and the one that has its beginning cached; or each in turn."""

    enable_expert_parallel: bool = False
    """Spread the experts of mixtures over all ranks of all replicas, whole, in place of a part of each on every rank.

    Replicas whose experts are spread compute in step."""

    cpu_collectives: Literal["shared_memory", "gloo"] = "shared_memory"
    """How ranks on the CPU add up, and replicas exchange tokens: in memory they share, or by torch, slower."""

    rank_start_timeout: Annotated[float, Field(gt=0.0)] = 300.0
    """Seconds that each rank may take longer than the first to load, and to meet the others."""

    distributed_executor_backend: Literal["mp", "ray"] = "mp"
    """Who starts the ranks: `mp` this host, and others as `nnodes` says; `ray` the Ray cluster that it belongs to."""

    ray_placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """Ray's strategy: few nodes if possible, many if possible, one node only, or a node for each rank."""

    nnodes: Annotated[int, Field(ge=1, le=64)] = 1
    """Hosts that the replicas, or the ranks of the only one, are shared out over.

    Each is started with the same settings, but for `node_rank`."""

    node_rank: Annotated[int, Field(ge=0, lt=64)] = 0
    """Number of this host; 0 serves HTTP, the others run their ranks or replicas for it."""

    master_addr: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address of host 0, by which the others reach it."""

    master_port: Annotated[int, Field(ge=1, le=65533)] = 29500
    """First port of host 0 that the others connect to: also the next two, or with replicas the r-th next for r."""

    cluster_key_file: Annotated[str, Field(min_length=1)] | None = None
    """File of the key that the hosts know each other by, in place of `KAON_CLUSTER_KEY`; no key: loopback only."""

    @model_validator(mode="after")
    def _ranks_fit_hosts(self) -> Self:
        if self.node_rank >= self.nnodes:
            raise ValueError(
                f"node_rank is {self.node_rank}, but there are {self.nnodes} hosts (nnodes); number them from 0"
            )
        if self.data_parallel_size == 1 and self.tensor_parallel_size % self.nnodes:
            raise ValueError(
                f"nnodes is {self.nnodes}, which does not divide the {self.tensor_parallel_size} ranks "
                "(tensor_parallel_size); each host has as many ranks as the others"
            )
        if self.data_parallel_size > 1 and self.data_parallel_size % self.nnodes:
            raise ValueError(
                f"nnodes is {self.nnodes}, which does not divide the {self.data_parallel_size} replicas "
                "(data_parallel_size); each host has as many as the others, and all ranks of those it has"
            )
        if self.in_lockstep and self.has_remote_replicas:
            where = "distributed_executor_backend is ray" if self.nnodes == 1 else f"nnodes is {self.nnodes}"
            raise ValueError(
                f"{where}, but with enable_expert_parallel the {self.data_parallel_size} replicas "
                "(data_parallel_size) exchange tokens, which they do on one host in this release; spread the experts "
                "over ranks (tensor_parallel_size)"
            )
        if self.has_remote_replicas and self.master_port + self.data_parallel_size - 1 > _MAX_PORT:
            raise ValueError(
                f"master_port is {self.master_port}, but each of {self.data_parallel_size} replicas "
                f"(data_parallel_size) has a port behind it; set it to at most "
                f"{_MAX_PORT + 1 - self.data_parallel_size}"
            )
        if self.distributed_executor_backend == "ray" and self.nnodes > 1:
            raise ValueError(
                f"nnodes is {self.nnodes}, but distributed_executor_backend is ray, which knows its hosts itself; "
                "leave nnodes out"
            )
        return self

    @field_validator("master_addr")
    @classmethod
    def _is_one_address(cls, master_addr: str) -> str:
        try:
            is_any = ip_address(master_addr).is_unspecified
        except ValueError:
            is_any = False  # A name.
            try:
                master_addr.encode("idna")
            except UnicodeError as error:
                raise ValueError(f"master_addr is {master_addr}, which is no host's name: {error}") from error
        if is_any:
            raise ValueError(
                f"master_addr is {master_addr}; name the one address by which the other hosts reach host 0"
            )
        return master_addr

    @model_validator(mode="after")
    def _experts_are_spread_over_several(self) -> Self:
        if self.enable_expert_parallel and self.tensor_parallel_size * self.data_parallel_size == 1:
            raise ValueError(
                "enable_expert_parallel is set, but there is one rank to hold the experts; raise tensor_parallel_size "
                "or data_parallel_size too"
            )
        return self

    @property
    def in_lockstep(self) -> bool:
        """Whether replicas compute in step: their layers exchange tokens."""
        return self.enable_expert_parallel and self.data_parallel_size > 1

    @property
    def has_remote_replicas(self) -> bool:
        """Whether there are replicas that other hosts run; the ranks of each are on one host then."""
        spans_hosts = self.nnodes > 1 or self.distributed_executor_backend == "ray"
        return spans_hosts and self.data_parallel_size > 1

    @property
    def has_remote_ranks(self) -> bool:
        """Whether there are ranks of the only replica that other hosts run."""
        spans_hosts = self.nnodes > 1 or self.distributed_executor_backend == "ray"
        return spans_hosts and self.data_parallel_size == 1
