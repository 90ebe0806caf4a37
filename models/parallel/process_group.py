"""Collectives by torch.distributed: NCCL, which on ROCm is RCCL, or Gloo.

In order: `Rendezvous`, by which the ranks of a group connect; NCCL's settings; `ProcessGroupCollectives`, the
group of one replica's ranks; and `ReplicaWorld`, the ranks of all replicas, which exchange tokens for experts.
"""

import ctypes
import fcntl
import logging
import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed import FileStore, Store, TCPStore  # type: ignore[attr-defined]

from models.ops import aiter, triton
from models.ops.types import NormWeight
from models.parallel import peer_sums
from models.parallel.peer_sums import PeerSums
from models.parallel.tensor_parallel import TokenExchange

if TYPE_CHECKING:
    from models.ops.aiter.all_reduce import FastSum

_log = logging.getLogger(__name__)

_LOOPBACK = "lo"
_SIOCGIFCONF = 0x8912
_REQUEST_BYTES = 40
"""The size of a `struct ifreq`: 16 bytes of a name, then an address."""
_ANY_PORT = 9
"""A port to which no packet is sent, since connecting a datagram socket only selects the route."""


class Rendezvous:
    """The rendezvous of a group's ranks: a file on one host, or a TCP store that rank 0 serves."""

    def __init__(
        self, address: str, timeout: float, listener: int | None = None, interface: str | None = None
    ) -> None:
        """`address` is `file://` and a path that no other group uses, or `tcp://`, a host and a port.

        `timeout`: seconds of the rendezvous, and of each collective. `listener`, on rank 0, is the descriptor of the
        socket that listens at a TCP address, and there only; the store takes it over. `interface`: the network
        interface that ranks on several hosts use; None: the one of the route to the address.
        """
        self._address = urlsplit(address)
        self._listener = listener
        self._interface = interface
        self.timeout = timedelta(seconds=timeout)

    @property
    def is_local(self) -> bool:
        """Whether all ranks are on this host."""
        return self._address.scheme == "file"

    def sibling_path(self, name: str) -> Path:
        """A further path for the ranks of one host, which no other group uses."""
        assert self.is_local
        return Path(f"{self._address.path}.{name}")

    def interface(self) -> str:
        """The network interface by which this host reaches the others. Raises `RuntimeError` where there is none."""
        if self.is_local:
            return _LOOPBACK
        if self._interface is None:
            return interface_to(self._address.hostname or "")
        present = [name for _, name in socket.if_nameindex()]
        if self._interface not in present:
            raise RuntimeError(
                f"cluster_interface is {self._interface}, which this host does not have; it has {', '.join(present)}"
            )
        return self._interface

    def set_interface(self, variable: str) -> None:
        """Set the interface that collectives use by their environment variable, unless the user has set it."""
        if self._interface is not None and not self.is_local:
            os.environ[variable] = self.interface()
        else:
            os.environ.setdefault(variable, self.interface())

    def store(self, rank: int, size: int) -> Store:
        """The store, after all ranks have connected. Raises `RuntimeError` on timeout."""
        if self.is_local:
            return FileStore(self._address.path, size)
        return TCPStore(
            self._address.hostname or "",
            self._address.port or 0,
            size,
            is_master=rank == 0,
            timeout=self.timeout,
            master_listen_fd=self._listener,
        )


def interface_to(host: str) -> str:
    """The network interface of the route to `host`. Raises `RuntimeError` where it cannot be determined."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            own = str(probe.getsockname()[0]).partition("%")[0]
    except OSError as error:
        raise RuntimeError(f"this host cannot reach {host}: {error.strerror}") from error
    if ip_address(own).is_loopback:
        return _LOOPBACK
    name = _interfaces_v6().get(own) if family == socket.AF_INET6 else _interfaces_v4().get(own)
    if name is None:
        raise RuntimeError(f"this host reaches {host} from {own}, but has no interface of that address")
    return name


def _interfaces_v4() -> dict[str, str]:
    """The names of IPv4 interfaces by address."""
    room = 256
    buffer = bytearray(room * _REQUEST_BYTES)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        output = fcntl.ioctl(probe, _SIOCGIFCONF, struct.pack("iP", len(buffer), address))
    used = struct.unpack("iP", output)[0]
    found = {}
    for begin in range(0, used, _REQUEST_BYTES):
        name = bytes(buffer[begin : begin + 16]).partition(b"\0")[0].decode()
        # An alias such as eth0:1 is a label of its interface.
        found[socket.inet_ntoa(bytes(buffer[begin + 20 : begin + 24]))] = name.partition(":")[0]
    return found


def _interfaces_v6() -> dict[str, str]:
    """The names of IPv6 interfaces by address."""
    lines = Path("/proc/net/if_inet6").read_text().splitlines()
    fields = [line.split() for line in lines]
    return {str(ip_address(bytes.fromhex(words[0]))): words[5] for words in fields}


def set_nccl_defaults(device: torch.device) -> None:
    """Set NCCL's environment before the first group is joined. Variables that are set already stay."""
    # Monitoring polls the store, which is closed early. The engine detects the end of ranks itself.
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    if torch.version.hip is not None and torch.cuda.get_device_properties(device).gcnArchName.startswith("gfx12"):
        # The other protocols rely on an order of writes that these GPUs do not guarantee; with ROCm 7.2 all-reduce
        # hangs.
        os.environ.setdefault("NCCL_PROTO", "Simple")


class ProcessGroupCollectives:
    """The `Collectives` of one replica's ranks. If one rank omits a collective, the others block in it."""

    def __init__(
        self, rank: int, size: int, device: torch.device, rendezvous: Rendezvous, world: "ReplicaWorld | None" = None
    ) -> None:
        """`world`: the group of all replicas' ranks, joined before, whose part is used instead of a new group."""
        self._rank, self._size, self._device = rank, size, device
        self._rendezvous, self._world = rendezvous, world
        self._group: dist.ProcessGroup | None = None
        self._fast_sum: FastSum | None = None
        self._peer_sums: PeerSums | None = None

    def join(self) -> None:
        """Join the group. Raises `RuntimeError` where another rank does not in time."""
        if self._world is not None:
            self._group = self._world.tensor_group
        else:
            self._join_own()
        if self._device.type == "cpu":
            return
        # Each rank has probed aiter itself, and all must use the same collectives.
        if self._world is None and torch.version.hip is not None and self._agree(aiter.takes("all_reduce")):
            self._fast_sum = self._joined_fast_sum()
        if self._fast_sum is None and self._rendezvous.is_local and self._agree(triton.takes("norm")):
            store = FileStore(str(self._rendezvous.sibling_path("sums")), self._size)
            self._peer_sums = peer_sums.join(self._rank, self._size, self._device, store, self._agree, self._exact_sum)

    def _exact_sum(self, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x, group=self._group)
        return x

    def _join_own(self) -> None:
        """Join a new group that contains only these ranks."""
        if self._device.type == "cpu":
            self._rendezvous.set_interface("GLOO_SOCKET_IFNAME")
        else:
            if not self._rendezvous.is_local:
                self._rendezvous.set_interface("NCCL_SOCKET_IFNAME")
            set_nccl_defaults(self._device)
        dist.init_process_group(
            "gloo" if self._device.type == "cpu" else "nccl",
            store=self._rendezvous.store(self._rank, self._size),
            rank=self._rank,
            world_size=self._size,
            timeout=self._rendezvous.timeout,
            device_id=None if self._device.type == "cpu" else self._device,
        )

    def _joined_fast_sum(self) -> "FastSum | None":
        """aiter's all-reduce over GPUs of one host; None if it is not used."""
        if not self._rendezvous.is_local:
            _log.warning("all_reduce by RCCL (not aiter: it sums over GPUs of one host)")
            return None
        from models.ops.aiter import all_reduce as reduce

        os.environ.setdefault("GLOO_SOCKET_IFNAME", self._rendezvous.interface())
        return reduce.join(self._rank, self._size, self._device, self._rendezvous.sibling_path("aiter"), self._agree)

    def _agree(self, is_so: bool) -> bool:
        """Whether something holds on all ranks."""
        found = torch.tensor(int(is_so), device=self._device)
        dist.all_reduce(found, dist.ReduceOp.MIN, group=self._group)
        return bool(found.item())

    def close(self) -> None:
        """Leave the group before the interpreter exits: Gloo's threads would crash it."""
        if self._device.type == "cpu" and dist.is_initialized():
            dist.destroy_process_group()

    def begin_step(self, number: int) -> None:
        """No effect: a step that fails on one rank ends the group."""

    def abort(self) -> bool:
        """See `RankGroup`: a collective that has begun cannot be aborted."""
        return False

    @property
    def are_captured(self) -> bool:
        """See `Collectives`: NCCL's and RCCL's are kernels, Gloo's are calls on the host."""
        return self._device.type != "cpu"

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See `Collectives`."""
        fast = self._fast_sum or self._peer_sums
        if fast is not None and (summed := fast(x)) is not None:
            return summed
        dist.all_reduce(x, group=self._group)
        return x

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, norm: NormWeight
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """See `Collectives`."""
        return None if self._peer_sums is None else self._peer_sums.add_norm(x, residual, norm)

    def leave_fast_sum(self) -> None:
        """Have NCCL or RCCL compute all sums from now on. All ranks call it between the same steps."""
        self._fast_sum = self._peer_sums = None

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """See `Collectives`."""
        x = x.contiguous()
        if x.numel() == 0:
            return x if self._rank else x.new_empty(*x.shape[:-1], self._size * x.shape[-1])
        if self._rank:
            dist.gather(x, group=self._group, group_dst=0)
            return x
        parts = [torch.empty_like(x) for _ in range(self._size)]
        dist.gather(x, parts, group=self._group, group_dst=0)
        return torch.cat(parts, -1)

    def broadcast(self, token_ids: torch.Tensor) -> torch.Tensor:
        """See `Collectives`."""
        dist.broadcast(token_ids, group=self._group, group_src=0)
        return token_ids

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """See `Collectives`: NCCL needs nothing; with RCCL no thread may query earlier collectives."""
        if self._device.type != "cpu" and torch.version.hip is not None:
            # A thread of torch queries pending collectives. Up to ROCm 7.2.0 that invalidates a capture in another
            # thread, whatever its capture mode, and the error ends the process.
            group = self._group or dist.group.WORLD
            assert isinstance(group, dist.ProcessGroup)
            group._wait_for_pending_works()
        with nullcontext() if self._fast_sum is None else self._fast_sum.capturing():
            yield


class ReplicaWorld(TokenExchange):
    """One rank of all replicas' ranks, which share the experts. If one rank omits a collective, the others block in
    it.
    """

    tensor_group: dist.ProcessGroup
    """The ranks of this replica."""
    _expert_group: dist.ProcessGroup
    """The ranks with the same index in their replicas."""
    _leader_group: dist.ProcessGroup
    """The first rank of each replica, on the host."""

    def __init__(
        self,
        *,
        replica: int,
        num_replicas: int,
        rank: int,
        size: int,
        device: torch.device,
        rendezvous: Rendezvous,
        on_collective: Callable[[], object] | None = None,
    ) -> None:
        """`on_collective` is called before each collective, to record which ranks have reached it."""
        super().__init__(replica, num_replicas)
        self._on_collective = on_collective
        self._rank, self._size = rank, size
        self.are_captured = device.type != "cpu"
        self._device, self._rendezvous, self._timeout = device, rendezvous, rendezvous.timeout

    def join(self) -> None:
        """Join the group. Raises `RuntimeError` where another rank does not in time."""
        on_host = self._device.type == "cpu"
        if on_host or not self._rendezvous.is_local:
            self._rendezvous.set_interface("GLOO_SOCKET_IFNAME")
        if not on_host:
            if not self._rendezvous.is_local:
                self._rendezvous.set_interface("NCCL_SOCKET_IFNAME")
            set_nccl_defaults(self._device)
        rank, num_ranks = self._replica * self._size + self._rank, self._num_replicas * self._size
        dist.init_process_group(
            "gloo" if on_host else "cpu:gloo,cuda:nccl",
            store=self._rendezvous.store(rank, num_ranks),
            rank=rank,
            world_size=num_ranks,
            timeout=self._timeout,
        )
        # Every rank must create all groups, in this order, and is a member of some.
        replicas = [list(range(first, first + self._size)) for first in range(0, num_ranks, self._size)]
        columns = [list(range(first, num_ranks, self._size)) for first in range(self._size)]
        self.tensor_group = [dist.new_group(ranks, timeout=self._timeout) for ranks in replicas][self._replica]
        self._expert_group = [dist.new_group(ranks, timeout=self._timeout) for ranks in columns][self._rank]
        self._leader_group = dist.new_group(columns[0], timeout=self._timeout, backend="gloo")

    def _all_gather(self, rows: torch.Tensor) -> torch.Tensor:
        """See `TokenExchange`."""
        self._notify()
        arrived = rows.new_empty(self._num_replicas * len(rows), *rows.shape[1:])
        dist.all_gather_into_tensor(arrived, rows.contiguous(), group=self._expert_group)
        return arrived

    def _all_to_all(self, rows: torch.Tensor) -> torch.Tensor:
        """See `TokenExchange`."""
        self._notify()
        arrived = torch.empty_like(rows)
        dist.all_to_all_single(arrived, rows.contiguous(), group=self._expert_group)
        return arrived

    def agree(self, own: int) -> tuple[int, ...]:
        """Gather the `own` of each replica, in order. Called by the first rank of each replica."""
        self._notify()
        votes = torch.zeros(self._num_replicas, dtype=torch.int64)
        votes[self._replica] = own
        dist.all_reduce(votes, group=self._leader_group)
        return tuple(votes.tolist())

    def leave(self) -> bool:
        """Returns False, since the others detect this rank's end by their connections."""
        return False

    def _notify(self) -> None:
        if self._on_collective is not None:
            self._on_collective()
