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
        """`descriptor` is of a file that all the ranks map, which stays the caller's to close."""
        self._functions = library.group_functions
        num_bytes = self._functions.bytes(size)
        os.ftruncate(descriptor, num_bytes)  # By whoever comes first: its length is the same for all.
        self._memory = mmap.mmap(descriptor, num_bytes)
        self._size = size
        self._group = Group(ctypes.addressof(ctypes.c_char.from_buffer(self._memory)), rank, size)
        self._address = ctypes.addressof(self._group)

    def join(self) -> None:
        """Does nothing: the first collective waits for all ranks."""

    def close(self) -> None:
        """Does nothing: the memory is freed with the process."""

    def begin_step(self, number: int) -> None:
        """The collectives from here on belong to this step."""
        self._functions.begin(self._address, number)

    def abort(self) -> bool:
        """Have every rank leave the step: what waits, or will, raises `CollectiveAborted`."""
        self._functions.leave(self._address)
        return True

    def check(self) -> None:
        """Raise `CollectiveAborted` where a recorded collective could not be finished."""
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
            assert x.stride(0) == columns, "sums are of rows without gaps"
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
        """See `Collectives`: a norm is an operator of its own."""

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
        """See `Collectives`: no graph has them."""
        return nullcontext()


# The exchange of expert tokens between replicas. `FusedMoE` calls it, which makes it part of the recorded step, and
# so does the loop of replicas in lockstep.

_Compute: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""`(rows [n, size], counts [local experts], tokens [pairs])`: `rows[tokens]`, by expert, through the experts."""

_LINE = 64
"""Bytes of a cache line: one replica's data at a barrier."""


class _Shape(NamedTuple):
    """Sizes of layers that use the same memory in turn."""

    size: int
    dtype: torch.dtype
    top_k: int
    asked: range
    local: range


class _Room(NamedTuple):
    """Memory for layers of one shape."""

    rows: torch.Tensor  # [replicas * most_tokens, size], shared
    ids: torch.Tensor  # [replicas * most_tokens, top_k] int64, shared
    answers: torch.Tensor  # [replicas * (most_tokens * top_k + 1), size], shared; the last row of each replica is 0
    counts: torch.Tensor  # [2, local experts] int64: pairs, and room to count in
    tokens: torch.Tensor  # [pairs] int64, the row that each pair takes
    to: torch.Tensor  # [pairs] int64, the answer that it becomes


class SharedMemoryExchange:
    """A rank of the exchange, called by one thread. Raises `ReplicaLeft` where another replica has left."""

    def __init__(self, library: Library, replica: int, num_replicas: int, descriptor: int, most_tokens: int) -> None:
        """`descriptor` is of a file that the ranks map which have the same place in their replicas; it stays open.

        `most_tokens`: of a replica in a step.
        """
        self._functions = library.exchange_functions
        self._replica, self._num_replicas, self._most_tokens = replica, num_replicas, most_tokens
        self._descriptor, self._end = descriptor, 0
        self._kept: list[mmap.mmap] = []
        self._exchange = Exchange(self._map(_LINE * (1 + num_replicas)), replica, num_replicas)
        self._address = ctypes.addressof(self._exchange)
        self._rooms: dict[_Shape, _Room] = {}
        self._pairs = Step()
        """The pairs that this rank computes in the running layer, as a step's tokens."""
        self._said = (ctypes.c_int64 * num_replicas)()

    @property
    def num_bytes(self) -> int:
        """See `Exchange`."""
        return self._end // self._num_replicas

    def join(self) -> None:
        """Does nothing: the first barrier waits for all."""

    def agree(self, own: int) -> tuple[int, ...]:
        """The data of each replica, in their order; called by their first ranks alone."""
        if self._functions.agree(self._address, own, ctypes.addressof(self._said)):
            self.check()
        return tuple(self._said)

    def leave(self) -> bool:
        """Leave the exchange. True: whoever waits for this replica from now on gets `ReplicaLeft`."""
        self._functions.leave(self._address)
        return True

    def check(self) -> None:
        """Raise `ReplicaLeft` where a recorded barrier was not passed."""
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
        """See `Exchange`. Where the step is recorded, it tells itself whether its tokens are a dummy's."""
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
        """As `across`, by what may be recorded. # hidden: bf16"""
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
        """The same, in the same order, on every replica: their layers are."""
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
        """The address of the next so many bytes of the file. Raises `MemoryError`, a sentence, where there is no room.

        Each replica commits its part of them, which is on its own node of memory then: written to without room, they
        would end the process by a signal.
        """
        num_bytes = -(-num_bytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        first, end = (num_bytes * part // self._num_replicas for part in (self._replica, self._replica + 1))
        try:
            os.posix_fallocate(self._descriptor, self._end + first, end - first)
            # The first rank extends the file to the size that all need.
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
