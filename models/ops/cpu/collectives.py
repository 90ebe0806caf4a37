"""Collectives of CPU ranks on one host: tensor-parallel groups and the exchange of expert tokens between replicas.

`SharedMemoryCollectives` all-reduces and gathers over shared memory for a tensor-parallel group (group.c).
`SharedMemoryExchange` sends tokens to the replica that holds their experts and receives the results (exchange.c).
"""

import ctypes
import mmap
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, TypeAlias

import torch

from models.errors import CollectiveAborted, ReplicaLeft
from models.ops.cpu import runtime
from models.ops.cpu.runtime import Library
from models.ops.cpu.structures import AllReduce, AwaitAnswers, CopyRows, Exchange, Group, ShareTokens, Step
from models.ops.memory import mapped_zeros
from models.ops.types import NormWeight


class SharedMemoryCollectives:
    """A rank of the group, called by one thread."""

    def __init__(self, library: Library, rank: int, size: int, descriptor: int) -> None:
        """`descriptor`: a file that all ranks map; the caller closes it."""
        self._functions = library.group_functions
        num_bytes = self._functions.bytes(size)
        os.ftruncate(descriptor, num_bytes)  # Every rank sets the same length.
        self._memory = mmap.mmap(descriptor, num_bytes)
        self._size = size
        self._group = Group(ctypes.addressof(ctypes.c_char.from_buffer(self._memory)), rank, size)
        self._address = ctypes.addressof(self._group)

    def join(self) -> None:
        """Does nothing: the first collective waits for all ranks."""

    def close(self) -> None:
        """Does nothing: the memory is freed with the process."""

    def begin_step(self, number: int) -> None:
        """Start a step: the following collectives belong to it."""
        self._functions.begin(self._address, number)

    def abort(self) -> bool:
        """Abort the step on all ranks: current and later collectives of it raise `CollectiveAborted`."""
        self._functions.leave(self._address)
        return True

    def check(self) -> None:
        """Raise `CollectiveAborted` if a recorded collective was aborted."""
        if self._group.has_left:
            raise CollectiveAborted("another rank has left this step")

    @property
    def are_captured(self) -> bool:
        """See `Collectives`."""
        return False

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See `Collectives`."""
        if x.dtype is torch.bfloat16 and runtime.active():
            rows, columns = x.shape
            assert x.stride(0) == columns, "rows of an all-reduce are contiguous"
            arguments = AllReduce(x.data_ptr(), columns, 0, self._address)
            runtime.current().run(arguments, Step(num_tokens=rows), (x,))
            self.check()
            return x
        if x.dtype not in (torch.float32, torch.bfloat16):
            return self.all_reduce(x.float()).to(x.dtype)
        x = x.contiguous()
        if self._functions.all_reduce(self._address, x.data_ptr(), x.numel(), x.dtype is torch.float32):
            self.check()
        return x

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, norm: NormWeight) -> None:
        """See `Collectives`. Not used here: CPU norms are separate operators."""

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """See `Collectives`."""
        x = x.contiguous()
        columns = x.shape[-1]
        whole = None if self._group.rank else x.new_empty(*x.shape[:-1], self._size * columns)
        rows = x.numel() // max(1, columns)
        if self._functions.gather(
            self._address, x.data_ptr(), rows, columns * x.itemsize, None if whole is None else whole.data_ptr()
        ):
            self.check()
        return x if whole is None else whole

    def broadcast(self, token_ids: torch.Tensor) -> torch.Tensor:
        """See `Collectives`. Token ids are exact in float32."""
        mine = torch.zeros_like(token_ids) if self._group.rank else token_ids
        return self.all_reduce(mine.float()).long()

    def capturing(self) -> AbstractContextManager[None]:
        """See `Collectives`. Does nothing, since there are no CPU graphs."""
        return nullcontext()


# The exchange of expert tokens between replicas. `FusedMoE` calls it, so that it is part of the recorded step, and the
# loop that keeps replicas in lockstep calls `agree`.

_Compute: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Computes the experts of `rows[tokens]`, sorted by expert. Takes `(rows [n, size], counts [local experts], tokens
[pairs])`, where `counts` is the number of pairs of each expert."""

_LINE = 64
"""Bytes of a cache line, of which each replica has one for its data at a barrier."""


class _Shape(NamedTuple):
    """Sizes of a layer; layers with equal sizes use the same memory, one after the other."""

    size: int
    dtype: torch.dtype
    top_k: int
    asked: range
    local: range


class _Room(NamedTuple):
    """Memory for the layers of one shape. A pair is a token and one of its experts."""

    rows: torch.Tensor  # [replicas * most_tokens, size], shared
    ids: torch.Tensor  # [replicas * most_tokens, top_k] int64, shared
    answers: torch.Tensor  # [replicas * (most_tokens * top_k + 1), size], shared; the last row of each replica is 0
    counts: torch.Tensor  # [2, local experts] int64: number of pairs, and scratch for counting
    tokens: torch.Tensor  # [pairs] int64, the index in `rows` of each pair's token
    to: torch.Tensor  # [pairs] int64, the index in `answers` of each pair's result


class SharedMemoryExchange:
    """A rank of the exchange, called by one thread. Methods raise `ReplicaLeft` if another replica has left."""

    def __init__(self, library: Library, replica: int, num_replicas: int, descriptor: int, most_tokens: int) -> None:
        """`descriptor`: a file that the ranks with the same index of all replicas map; it is not closed here.

        `most_tokens`: the largest number of a replica's tokens in a step.
        """
        self._functions = library.exchange_functions
        self._replica, self._num_replicas, self._most_tokens = replica, num_replicas, most_tokens
        self._descriptor, self._end = descriptor, 0
        self._kept: list[mmap.mmap] = []
        self._exchange = Exchange(self._map(_LINE * (1 + num_replicas)), replica, num_replicas)
        self._address = ctypes.addressof(self._exchange)
        self._rooms: dict[_Shape, _Room] = {}
        self._pairs = Step()
        """A step whose tokens are the pairs that this rank computes in the current layer."""
        self._said = (ctypes.c_int64 * num_replicas)()

    @property
    def num_bytes(self) -> int:
        """See `Exchange`."""
        return self._end // self._num_replicas

    def join(self) -> None:
        """Does nothing: the first barrier waits for all replicas."""

    def agree(self, own: int) -> tuple[int, ...]:
        """All-gather one number of each replica, in order of replicas. Only the first rank of each replica calls
        it."""
        if self._functions.agree(self._address, own, ctypes.addressof(self._said)):
            self.check()
        return tuple(self._said)

    def leave(self) -> bool:
        """Leave the exchange: replicas that wait for this one from now on get `ReplicaLeft`. Returns True."""
        self._functions.leave(self._address)
        return True

    def check(self) -> None:
        """Raise `ReplicaLeft` if a recorded barrier failed."""
        if self._exchange.left_by:
            raise ReplicaLeft(self._exchange.left_by - 1)

    def across(
        self,
        asked: range,
        local: range,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        compute: _Compute,
        num_tokens_across_dp: tuple[int, ...],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Exchange`. In a recorded program, the field `is_dummy` of the step marks dummy tokens."""
        assert len(hidden) <= self._most_tokens, f"{len(hidden)} tokens, but room for {self._most_tokens}"
        room = self._room(_Shape(hidden.shape[1], hidden.dtype, ids.shape[1], asked, local))
        is_dummy = not num_tokens_across_dp[self._replica]
        if runtime.runs(hidden):
            return self._by_operators(room, asked, local, hidden, ids, compute, is_dummy=is_dummy)
        first = self._replica * self._most_tokens
        room.rows[first : first + len(hidden)] = hidden
        ids = ids.contiguous()
        places = torch.empty_like(ids)
        arguments = self._share_tokens(room, asked, local, ids, places)
        if self._functions.tokens(ctypes.addressof(arguments), len(hidden), is_dummy):
            self.check()
        count = self._pairs.num_tokens
        if count:
            room.answers[room.to[:count]] = compute(room.rows, room.counts[0], room.tokens[:count])
        if self._functions.wait(self._address):
            self.check()
        return room.answers, places

    def _by_operators(
        self,
        room: _Room,
        asked: range,
        local: range,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        compute: _Compute,
        *,
        is_dummy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`across` by recordable operators only. # hidden: bf16"""
        current = runtime.current()
        step = Step(num_tokens=len(hidden), is_dummy=is_dummy)
        row_bytes = room.rows.stride(0) * room.rows.itemsize
        own = room.rows.data_ptr() + self._replica * self._most_tokens * row_bytes
        copy = CopyRows(hidden.data_ptr(), hidden.stride(0) * room.rows.itemsize, None, own, row_bytes)
        current.run(copy, step, (hidden, room.rows))
        places = current.rows(len(ids), ids.shape[1], torch.int64)
        current.run(self._share_tokens(room, asked, local, ids, places), step, (ids, places, *room))
        with current.on(self._pairs, len(room.tokens), self._num_replicas) as count:
            if count:
                found = compute(room.rows, room.counts[0], room.tokens[:count])
                copy = CopyRows(
                    found.data_ptr(),
                    found.stride(0) * room.rows.itemsize,
                    room.to.data_ptr(),
                    room.answers.data_ptr(),
                    row_bytes,
                )
                runtime.current().run(copy, self._pairs, (found, room.to, room.answers))
        current.run(AwaitAnswers(self._address), step, ())
        self.check()
        return room.answers, places

    def _share_tokens(
        self, room: _Room, asked: range, local: range, ids: torch.Tensor, places: torch.Tensor
    ) -> ShareTokens:
        assert ids.stride(0) == ids.shape[1]
        return ShareTokens(
            exchange=self._address,
            ids=ids.data_ptr(),
            top_k=ids.shape[1],
            shared_ids=room.ids.data_ptr(),
            most_tokens=self._most_tokens,
            first_asked=asked.start,
            asked=len(asked),
            first_local=local.start,
            local=len(local),
            next=room.counts[1].data_ptr(),
            counts=room.counts[0].data_ptr(),
            tokens=room.tokens.data_ptr(),
            to=room.to.data_ptr(),
            places=places.data_ptr(),
            pairs=ctypes.addressof(self._pairs),
        )

    def _room(self, shape: _Shape) -> _Room:
        """Return the memory for a shape. Replicas allocate in the same order, because they have the same layers."""
        if shape not in self._rooms:
            self._rooms[shape] = self._make_room(shape)
        return self._rooms[shape]

    def _make_room(self, shape: _Shape) -> _Room:
        num_tokens = self._num_replicas * self._most_tokens
        num_answers = num_tokens * shape.top_k + self._num_replicas
        most_pairs = num_tokens * min(shape.top_k, len(shape.local))
        return _Room(
            self._shared(num_tokens, shape.size, shape.dtype),
            self._shared(num_tokens, shape.top_k, torch.int64),
            self._shared(num_answers, shape.size, shape.dtype),
            torch.zeros(2, len(shape.local), dtype=torch.int64),
            torch.frombuffer(mapped_zeros(8 * most_pairs), dtype=torch.int64),
            torch.frombuffer(mapped_zeros(8 * most_pairs), dtype=torch.int64),
        )

    def _shared(self, num_rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        self._map(num_rows * columns * dtype.itemsize)
        return torch.frombuffer(self._kept[-1], dtype=dtype, count=num_rows * columns).view(num_rows, columns)

    def _map(self, num_bytes: int) -> int:
        """Map the next `num_bytes` of the file and return their address. Raises `MemoryError` if memory is exhausted.

        Each replica allocates its part in advance, which places it on the replica's own memory node. Writing to
        unallocated memory when none is left would end the process with a signal.
        """
        num_bytes = -(-num_bytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        first, end = (num_bytes * part // self._num_replicas for part in (self._replica, self._replica + 1))
        try:
            os.posix_fallocate(self._descriptor, self._end + first, end - first)
            # The first rank extends the file for all ranks.
            os.posix_fallocate(self._descriptor, self._end + num_bytes - 1, 1)
        except OSError as error:
            raise MemoryError(
                f"the replicas on this host share {(self._end + num_bytes) / 2**20:.0f} MiB of memory for steps of "
                f"max_num_batched_tokens {self._most_tokens}, which the system refuses ({error.strerror}); lower it, "
                "or free memory"
            ) from error
        self._kept.append(mmap.mmap(self._descriptor, num_bytes, offset=self._end))
        self._end += num_bytes
        return ctypes.addressof(ctypes.c_char.from_buffer(self._kept[-1]))
